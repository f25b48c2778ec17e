//! Log-probabilities of batch-invariant programs: the same bits within a training step, in packed rows and in tiles, as
//! of each text alone, which are those of an engine (`mt-engine/src/serve/tests/invariance.rs`).

use std::sync::Arc;

use mt_derive::Tree;
use mt_models::{Forward, Model, Tokens, build};
use mt_nn::{
    axes::{BATCH, POSITION},
    initialize, token_log_probabilities,
};
use mt_runtime::{Array, CompileSettings, Input, Runtime, testing::batch_invariant_cpu};
use mt_shape::{DType, HostArray, Placement, Sharding, axis};
use mt_trace::{Memory, ProgramOptions, Tensor, program};

use super::training::configuration;
use crate::objective::{BoundModel, ModelUse};

#[derive(Tree)]
struct Parameters<L> {
    all: Vec<L>,
}

/// A text: its tokens.
type Text = Vec<i32>;

fn array(runtime: &Runtime, host: &HostArray) -> Array {
    let sharding = Sharding::replicated(Placement::single().mesh().clone(), host.dims().len());
    Array::from_host(runtime, host, &sharding).unwrap()
}

/// Texts in rows: tokens, positions, segments and targets, and the place of each text.
fn packed(rows: &[Vec<&Text>], length: usize) -> ([HostArray; 4], Vec<(usize, usize)>) {
    let mut numbers = [(); 4].map(|()| vec![0_i32; rows.len() * length]);
    let mut places = Vec::new();
    for (row, texts) in rows.iter().enumerate() {
        let mut start = row * length;
        for (number, text) in texts.iter().enumerate() {
            places.push((start, text.len()));
            for (place, token) in text.iter().enumerate() {
                let next = text.get(place + 1).copied().unwrap_or(0);
                let own = [*token, place as i32, number as i32 + 1, next];
                numbers.iter_mut().zip(own).for_each(|(array, number)| array[start + place] = number);
            }
            start += text.len();
        }
    }
    let dims = [rows.len(), length];
    (numbers.map(|numbers| HostArray::from_slice(DType::I32, &dims, &numbers).unwrap()), places)
}

/// The log-probabilities of each text's tokens but the first, as bits. With `tiles`, they are those of a training step,
/// which also computes gradients.
fn scores(
    runtime: &Runtime,
    model: &dyn Model,
    parameters: &[Array],
    rows: &[Vec<&Text>],
    length: usize,
    tiles: Option<usize>,
) -> Vec<Vec<u32>> {
    let axes = [axis(BATCH, rows.len()), axis(POSITION, length)];
    let options =
        ProgramOptions { precision: model.precision(), ..ProgramOptions::new("scores", runtime.target()) };
    let specs = model.parameters();
    let traced = program(&options, |inputs| {
        let all: Vec<Tensor<'_>> = specs
            .iter()
            .map(|(path, spec)| {
                inputs.input(&path.to_string(), spec.dtype, &spec.axes, &spec.logical_axes, false)
            })
            .collect();
        let [tokens, positions, segments, targets] = ["tokens", "positions", "segments", "targets"]
            .map(|name| inputs.input(name, DType::I32, &axes, &[None, None], false));
        let tokens = Tokens::as_read(tokens, positions, segments);
        let Some(num_vocab_tiling) = tiles else {
            let hidden = model.hidden(&all, tokens, Forward::default()).hidden;
            let made = token_log_probabilities(model.head(&all, hidden), targets, true);
            return vec![inputs.replicated("scores", made.order(&[BATCH, POSITION]))];
        };
        let usage = ModelUse {
            num_vocab_tiling,
            gather_head_once: false,
            loss_in_f32: true,
            layers_in: Memory::Device,
            with_scores: false,
            with_statistics: false,
            is_split: false,
        };
        let (_, made, gradients) =
            inputs.region().value_and_grad_list(&Parameters { all }, |_, parameters| {
                let bound = BoundModel {
                    model,
                    specs: &specs,
                    parameters: &parameters.all,
                    usage,
                    dropout: None,
                    is_differentiated: true,
                };
                let hidden = bound.hidden(tokens).hidden;
                let made = bound.token_log_probabilities(hidden, targets);
                (made.sum(&[BATCH, POSITION]), vec![made])
            });
        let mut outputs = vec![inputs.replicated("scores", made[0].order(&[BATCH, POSITION]))];
        outputs.extend(gradients.all.into_iter().map(|gradient| inputs.replicated("gradient", gradient)));
        outputs
    });
    let executable = runtime.compile(&traced.unwrap(), &CompileSettings::default()).unwrap();
    let (arrays, places) = packed(rows, length);
    let arrays = arrays.map(|host| array(runtime, &host));
    let outputs = executable.run(parameters.iter().chain(&arrays).map(Input::from).collect()).unwrap();
    let made: Vec<u32> =
        outputs[0].to_host().unwrap().to_f64().iter().map(|score| (*score as f32).to_bits()).collect();
    places.into_iter().map(|(start, length)| made[start..start + length - 1].to_vec()).collect()
}

fn check(keys: &[&str]) {
    let own = ["batch_invariant=true", "cpu_kernels=true", "vocab_size=97", "enable_dropout=false"];
    let keys = [&own, keys].concat();
    let model: Arc<dyn Model> = build(&configuration(&keys, 1).model).unwrap().into();
    let runtime = batch_invariant_cpu();
    let initialized = program(&ProgramOptions::new("initialize", runtime.target()), |inputs| {
        let region = inputs.region();
        let parameters = initialize(region, region.key(3), &model.parameters());
        // Larger weights make attention uneven.
        parameters.into_iter().map(|parameter| inputs.replicated("parameter", parameter * 2.0)).collect()
    });
    let initialized = runtime.compile(&initialized.unwrap(), &CompileSettings::default()).unwrap();
    let parameters = initialized.run(Vec::new()).unwrap();
    let texts: Vec<Text> = [1, 7, 22, 40]
        .into_iter()
        .map(|length: i32| {
            (0..length + 1).map(|index| (index * index * 5 + index * length + 2) % 97).collect()
        })
        .collect();
    let alone: Vec<Vec<u32>> = texts
        .iter()
        .map(|text| scores(&runtime, &*model, &parameters, &[vec![text]], text.len(), None).remove(0))
        .collect();
    let rows = [vec![&texts[2], &texts[0], &texts[1]], vec![&texts[3], &texts[0]]];
    let order = [2, 0, 1, 3, 0];
    for tiles in [None, Some(1), Some(4)] {
        let made = scores(&runtime, &*model, &parameters, &rows, 52, tiles);
        for (made, index) in made.iter().zip(order) {
            assert!(*made == alone[index], "{keys:?}, {tiles:?}, text {index}");
        }
    }
}

#[test]
fn training_steps_compute_the_bits_of_each_text_alone() {
    let experts = ["decoder_block=mixtral", "num_experts=4", "num_experts_per_tok=2", "base_moe_mlp_dim=40"];
    for dtype in ["dtype=float32", "dtype=bfloat16"] {
        check(&[dtype, "scan_layers=true", "remat_policy=full"]);
        check(&[dtype, "scan_layers=false", "remat_policy=none"]);
        check(&[dtype, "decoder_block=gemma2", "sliding_window_size=20", "remat_policy=minimal"]);
        check(&[&[dtype], &experts[..]].concat());
    }
}
