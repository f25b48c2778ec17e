//! Attention over sequences that are split over devices, compared with attention on one device.

use std::{collections::BTreeMap, sync::Arc};

use mt_derive::Tree;
use mt_ir::{Program, Target};
use mt_nn::{
    SequenceOrder,
    attention::{Additions, AttentionOptions, Context, KeysValues, MaskSpec, blockwise, dense},
    axes::{BATCH, GROUP, HEAD_DIM, KV_HEADS, KV_POSITION, POSITION, VALUE_DIM},
};
use mt_runtime::{CompileSettings, testing};
use mt_shape::{Axis, DType, HostArray, LogicalAxis, LogicalRules, Mesh, Placement, axis, logical};
use mt_trace::{ProgramOptions, Tensor, program};

use crate::harness::{CAUSAL_ATTENTION, integers, numbers, of_documents, relative_error};

const ROWS: usize = 4;
const KV: usize = 2;
const WIDTH: usize = 6;

/// A test case: a mesh, an order, a length and attention options.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub mesh: &'static [(&'static str, usize)],
    pub target: Target,
    pub order: SequenceOrder,
    pub length: usize,
    /// The block size; dense if 0.
    pub block: usize,
    pub mask: MaskSpec,
    pub soft_cap: Option<f64>,
    pub has_sinks: bool,
    pub group: usize,
    pub with_scores: bool,
}

const ONE: &[(&str, usize)] = &[("fsdp", 1)];

pub const CASE: Case = Case {
    mesh: ONE,
    target: Target::CPU,
    order: SequenceOrder::AsRead,
    length: 48,
    block: 6,
    mask: MaskSpec::CAUSAL,
    soft_cap: None,
    has_sinks: false,
    group: 3,
    with_scores: false,
};

const QUERY: [Option<LogicalAxis>; 5] = [
    Some(logical::ACTIVATION_KV_BATCH),
    Some(logical::ACTIVATION_LENGTH_ATTN),
    Some(logical::ACTIVATION_KV_HEADS),
    None,
    None,
];
const KEY: [Option<LogicalAxis>; 4] = [
    Some(logical::ACTIVATION_KV_BATCH),
    Some(logical::ACTIVATION_LENGTH_ATTN),
    Some(logical::ACTIVATION_KV_HEADS),
    None,
];
const TOKENS: [Option<LogicalAxis>; 2] =
    [Some(logical::ACTIVATION_KV_BATCH), Some(logical::ACTIVATION_LENGTH_ATTN)];
const SINKS: [Option<LogicalAxis>; 2] = [Some(logical::ACTIVATION_KV_HEADS), None];
const CONTEXT: [Option<LogicalAxis>; 5] = [
    Some(logical::ACTIVATION_KV_BATCH),
    Some(logical::ACTIVATION_KV_HEADS),
    Some(logical::ACTIVATION_LENGTH_ATTN),
    None,
    None,
];

#[derive(Tree)]
struct Leaves<L>(Vec<L>);

impl Case {
    fn placement(self) -> Arc<Placement> {
        let mesh = Mesh::new(self.mesh.iter().map(|(name, size)| ((*name).to_owned(), *size))).unwrap();
        let rules = [
            ("activation_kv_batch", "fsdp"),
            ("activation_length_attn", "context"),
            ("activation_kv_heads", "tensor"),
        ];
        let rules = rules.map(|(name, axis)| (name.to_owned(), vec![axis.to_owned()]));
        // Nothing splits the other axes.
        let others = logical::all().filter(|axis| !rules.iter().any(|(name, _)| name == axis.name()));
        let others = others.map(|axis| (axis.name().to_owned(), Vec::new()));
        Arc::new(Placement::new(mesh, LogicalRules(rules.iter().cloned().chain(others).collect())))
    }

    fn options(self) -> AttentionOptions {
        AttentionOptions { mask: self.mask, soft_cap: self.soft_cap, ..CAUSAL_ATTENTION }
    }

    pub fn program(self, name: &str, dtype: DType) -> Program {
        let [rows, positions, keys] =
            [axis(BATCH, ROWS), axis(POSITION, self.length), axis(KV_POSITION, self.length)];
        let [heads, group, width] = [axis(KV_HEADS, KV), axis(GROUP, self.group), axis(HEAD_DIM, WIDTH)];
        let value_width = axis(VALUE_DIM, WIDTH);
        let context_axes = [rows, heads, positions, group, value_width];
        let options =
            ProgramOptions { placement: self.placement(), ..ProgramOptions::new(name, self.target) };
        program(&options, |inputs| {
            let input = |axes: &[Axis], logical: &[Option<LogicalAxis>], dtype: DType| {
                inputs.input("argument", dtype, axes, logical, false)
            };
            let key = |width| input(&[rows, keys, heads, width], &KEY, DType::F32);
            let query = input(&[rows, positions, heads, group, width], &QUERY, DType::F32);
            let leaves =
                vec![query, key(width), key(value_width), input(&[heads, group], &SINKS, DType::F32)];
            let segments = input(&[rows, positions], &TOKENS, DType::I32);
            let cotangent = input(&context_axes, &CONTEXT, DType::F32);
            let (_, made, gradients) = inputs.region().value_and_grad_list(&Leaves(leaves), |_, leaves| {
                let Context { context, largest_scores } = self.attend(&leaves.0, segments, dtype);
                let context = context.cast(DType::F32).constrain(&CONTEXT);
                ((context * cotangent).sum_all(), [context].into_iter().chain(largest_scores).collect())
            });
            let mut outputs = vec![inputs.output("context", made[0], &CONTEXT)];
            let logical: [&[Option<LogicalAxis>]; 4] = [&QUERY, &KEY, &KEY, &SINKS];
            for (gradient, logical) in gradients.0.iter().zip(logical) {
                outputs.push(inputs.output("gradient", *gradient, logical));
            }
            outputs.extend(made.get(1).map(|scores| inputs.output("scores", *scores, &CONTEXT[..4])));
            outputs
        })
        .unwrap()
    }

    fn attend<'t>(self, leaves: &[Tensor<'t>], segments: Tensor<'t>, dtype: DType) -> Context<'t> {
        let [query, key, value] = [0, 1, 2].map(|index| leaves[index].cast(dtype));
        let sinks = self.has_sinks.then_some(leaves[3]);
        let segments = of_documents(segments, self.mask, self.order);
        let options = self.options();
        if self.block == 0 {
            let whole: [Option<LogicalAxis>; 4] = [KEY[0], None, KEY[2], None];
            let keys_values = KeysValues { key: key.constrain(&whole), value: value.constrain(&whole) };
            let additions = Additions { sinks, ..Additions::default() };
            dense(query, keys_values, segments.mask(options.mask), additions, &options, self.with_scores)
        } else {
            let keys_values = KeysValues { key, value };
            blockwise(query, keys_values, segments, sinks, &options, Some(self.block), self.with_scores)
        }
    }

    /// Queries, keys, values, sinks, segments and the context's cotangent, in the order of the text.
    fn arguments(self) -> Vec<HostArray> {
        let Self { length, group, .. } = self;
        let segments: Vec<i32> = (0..ROWS)
            .flat_map(|row| {
                let (first, padding) = (length / (row + 2), length - row * length / 9);
                (0..length).map(move |place| if place >= padding { 0 } else { 1 + i32::from(place >= first) })
            })
            .collect();
        vec![
            numbers(1, &[ROWS, length, KV, group, WIDTH]),
            numbers(2, &[ROWS, length, KV, WIDTH]),
            numbers(3, &[ROWS, length, KV, WIDTH]),
            numbers(5, &[KV, group]),
            integers(&[ROWS, length], &segments),
            numbers(4, &[ROWS, KV, length, group, WIDTH]),
        ]
    }

    /// The context, the gradients and, if requested, the largest logits, in the order of the text.
    pub fn run(self, name: &str, dtype: DType) -> Vec<HostArray> {
        let program = self.program(name, dtype);
        let places: Vec<usize> = (0..self.length).map(|index| self.order.place(index, self.length)).collect();
        let mut indices = vec![0; self.length];
        for (index, place) in places.iter().enumerate() {
            indices[*place] = index;
        }
        let arguments: Vec<HostArray> = self
            .arguments()
            .iter()
            .zip([1, 1, 1, 9, 1, 2])
            .map(|(a, dim)| permuted(a, dim, &places))
            .collect();
        let results = testing::run(&program, &arguments).unwrap();
        results.iter().zip([2, 1, 1, 1, 9, 2]).map(|(a, dim)| permuted(a, dim, &indices)).collect()
    }
}

/// The array permuted along a dimension so that element `i` is the one at `from[i]`, or unchanged if it lacks the
/// dimension.
fn permuted(array: &HostArray, dim: usize, from: &[usize]) -> HostArray {
    let dims = array.dims();
    if dim >= dims.len() {
        return array.clone();
    }
    let (outer, inner): (usize, usize) = (dims[..dim].iter().product(), dims[dim + 1..].iter().product());
    let size = inner * array.bytes().len() / array.num_elements();
    let bytes: Vec<u8> = (0..outer)
        .flat_map(|row| from.iter().map(move |index| row * dims[dim] + index))
        .flat_map(|index| array.bytes()[index * size..(index + 1) * size].to_vec())
        .collect();
    HostArray::from_bytes(array.dtype(), dims, &bytes).unwrap()
}

pub const RESULTS: [&str; 6] = [
    "context",
    "query's gradient",
    "key's gradient",
    "value's gradient",
    "sinks' gradient",
    "largest scores",
];

#[track_caller]
fn check_in(
    dtype: DType,
    tolerance: f64,
    case: Case,
    cases: &[(&'static [(&'static str, usize)], SequenceOrder)],
) {
    let expected = Case { mesh: ONE, order: SequenceOrder::AsRead, ..case }.run("one", dtype);
    for (mesh, order) in cases {
        let actual = Case { mesh, order: *order, ..case }.run("split", dtype);
        for ((result, actual), expected) in RESULTS.iter().zip(&actual).zip(&expected) {
            let error = relative_error(actual, expected);
            assert!(error <= tolerance, "{mesh:?} {order:?}: {result} differs by {error:e}");
        }
    }
}

#[track_caller]
fn check(case: Case, cases: &[(&'static [(&'static str, usize)], SequenceOrder)]) {
    check_in(DType::F32, 2e-6, case, cases);
}

const CONTEXT_8: &[(&str, usize)] = &[("fsdp", 1), ("context", 8), ("tensor", 1)];
const CONTEXT_4: &[(&str, usize)] = &[("fsdp", 1), ("context", 4), ("tensor", 2)];
pub const CONTEXT_2: &[(&str, usize)] = &[("fsdp", 2), ("context", 2), ("tensor", 2)];
const OUTERMOST: &[(&str, usize)] = &[("context", 4), ("fsdp", 2)];

const fn paired(shards: usize) -> SequenceOrder {
    SequenceOrder::Paired { shards }
}

const MESHES: &[(&[(&str, usize)], SequenceOrder)] = &[
    (CONTEXT_8, SequenceOrder::AsRead),
    (CONTEXT_8, paired(8)),
    (CONTEXT_4, SequenceOrder::AsRead),
    (CONTEXT_4, paired(4)),
    (CONTEXT_2, paired(2)),
    (OUTERMOST, paired(4)),
];

#[test]
fn split_blocks_equal_whole_sequences() {
    check(CASE, MESHES);
}

#[test]
fn split_dense_attention_equals_whole_sequences() {
    check(Case { block: 0, ..CASE }, MESHES);
}

/// One mesh and order for each kind of partitioning.
const SOME: &[(&[(&str, usize)], SequenceOrder)] =
    &[(CONTEXT_4, SequenceOrder::AsRead), (CONTEXT_4, paired(4)), (CONTEXT_2, paired(2))];

#[test]
fn blocks_that_do_not_divide_a_shard_are_filled() {
    // Chunks of 6 and shards of 12, in blocks of 5 and of 4.
    check(Case { block: 5, ..CASE }, SOME);
    check(Case { block: 4, mask: MaskSpec { window: Some(7), ..MaskSpec::CAUSAL }, ..CASE }, SOME);
}

#[test]
fn windows_chunks_caps_and_sinks() {
    let causal = MaskSpec::CAUSAL;
    for (block, mask, soft_cap, has_sinks) in [
        // Windows shorter and longer than a device's chunk.
        (3, MaskSpec { window: Some(4), ..causal }, None, true),
        (3, MaskSpec { window: Some(17), ..causal }, Some(0.7), false),
        (3, MaskSpec { chunk: Some(10), ..causal }, Some(0.7), true),
        (3, MaskSpec { causal: false, ..MaskSpec::CAUSAL }, None, false),
        // Blocks of documents that begin anywhere in a device's chunk.
        (5, MaskSpec::blocks(7), Some(0.7), true),
        (0, MaskSpec::blocks(7), None, false),
        (0, MaskSpec { window: Some(4), chunk: Some(10), ..causal }, Some(0.7), true),
    ] {
        check(Case { block, mask, soft_cap, has_sinks, ..CASE }, SOME);
    }
}

#[test]
fn largest_scores() {
    let case = Case { with_scores: true, soft_cap: Some(0.7), has_sinks: true, ..CASE };
    check(Case { block: 5, ..case }, SOME);
    check(Case { block: 0, ..case }, &SOME[1..]);
}

#[test]
fn split_blocks_in_bf16() {
    check_in(DType::BF16, 1.2e-2, CASE, SOME);
}

/// Checks the bytes that collectives of each kind move to or from a device.
#[track_caller]
fn check_collectives(case: Case, expected: &[(&str, u64)]) {
    let program = case.program("collectives", DType::F32);
    let runtime = testing::cpu(program.mesh.num_devices());
    let collectives = runtime.compile(&program, &CompileSettings::default()).unwrap().collectives().unwrap();
    let mut bytes: BTreeMap<&str, u64> = BTreeMap::new();
    for collective in &collectives {
        *bytes.entry(&collective.kind).or_default() += collective.bytes * collective.times;
    }
    assert_eq!(bytes, expected.iter().copied().collect(), "{collectives:#?}");
}

/// Each device holds half of the rows, one of the heads and half of the places. Devices exchange only keys and values
/// with their places and segments.
#[test]
fn only_keys_and_values_are_sent() {
    let case = Case { mesh: CONTEXT_2, order: paired(2), ..CASE };
    let places = 4 * case.length as u64;
    let (segments, keys) = (2 * places, 2 * places * WIDTH as u64);
    check_collectives(case, &[("all-gather", 2 * keys + segments), ("reduce-scatter", 2 * keys)]);
    let dense = Case { block: 0, ..case };
    check_collectives(dense, &[("all-gather", 2 * keys + segments + places), ("all-reduce", 2 * keys)]);
}

/// If each device holds whole sequences, the partitioner places attention without per-device code.
#[test]
fn whole_sequences_are_left_to_the_partitioner() {
    let on = |mesh| Case { mesh, ..CASE }.program("text", DType::F32).text;
    assert!(on(CONTEXT_2).contains("sdy.manual_computation"));
    assert!(!on(&[("fsdp", 4), ("context", 1), ("tensor", 2)]).contains("sdy.manual_computation"));
}
