//! Measures attention on one thread: `cargo run --release -p mt-kernels --example attention`.
//!
//! Prints GFLOP/s of processor time as Linux counts it. Products with keys that the causal mask hides do not count.

use std::{fs, hint::black_box};

use half::bf16;
use mt_kernels::{
    Alone, Instructions,
    attention::{
        Attend, Gradients, Inputs, Mask, Operand, Options, Outcome, Residuals, Results, Shape, Strides,
    },
};

const REPEATS: usize = 10;

fn main() {
    for instructions in Instructions::available().into_iter().rev() {
        for shape in [
            Shape { batch: 4, length: 512, kv_heads: 8, group: 1, head_dim: 64 },
            Shape { batch: 1, length: 2048, kv_heads: 2, group: 4, head_dim: 128 },
        ] {
            measure::<f32>("f32", shape, instructions);
            measure::<bf16>("bf16", shape, instructions);
        }
    }
}

fn measure<E: Attend>(name: &str, shape: Shape, instructions: Instructions) {
    let Shape { batch, length, kv_heads, group, head_dim } = shape;
    let numbers = |count: usize| -> Vec<E> {
        (0..count).map(|index| E::from_f32((index as f32 * 0.37).sin() * 0.3)).collect()
    };
    let keys = batch * length * kv_heads * head_dim;
    let (query, key, value, cotangent) =
        (numbers(keys * group), numbers(keys), numbers(keys), numbers(keys * group));
    let segments = vec![1; batch * length];
    let strides = Strides::positions_first(shape);
    let key_strides = Strides::positions_first(Shape { group: 1, ..shape });
    let row_strides = Strides::positions_first(Shape { head_dim: 1, ..shape });
    let options =
        Options { shape, mask: Mask { causal: true, ..Mask::default() }, soft_cap: None, instructions };
    let inputs = Inputs {
        query: Operand::queries(&query, strides, shape),
        key: Operand::keys(&key, key_strides, shape),
        value: Operand::keys(&value, key_strides, shape),
        segments: &segments,
        sinks: None,
    };
    let mut context = query.clone();
    let mut log_sums = vec![0.0; query.len() / head_dim];
    let (mut query_gradient, mut key_gradient, mut value_gradient) =
        (query.clone(), key.clone(), value.clone());
    let pairs = (batch * kv_heads * group * length * (length + 1) / 2) as f64;
    let product = 2.0 * pairs * head_dim as f64;
    let forward = best(|| {
        let results = Results {
            context: Outcome::queries(&mut context, strides, shape),
            log_sums: Outcome::rows(&mut log_sums, row_strides, shape),
            largest_scores: None,
        };
        E::forward(&Alone, &options, &inputs, &results);
    });
    let residuals = Residuals {
        context: Operand::queries(&context, strides, shape),
        log_sums: Operand::rows(&log_sums, row_strides, shape),
        cotangent: Operand::queries(&cotangent, strides, shape),
    };
    let backward = best(|| {
        let gradients = Gradients {
            query: Outcome::queries(&mut query_gradient, strides, shape),
            key: Outcome::keys(&mut key_gradient, key_strides, shape),
            value: Outcome::keys(&mut value_gradient, key_strides, shape),
            sinks: None,
        };
        E::backward(&Alone, &options, &inputs, &residuals, gradients);
    });
    black_box((&query_gradient, &key_gradient, &value_gradient));
    println!(
        "{instructions:?} {name}, {length} of {head_dim}: forward {:.0} GFLOP/s ({:.2} ms), backward {:.0} ({:.2} ms)",
        2.0 * product / forward / 1e9,
        forward * 1e3,
        5.0 * product / backward / 1e9,
        backward * 1e3,
    );
}

/// The time of the fastest of several runs, in seconds.
fn best(mut run: impl FnMut()) -> f64 {
    (0..REPEATS)
        .map(|_| {
            let before = processor_time();
            run();
            processor_time() - before
        })
        .fold(f64::MAX, f64::min)
}

/// The processor time of this thread, in seconds.
fn processor_time() -> f64 {
    let times = fs::read_to_string("/proc/thread-self/schedstat").expect("Linux counts processor time");
    let nanoseconds: f64 =
        times.split(' ').next().and_then(|time| time.parse().ok()).expect("the first is a time");
    nanoseconds / 1e9
}
