//! Memories of n-grams, compared with `goldens/engram.py`, and piece by piece with whole sequences.

use mt_nn::{
    Linear, NormOptions, RmsNorm, SequenceOrder, Weight,
    attention::Segments,
    axes::{BATCH, EMBED, POSITION},
    engram::{
        BRANCH, ENTRY, ENTRY_DIM, Engram, EngramOptions, EngramState, EntryTable, EntryTables, MEMORY_DIM,
        NgramHash, ShortConvolution,
    },
    gated_delta::{CHANNEL, DepthwiseKernel, ONE, TAP},
};
use mt_shape::{Axis, DType, axis};
use mt_trace::Tensor;

use crate::harness::{Argument, assert_close, golden, gradients, run};

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

fn axes(name: &str) -> Vec<Axis> {
    let (embed, branch) = (axis(EMBED, 6), axis(BRANCH, 1));
    let memory = options().memory_dim();
    assert_eq!(memory, axis(MEMORY_DIM, 12));
    match name {
        "x" => vec![axis(BATCH, ROWS), axis(POSITION, LENGTH), embed],
        "table" => vec![axis(ENTRY, 112), axis(ENTRY_DIM, 2)],
        "key" => vec![memory, branch, embed],
        "value" => vec![memory, embed],
        "value_bias" => vec![embed],
        "conv" => vec![axis(TAP, 3), axis(ONE, 1), axis(CHANNEL, 6)],
        _ => vec![branch, embed],
    }
}

/// The arguments of the reference values, then numbers and segments.
fn arguments() -> Vec<Argument> {
    let golden = golden("engram.safetensors");
    let tokens = vec![axis(BATCH, ROWS), axis(POSITION, LENGTH)];
    let floats = NAMES.map(|name| (axes(name), golden.array(name)));
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
    let golden = golden("engram.safetensors");
    let (y, made) = gradients("engram", &arguments(), &golden.array("cotangent"), whole);
    assert_close("y", &y, &golden.array("y"), 1e-5);
    for (name, gradient) in NAMES.iter().zip(&made) {
        assert_close(name, gradient, &golden.array(&format!("gradient.{name}")), 1e-4);
    }
}

/// Pieces with states between them equal whole rows. The second row's first piece ends with padding.
#[test]
fn pieces_continue_where_the_state_ends() {
    let made = run("pieces", &arguments(), |region, t| {
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
                Some(EngramState {
                    tokens: empty(&[batch, axis(TAP, 2)], DType::I32),
                    window: Some(empty(&[batch, axis(TAP, 6), axis(EMBED, 6)], DType::F32)),
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
