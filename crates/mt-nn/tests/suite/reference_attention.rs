//! Attention compared with Hugging Face transformers.

use mt_nn::{
    Dropout, Linear, NormOptions, RmsNorm, Rotary, RotaryExtent, RotaryOptions, RotaryScaling, SequenceOrder,
    attention::{Attention, AttentionInputs, AttentionKernel, AttentionOptions, MaskSpec, Segments},
    axes::{EMBED, HEAD_DIM, KV_HEADS, QUERY_HEADS, VALUE_DIM},
};
use mt_trace::Tensor;

use crate::{
    harness::CAUSAL_ATTENTION,
    reference::{ACTIVATIONS, SEQUENCES, check},
    reference_rotary::PLAIN,
};

const KERNELS: [&dyn Fn(AttentionOptions) -> AttentionOptions; 2] =
    [&|options| AttentionOptions { kernel: AttentionKernel::Dense, ..options }, &|options| {
        AttentionOptions { kernel: AttentionKernel::Blockwise, ..options }
    }];

fn options(scale: f64) -> AttentionOptions {
    AttentionOptions { scale, ..CAUSAL_ATTENTION }
}

fn window(window: usize) -> MaskSpec {
    MaskSpec { window: Some(window), ..MaskSpec::CAUSAL }
}

fn plain(head_dim: usize) -> Option<RotaryOptions> {
    Some(RotaryOptions { head_dim, ..PLAIN })
}

type Named = (&'static str, &'static [&'static str]);

const INPUTS: [Named; 3] = [("x", ACTIVATIONS), ("segments", SEQUENCES), ("positions", SEQUENCES)];
const PROJECTIONS: [Named; 4] = [
    ("query", &[EMBED, QUERY_HEADS, HEAD_DIM]),
    ("key", &[EMBED, KV_HEADS, HEAD_DIM]),
    ("value", &[EMBED, KV_HEADS, VALUE_DIM]),
    ("out", &[QUERY_HEADS, VALUE_DIM, EMBED]),
];
const BIASES: [Named; 4] = [
    ("query_bias", &[QUERY_HEADS, HEAD_DIM]),
    ("key_bias", &[KV_HEADS, HEAD_DIM]),
    ("value_bias", &[KV_HEADS, VALUE_DIM]),
    ("out_bias", &[EMBED]),
];
const NORMS_OF_HEADS: [Named; 2] = [("query_norm", &[HEAD_DIM]), ("key_norm", &[HEAD_DIM])];

/// The layer with the parameters that `find` returns by name.
fn layer<'t>(find: impl Fn(&str) -> Option<Tensor<'t>>) -> Attention<Tensor<'t>> {
    let linear =
        |name: &str| find(name).map(|kernel| Linear::dense(kernel).with_bias(find(&format!("{name}_bias"))));
    let norm = |name: &str| find(name).map(|scale| RmsNorm { scale });
    Attention {
        query: linear("query").unwrap(),
        key: linear("key"),
        value: linear("value"),
        out: linear("out").unwrap(),
        query_norm: norm("query_norm"),
        key_norm: norm("key_norm"),
        sinks: find("sinks"),
    }
}

/// Compares a layer that has projections and the parameters `others`, with dense and blockwise attention.
#[track_caller]
fn check_attention(name: &str, others: &[Named], rotary: Option<RotaryOptions>, options: AttentionOptions) {
    let arguments = [&INPUTS, PROJECTIONS.as_slice(), others].concat();
    for with_kernel in KERNELS {
        let options = with_kernel(options);
        check(name, &arguments, |t| {
            let find = |name: &str| {
                arguments.iter().position(|(argument, _)| *argument == name).map(|index| t[index])
            };
            let inputs = AttentionInputs {
                angles: rotary.map(|rotary| Rotary::new(&rotary).angles(t[2])),
                query_factors: None,
                segments: Segments::within(t[1], SequenceOrder::AsRead),
                cache: None,
                shared: None,
                biases: None,
                weight_dropout: Dropout::Off,
                with_scores: false,
            };
            layer(find).forward(t[0], &inputs, &options).output
        });
    }
}

#[test]
fn attention_matches() {
    for (name, head_dim) in
        [("attention_six_on_two", 6), ("attention_three_on_one", 10), ("attention_single_token", 4)]
    {
        check_attention(name, &[], plain(head_dim), options((head_dim as f64).powf(-0.5)));
    }
    check_attention("attention_without_positions", &[], None, options(10_f64.powf(-0.5)));
}

#[test]
fn masks_match() {
    let masked = |mask: MaskSpec| AttentionOptions { mask, ..options(10_f64.powf(-0.5)) };
    check_attention("attention_window", &[], plain(10), masked(window(3)));
    let chunk = MaskSpec { chunk: Some(5), ..MaskSpec::CAUSAL };
    check_attention("attention_chunk", &[], plain(10), masked(chunk));
}

#[test]
fn soft_caps_match() {
    let options = AttentionOptions { soft_cap: Some(1.5), mask: window(4), ..options(1.0 / 3.0) };
    check_attention("attention_soft_cap", &[], plain(6), options);
}

#[test]
fn sinks_and_biases_match() {
    let scaling = RotaryScaling::Yarn {
        factor: 4.0,
        beta_fast: 8.0,
        beta_slow: 0.5,
        original_length: 16,
        truncate: false,
        attention_factor: None,
    };
    let others: &[Named] = &[("sinks", &[QUERY_HEADS])];
    check_attention(
        "attention_sinks",
        &[&BIASES, others].concat(),
        Some(RotaryOptions { head_dim: 10, scaling, ..PLAIN }),
        AttentionOptions { mask: window(5), ..options(10_f64.powf(-0.5)) },
    );
}

#[test]
fn norms_of_queries_and_keys_match() {
    let scaled = options(6_f64.powf(-0.5));
    check_attention("attention_norms_of_heads", &NORMS_OF_HEADS, plain(6), scaled);
    let norms_of_all: [Named; 2] =
        [("query_norm", &[QUERY_HEADS, HEAD_DIM]), ("key_norm", &[KV_HEADS, HEAD_DIM])];
    let norm = NormOptions { epsilon: 1e-5, offset: 0.0 };
    check_attention(
        "attention_norms_of_all_heads",
        &norms_of_all,
        plain(6),
        AttentionOptions { norm, ..scaled },
    );
    let norm = NormOptions { epsilon: 1e-6, offset: 1.0 };
    // The window is longer than the sequence.
    let options = AttentionOptions { norm, mask: window(20), ..options(5_f64.powf(-0.5)) };
    check_attention("attention_norms_around_zero", &NORMS_OF_HEADS, plain(6), options);
}

#[test]
fn shared_keys_and_values_match() {
    let [query, key, _, out] = PROJECTIONS;
    let first = [&[query, key, out], NORMS_OF_HEADS.as_slice()].concat();
    let second: [Named; 4] = [
        ("second_x", ACTIVATIONS),
        ("second_query", query.1),
        ("second_out", out.1),
        ("second_query_norm", &[HEAD_DIM]),
    ];
    let arguments = [&INPUTS, first.as_slice(), &second].concat();
    let extent = RotaryExtent::Frequencies(0.3);
    let rotary = Rotary::new(&RotaryOptions { extent, max_timescale: 1e6, ..PLAIN });
    for with_kernel in KERNELS {
        let options = with_kernel(AttentionOptions { normalize_values: true, ..options(1.0) });
        check("attention_shared", &arguments, |t| {
            let find = |name: &str| {
                arguments.iter().position(|(argument, _)| *argument == name).map(|index| t[index])
            };
            let inputs = AttentionInputs {
                angles: Some(rotary.angles(t[2])),
                query_factors: None,
                segments: Segments::within(t[1], SequenceOrder::AsRead),
                cache: None,
                shared: None,
                biases: None,
                weight_dropout: Dropout::Off,
                with_scores: false,
            };
            let attended = layer(find).forward(t[0], &inputs, &options);
            let inputs = AttentionInputs { shared: Some(attended.keys_values), ..inputs };
            let second = layer(|name| find(&format!("second_{name}")));
            attended.output + second.forward(find("second_x").unwrap(), &inputs, &options).output
        });
    }
}
