//! Hyper-connections compared with their equations in `f64`; `goldens/hyper_connections.py` computes the values.

use mt_nn::{
    NormOptions, RmsNorm,
    axes::{BATCH, EMBED, POSITION, STREAMS},
    hyper_connections::{
        HyperConnection, MIXED_STREAMS, ONE, PERMUTATIONS, STREAM_EMBED, STREAM_WEIGHTS, StreamHead,
        StreamMixing,
    },
};

use crate::reference::check_in;

const FILE: &str = "hyper_connections.safetensors";
const NORM: NormOptions = NormOptions { epsilon: 1e-5, offset: 0.0 };
const TOKENS: &[&str] = &[BATCH, POSITION, STREAMS, EMBED];

#[track_caller]
fn check(name: &str, mixing: StreamMixing, scaled: bool) {
    let matrix: &[&str] = &[STREAM_EMBED, STREAM_WEIGHTS];
    let res_beta: &[&str] = match mixing {
        StreamMixing::Sinkhorn { .. } => &[STREAMS, MIXED_STREAMS],
        StreamMixing::Permutations => &[PERMUTATIONS],
    };
    let mut arguments: Vec<(&str, &[&str])> = vec![
        ("x", TOKENS),
        ("pre_alpha", matrix),
        ("post_alpha", matrix),
        ("res_alpha", matrix),
        ("pre_beta", &[STREAM_WEIGHTS]),
        ("post_beta", &[STREAM_WEIGHTS]),
        ("res_beta", res_beta),
        ("pre_scale", &[ONE]),
        ("post_scale", &[ONE]),
        ("res_scale", &[ONE]),
    ];
    if scaled {
        arguments.push(("norm", &[STREAM_EMBED]));
    }
    check_in(FILE, name, &arguments, |t| {
        let connection = HyperConnection {
            mhc_norm: t.get(10).map(|scale| RmsNorm { scale: *scale }),
            pre_alpha: t[1],
            post_alpha: t[2],
            res_alpha: t[3],
            pre_beta: t[4],
            post_beta: t[5],
            res_beta: t[6],
            pre_alpha_scale: t[7],
            post_alpha_scale: t[8],
            res_alpha_scale: t[9],
        };
        let weights = connection.weights(t[0], mixing, NORM);
        weights.join(t[0], weights.input.tanh())
    });
}

#[test]
fn connections_and_their_gradients_match() {
    check("sinkhorn", StreamMixing::Sinkhorn { iterations: 20 }, true);
    check("one_iteration", StreamMixing::Sinkhorn { iterations: 1 }, false);
    check("lite", StreamMixing::Permutations, true);
    check("two_lite", StreamMixing::Permutations, false);
}

#[test]
fn the_sum_behind_the_last_layer_matches() {
    let arguments: &[(&str, &[&str])] = &[
        ("x", TOKENS),
        ("fn", &[STREAM_EMBED, STREAM_WEIGHTS]),
        ("base", &[STREAM_WEIGHTS]),
        ("scale", &[ONE]),
    ];
    check_in(FILE, "head", arguments, |t| {
        StreamHead { hc_fn: t[1], hc_base: t[2], hc_scale: t[3] }.forward(t[0], NORM)
    });
}
