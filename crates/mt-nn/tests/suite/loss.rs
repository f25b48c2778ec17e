//! Token losses compared with their formula, and tiled losses with untiled ones.

use mt_ir::{CpuKernels, Target};
use mt_nn::{
    TiledHead, TokenLoss,
    axes::{BATCH, EMBED, POSITION, VOCAB},
    divisor, narrow_token_loss, token_log_probabilities, token_loss,
};
use mt_shape::{Axis, DType, HostArray, axis, logical};
use mt_trace::Tensor;

use crate::harness::{
    Argument, assert_close, gradients, integers, numbers, run, run_for, temporary_bytes, text, text_for,
};

const MULTIPLIER: f64 = 0.02;

/// Rows, positions, embedding width and vocabulary size.
#[derive(Clone, Copy)]
struct Sizes(usize, usize, usize, usize);

impl Sizes {
    fn tokens(self) -> [Axis; 2] {
        [axis(BATCH, self.0), axis(POSITION, self.1)]
    }

    /// Hidden states, output matrix, targets and segments. Rows end with padding, each with more than the previous one.
    fn arguments(self) -> Vec<Argument> {
        let Self(rows, length, embed, vocab) = self;
        let [batch, position] = self.tokens();
        let targets: Vec<i32> = (0..rows * length).map(|index| (index * 7 % vocab) as i32).collect();
        let segments: Vec<i32> =
            (0..rows * length).map(|index| i32::from(index % length + index / length < length)).collect();
        let dims = [rows, length];
        vec![
            (vec![batch, position, axis(EMBED, embed)], numbers(3, &[rows, length, embed])),
            (vec![axis(EMBED, embed), axis(VOCAB, vocab)], numbers(4, &[embed, vocab])),
            (vec![batch, position], integers(&dims, &targets)),
            (vec![batch, position], integers(&dims, &segments)),
        ]
    }
}

const SMALL: Sizes = Sizes(2, 6, 8, 11);

/// Logits with a soft cap.
fn capped<'t>(parameters: &[Tensor<'t>], hidden: Tensor<'t>) -> Tensor<'t> {
    (parameters[0].cast(hidden.dtype()).dot(hidden, &[EMBED]) * 0.2).tanh() * 5.0
}

/// The loss of hidden states, tiled if `tiles` is given.
fn loss_of<'t>(t: &[Tensor<'t>], tiles: Option<usize>) -> TokenLoss<'t> {
    match tiles {
        None => token_loss(capped(&t[1..2], t[0]), t[2], t[3], MULTIPLIER),
        Some(tiles) => in_tiles(tiles, true, |head| head.token_loss(&t[1..2], t[0], t[2], t[3])),
    }
}

fn in_tiles<R>(tiles: usize, in_f32: bool, apply: impl FnOnce(TiledHead<'_>) -> R) -> R {
    apply(TiledHead {
        tiles,
        z_loss_multiplier: MULTIPLIER,
        in_f32,
        head: if in_f32 { &capped } else { &narrow },
        logical_axes: &[vec![Some(logical::EMBED_VOCAB), Some(logical::VOCAB)]],
        gathered: &[logical::EMBED_VOCAB],
    })
}

/// The same logits in `bf16`.
fn narrow<'t>(parameters: &[Tensor<'t>], hidden: Tensor<'t>) -> Tensor<'t> {
    capped(parameters, hidden).cast(DType::BF16)
}

/// The log-probability of each target, tiled if `tiles` is given. If it is not computed in `f32`, logits are narrow.
fn log_probabilities_of<'t>(t: &[Tensor<'t>], tiles: Option<usize>, in_f32: bool) -> Tensor<'t> {
    match tiles {
        None if in_f32 => token_log_probabilities(capped(&t[1..2], t[0]), t[2], true),
        None => token_log_probabilities(narrow(&t[1..2], t[0]), t[2], false),
        Some(tiles) => in_tiles(tiles, in_f32, |head| head.token_log_probabilities(&t[1..2], t[0], t[2])),
    }
}

/// The mean over counted tokens.
fn mean(loss: TokenLoss<'_>) -> Tensor<'_> {
    loss.total / divisor(loss.weights)
}

#[test]
fn token_loss_is_its_formula() {
    let Sizes(rows, length, _, vocab) = SMALL;
    let [batch, position] = SMALL.tokens();
    let mut arguments = SMALL.arguments().split_off(2);
    arguments.insert(0, (vec![batch, position, axis(VOCAB, vocab)], numbers(5, &[rows, length, vocab])));
    let values: Vec<Vec<f64>> = arguments.iter().map(|(_, array)| array.to_f64()).collect();
    let total_weight: f64 = values[2].iter().sum();
    let (mut loss, mut z_loss, mut gradient) = (0.0, 0.0, Vec::new());
    for (token, logits) in values[0].chunks(vocab).enumerate() {
        let (target, weight) = (values[1][token] as usize, values[2][token] / total_weight);
        let z: f64 = logits.iter().map(|logit| logit.exp()).sum();
        loss += weight * (z.ln() - logits[target] + MULTIPLIER * z.ln().powi(2));
        z_loss += weight * MULTIPLIER * z.ln().powi(2);
        for (index, logit) in logits.iter().enumerate() {
            let of_z = (1.0 + 2.0 * MULTIPLIER * z.ln()) * logit.exp() / z;
            gradient.push(weight * (of_z - f64::from(u8::from(index == target))));
        }
    }
    let gradient: Vec<f32> = gradient.iter().map(|value| *value as f32).collect();
    let gradient = HostArray::from_slice(DType::F32, &[rows, length, vocab], &gradient).unwrap();

    let values = run("token_loss", &arguments, |_, t| {
        let loss = token_loss(t[0], t[1], t[2], MULTIPLIER);
        vec![mean(loss), loss.z_loss.unwrap() / loss.weights]
    });
    assert_close("the loss", &values[0], &scalar(loss), 1e-6);
    assert_close("the z-loss", &values[1], &scalar(z_loss), 1e-6);
    let (_, gradients) =
        gradients("token_loss", &arguments, &scalar(1.0), |t| mean(token_loss(t[0], t[1], t[2], MULTIPLIER)));
    assert_close("the gradient", &gradients[0], &gradient, 1e-6);
}

/// The nearest `bf16` number.
fn rounded(value: f64) -> f64 {
    half::bf16::from_f64(value).to_f64()
}

#[test]
fn narrow_losses_are_those_of_the_logits_type() {
    let Sizes(rows, length, _, vocab) = SMALL;
    let [batch, position] = SMALL.tokens();
    let mut arguments = SMALL.arguments().split_off(2);
    arguments.insert(0, (vec![batch, position, axis(VOCAB, vocab)], numbers(5, &[rows, length, vocab])));
    let losses = run("narrow", &arguments, |_, t| {
        let narrow = |dtype: DType| narrow_token_loss(t[0].cast(dtype), t[1], t[2], MULTIPLIER);
        vec![
            token_loss(t[0], t[1], t[2], MULTIPLIER).total,
            narrow(DType::F32).total,
            narrow(DType::BF16).total,
            token_loss(t[0].cast(DType::BF16), t[1], t[2], MULTIPLIER).total,
        ]
    });
    let losses: Vec<f64> = losses.iter().map(|loss| loss.to_f64()[0]).collect();
    let [wide, of_wide, narrow, of_narrow] = losses[..] else { panic!("four losses") };
    assert_eq!(wide, of_wide, "in `f32` there is no difference");
    let mut expected = 0.0;
    for (token, logits) in arguments[0].1.to_f64().chunks(vocab).enumerate() {
        let target = arguments[1].1.to_f64()[token] as usize;
        let z: f64 = logits.iter().map(|logit| rounded(*logit).exp()).sum();
        let cross_entropy = rounded(rounded(z.ln()) - rounded(logits[target]));
        let z_loss = MULTIPLIER * rounded(z.ln()).powi(2);
        expected += arguments[2].1.to_f64()[token].min(1.0) * (cross_entropy + z_loss);
    }
    // Partial sums of exponentials are rounded, too.
    assert!((narrow - expected).abs() < 0.02 * expected, "{narrow}, not {expected}");
    assert_ne!(narrow, of_narrow, "rounding each token's loss shows");
    let gradients_of = |dtype: DType| {
        let (_, gradients) = gradients("narrow", &arguments, &scalar(1.0), |t| {
            mean(narrow_token_loss(t[0].cast(dtype), t[1], t[2], MULTIPLIER))
        });
        gradients[0].clone()
    };
    let (narrow, wide) = (gradients_of(DType::BF16).to_f64(), gradients_of(DType::F32).to_f64());
    for (narrow, wide) in narrow.iter().zip(&wide) {
        assert!((narrow - wide).abs() < 0.02 * wide.abs() + 2e-3, "{narrow}, not {wide}");
    }
}

fn scalar(value: f64) -> HostArray {
    HostArray::from_slice(DType::F32, &[], &[value as f32]).unwrap()
}

#[test]
fn tiles_change_neither_loss_nor_gradients() {
    let cotangent = HostArray::from_slice(DType::F32, &[], &[-2.5_f32]).unwrap();
    let of = |tiles: Option<usize>| {
        gradients("tiled", &SMALL.arguments(), &cotangent, |t| mean(loss_of(t, tiles)))
    };
    let z_loss = |tiles: Option<usize>| {
        run("tiled_z", &SMALL.arguments(), |_, t| vec![loss_of(&t, tiles).z_loss.unwrap()]).remove(0)
    };
    let (loss, whole) = of(None);
    for tiles in [1, 2, 3, 6] {
        let (tiled, values) = of(Some(tiles));
        assert_close(&format!("the loss in {tiles} tiles"), &tiled, &loss, 1e-6);
        for (value, whole) in values.iter().zip(&whole) {
            assert_close(&format!("a gradient in {tiles} tiles"), value, whole, 1e-6);
        }
        // The loss without gradients runs different code.
        assert_close("the z-loss", &z_loss(Some(tiles)), &z_loss(None), 1e-6);
    }
}

#[test]
fn tiles_change_no_log_probabilities_and_gradients() {
    let Sizes(rows, length, _, vocab) = SMALL;
    let [batch, position] = SMALL.tokens();
    let logits = (vec![batch, position, axis(VOCAB, vocab)], numbers(5, &[rows, length, vocab]));
    let made = run("formula", &[logits.clone(), SMALL.arguments().remove(2)], |_, t| {
        vec![token_log_probabilities(t[0], t[1], true)]
    });
    let targets = SMALL.arguments()[2].1.to_f64();
    for ((logits, target), made) in logits.1.to_f64().chunks(vocab).zip(targets).zip(made[0].to_f64()) {
        let z: f64 = logits.iter().map(|logit| logit.exp()).sum();
        assert!((made - (logits[target as usize] - z.ln())).abs() < 1e-6, "{made}");
    }

    // Each token has a cotangent of its own.
    let cotangent = numbers(6, &[rows, length]);
    for (in_f32, tolerance) in [(true, 1e-6), (false, 8e-3)] {
        let of = |tiles: Option<usize>| {
            gradients("log_probabilities", &SMALL.arguments(), &cotangent, |t| {
                log_probabilities_of(t, tiles, in_f32)
            })
        };
        let (whole, of_whole) = of(None);
        for tiles in [1, 3, 6] {
            let (tiled, of_tiled) = of(Some(tiles));
            let what = format!("in {tiles} tiles, in `f32`: {in_f32}");
            assert_close(&what, &tiled, &whole, tolerance);
            for (value, whole) in of_tiled.iter().zip(&of_whole) {
                assert_close(&format!("a gradient {what}"), value, whole, tolerance);
            }
        }
    }
}

#[test]
fn tiles_take_narrow_hidden_states() {
    let cotangent = HostArray::from_slice(DType::F32, &[], &[1.0_f32]).unwrap();
    let of = |tiles: Option<usize>| {
        gradients("narrow", &SMALL.arguments(), &cotangent, |t| {
            mean(loss_of(&[&[t[0].cast(DType::BF16)], &t[1..]].concat(), tiles))
        })
    };
    let ((loss, whole), (tiled, values)) = (of(None), of(Some(3)));
    assert_close("the loss", &tiled, &loss, 1e-5);
    for (value, whole) in values.iter().zip(&whole) {
        // Two roundings to `bf16`.
        assert_close("a gradient", value, whole, 8e-3);
    }
}

/// The differentiated arguments of a loss, as in training.
#[derive(mt_derive::Tree)]
struct Differentiated<L> {
    hidden: L,
    matrix: L,
}

fn differentiated<'t>(t: &[Tensor<'t>], tiles: Option<usize>) -> Vec<Tensor<'t>> {
    let both = Differentiated { hidden: t[0], matrix: t[1] };
    let (loss, [], gradients) = t[0]
        .region()
        .value_and_grad(&both, |_, both| (mean(loss_of(&[both.hidden, both.matrix, t[2], t[3]], tiles)), []));
    vec![loss, gradients.hidden, gradients.matrix]
}

#[test]
fn logits_are_never_whole() {
    let text_of = |tiles| text(&SMALL.arguments(), |_, t| differentiated(&t, tiles));
    assert!(text_of(None).contains("tensor<2x6x11xf32>"));
    let of_log_probabilities = text(&SMALL.arguments(), |_, t| {
        let both = Differentiated { hidden: t[0], matrix: t[1] };
        let (loss, [], gradients) = t[0].region().value_and_grad(&both, |_, both| {
            let made = log_probabilities_of(&[both.hidden, both.matrix, t[2]], Some(3), true);
            ((made * made).sum(&[BATCH, POSITION]), [])
        });
        vec![loss, gradients.hidden, gradients.matrix]
    });
    for tiled in [text_of(Some(3)), of_log_probabilities] {
        assert!(tiled.contains("tensor<2x2x11xf32>"), "{tiled}");
        for whole in ["2x6x11x", "3x2x2x11x", "12x11x"] {
            assert!(!tiled.contains(whole), "{whole} is in\n{tiled}");
        }
    }

    // Logits take 16 MiB, the output matrix 512 KiB.
    let large = Sizes(4, 128, 16, 8192);
    let bytes_of = |tiles| temporary_bytes(&large.arguments(), |_, t| differentiated(&t, tiles));
    let (whole, tiled) = (bytes_of(None), bytes_of(Some(16)));
    assert!(whole >= 16 << 20, "{whole}");
    assert!(tiled <= 6 << 20, "{tiled}");
}

/// As [`differentiated`], with hidden states and therefore logits of type `dtype`.
fn differentiated_in<'t>(dtype: DType, t: &[Tensor<'t>], tiles: Option<usize>) -> Vec<Tensor<'t>> {
    differentiated(&[&[t[0].cast(dtype)], &t[1..]].concat(), tiles)
}

#[test]
fn kernels_do_what_programs_do() {
    const KERNELS: Target = Target::Cpu(CpuKernels { f32: true, bf16: true, ..CpuKernels::NONE });
    let (one, many) = (Sizes(1, 1, 3, 2), Sizes(3, 7, 5, 200));
    for (sizes, tiles) in [(SMALL, None), (SMALL, Some(3)), (one, None), (many, Some(7))] {
        let arguments = sizes.arguments();
        for (dtype, tolerance) in [(DType::F32, 2e-6), (DType::BF16, 8e-3)] {
            let what = format!("{tiles:?} in {dtype}");
            let text = text_for(KERNELS, &arguments, |_, t| differentiated_in(dtype, &t, tiles));
            assert_eq!(text.matches("maxtext.cross_entropy").count(), 2, "{what}");
            let of = |target: Target| {
                run_for(target, "kernels", &arguments, |_, t| differentiated_in(dtype, &t, tiles))
            };
            for (with, without) in of(KERNELS).iter().zip(&of(Target::CPU)) {
                assert_close(&what, with, without, tolerance);
            }
        }
    }
}
