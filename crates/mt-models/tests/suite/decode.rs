//! Running a model piece by piece on a cache equals running it on whole sequences.

use std::sync::Arc;

use mt_ir::Program;
use mt_models::{Forward, GenerationState, Model, Tokens};
use mt_nn::axes::{BATCH, KV_POSITION, POSITION};
use mt_runtime::Executable;
use mt_shape::{DType, HostArray, Placement, axis};
use mt_trace::program;

use crate::{
    directory::Directory,
    harness::{
        Batch, compile, declare, deviation, execute, largest_difference, logits, model, options, parameters,
        with_source,
    },
};

/// A program from the next tokens of each row, their first slot and the cache to logits and the extended cache.
fn extend_program(model: &dyn Model, rows: usize, length: usize, slots: usize) -> Program {
    extend_program_on(Arc::new(Placement::single()), model, rows, length, slots)
}

/// As [`extend_program`], on another mesh.
pub fn extend_program_on(
    placement: Arc<Placement>,
    model: &dyn Model,
    rows: usize,
    length: usize,
    slots: usize,
) -> Program {
    let specs = model.parameters();
    let kept = model.state(rows, slots, slots);
    program(&options("extend", placement), |inputs| {
        let parameters = declare(inputs, "params", &specs, false);
        let integers = |name: &str, axes: &[mt_shape::Axis]| {
            inputs.input(name, DType::I32, axes, &vec![None; axes.len()], false)
        };
        let axes = [axis(BATCH, rows), axis(POSITION, length)];
        let tokens = ["tokens", "positions", "segmentation"].map(|name| integers(name, &axes));
        let tokens = Tokens::as_read(tokens[0], tokens[1], tokens[2]);
        let start = integers("start", &[]);
        let segmentation = integers("cache_segmentation", &[axis(BATCH, rows), axis(KV_POSITION, slots)]);
        let array = |spec: &mt_models::StateSpec| {
            inputs.input("cache", spec.dtype, &spec.axes, &spec.logical_axes, false)
        };
        let arrays = kept.iter().map(array).collect();
        let is_filled = length == slots;
        let tokens = if is_filled { with_source(model, tokens) } else { tokens };
        let state = GenerationState { arrays, start, segmentation, is_filled, slots, pages: None };
        let forward = Forward { state: Some(state), ..Forward::default() };
        let (logits, arrays) = model.logits(&parameters, tokens, forward);
        // Layers without rotary embeddings do not read positions.
        let unused = (tokens.positions + tokens.segmentation).sum_all().cast(DType::F32) * 0.0;
        [logits + unused]
            .into_iter()
            .chain(arrays)
            .map(|tensor| inputs.replicated("output", tensor))
            .collect()
    })
    .unwrap()
}

/// Sequences, and their division into pieces.
struct Cut<'a> {
    /// `i32[batch, position]`
    tokens: &'a HostArray,
    /// The number of tokens in each row's prompt. Shorter prompts are padded on the right.
    prompts: &'a [usize],
    /// The chunk size for prompts; the following tokens are read one at a time.
    chunk: usize,
    slots: usize,
}

/// Compares the logits of every piece with those of the whole sequence.
#[track_caller]
fn check(what: &str, model: &dyn Model, parameters: &[HostArray], cut: &Cut, whole: &HostArray, bound: f64) {
    let [rows, length, vocab] = *whole.dims() else { panic!("logits have three dimensions") };
    let (tokens, whole) = (cut.tokens.as_slice::<i32>().unwrap(), whole.to_f64());
    let deviation = deviation(&whole);
    let compiled = |size| compile(&extend_program(model, rows, size, cut.slots));
    let (chunk, single) = (compiled(cut.chunk), compiled(1));
    let longest = *cut.prompts.iter().max().unwrap();
    let chunks = (0..longest).step_by(cut.chunk).map(|start| (start, cut.chunk, &chunk));
    let pieces: Vec<(usize, usize, &Executable)> =
        chunks.chain((longest..cut.slots).map(|start| (start, 1, &single))).collect();
    let mut filled = vec![0; rows * cut.slots];
    let mut cache: Vec<HostArray> = Vec::new();
    for spec in model.state(rows, cut.slots, cut.slots) {
        cache.push(HostArray::zeros(spec.dtype, &spec.dims()));
    }
    for (start, size, program) in pieces {
        // The position of the token in a slot, if the slot holds one.
        let place = |row: usize, slot: usize| match slot.checked_sub(longest) {
            Some(generated) => Some(cut.prompts[row] + generated).filter(|place| *place < length),
            None => Some(slot).filter(|slot| *slot < cut.prompts[row]),
        };
        let places: Vec<(usize, Option<usize>)> = (0..rows)
            .flat_map(|row| (start..start + size).map(move |slot| (row, slot)))
            .map(|(row, slot)| {
                filled[row * cut.slots + slot] = i32::from(place(row, slot).is_some());
                (row, place(row, slot))
            })
            .collect();
        let array =
            |dims: &[usize], values: Vec<i32>| HostArray::from_slice(DType::I32, dims, &values).unwrap();
        let each = |value: &dyn Fn(usize, usize) -> i32| -> HostArray {
            let values = places.iter().map(|(row, place)| place.map_or(0, |place| value(*row, place)));
            array(&[rows, size], values.collect())
        };
        let inputs = [
            each(&|row, place| tokens[row * length + place]),
            each(&|_, place| place as i32),
            each(&|_, _| 1),
            array(&[], vec![start as i32]),
            array(&[rows, cut.slots], filled.clone()),
        ];
        let mut outputs = execute(program, &[parameters, &inputs, &cache].concat());
        let actual = outputs.remove(0).to_f64();
        cache = outputs;
        for (actual, (row, place)) in actual.chunks(vocab).zip(&places) {
            let Some(place) = place else { continue };
            let expected = &whole[(row * length + place) * vocab..][..vocab];
            let error = largest_difference(actual, expected) / deviation;
            assert!(error <= bound, "{what}: position {place} of row {row} differs by {error:e} deviations");
        }
    }
}

#[track_caller]
fn check_whole(arguments: &[&str]) {
    let model = model(arguments);
    let parameters = parameters(&*model);
    let batch = Batch::whole(2, 12, 256);
    let whole = logits(&*model, &parameters, &batch);
    let cut = Cut { tokens: &batch.arrays[0], prompts: &[8, 5], chunk: 4, slots: 12 };
    check(&arguments.join(" "), &*model, &parameters, &cut, &whole, 1e-5);
}

#[test]
fn chunks_on_a_cache_equal_the_whole() {
    check_whole(&["scan_layers=true"]);
    check_whole(&["scan_layers=false"]);
    check_whole(&[
        "scan_layers=true",
        "logits_via_embedding=true",
        "base_num_query_heads=6",
        "base_num_kv_heads=1",
    ]);
    check_whole(&["attention_type=chunk", "chunk_attn_window_size=3"]);
    check_whole(&["decoder_block=default", "nope_layer_interval=2"]);
}

/// Reads prompts of different lengths in two chunks and then one token at a time, and compares the logits with those of
/// the whole sequence.
#[track_caller]
pub fn check_pieces(
    what: &str,
    model: &dyn Model,
    parameters: &[HostArray],
    tokens: &HostArray,
    whole: &HostArray,
) {
    let cut = Cut { tokens, prompts: &[12, 7], chunk: 6, slots: tokens.dims()[1] };
    check(what, model, parameters, &cut, whole, 1e-4);
}

/// Checks a family's reference model. It reads prompts of different lengths in two chunks, and then one token at a time
/// past the borders of windows.
#[track_caller]
fn check_family(name: &str, scans: &[&str]) {
    let directory = Directory::open(name);
    let (golden, tokens) = (directory.golden().array("logits"), directory.batch().arrays[0].clone());
    // Dynamic NTK derives frequencies from the number of slots, which equals the length of the whole sequence here.
    for scan in scans {
        let model = directory.model(&[scan]);
        check_pieces(&format!("{name} {scan}"), &model, &directory.parameters(&model), &tokens, &golden);
    }
}

const BOTH: &[&str] = &["scan_layers=true", "scan_layers=false"];
const UNROLLED: &[&str] = &["scan_layers=false"];

macro_rules! families {
    ($($name:ident: $scans:expr,)*) => {
        $(
            #[test]
            fn $name() {
                check_family(stringify!($name), $scans);
            }
        )*
    };
}

families! {
    llama_six_on_two: BOTH,
    llama_scaled_tied: UNROLLED,
    llama_yarn: UNROLLED,
    llama_dynamic_ntk: UNROLLED,
    mistral_window: BOTH,
    mistral_window_one_layer: UNROLLED,
    gemma_multi_query: BOTH,
    gemma2_even: UNROLLED,
    gemma2_odd_untied: BOTH,
    gemma3_cycle_of_six: BOTH,
    gemma3_cycle_of_three_untied: UNROLLED,
    gemma4_dense_cycle_of_six: BOTH,
    gemma4_dense_separate_values: UNROLLED,
    gemma4_moe_two_of_five: BOTH,
    gemma4_moe_many_experts_one_layer: UNROLLED,
    gemma4_small_double_wide: UNROLLED,
    gemma4_small_cycle_of_six: UNROLLED,
    qwen2_late_windows: BOTH,
    qwen3_untied: BOTH,
    olmo3_yarn: BOTH,
    gpt2_two_layers: BOTH,
    mixtral_two_of_five: BOTH,
    gpt_oss_two_of_four: BOTH,
    deepseek3_groups: BOTH,
    deepseek3_direct_queries: UNROLLED,
    kimi_k2_eleven_experts: BOTH,
    deepseek32_groups: BOTH,
    deepseek32_one_layer: UNROLLED,
    deepseek2_greedy: UNROLLED,
    deepseek4_two_cycles: BOTH,
    deepseek4_yarn: UNROLLED,
    mixtral_window_one_expert: UNROLLED,
    qwen3_moe_three_of_seven: UNROLLED,
    qwen3_moe_every_second: BOTH,
    qwen3_moe_dense_first: UNROLLED,
    llama4_every_second: BOTH,
    llama4_many_experts: UNROLLED,
    qwen3_next_cycle: BOTH,
    qwen3_next_dense_between_tied: UNROLLED,
    qwen3_next_linear_one_layer: UNROLLED,
    qwen3_5_dense_cycle_of_three: BOTH,
    qwen3_5_moe_cycle: UNROLLED,
    mamba2_two_groups: BOTH,
    mamba2_biases_tied_one_layer: UNROLLED,
    bamba_every_second: BOTH,
    bamba_first_layer_attends_tied: UNROLLED,
}
