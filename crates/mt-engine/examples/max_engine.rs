//! Continues texts with MaxEngine's interface: prompts are read one by one, join the texts in progress, and leave when they
//! are complete: `cargo run --release -p mt-engine --example max_engine -- DIRECTORY [TOKENS] [PROMPT]…`, where the directory
//! holds a published model with its tokenizer.

use std::{collections::BTreeMap, error::Error, path::Path};

use mt_config::{Config, LoadConfig, ModelDescription, Request as ConfigRequest};
use mt_data::Tokenizer;
use mt_engine::{
    MaxEngine, PromptBounds, Slot, load_model,
    serve::{ServeOptions, ServedModel, TokenChoice},
};
use mt_models::hugging_face::{description_path, settings_of};

/// The number of texts that are continued at once.
const NUM_SLOTS: usize = 2;

#[allow(dead_code, reason = "the test of this example calls `run`")]
fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let directory = arguments.first().ok_or("name the directory of a published model")?;
    let num_tokens = arguments.get(1).map_or(Ok(20), |text| text.parse())?;
    let given = arguments.iter().skip(2).map(String::as_str).collect::<Vec<_>>();
    let prompts = if given.is_empty() { vec!["The sky is", "Once upon a time", "1, 2, 3,"] } else { given };
    let tokenizer = Tokenizer::load(Path::new(directory))?;
    let encoded: Vec<Vec<u32>> =
        prompts.iter().map(|prompt| tokenizer.encode(prompt, true, false)).collect::<Result<_, _>>()?;
    let answers = run(Path::new(directory), &encoded, num_tokens)?;
    for (prompt, answer) in prompts.iter().zip(answers) {
        println!("{prompt}{}", tokenizer.decode(&answer, true)?);
    }
    Ok(())
}

/// Continues prompts by a number of tokens each.
pub fn run(
    directory: &Path,
    prompts: &[Vec<u32>],
    num_tokens: usize,
) -> Result<Vec<Vec<u32>>, Box<dyn Error>> {
    let loaded = load_model(&configuration(directory)?, &mut |begins| eprintln!("{begins}"))?;
    let bounds = PromptBounds {
        vocab_size: loaded.vocab_size,
        max_target_length: 256,
        max_prefill_length: 255,
        source: None,
    };
    let options = ServeOptions { max_sequences: NUM_SLOTS, ..ServeOptions::new(bounds, loaded.vocab_size) };
    let mut engine = MaxEngine::new(ServedModel::from(loaded), options)?;

    let mut waiting = prompts.iter().enumerate();
    let mut answers: Vec<Vec<u32>> = vec![Vec::new(); prompts.len()];
    let mut running: BTreeMap<Slot, usize> = BTreeMap::new();
    loop {
        while running.len() < NUM_SLOTS
            && let Some((number, prompt)) = waiting.next()
        {
            let prefix = engine.prefill(prompt, TokenChoice::GREEDY)?;
            answers[number].push(prefix.first_token.token);
            running.insert(engine.insert(prefix), number);
        }
        if running.is_empty() {
            return Ok(answers);
        }
        for (slot, token) in engine.generate()? {
            answers[running[&slot]].push(token.token);
        }
        running.retain(|slot, number| {
            let goes_on = answers[*number].len() < num_tokens;
            if !goes_on {
                answers[*number].truncate(num_tokens);
                engine.release(*slot);
            }
            goes_on
        });
    }
}

/// The configuration of a published model.
fn configuration(directory: &Path) -> Result<LoadConfig, Box<dyn Error>> {
    let settings = settings_of(directory)?.into_pairs();
    let description = ModelDescription {
        path: description_path(directory),
        settings: settings.into_iter().map(|(name, value)| (name.to_owned(), value)).collect(),
        ..ModelDescription::default()
    };
    let path = format!("load_parameters_path={}", directory.display());
    let arguments = vec!["hardware=cpu".to_owned(), "dtype=float32".to_owned(), path];
    let request = ConfigRequest { arguments, ..ConfigRequest::default() }.describing(description);
    Ok(LoadConfig::from_config(&Config::resolve(&request)?)?)
}
