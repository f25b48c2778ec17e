//! Times of kernels on this processor.

use std::time::{Duration, Instant};

use half::bf16;

use crate::{
    Alone, Arithmetic, Candidate, Dim, Elements, ElementsMut, Features, Operand, Purpose, Timing,
    attention::{Attend, Inputs, Mask, Operand as Rows, Options, Outcome, Results, Shape, Strides},
    dot::dot_by,
    fastest,
};

/// The fewest runs of each contender. The first run waits for memory and for the processor's wide units.
const FEWEST_ROUNDS: usize = 4;

/// The time for which the contenders for one purpose run in turns.
const BUDGET: Duration = Duration::from_micros(1500);

/// More rounds than this do not lower the least time.
const MOST_ROUNDS: usize = 40;

/// Times the contenders for a purpose on one thread and returns them in order of preference. Other processes only make
/// runs longer, so the time of a contender is the least of several runs. The result is empty for fewer than two contenders.
pub fn measure(features: Features, arithmetic: Arithmetic, purpose: Purpose) -> Vec<Timing> {
    let contenders = Candidate::contenders(features, arithmetic, purpose);
    if contenders.len() < 2 {
        return Vec::new();
    }
    match arithmetic {
        Arithmetic::F32 | Arithmetic::Bf16X3 => {
            Sample::<f32>::new(arithmetic, purpose).checked_times(&contenders)
        }
        // At most one of these kernels is not portable, so no choice remains.
        Arithmetic::Int8 => Vec::new(),
        Arithmetic::Bf16 => Sample::<bf16>::new(arithmetic, purpose).checked_times(&contenders),
    }
}

/// The product or attention that contenders compute.
struct Sample<E> {
    arithmetic: Arithmetic,
    purpose: Purpose,
    left: Vec<E>,
    right: Vec<E>,
    result: Vec<E>,
}

/// Rows, columns and depth of the measured products. Operands stay in the L2 cache, because memory is equally fast for
/// all kernels.
const MANY_ROWS: [usize; 3] = [56, 256, 512];
const FEW_ROWS: [usize; 3] = [4, 512, 512];

/// The sizes of attention.
const SHAPE: Shape = Shape { batch: 1, length: 256, kv_heads: 1, group: 1, head_dim: 64 };

/// An element type of both products and attention.
trait Measured: Attend {
    fn elements(elements: &[Self]) -> Elements<'_>;
    fn elements_mut(elements: &mut [Self]) -> ElementsMut<'_>;
}

impl Measured for f32 {
    fn elements(elements: &[Self]) -> Elements<'_> {
        Elements::F32(elements)
    }

    fn elements_mut(elements: &mut [Self]) -> ElementsMut<'_> {
        ElementsMut::F32(elements)
    }
}

impl Measured for bf16 {
    fn elements(elements: &[Self]) -> Elements<'_> {
        Elements::Bf16(elements)
    }

    fn elements_mut(elements: &mut [Self]) -> ElementsMut<'_> {
        ElementsMut::Bf16(elements)
    }
}

impl<E: Measured> Sample<E> {
    fn new(arithmetic: Arithmetic, purpose: Purpose) -> Self {
        let [left, right, result] = match purpose {
            Purpose::ManyRows => sizes(MANY_ROWS),
            Purpose::FewRows => sizes(FEW_ROWS),
            Purpose::Attention => [SHAPE.length * SHAPE.head_dim; 3],
        };
        // No number is zero or subnormal, because some processors multiply those at another speed.
        let number = |index: usize| E::from_f32((index * 37 % 64) as f32 / 64.0 - 0.4921875);
        let numbers = |count: usize| (0..count).map(number).collect();
        Self { arithmetic, purpose, left: numbers(left), right: numbers(right), result: numbers(result) }
    }

    /// The least time of each contender. If a contender would replace the preferred kernel, all are measured twice.
    fn checked_times(&mut self, contenders: &[&'static Candidate]) -> Vec<Timing> {
        let mut timings = self.times(contenders);
        if fastest(timings.iter().copied()) != contenders.first().copied() {
            for (timing, again) in timings.iter_mut().zip(self.times(contenders)) {
                timing.nanoseconds = timing.nanoseconds.min(again.nanoseconds);
            }
        }
        timings
    }

    fn times(&mut self, contenders: &[&'static Candidate]) -> Vec<Timing> {
        let Self { arithmetic, purpose, .. } = *self;
        let unmeasured =
            |candidate: &&'static Candidate| Timing { arithmetic, purpose, candidate, nanoseconds: u64::MAX };
        let mut timings: Vec<Timing> = contenders.iter().map(unmeasured).collect();
        let begin = Instant::now();
        let mut rounds = 0;
        while rounds < FEWEST_ROUNDS || (rounds < MOST_ROUNDS && begin.elapsed() < BUDGET) {
            rounds += 1;
            for timing in &mut timings {
                let start = Instant::now();
                self.run(timing.candidate);
                let nanoseconds = start.elapsed().as_nanos().try_into().unwrap_or(u64::MAX);
                timing.nanoseconds = timing.nanoseconds.min(nanoseconds);
            }
        }
        timings
    }

    fn run(&mut self, candidate: &Candidate) {
        match self.purpose {
            Purpose::ManyRows => self.multiply(candidate, MANY_ROWS, false),
            // If the columns of the other operand are contiguous, another loop multiplies few rows.
            Purpose::FewRows => {
                self.multiply(candidate, FEW_ROWS, false);
                self.multiply(candidate, FEW_ROWS, true);
            }
            Purpose::Attention => self.attend(candidate),
        }
    }

    fn multiply(&mut self, candidate: &Candidate, [rows, columns, depth]: [usize; 3], by_columns: bool) {
        let dim = |size, stride| vec![Dim { size, stride }];
        let operand = |elements, free, contract| Operand { elements, batch: vec![], free, contract };
        let left = operand(E::elements(&self.left), dim(rows, depth), dim(depth, 1));
        let (between_columns, between_rows) = if by_columns { (depth, 1) } else { (1, columns) };
        let right =
            operand(E::elements(&self.right), dim(columns, between_columns), dim(depth, between_rows));
        dot_by(&Alone, candidate, &left, &right, E::elements_mut(&mut self.result));
    }

    fn attend(&mut self, candidate: &Candidate) {
        let Some(instructions) = candidate.attention() else { return };
        let strides = Strides::positions_first(SHAPE);
        let segments = [1; SHAPE.length];
        let mut log_sums = [0.0; SHAPE.length];
        let mask = Mask { causal: true, ..Mask::default() };
        let options = Options { shape: SHAPE, mask, soft_cap: None, instructions };
        let inputs = Inputs {
            query: Rows::queries(&self.left, strides, SHAPE),
            key: Rows::keys(&self.right, strides, SHAPE),
            value: Rows::keys(&self.right, strides, SHAPE),
            segments: &segments,
            sinks: None,
        };
        let results = Results {
            context: Outcome::queries(&mut self.result, strides, SHAPE),
            log_sums: Outcome::rows(
                &mut log_sums,
                Strides::positions_first(Shape { head_dim: 1, ..SHAPE }),
                SHAPE,
            ),
            largest_scores: None,
        };
        E::forward(&Alone, &options, &inputs, &results);
    }
}

/// The numbers of elements of the operands and of the result of a product.
fn sizes([rows, columns, depth]: [usize; 3]) -> [usize; 3] {
    [rows * depth, depth * columns, rows * columns]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_contender_is_measured() {
        let features = Features::detect();
        for arithmetic in Arithmetic::ALL {
            for purpose in Purpose::ALL {
                let contenders = Candidate::contenders(features, arithmetic, purpose);
                let timings = measure(features, arithmetic, purpose);
                let measured: Vec<_> = timings.iter().map(|timing| timing.candidate).collect();
                assert_eq!(measured, if contenders.len() < 2 { vec![] } else { contenders });
                for timing in timings {
                    assert_eq!((timing.arithmetic, timing.purpose), (arithmetic, purpose));
                    assert!((1..u64::MAX).contains(&timing.nanoseconds), "{timing:?}");
                }
            }
        }
    }
}
