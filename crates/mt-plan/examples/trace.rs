//! Times how long tracing, differentiating and printing a training step takes. `bench/trace.sh` runs it.
//!
//! Usage: trace RUNS KEY=VALUE…

use std::{error::Error, time::Instant};

use mt_config::{Config, Request, TrainConfig};
use mt_runtime::Platform;
use mt_shape::DeviceAttributes;
use mt_train::{Devices, TrainPlan};

const DEVICES: usize = 128;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let runs: usize = arguments.next().ok_or("the number of runs is missing")?.parse()?;
    let config = Config::resolve(&Request { arguments: arguments.collect(), ..Request::default() })?;
    let devices =
        Devices { platform: Platform::Tpu, number: DEVICES, attributes: DeviceAttributes::default() };
    let plan = TrainPlan::new(TrainConfig::from_config(&config)?, &devices)?;
    for _ in 0..runs {
        let start = Instant::now();
        let program = plan.train_step()?;
        let seconds = start.elapsed().as_secs_f64();
        println!("{seconds:.3} s, {} bytes of text", program.text.len());
    }
    Ok(())
}
