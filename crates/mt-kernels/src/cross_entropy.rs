//! Cross-entropy of rows of logits, and its gradient. A row is read from memory once, and from the cache after that.

use std::sync::{Mutex, PoisonError};

use crate::{
    Element, Team,
    block::{BLOCK, SIDE_BY_SIDE, filled, largest_of, narrowed, widened},
    simd::{Instructions, Simd, Work, with_simd},
};

/// Rows of logits, each with a target.
#[derive(Clone, Copy, Debug)]
pub struct Targets<'a> {
    /// The index of each row's target, `[rows]`. For an index outside of the row, the target's logit is 0.
    pub targets: &'a [i32],
    /// The length of a row.
    pub vocab: usize,
}

/// The cotangents of the results of [`cross_entropy`], `[rows]` each.
#[derive(Clone, Copy, Debug)]
pub struct Cotangents<'a> {
    pub cross_entropy: &'a [f32],
    pub log_z: &'a [f32],
}

/// Writes the cross-entropy of each row, and the logarithm of the sum of its exponentiated logits.
///
/// # Shapes
/// `logits: [rows, vocab]`; results: `[rows]` each.
///
/// # Panics
/// The sizes of the arrays do not match.
pub fn cross_entropy<E: Element>(
    team: &dyn Team,
    instructions: Instructions,
    rows: Targets<'_>,
    logits: &[E],
    [cross_entropy, log_z]: [&mut [f32]; 2],
) {
    rows.check(logits.len(), [cross_entropy.len(), log_z.len()]);
    let results = cross_entropy.iter_mut().zip(log_z);
    let results: Vec<_> = results.map(Mutex::new).collect();
    team.for_each(results.len(), &|row| {
        let logits = &logits[row * rows.vocab..][..rows.vocab];
        let mut results = results[row].lock().unwrap_or_else(PoisonError::into_inner);
        let (cross_entropy, log_z) = &mut *results;
        with_simd!(instructions, simd => simd.run(LogZ { simd, logits, log_z }));
        **cross_entropy = **log_z - rows.target(row).map_or(0.0, |target| logits[target].to_f32());
    });
}

/// Replaces the logits by their gradients. `log_z` is the second result of [`cross_entropy`].
///
/// # Panics
/// The sizes of the arrays do not match.
pub fn cross_entropy_gradient<E: Element>(
    team: &dyn Team,
    instructions: Instructions,
    rows: Targets<'_>,
    logits: &mut [E],
    log_z: &[f32],
    cotangents: Cotangents<'_>,
) {
    rows.check(logits.len(), [cotangents.cross_entropy.len(), cotangents.log_z.len()]);
    assert_eq!(log_z.len(), rows.targets.len(), "one logarithm for each row");
    let logits: Vec<_> = logits.chunks_mut(rows.vocab.max(1)).map(Mutex::new).collect();
    team.for_each(logits.len(), &|row| {
        let mut logits = logits[row].lock().unwrap_or_else(PoisonError::into_inner);
        let of_target = cotangents.cross_entropy[row];
        let factor = of_target + cotangents.log_z[row];
        let log_z = log_z[row];
        let target = rows.target(row).map(|target| (target, logits[target].to_f32()));
        with_simd!(instructions, simd => simd.run(Gradient { simd, logits: &mut logits, log_z, factor }));
        if let Some((target, logit)) = target {
            // The probability comes from the original logit, because the gradient stored above may be rounded.
            logits[target] = E::from_f32((logit - log_z).exp() * factor - of_target);
        }
    });
}

impl Targets<'_> {
    fn check(&self, num_logits: usize, num_results: [usize; 2]) {
        let count = self.targets.len();
        assert_eq!(num_logits, count * self.vocab, "each row has a target");
        assert_eq!(num_results, [count; 2], "one number for each row");
    }

    fn target(&self, row: usize) -> Option<usize> {
        usize::try_from(self.targets[row]).ok().filter(|target| *target < self.vocab)
    }
}

struct LogZ<'a, 'b, S, E> {
    simd: S,
    logits: &'a [E],
    log_z: &'b mut f32,
}

impl<S: Simd, E: Element> Work for LogZ<'_, '_, S, E> {
    // Loops call no closures, because closures would not be compiled for these instructions.
    #[inline(always)]
    fn run(self) {
        let Self { simd, logits, log_z } = self;
        let (blocks, rest) = logits.as_chunks::<BLOCK>();
        // Logits of negative infinity have no weight.
        let rest = filled(rest, f32::NEG_INFINITY);
        // A row is read twice, the second time from the cache.
        let largest = largest_of(simd, logits);
        let shift = simd.splat(largest);
        let mut sums = [simd.splat(0.0); SIDE_BY_SIDE];
        for block in blocks.iter().chain([&rest]) {
            let wide = widened(block);
            for (place, vector) in wide.0.chunks_exact(S::WIDTH).enumerate() {
                let sum = &mut sums[place % SIDE_BY_SIDE];
                *sum = simd.add(*sum, simd.exp(simd.sub(simd.load(vector), shift)));
            }
        }
        let mut numbers = [0.0; BLOCK];
        for (vector, to) in sums.iter().zip(numbers.chunks_exact_mut(S::WIDTH)) {
            simd.store(*vector, to);
        }
        let sum: f64 = numbers.iter().copied().map(f64::from).sum();
        *log_z = (f64::from(largest) + sum.ln()) as f32;
    }
}

struct Gradient<'a, S, E> {
    simd: S,
    logits: &'a mut [E],
    log_z: f32,
    factor: f32,
}

impl<S: Simd, E: Element> Work for Gradient<'_, S, E> {
    #[inline(always)]
    fn run(self) {
        let Self { simd, logits, log_z, factor } = self;
        let (blocks, rest) = logits.as_chunks_mut::<BLOCK>();
        let mut last = filled(rest, f32::NEG_INFINITY);
        for block in blocks.iter_mut().chain([&mut last]) {
            let mut wide = widened(block);
            for vector in wide.0.chunks_exact_mut(S::WIDTH) {
                let probabilities = simd.exp(simd.sub(simd.load(vector), simd.splat(log_z)));
                simd.store(simd.mul(probabilities, simd.splat(factor)), vector);
            }
            narrowed(&wide, block);
        }
        rest.copy_from_slice(&last[..rest.len()]);
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::ScopedThreads;

    fn check<E: Element>(instructions: Instructions, num_rows: usize, vocab: usize, tolerance: f64) {
        let number = |index: usize| (index as f32 * 0.37).sin() * 9.0;
        let logits: Vec<E> = (0..num_rows * vocab).map(|index| E::from_f32(number(index))).collect();
        // The first row's target is -1, which is no index.
        let targets: Vec<i32> =
            (0..num_rows).map(|row| (row * 7 % vocab) as i32 - i32::from(row == 0)).collect();
        let [of_cross_entropy, of_log_z]: [Vec<f32>; 2] =
            [0.3, 0.7].map(|scale| (0..num_rows).map(|row| (row as f32 * scale).cos()).collect());
        let rows = Targets { targets: &targets, vocab };
        let team = ScopedThreads(2);
        let (mut losses, mut log_z) = (vec![0.0; num_rows], vec![0.0; num_rows]);
        cross_entropy(&team, instructions, rows, &logits, [&mut losses, &mut log_z]);
        let mut gradients = logits.clone();
        let cotangents = Cotangents { cross_entropy: &of_cross_entropy, log_z: &of_log_z };
        cross_entropy_gradient(&team, instructions, rows, &mut gradients, &log_z, cotangents);
        for row in 0..num_rows {
            let logits: Vec<f64> =
                logits[row * vocab..][..vocab].iter().map(|logit| f64::from(logit.to_f32())).collect();
            let target = usize::try_from(targets[row]).ok();
            let expected = logits.iter().map(|logit| logit.exp()).sum::<f64>().ln();
            let name = format!("{instructions:?}, row {row} of {vocab}");
            assert!((f64::from(log_z[row]) - expected).abs() <= 2e-6 * expected.abs().max(1.0), "{name}");
            let loss = expected - target.map_or(0.0, |target| logits[target]);
            assert!((f64::from(losses[row]) - loss).abs() <= 2e-6 * loss.abs().max(9.0), "{name}");
            let [of_loss, of_log_z] = [of_cross_entropy[row], of_log_z[row]].map(f64::from);
            for (index, logit) in logits.iter().enumerate() {
                let of_target = if target == Some(index) { of_loss } else { 0.0 };
                let gradient = (logit - expected).exp() * (of_loss + of_log_z) - of_target;
                let actual = f64::from(gradients[row * vocab + index].to_f32());
                assert!(
                    (actual - gradient).abs() <= tolerance,
                    "{name}, logit {index}: {actual}, not {gradient}"
                );
            }
        }
    }

    #[test]
    fn rows_are_those_of_the_formula() {
        for instructions in Instructions::available() {
            for (num_rows, vocab) in [(1, 1), (3, 5), (4, 16), (5, 64), (7, 133), (2, 1000)] {
                check::<f32>(instructions, num_rows, vocab, 2e-6);
                check::<bf16>(instructions, num_rows, vocab, 8e-3);
            }
        }
    }

    #[test]
    fn what_is_masked_has_no_weight_and_what_is_no_number_shows() {
        for instructions in Instructions::available() {
            let logits = [[1.0, f32::NEG_INFINITY, -1e30], [0.0, f32::NAN, 1.0]].concat();
            let rows = Targets { targets: &[0, 0], vocab: 3 };
            let (mut losses, mut log_z) = ([9.0; 2], [9.0; 2]);
            cross_entropy(&ScopedThreads(1), instructions, rows, &logits, [&mut losses, &mut log_z]);
            assert_eq!((losses[0], log_z[0]), (0.0, 1.0));
            assert!(losses[1].is_nan() && log_z[1].is_nan());
        }
    }
}
