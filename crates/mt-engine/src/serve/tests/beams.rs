//! Beam search finds what transformers finds.

use std::collections::BTreeMap;

use mt_testing::Random;
use serde_json::Value;

use super::models::{family, prompts, request, start};
use crate::{
    FinishReason, load_model,
    serve::{
        AnswerEvent, AnswerLimits, Answers, BeamEnding, BeamSearch, EngineHandle, GenerationRequest,
        SubmitError, TokenChoice, TokenFilter,
    },
    tests::families::rows,
};

/// A text with its log-probabilities, and whether it was stopped.
type Found = (Vec<u32>, Vec<f32>, bool);

fn collect(mut answers: Answers, count: usize) -> Vec<Found> {
    let mut all = vec![(Vec::new(), Vec::new(), false); count];
    while let Some(event) = answers.recv() {
        match event {
            AnswerEvent::Prompt { .. } | AnswerEvent::Pooled { .. } => {}
            AnswerEvent::Token { answer, token } => {
                all[answer].0.push(token.token);
                all[answer].1.push(token.log_probability);
            }
            AnswerEvent::Finished { answer, reason, .. } => all[answer].2 = reason == FinishReason::Stop,
            AnswerEvent::Failed(error) => panic!("{error}"),
        }
    }
    all
}

fn searching(prompt: &[u32], search: BeamSearch, count: usize, num_answers: usize) -> GenerationRequest {
    let choice = TokenChoice { beams: Some(search), ..TokenChoice::GREEDY };
    GenerationRequest { choice, num_answers, ..request(prompt, count) }
}

/// The request of a golden case.
fn asked(case: &Value) -> GenerationRequest {
    let ending = match &case["early_stopping"] {
        Value::Bool(true) => BeamEnding::EnoughFinished,
        Value::String(_) => BeamEnding::NoBetterEver,
        _ => BeamEnding::NoBetterNow,
    };
    let number = |name: &str| case[name].as_u64().unwrap() as usize;
    let length_penalty = case["length_penalty"].as_f64().unwrap();
    let search = BeamSearch { length_penalty, ending, ..BeamSearch::new(number("beams")) };
    let tokens = |name: &str| rows(&Value::Array(vec![case[name].clone()])).remove(0);
    let num_answers = case["texts"].as_array().unwrap().len();
    let mut request = searching(&tokens("prompt"), search, number("max_new_tokens"), num_answers);
    request.limits.stop_tokens = tokens("stop");
    request
}

fn assert_found(what: &str, case: &Value, found: &[Found]) {
    for (text, (tokens, scores, is_stopped)) in case["texts"].as_array().unwrap().iter().zip(found) {
        let expected = rows(&Value::Array(vec![text["tokens"].clone()])).remove(0);
        assert_eq!(
            (tokens, *is_stopped),
            (&expected, text["is_stopped"].as_bool().unwrap()),
            "{what} {case}"
        );
        assert_eq!(scores.len(), tokens.len());
    }
    let penalty = case["length_penalty"].as_f64().unwrap();
    let scores = case["scores"].as_array().into_iter().flatten();
    for (expected, (_, scores, is_stopped)) in scores.zip(found).filter(|(_, found)| !found.2) {
        let sum: f64 = scores.iter().map(|score| f64::from(*score)).sum();
        let score = sum / (scores.len() as f64).powf(penalty);
        // A negative penalty multiplies the sum by its length.
        let expected = expected.as_f64().unwrap();
        assert!(
            (score - expected).abs() < 1e-5 * expected.abs().max(1.0),
            "{what} {case}: {score} {is_stopped}"
        );
    }
}

/// All searches of a model at once, beside greedy answers, in a cache that is too small for them.
#[test]
fn searches_find_what_transformers_finds() {
    let goldens: BTreeMap<String, Value> =
        serde_json::from_str(include_str!("../../../tests/goldens/beams.json")).unwrap();
    assert!(goldens.len() >= 4);
    for (name, cases) in goldens {
        let cases = cases.as_array().unwrap();
        // Twelve answers at once, or as many as the widest search needs.
        for (num_pages, sequences) in [(60, 12), (26, 5)] {
            let loaded = load_model(&family(&name), &mut |_| {}).unwrap();
            let others = prompts(loaded.vocab_size)[..5].to_vec();
            let handle = start(loaded, num_pages, sequences);
            let alone: Vec<_> =
                others.iter().map(|prompt| collect(handle.submit(request(prompt, 9)).unwrap(), 1)).collect();
            let beside: Vec<Answers> =
                others.iter().map(|prompt| handle.submit(request(prompt, 9)).unwrap()).collect();
            let open: Vec<Answers> = cases.iter().map(|case| handle.submit(asked(case)).unwrap()).collect();
            for (case, answers) in cases.iter().zip(open) {
                let count = case["texts"].as_array().unwrap().len();
                assert_found(&format!("{name} {num_pages}"), case, &collect(answers, count));
            }
            let beside: Vec<_> = beside.into_iter().map(|answers| collect(answers, 1)).collect();
            let ids = |all: &[Vec<Found>]| all.iter().map(|found| found[0].0.clone()).collect::<Vec<_>>();
            assert_eq!(ids(&beside), ids(&alone));
            assert_no_page_leaks(&handle);
        }
    }
}

/// Searches that are cancelled leave no pages behind.
#[test]
fn searches_can_be_cancelled() {
    let handle = start(load_model(&family("llama_six_on_two"), &mut |_| {}).unwrap(), 30, 6);
    let mut random = Random::new(3);
    for _ in 0..20 {
        let prompt: Vec<u32> = (0..1 + random.below(20) as u32).collect();
        let answers = handle.submit(searching(&prompt, BeamSearch::new(1 + random.below(6)), 20, 1)).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(random.below(8) as u64));
        drop(answers);
    }
    let found = collect(handle.submit(searching(&[1, 2, 3], BeamSearch::new(3), 0, 2)).unwrap(), 2);
    assert!(found.iter().all(|(tokens, ..)| tokens.is_empty()));
    assert_no_page_leaks(&handle);
}

#[track_caller]
fn assert_no_page_leaks(handle: &EngineHandle) {
    handle.drain();
    // Counts are reported after a step, and requests end within it.
    for _ in 0..100 {
        if handle.metrics().used_pages == 0 {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    panic!("{:?}", handle.metrics());
}

#[test]
fn searches_go_without_other_rules() {
    let handle = start(load_model(&family("llama_six_on_two"), &mut |_| {}).unwrap(), 30, 6);
    check(&handle, &|request| request.choice.temperature = 0.5, "looks for the most probable texts");
    check(&handle, &|request| request.choice.banned_tokens = vec![3], "looks for the most probable texts");
    check(&handle, &|request| request.num_answers = 4, "at least the number of answers (4)");
    check(&handle, &|request| request.choice.beams = Some(BeamSearch::new(7)), "at most 6");
    check(&handle, &|request| request.limits.min_tokens = 1, "looks for the most probable texts");
    let penalty = BeamSearch { length_penalty: f64::NAN, ..BeamSearch::new(3) };
    check(&handle, &|request| request.choice.beams = Some(penalty), "`length_penalty` is `NaN`");

    struct Nothing;
    impl TokenFilter for Nothing {
        fn allowed(&mut self, _allowed: &mut [u32]) {}
        fn accept(&mut self, _token: u32) -> bool {
            false
        }
    }
    let filters = |request: &mut GenerationRequest| request.filters = vec![Box::new(Nothing)];
    check(&handle, &filters, "looks for the most probable texts");
}

fn check(handle: &EngineHandle, change: &dyn Fn(&mut GenerationRequest), expected: &str) {
    let mut asked = searching(&[1, 2], BeamSearch::new(3), 5, 1);
    asked.limits = AnswerLimits { max_new_tokens: Some(5), ..AnswerLimits::default() };
    change(&mut asked);
    let Err(SubmitError::Invalid(error)) = handle.submit(asked) else { panic!("{expected} is accepted") };
    assert!(error.is_user_error() && error.to_string().contains(expected), "{error}");
}
