//! Rotary embeddings compared with Hugging Face transformers.

use mt_nn::{
    Rotary, RotaryExtent, RotaryOptions, RotaryScaling,
    axes::{BATCH, HEAD_DIM, POSITION, QUERY_HEADS},
};

use crate::reference::{SEQUENCES, check};

/// The most common frequencies, for heads of 16 dimensions.
pub const PLAIN: RotaryOptions = RotaryOptions {
    head_dim: 16,
    min_timescale: 1.0,
    max_timescale: 10_000.0,
    extent: RotaryExtent::Full,
    scaling: RotaryScaling::None,
};

#[track_caller]
fn check_rotary(name: &str, options: RotaryOptions) {
    let arguments: [(&str, &[&'static str]); 2] =
        [("x", &[BATCH, POSITION, QUERY_HEADS, HEAD_DIM]), ("positions", SEQUENCES)];
    check(name, &arguments, |t| Rotary::new(&options).angles(t[1]).rotate(t[0]));
}

#[track_caller]
fn check_scaling(name: &str, scaling: RotaryScaling) {
    check_rotary(name, RotaryOptions { scaling, ..PLAIN });
}

#[test]
fn heads_are_turned_as_far_as_asked() {
    check_rotary("rotary", RotaryOptions { head_dim: 10, ..PLAIN });
    check_rotary("rotary_leading", RotaryOptions { extent: RotaryExtent::Leading(0.375), ..PLAIN });
    let extent = RotaryExtent::Frequencies(0.3);
    check_rotary("rotary_frequencies", RotaryOptions { extent, max_timescale: 1e6, ..PLAIN });
}

#[test]
fn frequencies_are_scaled() {
    check_scaling("rotary_linear", RotaryScaling::Linear { factor: 3.0 });
    check_scaling("rotary_ntk", RotaryScaling::dynamic_ntk(2.5, 64, 6 * 37 + 1));
    check_scaling(
        "rotary_llama3",
        RotaryScaling::Llama3 {
            factor: 8.0,
            low_frequency_factor: 1.0,
            high_frequency_factor: 4.0,
            original_length: 64,
        },
    );
}

#[test]
fn frequencies_are_scaled_by_yarn() {
    let yarn =
        |beta_fast: f64, beta_slow: f64, truncate: bool, attention_factor: Option<f64>| RotaryScaling::Yarn {
            factor: 4.0,
            beta_fast,
            beta_slow,
            original_length: 64,
            truncate,
            attention_factor,
        };
    check_scaling("rotary_yarn", yarn(8.0, 0.5, true, None));
    check_scaling("rotary_yarn_not_truncated", yarn(8.0, 0.5, false, Some(1.25)));
    check_scaling("rotary_yarn_sudden", yarn(2000.0, 1000.0, true, None));
}

#[test]
fn dynamic_scaling_begins_at_the_original_length() {
    let rotary = |scaling: RotaryScaling| Rotary::new(&RotaryOptions { scaling, ..PLAIN });
    assert_eq!(rotary(RotaryScaling::dynamic_ntk(2.5, 64, 64)), rotary(RotaryScaling::None));
    assert_eq!(rotary(RotaryScaling::dynamic_ntk(2.5, 64, 7)), rotary(RotaryScaling::None));
    assert_ne!(rotary(RotaryScaling::dynamic_ntk(2.5, 64, 65)), rotary(RotaryScaling::None));
}
