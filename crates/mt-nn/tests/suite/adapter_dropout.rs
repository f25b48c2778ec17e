//! Dropout of the inputs of adapters, compared with PEFT; `goldens/adapter_dropout.py` generates the values.

use mt_ir::Target;
use mt_nn::{
    Adapter, DENSE, Initializer, ParamSpec, Quantized, QuantizedType, SequenceOrder, Weight,
    axes::{BATCH, EMBED, MLP, POSITION},
    dropout,
};
use mt_shape::{Attached, Axis, DType, HostArray, Noise, Tree, axis, logical};
use mt_trace::{Region, Tensor};

use crate::harness::{Argument, assert_close, golden, gradients, run, text_for};

const RATE: f64 = 0.4;
const KEY: u64 = 11;
const TOLERANCE: f64 = 1e-5;
/// Rows with draws of their own.
const DRAWS: usize = 40_000;

fn specs(weight: [Axis; 2], has_magnitude: bool, dropout: f64) -> Weight<ParamSpec> {
    let axes = weight.map(|axis| (axis, logical::EMBED));
    let adapter = Adapter { rank: 3, scale: 2.0, has_magnitude, dropout, choices: None };
    Weight::declare_adapted(&DENSE, ParamSpec::new(axes, Initializer::Zeros), 1, adapter)
}

fn noisy<'t>(
    mut weight: Weight<Tensor<'t>>,
    region: Region<'t>,
    paired: Option<usize>,
) -> Weight<Tensor<'t>> {
    weight.attach(|_| Attached::Noise(Noise { key: region.key(KEY).value(), paired_shards: paired }));
    weight
}

#[test]
fn outputs_and_gradients_are_those_of_peft_with_the_same_mask() {
    let golden = golden("adapter_dropout.safetensors");
    for (name, has_magnitude) in [("lora", false), ("dora", true)] {
        let array = |own: &str| golden.array(&format!("{name}.{own}"));
        let mut all: Vec<(&str, &[&'static str])> = vec![
            ("x", &[BATCH, POSITION, EMBED]),
            ("weight", &[EMBED, MLP]),
            ("a", &[EMBED, mt_nn::LORA_RANK]),
            ("b", &[mt_nn::LORA_RANK, MLP]),
        ];
        if has_magnitude {
            all.push(("magnitude", &[MLP]));
        }
        let loaded: Vec<Argument> = all
            .iter()
            .map(|(argument, names)| {
                let array = array(argument);
                (names.iter().zip(array.dims()).map(|(name, size)| axis(name, *size)).collect(), array)
            })
            .collect();
        let (y, found) = gradients(name, &loaded, &array("cotangent"), |t| {
            let weight = specs([t[1].axis(EMBED), t[1].axis(MLP)], has_magnitude, RATE);
            noisy(weight.with_leaves(t[1..].iter().copied()), t[0].region(), None).dot(t[0], &[EMBED])
        });
        assert_close(&format!("{name}.y"), &y, &array("y"), TOLERANCE);
        for ((argument, _), gradient) in
            all.iter().zip(&found).filter(|((argument, _), _)| *argument != "weight")
        {
            let expected = array(&format!("gradient.{argument}"));
            assert_close(&format!("{name}.gradient.{argument}"), gradient, &expected, TOLERANCE);
        }

        // In distribution: the means and deviations of many draws, which PEFT's own dropout made.
        let results = run(&format!("{name}_draws"), &loaded[1..], |region, t| {
            let weight = specs([t[0].axis(EMBED), t[0].axis(MLP)], has_magnitude, RATE);
            let weight = noisy(weight.with_leaves(t.iter().copied()), region, None);
            let x = region.table(array("x"), &loaded[0].0).at(BATCH, 0).at(POSITION, 0);
            let rows = [axis(BATCH, DRAWS), x.axis(EMBED)];
            let y = weight.dot(x.broadcast(&rows), &[EMBED]);
            let mean = y.mean(&[BATCH]);
            let deviation = (y - mean).square().mean(&[BATCH]).sqrt();
            vec![mean, deviation]
        });
        let statistics = array("statistics").to_f64();
        let (means, deviations) = statistics.split_at(statistics.len() / 2);
        let (own_means, own_deviations) = (results[0].to_f64(), results[1].to_f64());
        for index in 0..means.len() {
            // Five standard errors of the difference of two means of this many draws.
            let error = deviations[index] * (2.0 / DRAWS as f64).sqrt();
            assert!((means[index] - own_means[index]).abs() < 5.0 * error, "{name}: {means:?} {own_means:?}");
            let ratio = own_deviations[index] / deviations[index];
            assert!((ratio - 1.0).abs() < 0.03, "{name}: {deviations:?} {own_deviations:?}");
        }
    }
}

#[test]
fn weights_without_noise_drop_nothing_and_masks_follow_the_text() {
    const LENGTH: usize = 12;
    let axes = [axis(BATCH, 2), axis(POSITION, LENGTH), axis(EMBED, 6)];
    let results = run("orders", &[], |region, _| {
        let number = |axes: &[Axis], scale: f64| {
            let count = axes.iter().map(|axis| region.iota(DType::F32, *axis).broadcast(axes));
            count.reduce(|sum, one| sum + one * 0.7).map(|sum| (sum * scale).sin()).unwrap()
        };
        let (embed, mlp, rank) = (axis(EMBED, 6), axis(MLP, 4), axis(mt_nn::LORA_RANK, 3));
        let leaves = [number(&[embed, mlp], 1.1), number(&[embed, rank], 1.3), number(&[rank, mlp], 1.7)];
        let (on, off) = (specs([embed, mlp], false, RATE), specs([embed, mlp], false, 0.0));
        let x = number(&axes, 0.9);
        let paired = SequenceOrder::Paired { shards: 3 };
        let weight = || on.with_leaves(leaves);
        let read = noisy(weight(), region, None).dot(x, &[EMBED]);
        let stored = noisy(weight(), region, Some(3)).dot(paired.store(x, POSITION), &[EMBED]);
        let mask = dropout(x, RATE, region.key(KEY), SequenceOrder::AsRead);
        let by_hand = x.dot(leaves[0], &[EMBED])
            + mask.dot(leaves[1], &[EMBED]).dot(leaves[2], &[mt_nn::LORA_RANK]) * 2.0;
        let all = [
            read,
            paired.read(stored, POSITION),
            by_hand,
            weight().dot(x, &[EMBED]),
            noisy(off.with_leaves(leaves), region, None).dot(x, &[EMBED]),
        ];
        all.map(|tensor| tensor.order(&[BATCH, POSITION, MLP])).to_vec()
    });
    assert_close("the order of storage", &results[1], &results[0], 1e-6);
    assert_close("the mask of the site", &results[2], &results[0], 1e-6);
    assert_close("without noise", &results[3], &results[4], 1e-6);
    assert_ne!(results[0], results[3]);
}

/// Transposed rows would be copied by every later operation.
#[test]
fn adapters_leave_the_axes_of_rows_first() {
    let (embed, mlp, rank) = (axis(EMBED, 6), axis(MLP, 4), axis(mt_nn::LORA_RANK, 3));
    let axes: [Vec<Axis>; 4] = [
        vec![axis(BATCH, 2), axis(POSITION, 5), embed],
        vec![embed, mlp],
        vec![embed, rank],
        vec![rank, mlp],
    ];
    let arguments = axes.map(|axes| {
        let shape: Vec<usize> = axes.iter().map(|axis| axis.size).collect();
        let zeros = vec![0.0_f32; shape.iter().product()];
        (axes, HostArray::from_slice(DType::F32, &shape, &zeros).unwrap())
    });
    let program = text_for(Target::CPU, &arguments, |_, t| {
        let weight = specs([embed, mlp], false, 0.0).with_leaves(t[1..].iter().copied());
        let y = weight.dot(t[0], &[EMBED]);
        assert_eq!(y.axes().iter().map(|axis| axis.name).collect::<Vec<_>>(), [BATCH, POSITION, MLP]);
        vec![y]
    });
    assert!(!program.contains("stablehlo.transpose"), "{program}");
}

#[test]
fn formats_of_quantized_weights_are_one_value_each() {
    let one = Quantized::of(QuantizedType::Nf4, Some(64));
    assert!(std::ptr::eq(one, Quantized::of(QuantizedType::Nf4, Some(64))));
    assert!(!std::ptr::eq(one, Quantized::of(QuantizedType::Nf4, None)));
    assert!(!std::ptr::eq(one, Quantized::of(QuantizedType::Int4, Some(64))));
}
