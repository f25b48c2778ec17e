//! Distributions of samples from fixed logits.

use mt_ir::{CpuKernels, Target};
use mt_nn::axes::{BATCH, VOCAB};
use mt_runtime::testing;
use mt_shape::{DType, HostArray, axis};
use mt_trace::{ProgramOptions, program};

use crate::{
    SamplingOptions,
    sampler::{Controls, Sampler, log_probability},
};

const NUM_DRAWS: usize = 20_000;

/// The relative frequencies of the tokens in many draws from the same logits, and the log-probabilities of the drawn
/// tokens.
fn shares(target: Target, scores: &[f32], options: SamplingOptions) -> (Vec<f64>, Vec<f64>) {
    let size = scores.len();
    let sampler = options.sampler(size).unwrap();
    let program_options = ProgramOptions::new("draws", target);
    let program = program(&program_options, |inputs| {
        let (batch, vocab) = (axis(BATCH, NUM_DRAWS), axis(VOCAB, size));
        let scalar = |name, dtype| inputs.input(name, dtype, &[], &[], false);
        let row = inputs.input("scores", DType::F32, &[vocab], &[None], false);
        let controls = Controls {
            temperature: scalar("temperature", DType::F32),
            top_k: scalar("top_k", DType::I32),
            top_p: scalar("top_p", DType::F32),
            min_p: None,
            seed: scalar("seed", DType::U64),
            samples: inputs.region().iota(DType::U64, batch),
        };
        let logits = row.broadcast(&[batch, vocab]);
        let positions = inputs.region().full(DType::I32, &[batch], 5.0);
        let tokens = sampler.choose(logits, positions, Some(controls));
        let log_probabilities = log_probability(logits, tokens);
        vec![inputs.replicated("tokens", tokens), inputs.replicated("log_probabilities", log_probabilities)]
    });
    let program = program.unwrap();
    let calls = [("maxtext.cross_entropy", true), ("maxtext.largest", sampler == Sampler::Greedy)];
    for (name, is_needed) in calls {
        assert_eq!(program.text.contains(name), is_needed && target != Target::CPU, "{name}");
    }
    let scalar = |dtype, number: f64| match dtype {
        DType::F32 => HostArray::from_slice(dtype, &[], &[number as f32]),
        DType::I32 => HostArray::from_slice(dtype, &[], &[number as i32]),
        _ => HostArray::from_slice(dtype, &[], &[number as u64]),
    };
    let inputs = [
        HostArray::from_slice(DType::F32, &[size], scores).unwrap(),
        scalar(DType::F32, options.temperature).unwrap(),
        scalar(DType::I32, options.top_k.unwrap_or(size) as f64).unwrap(),
        scalar(DType::F32, options.top_p.unwrap_or(1.0)).unwrap(),
        scalar(DType::U64, options.seed as f64).unwrap(),
    ];
    let results = testing::run(&program, &inputs).unwrap();
    let mut counts = vec![0_usize; size];
    let mut log_probabilities = vec![f64::NAN; size];
    for (token, log_probability) in results[0].to_f64().into_iter().zip(results[1].to_f64()) {
        counts[token as usize] += 1;
        log_probabilities[token as usize] = log_probability;
    }
    (counts.into_iter().map(|count| count as f64 / NUM_DRAWS as f64).collect(), log_probabilities)
}

const PROBABILITIES: [f64; 10] = [0.02, 0.3, 0.0, 0.1, 0.05, 0.25, 0.08, 0.01, 0.15, 0.04];

/// Compares frequencies with `expected` weights; a token of weight 0 must never occur.
#[track_caller]
fn check(options: SamplingOptions, expected: [f64; 10]) {
    let scores = PROBABILITIES.map(|probability| (probability.max(1e-30).ln() + 3.0) as f32);
    let total: f64 = expected.iter().sum();
    for target in [Target::CPU, Target::Cpu(CpuKernels { f32: true, bf16: false, ..CpuKernels::NONE })] {
        let (shares, log_probabilities) = shares(target, &scores, SamplingOptions { seed: 11, ..options });
        for (token, expected) in expected.into_iter().enumerate() {
            let (share, expected) = (shares[token], expected / total);
            // Five standard deviations of a frequency.
            let slack = 5.0 * (expected * (1.0 - expected) / NUM_DRAWS as f64).sqrt();
            let what = format!("{options:?} token {token}");
            assert!((share - expected).abs() <= slack, "{what}: {share} is not {expected}");
            if share > 0.0 {
                // Log-probabilities ignore the sampling options.
                let exact = PROBABILITIES[token].ln();
                assert!((log_probabilities[token] - exact).abs() < 1e-5, "{}", log_probabilities[token]);
            }
        }
    }
}

const PLAIN: SamplingOptions = SamplingOptions { temperature: 1.0, top_k: None, top_p: None, seed: 0 };

#[test]
fn weighted_draws() {
    check(PLAIN, PROBABILITIES);
    check(SamplingOptions { temperature: 2.0, ..PLAIN }, PROBABILITIES.map(f64::sqrt));
}

#[test]
fn temperatures_near_zero_take_the_likeliest() {
    let likeliest = [0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0];
    check(SamplingOptions { temperature: 0.005, ..PLAIN }, likeliest);
    check(SamplingOptions { temperature: 0.0, ..PLAIN }, likeliest);
}

#[test]
fn draws_from_the_likeliest_few() {
    check(SamplingOptions { top_k: Some(3), ..PLAIN }, [0.0, 0.3, 0.0, 0.0, 0.0, 0.25, 0.0, 0.0, 0.15, 0.0]);
    check(SamplingOptions { top_k: Some(400), ..PLAIN }, PROBABILITIES);
}

#[test]
fn draws_from_a_mass() {
    // 0.3 + 0.25 is less than 0.6, and adding 0.15 exceeds it.
    check(
        SamplingOptions { top_p: Some(0.6), ..PLAIN },
        [0.0, 0.3, 0.0, 0.0, 0.0, 0.25, 0.0, 0.0, 0.15, 0.0],
    );
    check(SamplingOptions { top_p: Some(0.2), ..PLAIN }, [0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
    // The temperature applies before the truncation: 0.3² and 0.25² dominate the sum of squares.
    check(
        SamplingOptions { top_p: Some(0.7), temperature: 0.5, ..PLAIN },
        [0.0, 0.09, 0.0, 0.0, 0.0, 0.0625, 0.0, 0.0, 0.0, 0.0],
    );
}

#[test]
fn draws_by_number_then_mass() {
    // Among 0.3, 0.25 and 0.15, the first two hold more than three quarters of the mass.
    check(
        SamplingOptions { top_k: Some(3), top_p: Some(0.75), ..PLAIN },
        [0.0, 0.3, 0.0, 0.0, 0.0, 0.25, 0.0, 0.0, 0.0, 0.0],
    );
}
