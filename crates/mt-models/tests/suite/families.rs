//! All families compared with models of transformers; `goldens/families/generate.py` generates the directories.

use std::path::Path;

use mt_models::{
    Forward, ForwardPass,
    decoder::Decoder,
    hugging_face::{Weights, write_weights},
};
use mt_runtime::testing;
use mt_shape::{DType, HostArray, Placement};
use mt_trace::program;

use crate::{
    directory::Directory,
    harness::{self, Batch, declare, declare_batch, largest_error, options, relative_error},
};

/// The logits of a batch, and the outputs of layers by name.
pub fn taps_of(
    model: &Decoder,
    parameters: &[HostArray],
    batch: &Batch,
) -> (HostArray, Vec<(String, HostArray)>) {
    let specs = model.parameters();
    let mut names = Vec::new();
    let program = program(&options("taps", std::sync::Arc::new(Placement::single())), |inputs| {
        let parameters = declare(inputs, "params", &specs, false);
        let (tokens, [targets, segmentation]) = declare_batch(inputs, batch.rows, batch.length);
        let hidden = model.hidden(&parameters, tokens, Forward { taps: true, ..Forward::default() });
        let logits = model.head(&parameters, hidden.hidden).cast(DType::F32);
        let unused = (targets + segmentation).sum_all().cast(DType::F32) * 0.0;
        names = hidden.taps.iter().map(|(name, _)| name.clone()).collect();
        let taps = hidden.taps.into_iter().map(|(name, tap)| inputs.replicated(&name, tap));
        [inputs.replicated("logits", logits + unused)].into_iter().chain(taps).collect()
    })
    .unwrap();
    let mut results = harness::run(&program, &[parameters, &batch.arrays].concat());
    let logits = results.remove(0);
    (logits, names.into_iter().zip(results).collect())
}

/// Compares logits, and the outputs of all layers, with those of transformers.
#[track_caller]
pub fn check(directory: &Directory) {
    let name = &directory.name;
    let (golden, batch) = (directory.golden(), directory.batch());
    let expected = golden.array("logits").to_f64();
    for scan in directory.scans() {
        let model = directory.model(&[scan]);
        let (logits, taps) = taps_of(&model, &directory.parameters(&model), &batch);
        let num_layers = model.config().layers.len();
        let mut wrong = Vec::new();
        for layer in 0..=num_layers {
            let tap =
                if layer == 0 { "embedding".to_owned() } else { format!("layers.{}.output", layer - 1) };
            let (_, made) = taps.iter().find(|(name, _)| *name == tap).unwrap();
            let error = largest_error(&made.to_f64(), &golden.array(&format!("hidden_{layer}")).to_f64());
            if error.is_nan() || error > 1e-4 {
                wrong.push(format!("`{tap}` differs by {error:e} deviations"));
            }
        }
        let error = largest_error(&logits.to_f64(), &expected);
        if error.is_nan() || error > 1e-4 {
            wrong.push(format!("logits differ by {error:e} deviations"));
        }
        assert!(wrong.is_empty(), "{name} {scan}: {}", wrong.join("; "));
    }
}

macro_rules! families {
    ($($name:ident,)*) => {
        $(
            #[test]
            fn $name() {
                check(&Directory::open(stringify!($name)));
            }
        )*
    };
}

families! {
    llama_six_on_two,
    llama_scaled_tied,
    llama_biases_linear_one_layer,
    llama_yarn,
    llama_dynamic_ntk,
    llama_square_heads,
    mistral_window,
    mistral_full,
    mistral_window_one_layer,
    gemma_multi_query,
    gemma_wide_heads_one_layer,
    gemma2_even,
    gemma2_odd_untied,
    gemma2_uncapped_one_layer,
    gemma3_cycle_of_six,
    gemma3_cycle_of_three_untied,
    gemma3_one_layer,
    gemma3_multimodal,
    gemma4_dense_cycle_of_six,
    gemma4_dense_separate_values,
    gemma4_dense_one_layer,
    gemma4_moe_two_of_five,
    gemma4_moe_many_experts_one_layer,
    gemma4_moe_all_chosen,
    gemma4_small_double_wide,
    gemma4_small_cycle_of_six,
    gemma4_multimodal,
    qwen2_untied,
    qwen2_tied,
    qwen2_late_windows,
    qwen3_untied,
    qwen3_tied,
    qwen3_yarn_one_layer,
    olmo3_yarn,
    olmo3_yarn_own_factor,
    olmo3_default_tied_one_layer,
    gpt2_two_layers,
    gpt2_narrow_one_layer,
    mixtral_two_of_five,
    gpt_oss_two_of_four,
    deepseek3_groups,
    deepseek3_direct_queries,
    kimi_k2_eleven_experts,
    kimi_k2_all_chosen_one_layer,
    deepseek32_groups,
    deepseek32_one_layer,
    deepseek2_greedy,
    deepseek2_grouped,
    deepseek4_two_cycles,
    deepseek4_yarn,
    gpt_oss_one_expert_one_layer,
    mixtral_window_one_expert,
    mixtral_many_experts_one_layer,
    qwen3_moe_three_of_seven,
    qwen3_moe_all_chosen_tied,
    qwen3_moe_one_of_six_one_layer,
    qwen3_moe_every_second,
    qwen3_moe_dense_first,
    llama4_every_second,
    llama4_many_experts,
    llama4_one_expert_one_layer,
    llama4_multimodal,
    qwen3_next_cycle,
    qwen3_next_dense_between_tied,
    qwen3_next_linear_one_layer,
    qwen3_5_dense_cycle_of_three,
    qwen3_5_dense_irregular_tied,
    qwen3_5_moe_cycle,
    qwen3_5_moe_linear_one_layer,
    mamba2_two_groups,
    mamba2_biases_tied_one_layer,
    bamba_every_second,
    bamba_first_layer_attends_tied,
}

/// All tensors of a directory's weight files: name, type and shape, and bytes.
pub fn contents(path: &Path) -> Vec<(String, String, Vec<u8>)> {
    let mut all = Vec::new();
    for entry in path.read_dir().unwrap().flatten() {
        let file = entry.path();
        let is_weights = file.file_name().unwrap().to_str().unwrap().starts_with("model");
        if is_weights && file.extension().is_some_and(|extension| extension == "safetensors") {
            let bytes = std::fs::read(&file).unwrap();
            let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
            all.extend(tensors.iter().map(|(name, view)| {
                (name.to_owned(), format!("{:?} {:?}", view.dtype(), view.shape()), view.data().to_vec())
            }));
        }
    }
    all.sort();
    all
}

/// Weights that are read and written again are bit-identical.
#[test]
fn weights_come_back() {
    let runtime = testing::cpu(1);
    for (name, dtype) in [
        ("llama_six_on_two", DType::F32),
        ("llama_six_on_two_sharded", DType::F32),
        ("llama_six_on_two_bfloat16", DType::BF16),
        ("llama_biases_linear_one_layer", DType::F32),
        ("mistral_window", DType::F32),
        ("gemma_multi_query", DType::F32),
        ("gemma2_odd_untied", DType::F32),
        ("gemma3_cycle_of_six", DType::F32),
        ("gemma3_cycle_of_three_untied_float16", DType::F16),
        ("gemma4_dense_cycle_of_six", DType::F32),
        ("gemma4_small_double_wide", DType::F32),
        ("gemma4_moe_two_of_five", DType::F32),
        ("qwen2_untied", DType::F32),
        ("qwen3_untied", DType::F32),
        ("mixtral_two_of_five", DType::F32),
        ("gpt_oss_two_of_four", DType::F32),
        ("deepseek3_groups", DType::F32),
        ("kimi_k2_eleven_experts", DType::F32),
        ("kimi_k2_all_chosen_one_layer", DType::F32),
        ("deepseek32_groups", DType::F32),
        ("deepseek2_greedy", DType::F32),
        ("deepseek4_two_cycles", DType::F32),
        ("deepseek4_yarn", DType::F32),
        ("qwen3_moe_three_of_seven", DType::F32),
        ("qwen3_moe_every_second", DType::F32),
        ("llama4_every_second", DType::F32),
        ("llama4_many_experts", DType::F32),
        ("qwen3_next_cycle", DType::F32),
        ("qwen3_next_dense_between_tied", DType::F32),
        ("qwen3_5_dense_irregular_tied", DType::F32),
        ("qwen3_5_moe_cycle", DType::F32),
        ("mamba2_two_groups", DType::F32),
        ("mamba2_biases_tied_one_layer", DType::F32),
        ("bamba_every_second", DType::F32),
        ("bamba_first_layer_attends_tied", DType::F32),
        ("olmo3_yarn", DType::F32),
        ("gpt2_two_layers", DType::F32),
    ] {
        let directory = Directory::open(name);
        for scan in directory.scans() {
            let model = directory.model(&[scan]);
            let weights = Weights::open(&model, &directory.path).unwrap();
            let arrays = weights.load(runtime, &Placement::single(), &model, Some(dtype)).unwrap();
            let target = tempfile::tempdir().unwrap();
            write_weights(&model, &arrays, dtype, target.path(), Default::default()).unwrap();
            assert!(contents(&directory.path) == contents(target.path()), "{name} {scan}");
        }
    }
}

/// `bf16` has 8 bits of precision, so logits only come close.
#[test]
fn bf16_is_near() {
    for (name, reference) in [
        ("llama_six_on_two_bfloat16", "llama_six_on_two"),
        ("gemma2_even", "gemma2_even"),
        ("qwen3_untied", "qwen3_untied"),
        ("gpt2_two_layers", "gpt2_two_layers"),
    ] {
        let (directory, reference) = (Directory::open(name), Directory::open(reference));
        let model = directory.model(&["dtype=bfloat16", "weight_dtype=bfloat16"]);
        let weights = Weights::open(&model, &directory.path).unwrap();
        let arrays = weights.load(testing::cpu(1), &Placement::single(), &model, None).unwrap();
        let parameters: Vec<HostArray> = arrays.iter().map(|array| array.to_host().unwrap()).collect();
        assert!(parameters.iter().all(|array| array.dtype() == DType::BF16), "{name}");
        let (logits, _) = taps_of(&model, &parameters, &reference.batch());
        let error = relative_error(&logits.to_f64(), &reference.golden().array("logits").to_f64());
        assert!(error <= 3e-2, "{name}: logits differ by {error:e}");
    }
}

/// Configurations in the spelling of older releases, which most published checkpoints have, describe the same model.
#[test]
fn older_spellings_mean_the_same() {
    let mut count = 0;
    for entry in Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/families").read_dir().unwrap() {
        let path = entry.unwrap().path();
        let older = path.join("config_legacy.json");
        if !older.exists() {
            continue;
        }
        let target = tempfile::tempdir().unwrap();
        std::fs::copy(older, target.path().join("config.json")).unwrap();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        let older = Directory { name: name.clone(), path: target.path().to_owned() };
        let keys = ["scan_layers=false"];
        assert_eq!(older.model(&keys).config(), Directory::open(&name).model(&keys).config(), "{name}");
        count += 1;
    }
    assert!(count >= 9, "{count} directories have both spellings");
}
