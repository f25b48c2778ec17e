//! Properties of layers with any parts: segments, state, outputs, auxiliary losses, and correct declarations.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use mt_config::{Config, ModelGroup, PlacementGroup, Request};
use mt_derive::Tree as DeriveTree;
use mt_ir::{Program, Target};
use mt_nn::{
    LayerPlace, ParamSpec,
    axes::{BATCH, KV_POSITION, POSITION},
    initialize,
};
use mt_runtime::testing;
use mt_shape::{Axis, DType, HostArray, LogicalAxis, Path, axis};
use mt_trace::{Inputs, ProgramOptions, SavePolicy, Tensor, program};

use super::{
    Decoder, LayerNames, LayerRun,
    parts::probe::{DecayConfig, SHARES, ShiftConfig},
};
use crate::{
    Description, Forward, ForwardPass, GenerationState, LayerOutput, Tokens, build_decoder,
    layer_output::statistics_of, statistics,
};

const ROWS: usize = 2;
const LENGTH: usize = 9;

fn config(arguments: &[&str]) -> Config {
    let small = [
        "dataset_type=synthetic",
        "run_name=parts",
        "base_emb_dim=16",
        "base_num_query_heads=2",
        "base_num_kv_heads=2",
        "head_dim=8",
        "base_mlp_dim=24",
        "vocab_size=32",
        "dtype=float32",
        "base_num_decoder_layers=6",
        "enable_dropout=false",
        "remat_policy=none",
    ];
    let key = |argument: &str| argument.split('=').next().unwrap().to_owned();
    let kept = small.iter().filter(|own| arguments.iter().all(|given| key(given) != key(own)));
    let arguments = kept.chain(arguments).map(|argument| (*argument).to_owned()).collect();
    Config::resolve(&Request { arguments, ..Request::default() }).unwrap()
}

fn group(arguments: &[&str]) -> ModelGroup {
    ModelGroup::from_config(&config(arguments)).unwrap()
}

/// Four layers with attention, and two with a recurrent mixer and a feed-forward part with a state.
fn mixed(scan_layers: bool, remat: Option<SavePolicy>) -> Decoder {
    let decoder = build_decoder(&group(&["decoder_block=llama2"])).unwrap();
    let mut config = decoder.config().clone();
    for layer in &mut config.layers[4..] {
        layer.mixer = Some(DecayConfig { decay: 0.7 }.into());
        layer.feed_forward = Some(ShiftConfig.into());
    }
    let run = |name, first| LayerRun {
        name: std::borrow::Cow::Borrowed(name),
        first,
        cycle: 1,
        stored: LayerNames::LAYERS,
    };
    config.runs = vec![run("", 0), run("recurrent", 4)];
    (config.scan_layers, config.remat) = (scan_layers, remat);
    config.check().unwrap();
    Decoder::new(config, decoder.family())
}

fn options() -> ProgramOptions {
    ProgramOptions::new("parts", Target::CPU)
}

#[derive(DeriveTree)]
struct List<L>(Vec<L>);

fn integers<'t>(inputs: &Inputs<'t>, axes: &[Axis]) -> Tensor<'t> {
    inputs.input("integers", DType::I32, axes, &vec![None; axes.len()], false)
}

fn declared<'t>(inputs: &Inputs<'t>) -> Tokens<'t> {
    let axes = [axis(BATCH, ROWS), axis(POSITION, LENGTH)];
    Tokens::as_read(integers(inputs, &axes), integers(inputs, &axes), integers(inputs, &axes))
}

fn array(dims: &[usize], values: Vec<i32>) -> HostArray {
    HostArray::from_slice(DType::I32, dims, &values).unwrap()
}

fn token(row: usize, place: usize) -> i32 {
    ((row * 13 + place * 7) % 31) as i32
}

/// Tokens, positions and segments. Row 1 has one token less.
fn batch() -> Vec<HostArray> {
    let each = |value: &dyn Fn(usize, usize) -> i32| {
        let places = (0..ROWS).flat_map(|row| (0..LENGTH).map(move |place| (row, place)));
        array(&[ROWS, LENGTH], places.map(|(row, place)| value(row, place)).collect())
    };
    vec![each(&token), each(&|_, place| place as i32), each(&|row, place| i32::from(row + place < LENGTH))]
}

/// The loss, the auxiliary loss in it, and the gradients by role and layer.
fn gradients(decoder: &Decoder) -> (f64, f64, BTreeMap<(String, usize), Vec<f64>>) {
    let specs = decoder.parameters();
    let program = program(&options(), |inputs| {
        let region = inputs.region();
        let parameters = List(initialize(region, region.key(3), &specs));
        let tokens = declared(inputs);
        let (loss, [auxiliary], gradients) = region.value_and_grad(&parameters, |_, parameters| {
            let hidden = decoder.hidden(&parameters.0, tokens, Forward::default());
            let [(SHARES, auxiliary)] = hidden.auxiliary_losses[..] else {
                panic!("one kind of part adds a loss")
            };
            let logits = decoder.head(&parameters.0, hidden.hidden);
            (logits.square().mean(&[BATCH, POSITION]).sum_all() + auxiliary, [auxiliary])
        });
        let outputs = [loss, auxiliary].into_iter().chain(gradients.0);
        outputs.map(|tensor| inputs.replicated("output", tensor)).collect()
    })
    .unwrap();
    let made = testing::run(&program, &batch()).unwrap();
    let mut gradients = BTreeMap::new();
    for ((path, spec), gradient) in specs.iter().zip(&made[2..]) {
        let values = gradient.to_f64();
        let layers: Vec<usize> = match spec.place {
            LayerPlace::None => vec![0],
            LayerPlace::One(layer) => vec![layer],
            LayerPlace::Stacked { first, step } => {
                (0..spec.axes[0].size).map(|index| first + index * step).collect()
            }
        };
        for (layer, values) in layers.iter().zip(values.chunks(values.len() / layers.len())) {
            gradients.insert((role(path, spec), *layer), values.to_vec());
        }
    }
    (made[0].to_f64()[0], made[1].to_f64()[0], gradients)
}

fn role(path: &Path, spec: &ParamSpec) -> String {
    if spec.place == LayerPlace::None { path.to_string() } else { spec.role.clone() }
}

#[track_caller]
fn assert_near(what: &str, actual: &[f64], expected: &[f64]) {
    let largest = expected.iter().fold(1e-3_f64, |largest, value| largest.max(value.abs()));
    for (actual, expected) in actual.iter().zip(expected) {
        assert!((actual - expected).abs() <= 2e-5 * largest, "{what}: {actual}, not {expected}");
    }
}

#[test]
fn paths_follow_from_segments_and_parts() {
    let paths: Vec<String> =
        mixed(true, None).parameters().iter().map(|(path, _)| path.to_string()).collect();
    for path in [
        "layers.cycle.0.attention.query.kernel",
        "layers.cycle.0.mlp.wi_0.kernel",
        "layers.recurrent_cycle.0.decay.input.kernel",
        "layers.recurrent_cycle.0.shift.share",
    ] {
        assert!(paths.iter().any(|known| known == path), "{path}: {paths:?}");
    }
}

#[test]
fn losses_of_parts_have_gradients_in_scans_and_when_computed_again() {
    let (loss, auxiliary, expected) = gradients(&mixed(false, None));
    let shares = |layer: usize| &expected[&("shift.share".to_owned(), layer)];
    // The auxiliary loss contributes twice the share to the share's gradient.
    assert!(auxiliary > 0.5 && [4, 5].iter().all(|layer| shares(*layer).iter().any(|value| *value != 0.0)));
    for (scan_layers, remat) in [
        (true, None),
        (false, Some(SavePolicy::Names(BTreeMap::new()))),
        (true, Some(SavePolicy::Names(BTreeMap::new()))),
    ] {
        let way = format!("scan_layers={scan_layers} {remat:?}");
        let (other_loss, other_auxiliary, gradients) = gradients(&mixed(scan_layers, remat));
        assert_near(&way, &[other_loss, other_auxiliary], &[loss, auxiliary]);
        assert!(gradients.keys().eq(expected.keys()), "{way}");
        for (key, gradient) in &gradients {
            assert_near(&format!("{way} {key:?}"), gradient, &expected[key]);
        }
    }
}

/// A program from tokens, the index of the first token, the occupied slots and the state to logits and the next state.
fn extend(decoder: &Decoder, length: usize, slots: usize) -> Program {
    let (specs, kept) = (decoder.parameters(), decoder.state(ROWS, slots, 0));
    program(&options(), |inputs| {
        let region = inputs.region();
        let parameters = initialize(region, region.key(3), &specs);
        let rows = axis(BATCH, ROWS);
        let axes = [rows, axis(POSITION, length)];
        let tokens = integers(inputs, &axes);
        let start = integers(inputs, &[]);
        let occupied = integers(inputs, &[rows, axis(KV_POSITION, slots)]);
        let arrays = kept
            .iter()
            .map(|spec| inputs.input(&spec.full_name(), spec.dtype, &spec.axes, &spec.logical_axes, false));
        let arrays = arrays.collect();
        let positions = (region.iota(DType::I32, axes[1]) + start).broadcast(&axes);
        let segmentation = region.full(DType::I32, &axes, 1.0);
        let state =
            GenerationState { arrays, start, segmentation: occupied, is_filled: false, slots, pages: None };
        let forward = Forward { state: Some(state), ..Forward::default() };
        let tokens = Tokens::as_read(tokens, positions, segmentation);
        let (logits, arrays) = decoder.logits(&parameters, tokens, forward);
        let outputs = std::iter::once(logits).chain(arrays);
        outputs.map(|tensor| inputs.replicated("output", tensor)).collect()
    })
    .unwrap()
}

#[test]
fn state_of_both_kinds_continues_sequences() {
    for scan_layers in [true, false] {
        let decoder = mixed(scan_layers, None);
        let whole = testing::run(&extend(&decoder, LENGTH, LENGTH), &continued(&decoder, 0, LENGTH, None));
        let whole = whole.unwrap()[0].to_f64();
        let mut state: Option<Vec<HostArray>> = None;
        for (start, length) in [(0, 5), (5, 1), (6, 3)] {
            let inputs = continued(&decoder, start, length, state);
            let mut made = testing::run(&extend(&decoder, length, LENGTH), &inputs).unwrap();
            let logits = made.remove(0);
            let vocab = logits.dims()[2];
            for (row, own) in logits.to_f64().chunks(length * vocab).enumerate() {
                let first = (row * LENGTH + start) * vocab;
                assert_near(&format!("tokens from {start} on"), own, &whole[first..first + own.len()]);
            }
            state = Some(made);
        }
    }
}

/// The arguments of [`extend`] for the next tokens of each row.
fn continued(
    decoder: &Decoder,
    start: usize,
    length: usize,
    state: Option<Vec<HostArray>>,
) -> Vec<HostArray> {
    let places = (0..ROWS).flat_map(|row| (start..start + length).map(move |place| token(row, place)));
    let occupied = (0..ROWS).flat_map(|_| (0..LENGTH).map(|slot| i32::from(slot < start + length)));
    let empty = || {
        decoder.state(ROWS, LENGTH, 0).iter().map(|spec| HostArray::zeros(spec.dtype, &spec.dims())).collect()
    };
    let given = [
        array(&[ROWS, length], places.collect()),
        array(&[], vec![start as i32]),
        array(&[ROWS, LENGTH], occupied.collect()),
    ];
    given.into_iter().chain(state.unwrap_or_else(empty)).collect()
}

#[test]
fn arrays_of_state_are_listed_layer_by_layer() {
    let names = |scan_layers| -> Vec<String> {
        mixed(scan_layers, None).state(1, 4, 0).iter().map(|spec| spec.full_name()).collect()
    };
    assert_eq!(names(true), ["0.key", "0.value", "1.sum", "1.inputs"]);
    assert_eq!(names(false)[6..], ["3.key", "3.value", "4.sum", "4.inputs", "5.sum", "5.inputs"]);
}

#[test]
fn statistics_are_of_every_layer() {
    let of = |scan_layers| {
        let decoder = mixed(scan_layers, None);
        let specs = decoder.parameters();
        let mut names = Vec::new();
        let program = program(&options(), |inputs| {
            let region = inputs.region();
            let parameters = initialize(region, region.key(3), &specs);
            let layer_outputs = vec![LayerOutput::Statistics, LayerOutput::Residual];
            let forward = Forward { layer_outputs, ..Forward::default() };
            let outputs = decoder.hidden(&parameters, declared(inputs), forward).layer_outputs;
            let is_last = |(layer, _): &(usize, Tensor<'_>)| *layer == 5;
            let residual = outputs.iter().filter(|made| made.label.kind == LayerOutput::Residual);
            let last = residual.flat_map(|made| made.of_each()).find(is_last).unwrap().1;
            let mut values = vec![inputs.replicated("residual", last)];
            for (name, value) in statistics(&outputs) {
                names.push(name);
                values.push(inputs.replicated("statistic", value));
            }
            values
        })
        .unwrap();
        let made = testing::run(&program, &batch()).unwrap();
        let residual = made[0].to_f64();
        let values: Vec<f64> = made[1..].iter().map(|value| value.to_f64()[0]).collect();
        (names, values, residual)
    };
    let (names, values, residual) = of(true);
    assert_eq!(names.len(), 18);
    assert_eq!(
        names[15..],
        ["activ_mean/layer_005", "activ_stdev/layer_005", "activ_fraction_zero/layer_005"]
    );
    let mean = residual.iter().sum::<f64>() / residual.len() as f64;
    let variance = residual.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / residual.len() as f64;
    assert_near("statistics", &values[15..], &[mean, variance.sqrt(), 0.0]);
    let (unrolled_names, unrolled, _) = of(false);
    assert_eq!(unrolled_names, names);
    assert_near("statistics", &unrolled, &values);
}

#[test]
fn statistics_count_zeros() {
    let program = program(&options(), |inputs| {
        let x = inputs.input("x", DType::F32, &[axis(BATCH, 2), axis(POSITION, 4)], &[None, None], false);
        statistics_of(x).into_iter().map(|(_, value)| inputs.replicated("statistic", value)).collect()
    })
    .unwrap();
    let values = [0.0_f32, 1.0, 2.0, 3.0, -0.0, 5.0, -4.0, 1.0];
    let made =
        testing::run(&program, &[HostArray::from_slice(DType::F32, &[2, 4], &values).unwrap()]).unwrap();
    let made: Vec<f64> = made.iter().map(|value| value.to_f64()[0]).collect();
    assert_near("statistics", &made, &[1.0, 6.0_f64.sqrt(), 0.25]);
}

/// The named activations that parts declare equal those that a trace constrains.
#[test]
fn declared_activations_are_those_that_are_made() {
    const NAMES: [&str; 9] = [
        "query_proj",
        "key_proj",
        "value_proj",
        "context",
        "out_proj",
        "mlpwi",
        "mlpwi_0",
        "mlpwi_1",
        "mlpwo",
    ];
    let mesh = ["num_cpu_devices=8", "ici_fsdp_parallelism=8", "per_device_batch_size=1"];
    for arguments in [
        &["decoder_block=llama2"][..],
        &["decoder_block=llama2", "attention=flash", "dtype=bfloat16"],
        &["decoder_block=gemma3", "base_num_decoder_layers=7", "sliding_window_size=4"],
        &["decoder_block=gpt3", "mlp_activations=[gelu]"],
        &["decoder_block=simple_mlp"],
    ] {
        let resolved = config(&[arguments, &mesh].concat());
        let placement = Arc::new(PlacementGroup::from_config(&resolved).unwrap().placement(8).unwrap());
        let decoder = build_decoder(&ModelGroup::from_config(&resolved).unwrap()).unwrap();
        let specs = decoder.parameters();
        let placed = placement.clone();
        let options = ProgramOptions { placement: placement.clone(), ..options() };
        let (rows, length) = (8, LENGTH);
        program(&options, |inputs| {
            let parameters: Vec<Tensor<'_>> = specs
                .iter()
                .map(|(path, spec)| {
                    inputs.input(&path.to_string(), spec.dtype, &spec.axes, &spec.logical_axes, false)
                })
                .collect();
            let axes = [axis(BATCH, rows), axis(POSITION, length)];
            let tokens = [(); 3].map(|()| integers(inputs, &axes));
            let tokens = Tokens::as_read(tokens[0], tokens[1], tokens[2]);
            let hidden = decoder.hidden(&parameters, tokens, Forward::default());
            vec![inputs.replicated("hidden", hidden.hidden)]
        })
        .unwrap();
        let shown = |name: &str, dims: &[usize], dtype: DType, axes: Vec<Option<LogicalAxis>>| {
            format!("{name} {dims:?} {dtype} {axes:?}")
        };
        let made: BTreeSet<String> = placed
            .values()
            .into_iter()
            .filter(|value| NAMES.contains(&value.name.as_str()))
            .map(|value| shown(&value.name, &value.dims, value.dtype, value.logical_axes))
            .collect();
        let regions = decoder.activations(rows, length);
        let declared = regions.iter().flat_map(|region| &region.made);
        let declared: BTreeSet<String> = declared
            .filter_map(|activation| {
                let name = activation.name.filter(|name| NAMES.contains(name))?;
                Some(shown(name, &activation.dims, activation.dtype, activation.logical_axes.clone()))
            })
            .collect();
        assert!(!made.is_empty(), "{arguments:?}");
        assert_eq!(declared, made, "{arguments:?}");
    }
}
