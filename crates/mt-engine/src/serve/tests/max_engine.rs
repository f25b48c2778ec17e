//! MaxEngine's interface: the caller decides when prompts are read and tokens are generated.

use std::path::Path;

use super::models::{bounds, family, prompts, request, start, tokens};
use crate::{
    EngineError, MaxEngine, Slot, load_model,
    serve::{CacheSize, ServeOptions, ServedModel, StepSizes, TokenChoice},
};

#[path = "../../../examples/max_engine.rs"]
mod example;

const NUM_TOKENS: usize = 14;

fn engine(name: &str, num_pages: usize, max_sequences: usize) -> MaxEngine {
    let loaded = load_model(&family(name), &mut |_| {}).unwrap();
    let options = ServeOptions {
        page_size: 4,
        cache: CacheSize::Pages(num_pages),
        max_sequences,
        prefill_chunk_size: 8,
        ..ServeOptions::new(bounds(&loaded), loaded.vocab_size)
    };
    // One program for all batches keeps compilation short.
    let sizes =
        StepSizes { rows: vec![max_sequences], read_rows: vec![1], lengths: vec![8], pages: vec![16] };
    MaxEngine::with_sizes(ServedModel::from(loaded), options, &sizes).unwrap()
}

/// Texts join and leave, in a cache that is too small for all of them.
fn check(name: &str, num_pages: usize) {
    let loaded = load_model(&family(name), &mut |_| {}).unwrap();
    let prompts = prompts(loaded.vocab_size)[..9].to_vec();
    let handle = start(loaded, 60, 4);
    let expected: Vec<Vec<u32>> =
        prompts.iter().map(|prompt| tokens(handle.submit(request(prompt, NUM_TOKENS)).unwrap())).collect();
    let mut engine = engine(name, num_pages, 3);
    let mut answers = vec![Vec::new(); prompts.len()];
    let mut running: Vec<(Slot, usize)> = Vec::new();
    let mut next = 0;
    while next < prompts.len() || !running.is_empty() {
        // Some prompts wait although a slot is free.
        if running.len() < 3
            && next < prompts.len()
            && (running.is_empty() || next % 2 == 0 || running.len() < 2)
        {
            let prefix = engine.prefill(&prompts[next], TokenChoice::GREEDY).unwrap();
            answers[next].push(prefix.first_token.token);
            running.push((engine.insert(prefix), next));
            next += 1;
        }
        for (slot, token) in engine.generate().unwrap() {
            let (_, number) = running.iter().find(|(other, _)| *other == slot).unwrap();
            answers[*number].push(token.token);
        }
        running.retain(|(slot, number)| {
            let goes_on = answers[*number].len() < NUM_TOKENS;
            assert!(goes_on || engine.release(*slot));
            goes_on
        });
    }
    assert_eq!(answers, expected, "{name}");
    assert_eq!(engine.slots().count(), 0);
}

#[test]
fn texts_join_and_leave() {
    check("llama_six_on_two", 40);
    check("llama_six_on_two", 22);
    check("qwen3_next_cycle", 40);
    check("mistral_window", 40);
}

#[test]
fn slots_are_limited() {
    let mut engine = engine("llama_six_on_two", 40, 2);
    let first = engine.prefill(&[1, 2, 3], TokenChoice::GREEDY).unwrap();
    let second = engine.prefill(&[1, 2, 3], TokenChoice::GREEDY).unwrap();
    assert_eq!(first.first_token, second.first_token);
    let Err(error @ EngineError::NoSlot { slots: 2 }) = engine.prefill(&[4], TokenChoice::GREEDY) else {
        panic!("there are two slots")
    };
    assert!(error.is_user_error());
    // Prompts that are not inserted are not continued.
    assert!(engine.generate().unwrap().is_empty());
    engine.discard(second);
    let slot = engine.insert(first);
    assert_eq!(engine.length(slot), Some(4));
    assert_eq!(engine.generate().unwrap()[0].0, slot);
    assert!(engine.release(slot) && !engine.release(slot));
    let banned = TokenChoice { banned_tokens: vec![1], ..TokenChoice::GREEDY };
    for (prompt, choice) in
        [(vec![], TokenChoice::GREEDY), (vec![1], banned), (vec![1; 64], TokenChoice::GREEDY)]
    {
        assert!(engine.prefill(&prompt, choice).unwrap_err().is_user_error());
    }
    // A text that fills the context yields no more tokens.
    let full = engine.prefill(&[5; 63], TokenChoice::GREEDY).unwrap();
    let slot = engine.insert(full);
    assert_eq!(engine.length(slot), Some(64));
    assert!(engine.generate().unwrap().is_empty());
}

#[test]
fn the_example_continues_texts() {
    let directory =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../mt-models/tests/goldens/families/llama_six_on_two");
    let loaded = load_model(&family("llama_six_on_two"), &mut |_| {}).unwrap();
    let prompts = prompts(loaded.vocab_size)[..4].to_vec();
    let handle = start(loaded, 60, 4);
    let expected: Vec<Vec<u32>> =
        prompts.iter().map(|prompt| tokens(handle.submit(request(prompt, 6)).unwrap())).collect();
    assert_eq!(example::run(&directory, &prompts, 6).unwrap(), expected);
}
