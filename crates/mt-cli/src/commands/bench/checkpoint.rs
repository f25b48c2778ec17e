//! `maxtext bench checkpoint`: MaxText's standalone checkpointer, which saves and restores a run's state without training.

use std::{sync::Arc, time::Instant};

use mt_checkpoint::{Checkpoint, CheckpointManager, ManagerOptions, RunLock, StoredValue};
use mt_config::TrainConfig;
use mt_runtime::start_runtime;
use mt_train::{Devices, Event, Observer, TrainPlan, Trainer};
use serde_json::{Value, json};

use crate::{
    arguments::BenchCheckpoint,
    commands::{checkpoint::format_of, resolve_without_data, say_installation},
    failure::{Failure, print},
};

/// The name of the run if no key names one. Its directory is removed at the end.
const NAME: &str = "bench_checkpoint";

/// The times of one checkpoint in seconds.
struct Times {
    /// Until training could go on.
    blocked: f64,
    saved: f64,
    restored: f64,
    bytes: u64,
}

/// Runs `maxtext bench checkpoint`.
pub fn run(mut command: BenchCheckpoint) -> Result<(), Failure> {
    command.json |= command.settings.take_flag("--json");
    if let Some(number) = command.settings.take_option("--repeats", "NUMBER")? {
        command.repeats = number.parse().ok().filter(|number| *number > 0).ok_or_else(|| {
            Failure::user(format!("`--repeats {number}` is no number of at least 1\nhint: use `--repeats 3`"))
        })?;
    }
    let mut arguments = std::mem::take(&mut command.settings.settings);
    arguments.insert(0, format!("run_name={NAME}"));
    let settings = TrainConfig::from_config(&resolve_without_data(arguments)?)?;
    let directory = settings.run.stored_directory();
    let lock = RunLock::acquire(&directory)?.provisional();
    let checkpoints = settings.run.checkpoint_directory();
    if !mt_checkpoint::complete_steps(&checkpoints)?.is_empty() {
        return Err(Failure::user(format!(
            "`{}` has checkpoints\nhint: name a new run with `run_name`, whose directory is removed afterwards",
            directory.display()
        )));
    }
    let options = ManagerOptions {
        max_to_keep: Some(1),
        asynchronous: true,
        format: format_of(&settings.checkpoint),
        ..ManagerOptions::default()
    };
    let runtime = start_runtime(&settings.run, &settings.debug, &mut say_installation)?;
    let plan = TrainPlan::new(settings, &Devices::of(&runtime))?;
    let observer: Observer = Arc::new(|event| {
        if let Event::Notice(notice) = event {
            say!("{notice}");
        }
    });
    let trainer = Trainer::start(plan, runtime, &observer)?;
    let mut manager = CheckpointManager::open(&checkpoints, &lock, options)?;
    let mut all = Vec::new();
    for step in 0..command.repeats {
        let times = measure(&trainer, &mut manager, step)?;
        if !command.json {
            print(&times.text(step))?;
        }
        all.push(times);
    }
    if command.json {
        print(&Value::from(all.iter().map(Times::json).collect::<Vec<_>>()).to_string())?;
    }
    Ok(())
}

fn measure(trainer: &Trainer, manager: &mut CheckpointManager, step: u64) -> Result<Times, Failure> {
    let started = Instant::now();
    trainer.save_as(manager, step, None, None)?;
    let blocked = started.elapsed().as_secs_f64();
    let report = manager.wait_until_finished()?;
    let saved = started.elapsed().as_secs_f64();
    let started = Instant::now();
    let checkpoint = Checkpoint::open(manager.directory(), step)?;
    // As when a run resumes: every byte is checked, and every array is read.
    checkpoint.verify()?;
    for entry in checkpoint.entries() {
        if matches!(entry.value, StoredValue::Array { .. }) {
            checkpoint.read_all(&entry.name)?;
        }
    }
    let restored = started.elapsed().as_secs_f64();
    Ok(Times { blocked, saved, restored, bytes: report.map_or(0, |report| report.bytes) })
}

impl Times {
    fn text(&self, step: u64) -> String {
        let rate = |seconds: f64| self.bytes as f64 / 1e6 / seconds.max(f64::MIN_POSITIVE);
        format!(
            "checkpoint {step}: {:.1} MB, training blocked for {:.3} s, saved in {:.3} s ({:.0} MB/s), checked and read in \
             {:.3} s ({:.0} MB/s)",
            self.bytes as f64 / 1e6,
            self.blocked,
            self.saved,
            rate(self.saved),
            self.restored,
            rate(self.restored)
        )
    }

    fn json(&self) -> Value {
        json!({
            "bytes": self.bytes,
            "blocked_seconds": self.blocked,
            "saved_seconds": self.saved,
            "restored_seconds": self.restored,
        })
    }
}
