//! `maxtext rl`: reinforcement learning, and its quick start.

use std::{fs, path::Path, process::ExitCode};

use mt_config::{PresetCommand, Request, RunGroup};
use serde_json::Value;

use crate::{
    arguments::Settings,
    commands::{
        resolve,
        sft::{self, Lesson},
        train,
    },
    failure::Failure,
};

/// The answers that are shown.
const SHOWN: usize = 3;

/// Runs `maxtext rl`.
pub fn run(settings: Settings) -> Result<ExitCode, Failure> {
    let command = PresetCommand::named("rl");
    let request = Request::from_process(settings.settings.clone()).with_quick_start().for_command(command);
    let config = resolve(&request)?;
    if !config.is_quick_start() {
        return train::run_as(command, settings, None);
    }
    let known = match sft::base_of(&RunGroup::from_config(&config)?)? {
        Some(base) => Some(base),
        None => sft::newest_run(&config, "instructions")?,
    };
    let base = match known {
        Some(base) => base,
        None => {
            say!("no run of the quick start follows instructions, so `maxtext sft` runs first");
            let status = sft::run(Settings { settings: sft::without_name_and_steps(&settings.settings) })?;
            match sft::newest_run(&config, "instructions")? {
                Some(base) if status == ExitCode::SUCCESS => base,
                _ => return Ok(status),
            }
        }
    };
    say!("the run `{}` is rewarded for right answers to questions of arithmetic", base.display());
    train::run_as(command, settings, Some(Lesson { base, has_exam: false }))
}

/// Reports the answers of a run of the quick start to held-out questions, before and after it.
pub fn report(run: &Path) -> Result<(), Failure> {
    let lines = |name: &str| -> Vec<Value> {
        let text = fs::read_to_string(run.join(name)).unwrap_or_default();
        text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    };
    let answers = lines("rollouts/evaluation.jsonl");
    let last = answers.iter().filter_map(|answer| answer["step"].as_u64()).max();
    let of_last = answers.iter().filter(|answer| answer["step"].as_u64() == last);
    for answer in of_last.take(SHOWN) {
        let (given, expected) = (&answer["text"], &answer["answer"]);
        say!(
            "expected {}, answered {}",
            expected.as_str().unwrap_or_default(),
            given.as_str().unwrap_or_default().trim()
        );
    }
    let measured = lines("metrics/metrics.jsonl");
    let shares: Vec<f64> = measured.iter().filter_map(|line| line["eval/accuracy"].as_f64()).collect();
    if let (Some(first), Some(last)) = (shares.first(), shares.last()) {
        say!("right answers to held-out questions: {:.0}% before, {:.0}% now", first * 100.0, last * 100.0);
    }
    Ok(())
}
