//! QK-clip: its factors, and equal results however a model is run and placed.

use std::collections::BTreeMap;

use mt_data::arrays::{INPUTS, INPUTS_POSITION, INPUTS_SEGMENTATION};

use super::training::{LENGTH, NUM_DEVICES, NUM_ROWS, Trained, batch, configuration, on_one_device, train};
use crate::{metrics::names::LARGEST_SCORE, plan::StateRule, query_key_clip::QueryKeyClipError};

/// Sizes of the tiny model.
const EMBED: usize = 32;
const HEADS: usize = 4;
const WIDTH: usize = 8;

/// The values of the only parameter whose name ends with `end`.
fn of<'a>(state: &'a BTreeMap<String, Vec<f64>>, end: &str) -> &'a [f64] {
    let is_named = |name: &&String| name.starts_with("params.") && name.ends_with(end);
    let names: Vec<&String> = state.keys().filter(is_named).collect();
    assert_eq!(names.len(), 1, "{end}: {names:?}");
    &state[names[0]]
}

/// Queries or keys: normalized embeddings times a kernel, with rotary embeddings, for each token and head.
fn projected(state: &BTreeMap<String, Vec<f64>>, kernel: &str, heads: usize) -> Vec<f64> {
    let (table, kernel) = (of(state, "embedding"), of(state, kernel));
    let batch = batch();
    let mut all = Vec::new();
    for (token, position) in batch.integers(INPUTS).iter().zip(batch.integers(INPUTS_POSITION)) {
        let x = &table[*token as usize * EMBED..][..EMBED];
        let size = (x.iter().map(|x| x * x).sum::<f64>() / EMBED as f64 + 1e-5).sqrt();
        for head in 0..heads {
            let column = |index: usize| -> f64 {
                (0..EMBED).map(|row| x[row] / size * kernel[(row * heads + head) * WIDTH + index]).sum()
            };
            let plain: Vec<f64> = (0..WIDTH).map(column).collect();
            all.extend((0..WIDTH).map(|index| {
                let (pair, half) = (index % (WIDTH / 2), WIDTH / 2);
                let angle = f64::from(*position) * 10_000_f64.powf(-(pair as f64) / half as f64);
                let (one, other) = (plain[pair], plain[pair + half]);
                if index < half {
                    one * angle.cos() - other * angle.sin()
                } else {
                    other * angle.cos() + one * angle.sin()
                }
            }));
        }
    }
    all
}

/// The largest attention logit of each head in the first layer, by plain loops.
fn largest_scores(state: &BTreeMap<String, Vec<f64>>, kv_heads: usize) -> Vec<f64> {
    let queries = projected(state, "attention.query.kernel", HEADS);
    let keys = projected(state, "attention.key.kernel", kv_heads);
    let batch = batch();
    let segments = batch.integers(INPUTS_SEGMENTATION);
    let score = |head: usize, query: usize, key: usize| {
        let query = &queries[(query * HEADS + head) * WIDTH..][..WIDTH];
        let key = &keys[(key * kv_heads + head * kv_heads / HEADS) * WIDTH..][..WIDTH];
        query.iter().zip(key).map(|(q, k)| q * k).sum::<f64>() / (WIDTH as f64).sqrt()
    };
    let seen = |row: usize| {
        let tokens = move |end: usize| row * LENGTH..end;
        tokens((row + 1) * LENGTH).flat_map(move |query| tokens(query + 1).map(move |key| (query, key)))
    };
    let pairs: Vec<(usize, usize)> = (0..NUM_ROWS)
        .flat_map(seen)
        .filter(|(query, key)| segments[*query] == segments[*key] && segments[*query] != 0)
        .collect();
    (0..HEADS)
        .map(|head| pairs.iter().map(|(q, k)| score(head, *q, *k)).fold(f64::NEG_INFINITY, f64::max))
        .collect()
}

/// Weights are scaled by the ratio of the threshold to the largest attention logit, and otherwise unchanged because the
/// learning rate is negligible.
#[track_caller]
fn check_factors(kv_heads: usize, threshold: f64, keys: &[&str]) {
    let (kv, threshold_key) =
        (format!("base_num_kv_heads={kv_heads}"), format!("qk_clip_threshold={threshold}"));
    let clip = ["use_qk_clip=true", &threshold_key, &kv, "base_num_decoder_layers=1", "learning_rate=1e-30"];
    let trained = train(&[&clip, keys].concat(), &[], 1);
    let [before, after] = &trained.states;
    let largest = largest_scores(before, kv_heads);
    let factors: Vec<f64> = largest.iter().map(|score| (threshold / score).min(1.0)).collect();
    let clipped = factors.iter().filter(|factor| **factor < 1.0).count();
    assert!((1..HEADS).contains(&clipped), "not some of the heads are clipped: {largest:?}");
    let share = |factor: f64| if kv_heads == HEADS { factor.sqrt() } else { factor };
    let check = |end: &str, heads: usize, factor: &dyn Fn(usize) -> f64| {
        for (index, (before, after)) in of(before, end).iter().zip(of(after, end)).enumerate() {
            let expected = before * factor(index / WIDTH % heads);
            let error = (after - expected).abs();
            assert!(error <= 1e-5 * expected.abs() + 1e-8, "{end}, {index}: {after}, not {expected}");
        }
    };
    check("attention.query.kernel", HEADS, &|head| share(factors[head]));
    let of_key = |head: usize| if kv_heads == HEADS { share(factors[head]) } else { 1.0 };
    check("attention.key.kernel", kv_heads, &of_key);
    check("attention.value.kernel", kv_heads, &|_| 1.0);
    let all = largest.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    for (step, score) in trained.reported[LARGEST_SCORE].iter().enumerate() {
        let expected = if step == 0 { all } else { threshold };
        assert!((score - expected).abs() <= 1e-5 * expected, "step {step}: {score}, not {expected}");
    }
}

#[test]
fn heads_are_scaled_to_the_threshold() {
    check_factors(4, 4.25, &[]);
    check_factors(2, 4.6, &["attention=flash"]);
    check_factors(1, 4.6, &[]);
}

#[test]
fn whatever_the_optimizer() {
    for optimizer in ["opt_type=muon", "opt_type=adafactor", "opt_type=sgd", "opt_type=adam_pax"] {
        check_factors(4, 4.25, &[optimizer]);
    }
}

/// A threshold below the tiny model's initial attention logits, so that clipping begins with the first step.
const CLIPPED: [&str; 2] = ["use_qk_clip=true", "qk_clip_threshold=2"];

#[track_caller]
fn assert_same(what: &str, actual: &Trained, expected: &Trained) {
    let of = |trained: &Trained| [trained.losses.clone(), trained.reported[LARGEST_SCORE].clone()].concat();
    for (actual, expected) in of(actual).iter().zip(of(expected)) {
        assert!((actual - expected).abs() <= 1e-5 * expected, "{what}: {actual} is not {expected}");
    }
}

#[test]
fn however_it_is_run_and_placed() {
    for heads in ["base_num_kv_heads=4", "base_num_kv_heads=2"] {
        let model = [CLIPPED.as_slice(), &[heads]].concat();
        let expected = on_one_device(&model);
        let unclipped = on_one_device(&[heads]);
        assert!(expected.reported[LARGEST_SCORE].iter().all(|score| *score > 2.0));
        assert!(expected.losses.iter().zip(&unclipped.losses).skip(1).all(|(one, other)| one != other));
        for way in [
            &["scan_layers=false"][..],
            &["scan_layers=false", "remat_policy=none"],
            &["remat_policy=minimal_with_context", "attention=flash"],
            &["gradient_accumulation_steps=2"],
        ] {
            let run = train(&[model.as_slice(), way].concat(), &[], 1);
            assert_same(&format!("{heads} {way:?}"), &run, &expected);
        }
        for (keys, mesh) in [
            (&[][..], &["ici_fsdp_parallelism=4", "ici_tensor_parallelism=2"][..]),
            (&["scan_layers=false"], &["ici_fsdp_parallelism=2", "ici_tensor_parallelism=4"]),
            (
                &["attention=flash"],
                &["ici_fsdp_parallelism=2", "ici_context_parallelism=2", "ici_tensor_parallelism=2"],
            ),
            (
                &["gradient_accumulation_steps=2"],
                &["ici_fsdp_parallelism=1", "ici_data_parallelism=8", "shard_optimizer_over_data=true"],
            ),
        ] {
            let run = train(&[model.as_slice(), keys].concat(), mesh, NUM_DEVICES);
            assert_same(&format!("{heads} {keys:?} {mesh:?}"), &run, &expected);
        }
    }
}

#[test]
fn nothing_changes_below_the_threshold() {
    for keys in [&["base_num_kv_heads=4"][..], &["attention=flash", "attn_logits_soft_cap=3"]] {
        let without = train(keys, &[], 1);
        let with = train(&[&["use_qk_clip=true", "qk_clip_threshold=1e3"], keys].concat(), &[], 1);
        assert_eq!(with.losses, without.losses, "{keys:?}");
        assert_eq!(with.states, without.states, "{keys:?}");
        assert!(!without.reported.contains_key(LARGEST_SCORE));
    }
}

#[test]
fn what_cannot_be_clipped_is_refused() {
    let refused = |keys: &[&str]| {
        let settings = configuration(&[&["use_qk_clip=true"], keys].concat(), 1);
        let model = mt_models::build(&settings.model).unwrap();
        let made = StateRule::new(&settings, &*model, mt_runtime::Platform::Cpu);
        match made.err() {
            Some(crate::TrainError::QueryKeyClip(error)) => error,
            other => panic!("{keys:?}: {other:?}"),
        }
    };
    assert!(matches!(
        refused(&["decoder_block=qwen3", "use_qk_norm=true"]),
        QueryKeyClipError::Normalized { .. }
    ));
    assert!(matches!(refused(&["decoder_block=simple"]), QueryKeyClipError::NoAttention { .. }));
    let masked = refused(&["trainable_parameters_mask=['query','mlp']", "base_num_kv_heads=4"]);
    let QueryKeyClipError::NotTrained { parameter, .. } = masked else { panic!("{masked}") };
    assert_eq!(parameter, "decoder/layers/self_attention/key/kernel");
}
