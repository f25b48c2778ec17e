//! The fields of beam search, with vLLM's and transformers' names.

use mt_engine::serve::{BeamEnding, BeamSearch, TokenChoice};
use serde_json::Value;

use crate::{
    error::{ApiError, Result},
    fields::Fields,
};

/// The choice of a request whose answers are searched for, if it wants a search.
///
/// # Errors
/// A field has a wrong value, or contradicts another one.
pub fn with_beams(fields: &Fields, choice: TokenChoice, num_answers: usize) -> Result<TokenChoice> {
    let wants = fields.flag("use_beam_search")? == Some(true);
    let width = fields.count("beam_width", 1)?;
    let penalty = fields.number("length_penalty", f64::MIN..=f64::MAX)?;
    let ending = match fields.value("early_stopping") {
        None | Some(Value::Null) => None,
        Some(Value::Bool(true)) => Some(BeamEnding::EnoughFinished),
        Some(Value::Bool(false)) => Some(BeamEnding::NoBetterNow),
        Some(Value::String(text)) if text == "never" => Some(BeamEnding::NoBetterEver),
        Some(_) => {
            let message = "`early_stopping` has to be true, false or `never`";
            return Err(ApiError::field("early_stopping", message).with_code("invalid_value"));
        }
    };
    if !wants {
        let given = [
            ("beam_width", width.is_some()),
            // vLLM's clients send these without a search.
            ("length_penalty", penalty.is_some_and(|penalty| penalty != 1.0)),
            ("early_stopping", ending.is_some_and(|ending| ending != BeamEnding::NoBetterNow)),
        ];
        return match given.into_iter().find(|(_, is_given)| *is_given) {
            Some((name, _)) => {
                let message = format!("`{name}` acts on beam search, but `use_beam_search` is not true");
                Err(ApiError::field(name, message).with_code("invalid_value"))
            }
            None => Ok(choice),
        };
    }
    if fields.number("temperature", 0.0..=100.0)?.is_some_and(|temperature| temperature > 0.0) {
        let message = "`temperature` draws tokens, and `use_beam_search` looks for the most probable texts";
        return Err(ApiError::field("temperature", message).with_code("invalid_value"));
    }
    let width = width.unwrap_or(num_answers);
    if width < num_answers {
        let message = format!("`beam_width` is {width}, but `n` is {num_answers}");
        return Err(ApiError::field("beam_width", message).with_code("invalid_value"));
    }
    let beams = BeamSearch {
        length_penalty: penalty.unwrap_or(1.0),
        ending: ending.unwrap_or_default(),
        ..BeamSearch::new(width)
    };
    Ok(TokenChoice { temperature: 0.0, beams: Some(beams), ..choice })
}
