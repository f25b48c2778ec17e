//! Layers against Hugging Face transformers; `goldens/generate.py` made the values.

use mt_nn::{
    Activation, Dropout, Embedding, Linear, Mlp, NormOptions, RmsNorm, Rotary, RotaryExtent, RotaryOptions,
    RotaryScaling,
    attention::{Attention, AttentionInputs, AttentionKernel, AttentionOptions, MaskSpec, Segments},
    axes::{BATCH, EMBED, HEAD_DIM, KV_HEADS, MLP, POSITION, QUERY_HEADS, VOCAB},
    token_cross_entropy,
};
use mt_shape::{DType, axis};
use mt_trace::Tensor;

use crate::harness::{Argument, Golden, assert_close, gradients};

const TOLERANCE: f64 = 1e-5;

/// Compares a layer and its gradients with the values under `name`.
#[track_caller]
fn check<F>(name: &str, arguments: &[(&str, &[&'static str])], code: F)
where
    F: for<'b> Fn(&[Tensor<'b>]) -> Tensor<'b>,
{
    let golden = Golden::open("modules.safetensors");
    let array = |part: &str| golden.array(&format!("{name}.{part}"));
    let loaded: Vec<Argument> = arguments
        .iter()
        .map(|(argument, names)| {
            let array = array(argument);
            (names.iter().zip(array.dims()).map(|(name, size)| axis(name, *size)).collect(), array)
        })
        .collect();
    let (y, gradients) = gradients(name, &loaded, &array("cotangent"), code);
    assert_close(&format!("{name}.y"), &y, &array("y"), TOLERANCE);
    let differentiated = arguments.iter().zip(&loaded).filter(|(_, (_, array))| array.dtype() == DType::F32);
    for (((argument, _), _), gradient) in differentiated.zip(&gradients) {
        let expected = array(&format!("gradient.{argument}"));
        // What does not depend on the argument at all has no size to be relative to.
        if expected.to_f64().iter().all(|value| value.abs() < 1e-6) {
            assert!(gradient.to_f64().iter().all(|value| value.abs() < 1e-5), "{name}.gradient.{argument}");
        } else {
            assert_close(&format!("{name}.gradient.{argument}"), gradient, &expected, TOLERANCE);
        }
    }
}

const SEQUENCES: &[&str] = &[BATCH, POSITION];
const ACTIVATIONS: &[&str] = &[BATCH, POSITION, EMBED];

#[test]
fn rms_norm_matches() {
    check("rms_norm", &[("x", ACTIVATIONS), ("scale", &[EMBED])], |t| {
        RmsNorm { scale: t[1] }.forward(t[0], EMBED, NormOptions { epsilon: 1e-5, offset: 0.0 })
    });
}

fn rotary(head_dim: usize) -> Rotary {
    Rotary::new(&RotaryOptions {
        head_dim,
        min_timescale: 1.0,
        max_timescale: 10_000.0,
        extent: RotaryExtent::Full,
        scaling: RotaryScaling::None,
    })
}

#[test]
fn rotary_embeddings_match() {
    check("rotary", &[("x", &[BATCH, POSITION, QUERY_HEADS, HEAD_DIM]), ("positions", SEQUENCES)], |t| {
        rotary(10).angles(t[1]).rotate(t[0])
    });
}

#[track_caller]
fn check_attention(name: &str, head_dim: usize) {
    let arguments: [(&str, &[&'static str]); 7] = [
        ("x", ACTIVATIONS),
        ("query", &[EMBED, QUERY_HEADS, HEAD_DIM]),
        ("key", &[EMBED, KV_HEADS, HEAD_DIM]),
        ("value", &[EMBED, KV_HEADS, HEAD_DIM]),
        ("out", &[QUERY_HEADS, HEAD_DIM, EMBED]),
        ("segments", SEQUENCES),
        ("positions", SEQUENCES),
    ];
    for kernel in [AttentionKernel::Dense, AttentionKernel::Blockwise] {
        let options = AttentionOptions {
            scale: (head_dim as f64).powf(-0.5),
            kernel,
            float32_product: false,
            float32_scores: true,
            mask: MaskSpec::CAUSAL,
            soft_cap: None,
            norm: NormOptions { epsilon: 1e-6, offset: 0.0 },
            normalize_values: false,
        };
        check(name, &arguments, |t| {
            let [query, key, value, out] = [t[1], t[2], t[3], t[4]].map(Linear::without_bias);
            let layer = Attention {
                query,
                key: Some(key),
                value: Some(value),
                out,
                query_norm: None,
                key_norm: None,
                sinks: None,
            };
            let inputs = AttentionInputs {
                angles: Some(rotary(head_dim).angles(t[6])),
                segments: Segments::within(t[5]),
                cache: None,
                shared: None,
            };
            layer.forward(t[0], &inputs, &options).output
        });
    }
}

#[test]
fn attention_matches() {
    check_attention("attention_six_on_two", 6);
    check_attention("attention_three_on_one", 10);
    check_attention("attention_single_token", 4);
}

#[test]
fn feed_forward_layers_match() {
    let arguments: [(&str, &[&'static str]); 4] =
        [("x", ACTIVATIONS), ("wi_0", &[EMBED, MLP]), ("wi_1", &[EMBED, MLP]), ("wo", &[MLP, EMBED])];
    check("mlp", &arguments, |t| {
        let [wi_0, wi_1, wo] = [t[1], t[2], t[3]].map(Linear::without_bias);
        Mlp { wi_0, wi_1: Some(wi_1), wo }.forward(
            t[0],
            &[Activation::Silu, Activation::Linear],
            Dropout::Off,
        )
    });
}

#[test]
fn embeddings_match() {
    check("lookup", &[("embedding", &[VOCAB, EMBED]), ("tokens", SEQUENCES)], |t| {
        Embedding { embedding: t[0] }.lookup(t[1], DType::F32)
    });
    check("attend", &[("x", ACTIVATIONS), ("embedding", &[VOCAB, EMBED])], |t| {
        Embedding { embedding: t[1] }.attend(t[0])
    });
}

#[test]
fn cross_entropy_matches() {
    let arguments: [(&str, &[&'static str]); 3] =
        [("logits", &[BATCH, POSITION, VOCAB]), ("targets", SEQUENCES), ("segments", SEQUENCES)];
    check("cross_entropy", &arguments, |t| token_cross_entropy(t[0], t[1], t[2]).mean());
}
