//! Spike detection against the same rule in double precision.

use std::collections::VecDeque;

use mt_ir::Program;
use mt_optim::{History, SpikeGuard};
use mt_runtime::testing;
use mt_shape::{DType, HostArray};

use crate::traced;

const GUARD: SpikeGuard = SpikeGuard { interval: 6, scaling_factor: 2.0 };

fn program() -> Program {
    traced("judge", |inputs| {
        let ring = |name: &str| inputs.input(name, DType::F32, &[GUARD.axis()], &[None], false);
        let scalar = |name: &str, dtype: DType| inputs.input(name, dtype, &[], &[], false);
        let (losses, gradient_norms) = (ring("losses"), ring("gradient_norms"));
        let history = History { losses, gradient_norms, count: scalar("count", DType::I32) };
        let (loss, norm) = (scalar("loss", DType::F32), scalar("norm", DType::F32));
        let (is_spike, next) = GUARD.judge(history, loss, norm);
        [next.losses, next.gradient_norms, next.count, is_spike.cast(DType::F32)]
            .map(|tensor| inputs.replicated("result", tensor))
            .into()
    })
}

/// Whether a value is within the allowed deviations of the previous ones.
fn is_normal(before: &VecDeque<f64>, value: f64) -> bool {
    let count = before.len() as f64;
    let mean = before.iter().sum::<f64>() / count.max(1.0);
    let variance = before.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (count - 1.0).max(1.0);
    value - mean <= GUARD.scaling_factor * variance.sqrt()
}

#[test]
fn steps_far_above_those_before_are_spikes() {
    let program = program();
    let losses =
        [3.0, 2.9, 9.0, 2.7, 2.6, 2.5, 2.65, 7.0, 2.4, 2.5, f64::NAN, 2.3, 2.45, f64::INFINITY, 2.2, 6.0];
    let norms = [1.0, 1.1, 0.9, 1.0, 1.2, 0.8, 5.0, 1.0, 1.1, 0.9, 1.0, 1.0, 30.0, 1.1, 1.0, 1.1];
    let mut state = vec![
        HostArray::zeros(DType::F32, &[GUARD.interval]),
        HostArray::zeros(DType::F32, &[GUARD.interval]),
        HostArray::zeros(DType::I32, &[]),
    ];
    let (mut before, mut norms_before) = (VecDeque::new(), VecDeque::new());
    let mut spikes = Vec::new();
    let mut written = 0;
    for (loss, norm) in losses.into_iter().zip(norms) {
        let is_early = written + 1 < GUARD.interval / 2;
        let expected = !(is_early || is_normal(&before, loss) && is_normal(&norms_before, norm));
        let scalar = |value: f64| HostArray::from_slice(DType::F32, &[], &[value as f32]).unwrap();
        state.extend([scalar(loss), scalar(norm)]);
        state = testing::run(&program, &state).unwrap();
        let is_spike = state.pop().unwrap().to_f64()[0] == 1.0;
        assert_eq!(is_spike, expected, "loss {loss}, norm {norm} after {before:?} and {norms_before:?}");
        spikes.push(is_spike);
        if loss.is_finite() && norm.is_finite() {
            written += 1;
            for (ring, value) in [(&mut before, loss), (&mut norms_before, norm)] {
                ring.push_back(value);
                if ring.len() > GUARD.interval {
                    ring.pop_front();
                }
            }
        }
        assert_eq!(state[2].to_f64(), [written as f64]);
        assert!(state[0].to_f64().iter().all(|value| value.is_finite()));
    }
    assert!(spikes[2] && spikes[6] && spikes[10] && spikes[12] && spikes[13], "{spikes:?}");
    assert!(!spikes[0] && !spikes[1] && !spikes[3] && !spikes[14], "{spikes:?}");
}
