//! Initial values of parameters.

use mt_ir::{CpuKernels, Target};
use mt_nn::{
    Initializer, ParamSpec,
    axes::{EMBED, LAYERS, MLP, QUERY_HEADS},
    initialize,
};
use mt_shape::{Path, axis, logical};

use crate::harness::{run, run_for, text_for};

const FAN_IN: usize = 400;

fn path(segments: &[&str]) -> Path {
    let mut path = Path::default();
    fn descend(path: &mut Path, segments: &[&str]) -> Path {
        match segments {
            [] => path.clone(),
            [first, rest @ ..] => path.within(first, |path| descend(path, rest)),
        }
    }
    descend(&mut path, segments)
}

fn deviation(values: &[f64]) -> f64 {
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    (values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / values.len() as f64).sqrt()
}

#[test]
fn values_have_the_distribution_that_is_asked_for() {
    let spec = |initializer| {
        ParamSpec::new([(axis(EMBED, FAN_IN), logical::EMBED), (axis(MLP, 100), logical::MLP)], initializer)
    };
    let results = run("initialize", &[], |region, _| {
        let specs = [
            (path(&["a"]), spec(Initializer::fan_in(1.0, FAN_IN))),
            (path(&["b"]), spec(Initializer::Normal { deviation: 0.02 })),
            (path(&["c"]), spec(Initializer::Ones)),
            (path(&["d"]), spec(Initializer::Zeros)),
            (path(&["e"]), spec(Initializer::fan_in(1.0, FAN_IN))),
        ];
        initialize(region, region.key(0), &specs)
    });
    let values: Vec<Vec<f64>> = results.iter().map(|result| result.to_f64()).collect();
    let expected = (1.0 / FAN_IN as f64).sqrt();
    assert!((deviation(&values[0]) / expected - 1.0).abs() < 0.02);
    // Truncated at two standard deviations of the original distribution.
    let bound = 2.0 * expected / 0.879_625_661_034_239_8;
    let largest = values[0].iter().fold(0.0_f64, |largest, value| largest.max(value.abs()));
    assert!(largest <= bound * 1.000_001 && largest > bound * 0.99);
    assert!((deviation(&values[1]) / 0.02 - 1.0).abs() < 0.02);
    assert!(values[1].iter().any(|value| value.abs() > 0.06), "not cut");
    assert!(values[2].iter().all(|value| *value == 1.0));
    assert!(values[3].iter().all(|value| *value == 0.0));
    assert_ne!(values[0], values[4], "parameters draw differently");
}

/// Rates of decay are uniform and time steps log-uniform between two numbers; the parameters are functions of them.
#[test]
fn rates_and_time_steps_lie_between_their_bounds() {
    let spec = |initializer| ParamSpec::new([(axis(EMBED, 4000), logical::EMBED)], initializer);
    let [rates, steps] = [[1.0, 16.0], [1e-3, 1e-1]];
    let results = run("initialize", &[], |region, _| {
        let rate = Initializer::LogOfUniform { smallest: rates[0], largest: rates[1] };
        let step = Initializer::InverseSoftplusOfLogUniform { smallest: steps[0], largest: steps[1] };
        initialize(region, region.key(0), &[(path(&["a"]), spec(rate)), (path(&["b"]), spec(step))])
    });
    let drawn = [
        (results[0].to_f64().iter().map(|value| value.exp()).collect::<Vec<f64>>(), rates),
        (results[1].to_f64().iter().map(|value| value.exp().ln_1p().ln()).collect(), steps.map(f64::ln)),
    ];
    for (values, [low, high]) in drawn {
        let slack = 1e-4 * (high - low);
        assert!(values.iter().all(|value| (low - slack..=high + slack).contains(value)), "{values:?}");
        let (mean, spread) = (values.iter().sum::<f64>() / 4000.0, deviation(&values));
        assert!((mean - (low + high) / 2.0).abs() < 0.02 * (high - low), "{mean}");
        assert!((spread * 12_f64.sqrt() / (high - low) - 1.0).abs() < 0.03, "{spread}");
    }
}

#[test]
fn stacked_and_unrolled_layers_start_alike() {
    let spec = ParamSpec::new([(axis(EMBED, 7), logical::EMBED)], Initializer::fan_in(1.0, 7));
    let wi = path(&["wi"]);
    let stacked = run("stacked", &[], |region, _| {
        // Two layers of each position in the cycle, and one remaining layer.
        let layers = axis(LAYERS, 2);
        let specs = [
            (path(&["cycle", "0", "wi"]), spec.stacked(&wi, layers, 0, 2)),
            (path(&["cycle", "1", "wi"]), spec.stacked(&wi, layers, 1, 2)),
            (path(&["rest", "0", "wi"]), spec.of_layer(&wi, 4)),
        ];
        initialize(region, region.key(3), &specs)
    });
    let unrolled = run("unrolled", &[], |region, _| {
        let specs: Vec<_> = (0..5)
            .map(|layer| (path(&["rest", &layer.to_string(), "wi"]), spec.of_layer(&wi, layer)))
            .collect();
        initialize(region, region.key(3), &specs)
    });
    let unrolled: Vec<Vec<f64>> = unrolled.iter().map(|layer| layer.to_f64()).collect();
    assert_eq!(stacked[0].to_f64(), [&unrolled[0][..], &unrolled[2]].concat());
    assert_eq!(stacked[1].to_f64(), [&unrolled[1][..], &unrolled[3]].concat());
    assert_eq!(stacked[2].to_f64(), unrolled[4]);
    assert_ne!(unrolled[0], unrolled[1]);
}

#[test]
fn kernels_draw_what_programs_draw() {
    let kernels = Target::Cpu(CpuKernels { f32: true, bf16: false, ..CpuKernels::NONE });
    // With and without an even dimension, as the first, a middle or the last one.
    for [embed, head, mlp] in
        [[7, 1, 5], [1, 1, 1], [5, 5, 3], [6, 3, 70], [3, 4, 65], [3, 9, 130], [41, 300, 3]]
    {
        let axes = [
            (axis(EMBED, embed), logical::EMBED),
            (axis(QUERY_HEADS, head), logical::HEADS),
            (axis(MLP, mlp), logical::MLP),
        ];
        let spec = |initializer| ParamSpec::new(axes, initializer);
        let specs = [
            (path(&["a"]), spec(Initializer::fan_in(1.0, embed))),
            (path(&["b"]), spec(Initializer::Normal { deviation: 0.02 })),
            (
                path(&["layers", "c"]),
                spec(Initializer::fan_in(3.0, 2)).stacked(&path(&["c"]), axis(LAYERS, 3), 1, 4),
            ),
            (
                path(&["layers", "2", "d"]),
                spec(Initializer::Normal { deviation: 2.0 }).of_layer(&path(&["d"]), 2),
            ),
        ];
        let scales = [(1.0 / embed as f64).sqrt(), 0.02, 1.5_f64.sqrt(), 2.0];
        let text = text_for(kernels, &[], |region, _| initialize(region, region.key(5), &specs));
        assert_eq!(text.matches("maxtext.normal").count(), specs.len());
        let of = |target| {
            run_for(target, "initialize", &[], |region, _| initialize(region, region.key(5), &specs))
        };
        for (index, (with, without)) in of(kernels).iter().zip(&of(Target::CPU)).enumerate() {
            assert_eq!(with.dims(), without.dims());
            for (with, without) in with.to_f64().iter().zip(without.to_f64()) {
                // In the tails, programs square a number near 1 and lose digits of its distance to 1.
                let tolerance = if without.abs() > 2.5 * scales[index] { 1e-3 } else { 3e-6 };
                let error = (with - without).abs();
                assert!(
                    error <= tolerance * scales[index],
                    "{embed} x {head} x {mlp}, {index}: {with}, not {without}"
                );
            }
        }
    }
}
