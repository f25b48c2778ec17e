//! Complete answers.

use std::ops::ControlFlow;

use super::{Equipped, engine, engine_on, prompt, request};
use crate::{EngineError, FinishReason, Generation, GenerationEvent, Limits, Request, SamplingOptions};

const WEIGHTED: SamplingOptions = SamplingOptions { temperature: 1.0, top_k: None, top_p: None, seed: 3 };

fn at_most(max_new_tokens: usize) -> Limits {
    Limits { max_new_tokens: Some(max_new_tokens), stop: Vec::new() }
}

fn generate(
    engine: &Equipped,
    requests: &[Request],
    sampling: &SamplingOptions,
    limits: &Limits,
) -> Generation {
    engine.generate(requests, sampling, limits, |_| ControlFlow::Continue(())).unwrap()
}

fn tokens(engine: &Equipped, requests: &[Request], sampling: &SamplingOptions) -> Vec<Vec<u32>> {
    generate(engine, requests, sampling, &at_most(12)).rows.into_iter().map(|row| row.tokens).collect()
}

#[test]
fn answers_do_not_depend_on_the_batch() {
    let engine = engine(&[]);
    let requests: Vec<Request> =
        [4, 1, 20, 9, 2].iter().zip(0..).map(|(length, seed)| request(*length, seed)).collect();
    for sampling in [SamplingOptions::GREEDY, WEIGHTED] {
        // Five requests run as a group of four rows and a group of one.
        let together = tokens(&engine, &requests, &sampling);
        let alone: Vec<Vec<u32>> = requests
            .iter()
            .flat_map(|request| tokens(&engine, std::slice::from_ref(request), &sampling))
            .collect();
        assert_eq!(together, alone);
        assert!(together.iter().all(|answer| answer.len() == 12));
    }
}

#[test]
fn seeds_and_samples_draw_differently() {
    let engine = engine(&[]);
    let asked = |sample| Request { prompt: prompt(5, 1), sample };
    let first = tokens(&engine, &[asked(0), asked(0), asked(1)], &WEIGHTED);
    assert_eq!(first[0], first[1]);
    assert_ne!(first[0], first[2]);
    assert_eq!(tokens(&engine, &[asked(1)], &WEIGHTED)[0], first[2], "it is the same again");
    let other = SamplingOptions { seed: 4, ..WEIGHTED };
    assert_ne!(tokens(&engine, &[asked(0)], &other)[0], first[0]);
}

#[test]
fn narrow_choices_are_greedy() {
    let engine = engine(&[]);
    let requests = [request(5, 2), request(8, 3)];
    let greedy = tokens(&engine, &requests, &SamplingOptions::GREEDY);
    for sampling in [
        SamplingOptions { top_k: Some(1), ..WEIGHTED },
        SamplingOptions { top_p: Some(1e-6), ..WEIGHTED },
        SamplingOptions { top_k: Some(9), top_p: Some(1e-6), ..WEIGHTED },
        SamplingOptions { temperature: 1e-5, ..WEIGHTED },
        SamplingOptions { temperature: 1e-30, ..WEIGHTED },
    ] {
        assert_eq!(tokens(&engine, &requests, &sampling), greedy, "{sampling:?}");
    }
    assert_ne!(tokens(&engine, &requests, &WEIGHTED), greedy);
}

#[test]
fn rows_stop_at_their_own_end() {
    let engine = engine(&[]);
    let requests = [request(5, 2), request(8, 3), request(3, 4)];
    let free = generate(&engine, &requests, &SamplingOptions::GREEDY, &at_most(12));
    // A token in the first row's answer, as the stop token.
    let stop = free.rows[0].tokens[4];
    let limits = Limits { stop: vec![stop], ..at_most(12) };
    let mut seen: Vec<Vec<u32>> = vec![Vec::new(); 3];
    let mut finished: Vec<(usize, FinishReason)> = Vec::new();
    let stopped = engine.generate(&requests, &SamplingOptions::GREEDY, &limits, |event| {
        match event {
            GenerationEvent::Token(token) => {
                assert!(finished.iter().all(|(row, _)| *row != token.row), "{token:?} of {finished:?}");
                seen[token.row].push(token.token);
            }
            GenerationEvent::Finished { row, reason } => finished.push((row, reason)),
        }
        ControlFlow::Continue(())
    });
    let stopped = stopped.unwrap();
    for ((row, free), seen) in stopped.rows.iter().zip(&free.rows).zip(&seen) {
        let end = free.tokens.iter().position(|token| *token == stop);
        assert_eq!(row.tokens, free.tokens[..end.unwrap_or(12)]);
        assert_eq!(row.log_probabilities, free.log_probabilities[..end.unwrap_or(12)]);
        assert_eq!(row.finish, if end.is_some() { FinishReason::Stop } else { FinishReason::Length });
        assert_eq!(*seen, row.tokens);
    }
    assert_eq!(stopped.rows[0].finish, FinishReason::Stop);
    // Each row ends once, in order of length.
    let mut order: Vec<usize> = (0..3).collect();
    order.sort_by_key(|row| match stopped.rows[*row].finish {
        FinishReason::Stop => stopped.rows[*row].tokens.len() + 1,
        _ => stopped.rows[*row].tokens.len(),
    });
    let ends: Vec<_> = order.into_iter().map(|row| (row, stopped.rows[row].finish)).collect();
    assert_eq!(finished, ends);
    assert_eq!(stopped.timing.num_tokens, stopped.rows.iter().map(|row| row.tokens.len()).sum::<usize>());
}

#[test]
fn receivers_can_end_a_row() {
    let engine = engine(&[]);
    let requests = [request(5, 2), request(8, 3)];
    let mut left = 3;
    let generation = engine.generate(&requests, &SamplingOptions::GREEDY, &at_most(8), |event| {
        left -= usize::from(matches!(event, GenerationEvent::Token(token) if token.row == 1));
        if left == 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    let rows = generation.unwrap().rows;
    assert_eq!((rows[1].tokens.len(), rows[1].finish), (3, FinishReason::Cancelled));
    assert!(rows[0].tokens.len() < 8 || rows[0].finish == FinishReason::Length);
}

#[test]
fn answers_fill_the_target_length() {
    let engine = engine(&[]);
    let requests = [request(1, 2), request(31, 3)];
    let rows = generate(&engine, &requests, &SamplingOptions::GREEDY, &Limits::default()).rows;
    assert_eq!(rows.iter().map(|row| row.tokens.len()).collect::<Vec<_>>(), [63, 33]);
    let none = generate(&engine, &requests, &SamplingOptions::GREEDY, &at_most(0)).rows;
    assert!(none.iter().all(|row| row.tokens.is_empty() && row.finish == FinishReason::Length));
    assert!(generate(&engine, &[], &SamplingOptions::GREEDY, &Limits::default()).rows.is_empty());
}

#[test]
fn what_is_out_of_bounds_is_named() {
    let engine = engine(&[]);
    let check = |request: Request, sampling: SamplingOptions, expected: &str| {
        let result =
            engine.generate(&[request], &sampling, &Limits::default(), |_| ControlFlow::Continue(()));
        let error = result.unwrap_err();
        assert!(error.is_user_error());
        assert!(error.to_string().contains(expected), "{error}");
    };
    let greedy = SamplingOptions::GREEDY;
    check(request(33, 0), greedy, "33 tokens, more than the 32 of `max_prefill_predict_length`");
    check(request(0, 0), greedy, "has no token");
    check(Request { prompt: vec![1, 61], sample: 0 }, greedy, "token 61, but the model's `vocab_size` is 61");
    check(request(3, 0), SamplingOptions { temperature: -1.0, ..WEIGHTED }, "the temperature is `-1`");
    check(request(3, 0), SamplingOptions { top_k: Some(0), ..WEIGHTED }, "`top_k` is `0`");
    check(request(3, 0), SamplingOptions { top_p: Some(1.5), ..WEIGHTED }, "not `1.5`");
}

#[test]
fn tokens_beyond_the_tokenizer_are_not_chosen() {
    let mut engine = engine(&[]);
    engine.engine.programs.num_choices = 10;
    let hot = SamplingOptions { temperature: 50.0, ..WEIGHTED };
    for sampling in [SamplingOptions::GREEDY, hot, SamplingOptions { top_k: Some(40), ..hot }] {
        let answers = tokens(&engine, &[request(5, 2), request(8, 3)], &sampling);
        assert!(answers.iter().flatten().all(|token| *token < 10), "{answers:?}");
    }
}

#[test]
fn scores_that_are_no_numbers_are_reported() {
    let mut engine = engine(&[]);
    let runtime = mt_runtime::testing::cpu(1);
    for array in &mut engine.parameters {
        let mut host = array.to_host().unwrap();
        host.bytes_mut().chunks_exact_mut(4).for_each(|bytes| bytes.copy_from_slice(&f32::NAN.to_le_bytes()));
        *array = mt_runtime::Array::from_host(runtime, &host, array.sharding()).unwrap();
    }
    let result = engine.generate(&[request(4, 0)], &SamplingOptions::GREEDY, &Limits::default(), |_| {
        ControlFlow::Continue(())
    });
    let error = result.unwrap_err();
    assert!(matches!(error, EngineError::NotANumber { position: 4 }) && !error.is_user_error(), "{error}");
}

#[test]
fn several_devices_agree_with_one() {
    let keys = ["base_num_query_heads=4", "base_num_kv_heads=2", "base_emb_dim=32", "base_mlp_dim=48"];
    let requests = [request(5, 2), request(1, 3), request(17, 5)];
    let expected = tokens(&engine(&keys), &requests, &SamplingOptions::GREEDY);
    let drawn = tokens(&engine(&keys), &requests, &WEIGHTED);
    let over_three = ["ici_data_parallelism=2", "ici_fsdp_parallelism=2", "ici_tensor_parallelism=2"];
    for parallelism in [
        &["ici_fsdp_parallelism=4", "ici_tensor_parallelism=2"][..],
        &["ici_fsdp_parallelism=8", "ici_tensor_parallelism=1"],
        &["ici_fsdp_parallelism=4", "ici_autoregressive_parallelism=2"],
        &["ici_fsdp_parallelism=2", "ici_tensor_parallelism=4"],
        &over_three,
    ] {
        let engine = engine_on(8, &[&keys[..], parallelism].concat());
        assert_eq!(tokens(&engine, &requests, &SamplingOptions::GREEDY), expected, "{parallelism:?}");
        assert_eq!(tokens(&engine, &requests, &WEIGHTED), drawn, "{parallelism:?}");
    }
}
