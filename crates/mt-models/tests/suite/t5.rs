//! Encoder–decoder models compared with transformers; `goldens/families/t5.py` generates the directories.

use mt_ir::Target;
use mt_models::{
    Description, Forward, ForwardPass, GenerationState, StateSpec, Tokens,
    decoder::Decoder,
    hugging_face::{Weights, write_weights},
};
use mt_nn::axes::{BATCH, KV_POSITION, POSITION};
use mt_runtime::testing;
use mt_shape::{DType, HostArray, Placement, axis};
use mt_trace::{Inputs, Tensor, program};

use crate::{
    directory::Directory,
    families::contents,
    harness::{
        Golden, Parameters, cross_entropy, declare, execute, from_hugging_face, largest_error, numbers_of,
        options, relative_error, run, with_numbers,
    },
};

const MODELS: &[&str] = &["t5_relu_tied", "t5_gated_untied", "t5_gated_silu_one_layer"];
const SCANS: &[&str] = &["scan_layers=true", "scan_layers=false"];

/// The source with its segmentation, the decoder's tokens, and the targets.
fn arrays(golden: &Golden) -> [HostArray; 4] {
    ["source", "source_segmentation", "tokens", "targets"].map(|name| golden.array(name))
}

/// Declares [`arrays`]. The decoder's rows have no padding.
fn declare_arrays<'t>(inputs: &Inputs<'t>, arrays: &[HostArray; 4]) -> (Tokens<'t>, Tensor<'t>) {
    let [source, segmentation, tokens, targets] = ["source", "segmentation", "tokens", "targets"];
    let array = |name, array: &HostArray| {
        let axes = [axis(BATCH, array.dims()[0]), axis(POSITION, array.dims()[1])];
        inputs.input(name, DType::I32, &axes, &[None, None], false)
    };
    let (source, segmentation) = (array(source, &arrays[0]), array(segmentation, &arrays[1]));
    let (tokens, targets) = (array(tokens, &arrays[2]), array(targets, &arrays[3]));
    let region = inputs.region();
    let axes = tokens.axes();
    let positions = region.iota(DType::I32, axes[1]).broadcast(&axes);
    let whole = region.full(DType::I32, &axes, 1.0);
    (Tokens::as_read(tokens, positions, whole).with_source(source, segmentation), targets)
}

/// The logits, and the outputs of layers by name.
fn taps_of(model: &Decoder, parameters: &[HostArray], arrays: &[HostArray; 4]) -> Vec<(String, HostArray)> {
    let specs = model.parameters();
    let mut names = vec!["logits".to_owned()];
    let program = program(&options("taps", Placement::single().into()), |inputs| {
        let parameters = declare(inputs, "params", &specs, false);
        let (tokens, targets) = declare_arrays(inputs, arrays);
        let hidden = model.hidden(&parameters, tokens, Forward { taps: true, ..Forward::default() });
        let unused = targets.sum_all().cast(DType::F32) * 0.0;
        let logits = model.head(&parameters, hidden.hidden).cast(DType::F32) + unused;
        names.extend(hidden.taps.iter().map(|(name, _)| name.clone()));
        let taps = hidden.taps.into_iter().map(|(name, tap)| inputs.replicated(&name, tap));
        [inputs.replicated("logits", logits)].into_iter().chain(taps).collect()
    })
    .unwrap();
    names.into_iter().zip(run(&program, &[parameters, arrays.as_slice()].concat())).collect()
}

#[test]
fn every_layer_matches() {
    for name in MODELS {
        let directory = Directory::open(name);
        let golden = directory.golden();
        for scan in SCANS {
            let model = directory.model(&[scan]);
            let taps = taps_of(&model, &directory.parameters(&model), &arrays(&golden));
            let num_encoder = model.config().num_encoder_layers();
            let stacks = [
                ("encoder.", "encoder", num_encoder),
                ("", "hidden", model.config().layers.len() - num_encoder),
            ];
            let mut pairs = vec![("logits".to_owned(), "logits".to_owned())];
            for (ours, theirs, num_layers) in stacks {
                pairs.push((format!("{ours}embedding"), format!("{theirs}_0")));
                let layer =
                    |layer| (format!("{ours}layers.{layer}.output"), format!("{theirs}_{}", layer + 1));
                pairs.extend((0..num_layers).map(layer));
            }
            for (ours, theirs) in pairs {
                let made = &taps.iter().find(|(tap, _)| *tap == ours).unwrap().1;
                let (mut made, mut expected) = (made.to_f64(), golden.array(&theirs).to_f64());
                if theirs.starts_with("encoder") {
                    // Padding has other states here than in transformers, and no token sees them.
                    let is_token = golden.array("source_segmentation").to_f64();
                    let width = made.len() / is_token.len();
                    for states in [&mut made, &mut expected] {
                        let of_tokens = states.chunks(width).zip(&is_token).filter(|(_, one)| **one == 1.0);
                        *states = of_tokens.flat_map(|(state, _)| state.to_vec()).collect();
                    }
                }
                let error = largest_error(&made, &expected);
                assert!(error <= 1e-4, "{name} {scan}: `{ours}` differs by {error:e} deviations");
            }
            assert!(taps.iter().any(|(tap, _)| tap == "layers.0.cross_attention"));
            assert!(model.is_causal() && model.reads_source());
        }
    }
}

#[test]
fn weights_come_back() {
    for name in MODELS {
        let directory = Directory::open(name);
        for scan in SCANS {
            let model = directory.model(&[scan]);
            let weights = Weights::open(&model, &directory.path).unwrap();
            let dtype = DType::F32;
            let arrays = weights.load(testing::cpu(1), &Placement::single(), &model, Some(dtype)).unwrap();
            let target = tempfile::tempdir().unwrap();
            write_weights(&model, &arrays, dtype, target.path(), Default::default()).unwrap();
            assert!(contents(&directory.path) == contents(target.path()), "{name} {scan}");
        }
    }
}

#[test]
fn gradients_match() {
    for name in MODELS {
        let directory = Directory::open(name);
        let (golden, gradients) = (directory.golden(), directory.values("gradients"));
        let loss = golden.array("loss").to_f64()[0];
        for way in
            [&["scan_layers=true", "remat_policy=full"][..], &["scan_layers=false", "remat_policy=none"]]
        {
            let model = directory.model(way);
            let (specs, arrays) = (model.parameters(), arrays(&golden));
            let program = program(&options("gradients", Placement::single().into()), |inputs| {
                let parameters = declare(inputs, "params", &specs, false);
                let (tokens, targets) = declare_arrays(inputs, &arrays);
                let (loss, [], gradients) =
                    inputs.region().value_and_grad(&numbers_of(&parameters), |_, differentiated| {
                        let parameters = with_numbers(&parameters, differentiated);
                        let (logits, _) = model.logits(&parameters, tokens, Forward::default());
                        (cross_entropy(logits, targets, tokens.segmentation), [])
                    });
                let Parameters(gradients) = gradients;
                let outputs = gradients.iter().map(|gradient| inputs.replicated("gradient", *gradient));
                [inputs.replicated("loss", loss)].into_iter().chain(outputs).collect()
            })
            .unwrap();
            let parameters = directory.parameters(&model);
            let results = run(&program, &[parameters.as_slice(), &arrays].concat());
            let error = (results[0].to_f64()[0] - loss).abs() / loss;
            assert!(error <= 1e-5, "{name} {way:?}: the loss differs by {error:e}");
            let expected = from_hugging_face(&model, &|tensor| gradients.array(tensor));
            for (((path, _), actual), expected) in specs.iter().zip(&results[1..]).zip(&expected) {
                let error = relative_error(&actual.to_f64(), &expected.to_f64());
                assert!(error <= 1e-4, "{name} {way:?}: gradient of `{path}` differs by {error:e}");
            }
        }
    }
}

/// `bf16` has 8 bits of precision, so logits only come close.
#[test]
fn bf16_is_near() {
    for name in MODELS {
        let directory = Directory::open(name);
        let (golden, model) =
            (directory.golden(), directory.model(&["dtype=bfloat16", "weight_dtype=bfloat16"]));
        let weights = Weights::open(&model, &directory.path).unwrap();
        let arrays_of = weights.load(testing::cpu(1), &Placement::single(), &model, None).unwrap();
        let parameters: Vec<HostArray> = arrays_of.iter().map(|array| array.to_host().unwrap()).collect();
        assert!(parameters.iter().all(|array| array.dtype() == DType::BF16), "{name}");
        let logits = &taps_of(&model, &parameters, &arrays(&golden))[0].1;
        let error = relative_error(&logits.to_f64(), &golden.array("logits").to_f64());
        assert!(error <= 3e-2, "{name}: logits differ by {error:e}");
    }
}

/// Dropout acts on the embeddings and on the normalized output of each stack.
#[test]
fn both_ends_of_each_stack_are_dropped_out() {
    let directory = Directory::open(MODELS[0]);
    let (golden, model) = (directory.golden(), directory.model(&["enable_dropout=true", "dropout_rate=0.3"]));
    let (specs, arrays) = (model.parameters(), arrays(&golden));
    let mut names = Vec::new();
    let program = program(&options("dropout", Placement::single().into()), |inputs| {
        let parameters = declare(inputs, "params", &specs, false);
        let (tokens, targets) = declare_arrays(inputs, &arrays);
        let dropout = Some(inputs.region().key(3));
        let forward = Forward { taps: true, dropout, ..Forward::default() };
        let hidden = model.hidden(&parameters, tokens, forward);
        let unused = targets.sum_all().cast(DType::F32) * 0.0;
        names = hidden.taps.iter().map(|(name, _)| name.clone()).collect();
        let taps = hidden.taps.into_iter().map(|(name, tap)| inputs.replicated(&name, tap + unused));
        taps.collect()
    })
    .unwrap();
    let made = run(&program, &[directory.parameters(&model).as_slice(), &arrays].concat());
    for name in ["encoder.embedding", "encoder.final_norm", "embedding", "final_norm"] {
        let values = made[names.iter().position(|known| known == name).unwrap()].to_f64();
        let dropped = values.iter().filter(|value| **value == 0.0).count() as f64 / values.len() as f64;
        assert!((dropped - 0.3).abs() < 0.1, "{name}: {dropped}");
    }
    let of = |name: &str| &made[names.iter().position(|known| known == name).unwrap()];
    assert_ne!(of("encoder.embedding").to_f64()[..20], of("embedding").to_f64()[..20]);
}

/// A program from the decoder's next token, its slot, its state and, in the first call, the source to logits and the next
/// state.
fn step_program(model: &Decoder, arrays: &[HostArray; 4], slots: usize, is_first: bool) -> mt_ir::Program {
    let specs = model.parameters();
    let (rows, source) = (arrays[0].dims()[0], arrays[0].dims()[1]);
    let kept = model.state(rows, slots, source);
    let options = mt_trace::ProgramOptions::new("step", Target::CPU);
    program(&options, |inputs| {
        let parameters = declare(inputs, "params", &specs, false);
        let (given, targets) = declare_arrays(inputs, arrays);
        let source = given.source.unwrap();
        let unread = [source.tokens, source.segmentation, given.tokens, targets, given.positions];
        let unread =
            unread.map(|tensor| tensor.sum_all()).into_iter().reduce(|all, other| all + other).unwrap();
        let integers = |name: &str, axes: &[mt_shape::Axis]| {
            inputs.input(name, DType::I32, axes, &vec![None; axes.len()], false)
        };
        let one = [axis(BATCH, rows), axis(POSITION, 1)];
        let (token, position) = (integers("token", &one), integers("position", &one));
        let start = integers("start", &[]);
        let segmentation = integers("cache_segmentation", &[axis(BATCH, rows), axis(KV_POSITION, slots)]);
        let array =
            |spec: &StateSpec| inputs.input("cache", spec.dtype, &spec.axes, &spec.logical_axes, false);
        let state = GenerationState {
            arrays: kept.iter().map(array).collect(),
            start,
            segmentation,
            is_filled: false,
            slots,
            pages: None,
        };
        let whole = inputs.region().full(DType::I32, &one, 1.0);
        let tokens =
            Tokens { source: given.source.filter(|_| is_first), ..Tokens::as_read(token, position, whole) };
        let forward = Forward { state: Some(state), ..Forward::default() };
        let (logits, arrays) = model.logits(&parameters, tokens, forward);
        let logits = logits.cast(DType::F32) + (unread + position.sum_all()).cast(DType::F32) * 0.0;
        [logits].into_iter().chain(arrays).map(|tensor| inputs.replicated("output", tensor)).collect()
    })
    .unwrap()
}

/// Tokens that are read one at a time have the logits of the whole sequence; the source is encoded once.
#[test]
fn steps_equal_the_whole() {
    for name in MODELS {
        let directory = Directory::open(name);
        let golden = directory.golden();
        let arrays = arrays(&golden);
        let whole = golden.array("logits");
        let [rows, length, vocab] = *whole.dims() else { panic!("logits have three dimensions") };
        let (whole, slots) = (whole.to_f64(), length + 2);
        for scan in SCANS {
            let model = directory.model(&[scan]);
            let parameters = directory.parameters(&model);
            let programs = [true, false]
                .map(|is_first| crate::harness::compile(&step_program(&model, &arrays, slots, is_first)));
            let tokens = arrays[2].as_slice::<i32>().unwrap().to_vec();
            let integers =
                |dims: &[usize], values: Vec<i32>| HostArray::from_slice(DType::I32, dims, &values).unwrap();
            let mut cache: Vec<HostArray> = model
                .state(rows, slots, arrays[0].dims()[1])
                .iter()
                .map(|spec| HostArray::zeros(spec.dtype, &spec.dims()))
                .collect();
            let mut made = Vec::new();
            // The first slot stays empty, as for prompts that are shorter than the longest one.
            for position in 0..length {
                let slot = position + 1;
                let filled = (0..rows * slots).map(|place| i32::from((1..=slot).contains(&(place % slots))));
                let inputs = [
                    integers(&[rows, 1], (0..rows).map(|row| tokens[row * length + position]).collect()),
                    integers(&[rows, 1], vec![position as i32; rows]),
                    integers(&[], vec![slot as i32]),
                    integers(&[rows, slots], filled.collect()),
                ];
                let program = &programs[usize::from(position > 0)];
                let mut outputs = execute(program, &[&parameters, &arrays[..], &inputs, &cache].concat());
                made.push(outputs.remove(0).to_f64());
                cache = outputs;
            }
            let at = |row: usize, position: usize| &whole[(row * length + position) * vocab..][..vocab];
            let expected: Vec<f64> = (0..length)
                .flat_map(|position| (0..rows).flat_map(move |row| at(row, position).to_vec()))
                .collect();
            let error = largest_error(&made.concat(), &expected);
            assert!(error <= 1e-4, "{name} {scan}: steps differ by {error:e} deviations");
        }
    }
}
