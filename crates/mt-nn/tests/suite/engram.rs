//! Memories of n-grams, compared with `goldens/engram.py`, piece by piece with whole sequences, and on 8 devices with one.

use std::{collections::BTreeMap, sync::Arc};

use mt_derive::Tree;
use mt_ir::{Program, Target};
use mt_nn::{
    Linear, NormOptions, RmsNorm, SequenceOrder, Weight,
    attention::Segments,
    axes::{BATCH, EMBED, POSITION, STREAMS},
    engram::{
        BRANCH, ENTRY, ENTRY_DIM, Engram, EngramOptions, EngramState, EntryTable, EntryTables, MEMORY_DIM,
        NgramHash, ShortConvolution, TABLE,
    },
    gated_delta::{CHANNEL, DepthwiseKernel, ONE, TAP},
};
use mt_runtime::Collective;
use mt_shape::{Axis, DType, HostArray, LogicalAxis, LogicalRules, Mesh, Placement, axis, logical};
use mt_trace::{ProgramOptions, Tensor, program};

use crate::harness::{Argument, Golden, assert_close, execute, golden, gradients, numbers, run};

const NAMES: [&str; 10] =
    ["x", "table", "key", "key_bias", "value", "value_bias", "k_norm", "q_norm", "conv_norm", "conv"];
const ROWS: usize = 2;
const LENGTH: usize = 11;

fn options() -> EngramOptions {
    EngramOptions {
        hash: NgramHash {
            multipliers: vec![126_322_567, 90_112_011, 33],
            sizes: vec![vec![11, 13, 17], vec![19, 23, 29]],
            padding: 4,
        },
        entry_dim: 2,
        taps: 3,
        norm: NormOptions { epsilon: 1e-5, offset: 0.0 },
    }
}

/// The axes of an argument. Without streams, `x` has no axis for them.
fn axes(name: &str, streams: Option<usize>) -> Vec<Axis> {
    let (embed, branch) = (axis(EMBED, 6), axis(BRANCH, streams.unwrap_or(1)));
    let memory = options().memory_dim();
    assert_eq!(memory, axis(MEMORY_DIM, 12));
    match name {
        "x" => {
            let streams = streams.map(|count| axis(STREAMS, count));
            [axis(BATCH, ROWS), axis(POSITION, LENGTH)].into_iter().chain(streams).chain([embed]).collect()
        }
        "table" => vec![axis(ENTRY, 112), axis(ENTRY_DIM, 2)],
        "key" => vec![memory, branch, embed],
        "value" => vec![memory, embed],
        "value_bias" => vec![embed],
        "conv" => vec![axis(TAP, 3), axis(ONE, 1), axis(CHANNEL, 6 * branch.size)],
        _ => vec![branch, embed],
    }
}

/// The arguments of the reference values, then numbers and segments.
fn arguments(golden: &Golden, streams: Option<usize>) -> Vec<Argument> {
    let tokens = vec![axis(BATCH, ROWS), axis(POSITION, LENGTH)];
    let floats = NAMES.map(|name| (axes(name, streams), golden.array(name)));
    let integers = ["numbers", "segments"].map(|name| (tokens.clone(), golden.array(name)));
    floats.into_iter().chain(integers).collect()
}

fn layer<'t>(t: &[Tensor<'t>]) -> Engram<Tensor<'t>> {
    let linear = |kernel: usize| Linear::dense(t[kernel]).with_bias(Some(t[kernel + 1]));
    let norm = |index: usize| RmsNorm { scale: t[index] };
    let table = EntryTable { embedding: Weight::dense(t[1]) };
    Engram {
        multi_head_embedding: EntryTables { embedding: table },
        key_proj: linear(2),
        value_proj: linear(4),
        k_norm: norm(6),
        q_norm: norm(7),
        short_conv: ShortConvolution { norm: norm(8), conv: DepthwiseKernel { kernel: t[9] } },
    }
}

fn whole<'t>(t: &[Tensor<'t>]) -> Tensor<'t> {
    let segments = Segments::within(t[11], SequenceOrder::AsRead);
    let (output, _) = layer(t).forward(t[0], t[10], segments, None, &options());
    output * t[11].differs(0.0).cast(DType::F32)
}

#[test]
fn outputs_and_gradients_are_those_of_the_equations() {
    for (name, streams) in [("engram", None), ("engram_streams", Some(2))] {
        let golden = golden(&format!("{name}.safetensors"));
        let (y, made) = gradients(name, &arguments(&golden, streams), &golden.array("cotangent"), whole);
        assert_close(&format!("{name}: y"), &y, &golden.array("y"), 1e-5);
        for (argument, gradient) in NAMES.iter().zip(&made) {
            let expected = golden.array(&format!("gradient.{argument}"));
            assert_close(&format!("{name}: {argument}"), gradient, &expected, 1e-4);
        }
    }
}

/// Pieces with states between them equal whole rows. The second row's first piece ends with padding.
#[test]
fn pieces_continue_where_the_state_ends() {
    for (name, streams) in [("engram", None), ("engram_streams", Some(2))] {
        check_pieces(&golden(&format!("{name}.safetensors")), streams);
    }
}

#[track_caller]
fn check_pieces(golden: &Golden, streams: Option<usize>) {
    let made = run("pieces", &arguments(golden, streams), |region, t| {
        let layer = layer(&t);
        // Each row is one document: 11 tokens, and 8 whose fourth and later ones follow in the second piece.
        let rows = |first: usize, count: usize| {
            [t[0], t[10]].map(|tensor| tensor.slice(POSITION, first, first + count))
        };
        let tokens = [axis(BATCH, ROWS), axis(POSITION, LENGTH)];
        let ones = region.full(DType::I32, &tokens, 1.0);
        let within = |segments| Segments::within(segments, SequenceOrder::AsRead);
        let (expected, _) = layer.forward(t[0], t[10], within(ones), None, &options());
        let mut state: Option<EngramState<Tensor<'_>>> = None;
        let mut outputs = Vec::new();
        for (first, count) in [(0, 4), (4, 1), (5, 1), (6, 5)] {
            let [x, numbers] = rows(first, count);
            // Two tokens of padding behind the piece change nothing.
            let [x, numbers] = [x, numbers].map(|tensor| tensor.pad(POSITION, 0, 2, 0.0));
            let segments = ones.slice(POSITION, 0, count).pad(POSITION, 0, 2, 0.0);
            let given = state.or_else(|| {
                let empty = |axes: &[Axis], dtype| region.full(dtype, axes, 0.0);
                let batch = axis(BATCH, ROWS);
                let streams = streams.map(|count| axis(STREAMS, count));
                let window: Vec<Axis> =
                    [batch, axis(TAP, 6)].into_iter().chain(streams).chain([axis(EMBED, 6)]).collect();
                Some(EngramState {
                    tokens: empty(&[batch, axis(TAP, 2)], DType::I32),
                    window: Some(empty(&window, DType::F32)),
                })
            });
            let (output, after) = layer.forward(x, numbers, within(segments), given, &options());
            outputs.push(output.slice(POSITION, 0, count));
            state = Some(after);
        }
        let joined = outputs[0].concatenate(&outputs[1..], POSITION);
        vec![joined, expected]
    });
    assert_close("pieces", &made[0], &made[1], 1e-6);
}

/// The sizes on several devices. A table of all entries is much larger than the entries of a batch.
const MANY_ROWS: usize = 8;
const WIDE: usize = 16;

/// Tables whose entries 8 devices can split, which they need not be primes for.
fn large() -> EngramOptions {
    let hash = NgramHash { sizes: vec![vec![211, 223, 227], vec![229, 233, 237]], ..options().hash };
    EngramOptions { hash, entry_dim: WIDE, ..options() }
}

#[derive(Tree)]
struct Leaves<L>(Vec<L>);

/// The mesh axes that split rows of a batch, the widths of entries, and entries.
type Rules<'a> = [&'a [&'a str]; 3];

const WIDTHS_WITH_BATCH: Rules<'_> = [&["fsdp"], &["fsdp"], &["tensor"]];

/// A program from the arguments and a cotangent to the output and the gradients.
fn on_mesh(mesh: &[(&str, usize)], rules: Rules<'_>) -> Program {
    let mesh = Mesh::new(mesh.iter().map(|(name, size)| ((*name).to_owned(), *size))).unwrap();
    let owned = |axes: &[&str]| axes.iter().map(|axis| (*axis).to_owned()).collect::<Vec<_>>();
    let names = ["activation_kv_batch", "embed_vocab", "vocab"];
    let rules: Vec<(String, Vec<String>)> =
        names.iter().zip(rules).map(|(name, axes)| ((*name).to_owned(), owned(axes))).collect();
    let others = logical::all().filter(|axis| !rules.iter().any(|(name, _)| name == axis.name()));
    let others = others.map(|axis| (axis.name().to_owned(), Vec::new()));
    let placement = Placement::new(mesh, LogicalRules(rules.iter().cloned().chain(others).collect()));
    let options =
        ProgramOptions { placement: Arc::new(placement), ..ProgramOptions::new("engram", Target::CPU) };
    let own = large();
    let of_batch = |rank: usize| -> Vec<Option<LogicalAxis>> {
        std::iter::once(Some(logical::ACTIVATION_KV_BATCH)).chain(vec![None; rank - 1]).collect()
    };
    program(&options, |inputs| {
        let placed = |name: &str, axes: &[Axis]| match name {
            "x" => of_batch(3),
            "table" => TABLE.to_vec(),
            _ => vec![None; axes.len()],
        };
        let leaves: Vec<Tensor<'_>> = NAMES
            .iter()
            .map(|name| {
                let axes = large_axes(name);
                inputs.input(name, DType::F32, &axes, &placed(name, &axes), false)
            })
            .collect();
        let tokens = [axis(BATCH, MANY_ROWS), axis(POSITION, LENGTH)];
        let [numbers, segments] =
            ["numbers", "segments"].map(|name| inputs.input(name, DType::I32, &tokens, &of_batch(2), false));
        let cotangent = inputs.input("cotangent", DType::F32, &large_axes("x"), &of_batch(3), false);
        let (_, made, gradients) = inputs.region().value_and_grad_list(&Leaves(leaves), |_, leaves| {
            let segments = Segments::within(segments, SequenceOrder::AsRead);
            let (y, _) = layer(&leaves.0).forward(leaves.0[0], numbers, segments, None, &own);
            ((y * cotangent).sum_all(), vec![y])
        });
        let gradients = NAMES.iter().zip(&gradients.0).map(|(name, gradient)| {
            let placed = placed(name, &gradient.axes());
            inputs.output(name, gradient.constrain(&placed), &placed)
        });
        std::iter::once(inputs.output("y", made[0], &of_batch(3))).chain(gradients).collect()
    })
    .unwrap()
}

fn large_axes(name: &str) -> Vec<Axis> {
    let memory = large().memory_dim();
    match name {
        "x" => vec![axis(BATCH, MANY_ROWS), axis(POSITION, LENGTH), axis(EMBED, 6)],
        "table" => vec![axis(ENTRY, large().hash.num_entries()), axis(ENTRY_DIM, WIDE)],
        "key" => vec![memory, axis(BRANCH, 1), axis(EMBED, 6)],
        "value" => vec![memory, axis(EMBED, 6)],
        other => axes(other, None),
    }
}

/// The arguments of [`on_mesh`].
fn large_arguments() -> Vec<HostArray> {
    let dims = |axes: Vec<Axis>| axes.iter().map(|axis| axis.size).collect::<Vec<_>>();
    let floats = NAMES.iter().zip(0..).map(|(name, seed)| numbers(seed + 40, &dims(large_axes(name))));
    let tokens = [MANY_ROWS, LENGTH];
    let count = MANY_ROWS * LENGTH;
    // Rows repeat, so that devices add gradients to the same entries.
    let known: Vec<i32> = (0..count).map(|place| (place * 7 % 23 % 17) as i32).collect();
    let segments: Vec<i32> = (0..count).map(|place| 1 + i32::from(place % LENGTH > 4)).collect();
    let array = |values: &[i32]| HostArray::from_slice(DType::I32, &tokens, values).unwrap();
    let cotangent = numbers(77, &dims(large_axes("x")));
    floats.chain([array(&known), array(&segments), cotangent]).collect()
}

/// Devices exchange indices and rows of a batch, never the table or its gradient.
#[test]
fn rows_are_looked_up_where_they_are() {
    let arguments = large_arguments();
    let expected = execute(&on_mesh(&[("fsdp", 1), ("tensor", 1)], WIDTHS_WITH_BATCH), &arguments).0;
    for [devices, halves] in [[8, 1], [4, 2], [1, 2], [2, 1]] {
        let what = format!("fsdp {devices}, tensor {halves}");
        let program = on_mesh(&[("fsdp", devices), ("tensor", halves)], WIDTHS_WITH_BATCH);
        let (made, collectives) = execute(&program, &arguments);
        for ((name, made), expected) in ["y"].iter().chain(&NAMES).zip(&made).zip(&expected) {
            assert_close(&format!("{what}: {name}"), made, expected, 1e-5);
        }
        let mut bytes: BTreeMap<&str, u64> = BTreeMap::new();
        let table = 4 * large().hash.num_entries() * WIDE;
        for collective in &collectives {
            *bytes.entry(&collective.kind).or_default() += collective.bytes * collective.times;
            let largest = collective.arrays.iter().max().copied().unwrap_or_default() as usize;
            assert!(largest < table / (devices * halves), "{what}: {collective:#?}");
        }
        let entries = 4 * MANY_ROWS * LENGTH * large().hash.num_tables();
        let of = |kind: &str| bytes.get(kind).copied().unwrap_or_default() as usize;
        let exchanged = devices > 1;
        assert_eq!(of("all-gather"), usize::from(exchanged) * entries, "{what}: {collectives:#?}");
        // Forwards, and backwards.
        let rows = 2 * entries * WIDE / devices;
        assert_eq!(of("all-to-all"), usize::from(exchanged) * rows, "{what}: {collectives:#?}");
        assert_eq!(of("reduce-scatter"), 0, "{what}: {collectives:#?}");
    }
}

/// Where rules split entries over the mesh axes of the batch, devices gather indices, look up what they have, and scatter
/// sums.
#[test]
fn entries_are_split_over_the_devices_of_a_batch() {
    let arguments = large_arguments();
    let expected = execute(&on_mesh(&[("fsdp", 1), ("tensor", 1)], WIDTHS_WITH_BATCH), &arguments).0;
    let [four, two] = [("fsdp", 4), ("tensor", 2)];
    let cases: [(&[(&str, usize)], Rules<'_>, usize); 4] = [
        (&[("fsdp", 8)], [&["fsdp"], &[], &["fsdp"]], 8),
        // Half of the devices that hold other entries have the same sequences.
        (&[four, two], [&["fsdp"], &[], &["fsdp", "tensor"]], 4),
        // Columns are split, too: by devices with the same sequences, and by those with others.
        (&[four, two], [&["fsdp"], &["tensor"], &["fsdp"]], 4),
        (&[four, ("expert", 2)], [&["fsdp", "expert"], &["expert"], &["fsdp"]], 4),
    ];
    for (mesh, rules, shards) in cases {
        let what = format!("{mesh:?} {rules:?}");
        let (made, collectives) = execute(&on_mesh(mesh, rules), &arguments);
        for ((name, made), expected) in ["y"].iter().chain(&NAMES).zip(&made).zip(&expected) {
            assert_close(&format!("{what}: {name}"), made, expected, 1e-5);
        }
        let table = 4 * large().hash.num_entries() * WIDE;
        for collective in &collectives {
            let largest = collective.arrays.iter().max().copied().unwrap_or_default() as usize;
            assert!(largest < table / 2, "{what}: {collective:#?}");
        }
        // Forwards, the rows for the sequences of all devices that hold other entries are scattered.
        let columns = if rules[1].is_empty() { WIDE } else { WIDE / 2 };
        let rows = (4 * MANY_ROWS * LENGTH * large().hash.num_tables() * columns) as u64;
        let is_scatter = |collective: &&Collective| {
            collective.kind == "reduce-scatter" && collective.places.len() == shards
        };
        let scattered = collectives.iter().filter(is_scatter).map(|one| one.bytes * one.times).sum::<u64>();
        assert_eq!(scattered, rows, "{what}: {collectives:#?}");
    }
}
