//! Engines on several devices answer as on one.

use super::models::{collect, family_with, prompts, request, start};
use crate::{
    load_model,
    serve::{Answers, EngineHandle, GenerationRequest, TokenLogProbability},
};

const NUM_TOKENS: usize = 12;

/// The answers to prompts, and the log-probabilities of the first prompt.
type Answered = (Vec<Vec<TokenLogProbability>>, Vec<Option<TokenLogProbability>>);

fn answered(handle: &EngineHandle, prompts: &[Vec<u32>]) -> Answered {
    let ask = |prompt: &Vec<u32>| GenerationRequest {
        log_probabilities: Some(2),
        prompt_log_probabilities: (*prompt == prompts[0]).then_some(0),
        ..request(prompt, NUM_TOKENS)
    };
    let open: Vec<Answers> = prompts.iter().map(|prompt| handle.submit(ask(prompt)).unwrap()).collect();
    let (mut answers, mut of_prompt) = (Vec::new(), Vec::new());
    for (index, answer) in open.into_iter().enumerate() {
        let (scores, mut all) = collect(answer, 1);
        answers.push(all.remove(0));
        if index == 0 {
            of_prompt = scores;
        }
    }
    (answers, of_prompt)
}

/// The bound on differences of log-probabilities.
const CLOSE: f32 = 1e-5;
/// The bound of models whose layers make more of rounding, such as that of products whose sums are split over devices.
const WHOLE_MODEL: f32 = 1e-4;

fn assert_close(what: &str, within: f32, given: &TokenLogProbability, expected: &TokenLogProbability) {
    assert_eq!(given.token, expected.token, "{what}");
    let scores = |token: &TokenLogProbability| -> Vec<f32> {
        [token.log_probability].into_iter().chain(token.top.iter().map(|(_, score)| *score)).collect()
    };
    for (given, expected) in scores(given).into_iter().zip(scores(expected)) {
        assert!((given - expected).abs() < within, "{what}: {given}, not {expected}");
    }
}

/// Eight devices choose the tokens of one device, with log-probabilities within rounding.
fn check(name: &str, within: f32, placements: &[&[&str]]) {
    // The same products on one device, which kernels would compute in another order.
    let loaded = load_model(&family_with(name, &["cpu_kernels=false"]), &mut |_| {}).unwrap();
    let prompts = prompts(loaded.vocab_size)[..7].to_vec();
    let (expected, of_prompt) = answered(&start(loaded, 40, 4), &prompts);
    for keys in placements {
        let keys = [&["num_cpu_devices=8"], *keys].concat();
        let loaded = load_model(&family_with(name, &keys), &mut |_| {}).unwrap();
        assert_eq!(loaded.placement.mesh().num_devices(), 8);
        let (given, scores) = answered(&start(loaded, 40, 4), &prompts);
        for (row, (given, expected)) in given.iter().zip(&expected).enumerate() {
            assert_eq!(given.len(), expected.len());
            for (place, (given, expected)) in given.iter().zip(expected).enumerate() {
                assert_close(&format!("{name} {keys:?} row {row} token {place}"), within, given, expected);
            }
        }
        assert_eq!(scores.len(), of_prompt.len());
        for (given, expected) in scores.iter().flatten().zip(of_prompt.iter().flatten()) {
            assert_close(&format!("{name} {keys:?} prompt"), within, given, expected);
        }
    }
}

const FSDP: &[&str] = &["ici_fsdp_parallelism=8"];
const WITH_TENSOR: &[&str] = &["ici_fsdp_parallelism=4", "ici_tensor_parallelism=2"];
const WITH_DATA: &[&str] = &["ici_data_parallelism=2", "ici_fsdp_parallelism=2", "ici_tensor_parallelism=2"];

#[test]
fn dense_models() {
    // Two key-value heads, which four devices cannot share.
    let wide = ["ici_fsdp_parallelism=2", "ici_tensor_parallelism=4"];
    // Pages in shares.
    let pages = ["ici_fsdp_parallelism=8", "logical_axis_rules=[['cache_sequence', ['fsdp']]]"];
    check("llama_six_on_two", CLOSE, &[FSDP, WITH_TENSOR, WITH_DATA, &wide, &pages]);
    // One key-value head.
    check("gemma_multi_query", CLOSE, &[WITH_TENSOR]);
}

#[test]
fn windowed_models() {
    check("mistral_window", CLOSE, &[FSDP, WITH_TENSOR]);
    check("gemma3_cycle_of_six", CLOSE, &[WITH_TENSOR]);
}

#[test]
fn latent_models() {
    check("deepseek2_grouped", CLOSE, &[FSDP, WITH_TENSOR]);
    check("deepseek3_groups", WHOLE_MODEL, &[FSDP, WITH_TENSOR]);
}

#[test]
fn mixtures() {
    let experts = ["ici_expert_parallelism=2", "ici_fsdp_parallelism=4"];
    check("mixtral_many_experts_one_layer", CLOSE, &[FSDP, WITH_TENSOR, &experts]);
}

#[test]
fn hybrid_and_recurrent_models() {
    check("bamba_first_layer_attends_tied", CLOSE, &[FSDP, WITH_TENSOR]);
    check("qwen3_next_cycle", WHOLE_MODEL, &[FSDP, WITH_TENSOR]);
    check("mamba2_two_groups", WHOLE_MODEL, &[WITH_TENSOR]);
}

#[test]
fn probe() {
    let cases = std::env::var("PROBE").unwrap_or_default();
    for case in cases.split(';').filter(|case| !case.is_empty()) {
        let mut words = case.split(' ');
        let name = words.next().unwrap();
        let (reference, keys): (Vec<&str>, Vec<&str>) = words.partition(|word| word.starts_with("one."));
        let reference: Vec<&str> = reference.iter().map(|word| &word[4..]).collect();
        let run = |keys: &[&str]| {
            let loaded = load_model(&family_with(name, keys), &mut |_| {}).unwrap();
            let prompts = prompts(loaded.vocab_size)[..7].to_vec();
            (answered(&start(loaded, 40, 4), &prompts).0, prompts)
        };
        let (expected, prompts) = run(&reference);
        let (given, _) = run(&keys);
        let mut most = 0.0_f32;
        let mut bad = String::new();
        for (row, (given, expected)) in given.iter().zip(&expected).enumerate() {
            let mut worst = 0.0_f32;
            let mut wrong = None;
            for (place, (g, e)) in given.iter().zip(expected).enumerate() {
                if g.token != e.token {
                    wrong = Some(place);
                    break;
                }
                worst = worst.max((g.log_probability - e.log_probability).abs());
            }
            most = most.max(worst);
            bad += &format!(
                " {row}({}):{worst:.1e}{}",
                prompts[row].len(),
                wrong.map_or(String::new(), |p| format!("!{p}"))
            );
        }
        eprintln!("PROBE {case}: {most:.2e} {bad}");
    }
}

/// Scores of the whole text on a mesh, and the answers of the caller's engine.
#[test]
fn probe_score() {
    let keys: Vec<String> =
        std::env::var("PROBE_KEYS").unwrap_or_default().split(' ').map(str::to_owned).collect();
    if keys.len() < 2 {
        return;
    }
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    let run = |keys: &[&str]| {
        let loaded = load_model(&family_with("llama_six_on_two", keys), &mut |_| {}).unwrap();
        let rows = prompts(loaded.vocab_size)[..4].to_vec();
        let made =
            crate::score(&loaded, rows.as_slice().into(), false, &mt_runtime::CompileSettings::default())
                .unwrap();
        made.logits.to_f64()
    };
    let (one, other) = (run(&[]), run(&keys));
    let most = one.iter().zip(&other).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    eprintln!("PROBE score {keys:?} {most:e}");
}

#[test]
fn probe_sizes() {
    let Ok(cases) = std::env::var("PROBE_SIZES") else { return };
    let all = std::env::var("PROBE_KEYS").unwrap_or_default();
    let keys: Vec<&str> = all.split(' ').collect();
    let run = |keys: &[&str], read: usize, choose: usize| {
        let loaded = load_model(&family_with("llama_six_on_two", keys), &mut |_| {}).unwrap();
        let prompts = prompts(loaded.vocab_size)[..4].to_vec();
        let options = crate::serve::ServeOptions {
            page_size: 4,
            cache: crate::serve::CacheSize::Pages(80),
            max_sequences: choose,
            prefill_chunk_size: 8,
            ..crate::serve::ServeOptions::new(super::models::bounds(&loaded), loaded.vocab_size)
        };
        let sizes = crate::serve::StepSizes {
            rows: vec![choose],
            read_rows: vec![read],
            lengths: vec![8],
            pages: vec![16],
        };
        let handle =
            EngineHandle::start_with(crate::serve::ServedModel::from(loaded), options, sizes).unwrap();
        let ask = |prompt: &Vec<u32>| GenerationRequest {
            log_probabilities: Some(2),
            prompt_log_probabilities: Some(0),
            ..request(prompt, 4)
        };
        let open: Vec<Answers> = prompts.iter().map(|prompt| handle.submit(ask(prompt)).unwrap()).collect();
        open.into_iter().map(|answers| collect(answers, 1)).collect::<Vec<_>>()
    };
    let expected = run(&[], 2, 4);
    for case in cases.split(' ') {
        let (read, choose) = case.split_once(',').unwrap();
        let given = run(&keys, read.parse().unwrap(), choose.parse().unwrap());
        let mut text = String::new();
        for (given, expected) in given.iter().zip(&expected) {
            let pairs = given.0.iter().flatten().zip(expected.0.iter().flatten());
            let wrong: Vec<usize> = pairs
                .enumerate()
                .filter(|(_, (g, e))| (g.log_probability - e.log_probability).abs() > 1e-4)
                .map(|(place, _)| place + 1)
                .collect();
            let first = given.1[0].iter().zip(&expected.1[0]);
            let wrong_answer: Vec<usize> = first
                .enumerate()
                .filter(|(_, (g, e))| (g.log_probability - e.log_probability).abs() > 1e-4)
                .map(|(place, _)| place)
                .collect();
            text += &format!(" [{} tokens: prompt {wrong:?} answer {wrong_answer:?}]", given.0.len());
        }
        eprintln!("PROBE read {read} choose {choose}:{text}");
    }
}
