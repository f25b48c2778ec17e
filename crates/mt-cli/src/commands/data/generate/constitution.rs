//! Data by a written constitution: critiques and revisions of answers, and preferences between answers.

use std::fs;

use mt_rl::{
    Prompt, key,
    synthesis::{Principle, Side, verdict},
};
use serde_json::{Value, json};

use super::{
    given_prompt, in_form_of, option, option_or,
    output::Output,
    quoted_prompt,
    writer::{CHUNK, Draw, Writer, Written, assistant, messages_of, show_progress, user},
};
use crate::{
    arguments::{GeneratePreferences, GenerateRevisions},
    failure::Failure,
};

/// Distinguishes the draws of principles from others.
const PRINCIPLES: u64 = u64::from_le_bytes(*b"charters");

/// The kinds of draws. Those of critiques and revisions follow, two for each round.
const OF_ANSWERS: u64 = 0;

/// Runs `maxtext data generate revisions`.
pub fn revise(mut arguments: GenerateRevisions) -> Result<(), Failure> {
    arguments.generated.complete()?;
    let settings = &mut arguments.generated.settings;
    let path = option(settings, ("--principles", "FILE"), arguments.principles.take())?;
    let rounds: u64 = option_or(settings, ("--rounds", "ROUNDS"), arguments.rounds, 1)?;
    let seed: u64 = option_or(settings, ("--seed", "SEED"), arguments.seed, 0)?;
    let principles = principles(path.as_deref())?;
    let keys = std::mem::take(&mut settings.settings);
    let writer = Writer::open(keys.clone(), arguments.generated.max_tokens)?;
    writer.need_chat("critiques and revisions")?;
    let prompts = writer.prompts(&arguments.generated)?.prompts;
    let options = json!([
        "revisions",
        arguments.generated.prompts,
        arguments.generated.columns,
        arguments.generated.max_tokens,
        path,
        rounds,
        seed,
        keys,
    ]);
    let mut output = Output::open(arguments.generated.output()?, options, 1)?;
    let ((column, _), total) = (arguments.generated.columns(), prompts.len() as u64);
    while output.done() < total {
        let first = output.done() as usize;
        let chunk = &prompts[first..(first + CHUNK).min(prompts.len())];
        let mut revisions: Vec<Revision<'_>> = chunk
            .iter()
            .zip(first as u64..)
            .map(|(prompt, row)| Revision::new(given_prompt(prompt, &column), row))
            .collect();
        answer(&writer, &mut revisions, chunk)?;
        for round in 0..rounds {
            let principle = |row: u64| {
                let drawn = key(&[seed, PRINCIPLES, row, round]);
                &principles[(drawn % principles.len() as u64) as usize]
            };
            revise_once(&writer, &mut revisions, principle, round)?;
        }
        let rows: Vec<Value> = revisions.iter().filter_map(Revision::row).collect();
        output.add(&rows, chunk.len() as u64, &[rows.len() as u64])?;
        show_progress(output.done(), total, "prompts");
    }
    let made = output.counts()[0];
    output.finish()?;
    say!("{made} of {total} answers were revised");
    Ok(())
}

/// An answer that is revised.
struct Revision<'a> {
    prompt: &'a Value,
    row: u64,
    /// The first answer, and its revisions; empty if the prompt could not be answered.
    answers: Vec<String>,
    critiques: Vec<(String, String)>,
}

impl<'a> Revision<'a> {
    fn new(prompt: &'a Value, row: u64) -> Self {
        Self { prompt, row, answers: Vec::new(), critiques: Vec::new() }
    }

    /// A line of data; none if nothing was revised.
    fn row(&self) -> Option<Value> {
        let [first, .., last] = self.answers.as_slice() else { return None };
        if first == last || last.is_empty() {
            return None;
        }
        let critiques: Vec<Value> = self
            .critiques
            .iter()
            .map(|(principle, critique)| json!({"principle": principle, "critique": critique}))
            .collect();
        Some(json!({
            "prompt": self.prompt,
            "chosen": in_form_of(self.prompt, last),
            "rejected": in_form_of(self.prompt, first),
            "critiques": critiques,
        }))
    }
}

/// The first answers.
fn answer(writer: &Writer, revisions: &mut [Revision<'_>], prompts: &[Prompt]) -> Result<(), Failure> {
    let asked: Vec<(Vec<u32>, u64)> = revisions
        .iter()
        .zip(prompts)
        .map(|(revision, prompt)| (prompt.tokens.clone(), revision.row))
        .collect();
    for (revision, written) in revisions.iter_mut().zip(writer.answers(&asked, Draw::Sampled(OF_ANSWERS))?) {
        revision.answers.extend(written.map(|written| written.text));
    }
    Ok(())
}

/// A critique of each last answer, and a revision after it. Answers whose conversation has no room for them stay as they
/// are.
fn revise_once<'p>(
    writer: &Writer,
    revisions: &mut [Revision<'_>],
    principle: impl Fn(u64) -> &'p Principle,
    round: u64,
) -> Result<(), Failure> {
    let criticized = |revision: &Revision<'_>| {
        let mut messages = messages_of(revision.prompt);
        messages.push(assistant(revision.answers.last().map_or("", String::as_str)));
        messages.push(user(principle(revision.row).critique.clone()));
        messages
    };
    let asked: Vec<(Vec<u32>, u64)> = revisions
        .iter()
        .map(|revision| match revision.answers.is_empty() {
            true => Ok((Vec::new(), revision.row)),
            false => Ok((writer.tokens(&criticized(revision))?, revision.row)),
        })
        .collect::<Result<_, Failure>>()?;
    let critiques = writer.answers(&asked, Draw::Sampled(1 + 2 * round))?;
    let asked: Vec<(Vec<u32>, u64)> = revisions
        .iter()
        .zip(&critiques)
        .map(|(revision, critique)| {
            let Some(critique) = critique else { return Ok((Vec::new(), revision.row)) };
            let mut messages = criticized(revision);
            messages.push(assistant(critique.text.clone()));
            messages.push(user(principle(revision.row).revision.clone()));
            Ok((writer.tokens(&messages)?, revision.row))
        })
        .collect::<Result<_, Failure>>()?;
    let made = writer.answers(&asked, Draw::Sampled(2 + 2 * round))?;
    for (revision, (critique, made)) in revisions.iter_mut().zip(critiques.into_iter().zip(made)) {
        if let (Some(critique), Some(made)) = (critique, made) {
            revision.critiques.push((principle(revision.row).text.clone(), critique.text));
            revision.answers.push(made.text);
        }
    }
    Ok(())
}

/// Runs `maxtext data generate preferences`.
pub fn compare(mut arguments: GeneratePreferences) -> Result<(), Failure> {
    arguments.generated.complete()?;
    let settings = &mut arguments.generated.settings;
    let path = option(settings, ("--principles", "FILE"), arguments.principles.take())?;
    let seed: u64 = option_or(settings, ("--seed", "SEED"), arguments.seed, 0)?;
    let principles = principles(path.as_deref())?;
    let keys = std::mem::take(&mut settings.settings);
    let writer = Writer::open(keys.clone(), arguments.generated.max_tokens)?;
    writer.need_chat("comparisons of answers")?;
    let prompts = writer.prompts(&arguments.generated)?.prompts;
    let options = json!([
        "preferences",
        arguments.generated.prompts,
        arguments.generated.columns,
        arguments.generated.max_tokens,
        path,
        seed,
        keys,
    ]);
    let mut output = Output::open(arguments.generated.output()?, options, 3)?;
    let ((column, _), total) = (arguments.generated.columns(), prompts.len() as u64);
    while output.done() < total {
        let first = output.done() as usize;
        let chunk = &prompts[first..(first + CHUNK).min(prompts.len())];
        let both = pairs(&writer, chunk, first as u64)?;
        let drawn = |row: u64| {
            let drawn = key(&[seed, PRINCIPLES, row]);
            &principles[(drawn % principles.len() as u64) as usize]
        };
        let mut asked = Vec::new();
        for ((prompt, pair), row) in chunk.iter().zip(&both).zip(first as u64..) {
            let Some([one, other]) = pair else { continue };
            let text = quoted_prompt(given_prompt(prompt, &column));
            // Models prefer an answer by its place, so that both orders are compared.
            for order in [[one, other], [other, one]] {
                let request = drawn(row).comparison(&text, order.map(|written| written.text.as_str()));
                asked.push((writer.tokens(&[user(request)])?, row));
            }
        }
        let replies = writer.answers(&asked, Draw::Best)?;
        let mut replies = replies.chunks(2);
        let (mut rows, mut equal, mut undecided) = (Vec::new(), 0, 0);
        for ((prompt, pair), row) in chunk.iter().zip(&both).zip(first as u64..) {
            let Some(pair) = pair else {
                equal += 1;
                continue;
            };
            match preferred(replies.next().unwrap_or_default()) {
                Some(side) => rows.push(preference(given_prompt(prompt, &column), pair, side, drawn(row))),
                None => undecided += 1,
            }
        }
        output.add(&rows, chunk.len() as u64, &[rows.len() as u64, equal, undecided])?;
        show_progress(output.done(), total, "prompts");
    }
    let [made, equal, undecided] = [output.counts()[0], output.counts()[1], output.counts()[2]];
    output.finish()?;
    say!(
        "{made} preferences from {total} prompts; {equal} had no two different answers, and for {undecided} the verdict \
         depended on the order of the answers or named none"
    );
    Ok(())
}

/// Two different answers to each prompt.
fn pairs(writer: &Writer, prompts: &[Prompt], first: u64) -> Result<Vec<Option<[Written; 2]>>, Failure> {
    let asked: Vec<(Vec<u32>, u64)> = prompts
        .iter()
        .zip(first..)
        .flat_map(|(prompt, row)| [0, 1].map(|sample| (prompt.tokens.clone(), 2 * row + sample)))
        .collect();
    let written = writer.answers(&asked, Draw::Sampled(OF_ANSWERS))?;
    let pair = |pair: &[Option<Written>]| match pair {
        [Some(one), Some(other)] if one.text != other.text => Some([one.clone(), other.clone()]),
        _ => None,
    };
    Ok(written.chunks(2).map(pair).collect())
}

/// The answer that both orders prefer.
fn preferred(replies: &[Option<Written>]) -> Option<Side> {
    let [Some(in_order), Some(reversed)] = replies else { return None };
    match (verdict(&in_order.text)?, verdict(&reversed.text)?) {
        (Side::First, Side::Second) => Some(Side::First),
        (Side::Second, Side::First) => Some(Side::Second),
        _ => None,
    }
}

/// A line of preference data.
fn preference(prompt: &Value, [one, other]: &[Written; 2], side: Side, principle: &Principle) -> Value {
    let (chosen, rejected) = if side == Side::First { (one, other) } else { (other, one) };
    json!({
        "prompt": prompt,
        "chosen": in_form_of(prompt, &chosen.text),
        "rejected": in_form_of(prompt, &rejected.text),
        "principle": principle.text,
    })
}

/// The principles of a file.
fn principles(path: Option<&str>) -> Result<Vec<Principle>, Failure> {
    let path = path.ok_or_else(|| {
        Failure::user(
            "no file of principles is named\nhint: write `--principles constitution.txt`, with a principle on each line",
        )
    })?;
    let text = fs::read_to_string(path)
        .map_err(|error| Failure::user(format!("cannot read the principles in `{path}`: {error}")))?;
    Principle::read_all(&text).map_err(|reason| {
        Failure::user(format!(
            "`{path}`: {reason}\nhint: write a principle on each line, or an object with `critique` and `revision`"
        ))
    })
}
