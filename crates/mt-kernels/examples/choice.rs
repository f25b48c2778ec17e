//! Measures the kernels among which a program chooses at its first start on a machine:
//! `cargo run --release -p mt-kernels --example choice`.

use std::time::Instant;

use mt_kernels::{Arithmetic, Features, Purpose, fastest, measure};

fn main() {
    let features = Features::detect();
    let begin = Instant::now();
    for arithmetic in Arithmetic::ALL {
        for purpose in Purpose::ALL {
            let timings = measure(features, arithmetic, purpose);
            let Some(chosen) = fastest(timings.iter().copied()) else { continue };
            let times: Vec<String> = timings
                .iter()
                .map(|timing| {
                    format!("{} {:.1} µs", timing.candidate.name(), timing.nanoseconds as f64 / 1e3)
                })
                .collect();
            println!(
                "{:4} {:9} {:12} {}",
                arithmetic.name(),
                purpose.name(),
                chosen.name(),
                times.join(", ")
            );
        }
    }
    println!("all together {:.1} ms", begin.elapsed().as_secs_f64() * 1e3);
}
