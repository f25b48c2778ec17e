//! `maxtext train`.

use std::{
    env,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use mt_config::{Config, Request, RunGroup, RunRecord, TrainConfig, table, tokenizer_directory, value_text};
use mt_train::{Ending, TrainOptions, TrainReport, train};

use crate::{
    arguments::{Decode, Settings},
    commands::{decode, resolve, warn, warn_of_training},
    console::Console,
    failure::Failure,
};

/// Runs `maxtext train`. A run that a signal stopped ends with the status that signals have in a shell.
pub fn run(settings: Settings) -> Result<ExitCode, Failure> {
    let given = settings.settings.clone();
    let (config, is_named) = configure(settings.settings)?;
    let train_config = TrainConfig::from_config(&config)?;
    if let Some(hardware) = &train_config.ahead.compile_topology {
        let origin = &config.entry("compile_topology").origin;
        return Err(Failure::user(format!(
            "`compile_topology` is `{hardware}` ({origin}), but a run is trained on the hardware that is there\nhint: leave it out, or let `{} estimate` say what the run would need",
            program()
        )));
    }
    let mut announcement = Vec::new();
    if !is_named {
        let name = value_text(&config.entry("run_name").value);
        announcement.push(format!("this is the new run `{name}`; to resume it: {}", command(&given, &name)));
    }
    if train_config.run.log_config {
        let given = config.entries().filter(|entry| entry.origin.is_given());
        announcement
            .extend(given.map(|entry| format!("{}: {} ({})", entry.key.name, entry.shown(), entry.origin)));
    }
    let console = Console::new(announcement);
    let observer = Arc::new(move |event| console.show(&event));
    let options = TrainOptions { observer, repository: repository() };
    let report = train(train_config, &RunRecord::new(config.clone()), &options)?;
    close(&config, &report, &given)
}

/// Says what came of the run, and what to do next.
fn close(config: &Config, report: &TrainReport, given: &[String]) -> Result<ExitCode, Failure> {
    let name = value_text(&config.entry("run_name").value);
    let directory = report.run_directory.display();
    let has_checkpoints = has_checkpoints(&report.run_directory);
    match report.ending {
        Ending::AlreadyComplete => {
            eprintln!(
                "run `{name}` has done its {} steps already; `steps` says how many it is to have",
                report.steps
            );
            return Ok(ExitCode::SUCCESS);
        }
        Ending::Stopped { signal } => {
            let next = if has_checkpoints {
                format!("to resume: {}", command(given, &name))
            } else {
                "there is no checkpoint to resume from".to_owned()
            };
            eprintln!("stopped by a signal after {} steps; {next}", report.steps);
            return Ok(ExitCode::from(u8::try_from(128 + signal).unwrap_or(1)));
        }
        Ending::TargetReached { loss, target } => eprintln!(
            "the evaluation loss of {loss:.3} reached the target of {target} after {} steps",
            report.steps
        ),
        Ending::DataEnded => eprintln!("the data ended after {} steps", report.steps),
        Ending::Completed => {}
    }
    if let (Some(first), Some(last)) = (report.first_evaluation, report.last_evaluation) {
        let mut line = format!("evaluation loss: {:.3} at first, {:.3} now", first.loss, last.loss);
        if let Some(bits) = last.bits_per_byte {
            line += &format!("; {bits:.3} bits per byte");
        }
        if let Some(unigram) = report.unigram_bits_per_byte {
            line += &format!(" (token frequencies alone: {unigram:.3})");
        }
        eprintln!("{line}");
    }
    if let Some(chart) = &report.chart {
        eprintln!("loss curve: {}", chart.display());
    }
    if config.is_quick_start() && has_checkpoints {
        sample(&report.run_directory);
    }
    let mut next = Vec::new();
    if tokenizer_directory(&report.run_directory).is_dir() && has_checkpoints {
        let path = quoted(&format!("load_parameters_path={directory}"));
        next.push(format!("{} decode {path} prompt='…'", program()));
    }
    if has_checkpoints && report.ending == Ending::Completed && report.steps > 0 {
        let given: Vec<String> =
            given.iter().filter(|argument| !argument.starts_with("steps=")).cloned().collect();
        next.push(format!("{} steps={}", command(&given, &name), report.steps * 2));
    }
    for (index, line) in next.iter().enumerate() {
        eprintln!("{} {line}", if index == 0 { "next:" } else { "  or:" });
    }
    Ok(ExitCode::SUCCESS)
}

/// Whether there is anything to decode with or to resume.
fn has_checkpoints(run: &Path) -> bool {
    let Ok(steps) = run.join("checkpoints").read_dir() else { return false };
    steps.flatten().any(|step| step.file_name().to_string_lossy().parse::<u64>().is_ok())
}

/// What the sample at the end of the quick start continues.
const SAMPLE_PROMPT: &str = "/// Returns the ";

/// Shows what the quick start's model writes, by the command that a user would give.
fn sample(run: &Path) {
    eprintln!("a sample, which continues {SAMPLE_PROMPT:?}:");
    let keys = [
        format!("load_parameters_path={}", run.display()),
        format!("prompt={SAMPLE_PROMPT}"),
        "max_prefill_predict_length=32".to_owned(),
        "max_target_length=128".to_owned(),
        "decode_sampling_strategy=nucleus".to_owned(),
        "decode_sampling_nucleus_p=0.9".to_owned(),
        "decode_sampling_temperature=0.7".to_owned(),
    ];
    // The run is saved; that it cannot be sampled is worth a message, not a failure.
    if let Err(failure) = decode::run(Decode { json: false, settings: Settings { settings: keys.into() } }) {
        failure.report();
    }
}

/// The command that goes on with a run.
fn command(given: &[String], name: &str) -> String {
    // Output is kept and passed on, so it holds no secrets.
    let is_secret = |argument: &str| {
        let key = argument.split_once('=').and_then(|(name, _)| table::canonical(name.trim()));
        key.is_some_and(|key| key.secret)
    };
    let others =
        given.iter().filter(|argument| !argument.starts_with("run_name=") && !is_secret(argument)).cloned();
    let words: Vec<String> = others.chain([format!("run_name={name}")]).map(|word| quoted(&word)).collect();
    format!("{} train {}", program(), words.join(" "))
}

/// How this program was called, so that a shell in the same directory finds it again.
fn program() -> String {
    quoted(&env::args().next().unwrap_or_else(|| "maxtext".to_owned()))
}

/// The word as a shell reads it back.
fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_alphanumeric() || "_-+=.,:/@%^".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', "'\\''"))
}

/// The clone whose files the quick start trains on: the one around the current directory, or the one that the program
/// was built in.
fn repository() -> PathBuf {
    let is_clone = |directory: &Path| directory.join("crates/mt-cli/Cargo.toml").is_file();
    let current = env::current_dir().unwrap_or_default();
    let built = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap_or(Path::new("."));
    current
        .ancestors()
        .chain([built])
        .find(|directory| is_clone(directory))
        .map_or(current.clone(), Path::to_owned)
}

/// The configuration of a run, with its notes reported and the run named.
fn configure(arguments: Vec<String>) -> Result<(Config, bool), Failure> {
    let mut config = resolve(&Request::from_process(arguments).with_quick_start())?;
    decode::adopt_tokenizer_settings(&mut config)?;
    warn(&config);
    warn_of_training(&config);
    let model = if config.is_quick_start() { "quick-start" } else { "" };
    let model = match (model, config.entry("model_name").value.as_str()) {
        ("", Some(name)) => name,
        (quick_start, _) => quick_start,
    };
    let job = env::var("JOBSET_NAME").ok().filter(|name| !name.is_empty());
    let is_named = job.is_some() || config.entry("run_name").value != "";
    let name = job;
    let name = name.unwrap_or_else(|| {
        let runs = RunGroup::from_config(&config).map(|run| run.output_directory()).unwrap_or_default();
        unused_name(&format!("{model}_{}", timestamp(SystemTime::now())), &runs)
    });
    config.name_run(&name);
    Ok((config, is_named))
}

/// The name itself, or with a number behind it if a run has it.
fn unused_name(name: &str, runs: &Path) -> String {
    let numbered = (2..).map(|number| format!("{name}-{number}"));
    std::iter::once(name.to_owned())
        .chain(numbered)
        .find(|candidate| !runs.join(candidate).exists())
        .expect("there is no end to numbers")
}

/// The time as `2026-11-21-13-05-09`, in UTC.
fn timestamp(time: SystemTime) -> String {
    let seconds = time.duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs());
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    // Years that begin in March end with the day that leap years add, so that months have fixed offsets.
    let era_day = days + 719_468;
    let (era, day_of_era) = (era_day / 146_097, era_day % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    let (hour, minute, second) = (second / 3_600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}-{hour:02}-{minute:02}-{second:02}")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn timestamps() {
        for (seconds, expected) in [
            (0, "1970-01-01-00-00-00"),
            (951_827_696, "2000-02-29-12-34-56"),
            (1_709_164_799, "2024-02-28-23-59-59"),
            (1_709_251_199, "2024-02-29-23-59-59"),
            (1_735_689_599, "2024-12-31-23-59-59"),
            (4_107_542_400, "2100-03-01-00-00-00"),
        ] {
            assert_eq!(timestamp(UNIX_EPOCH + Duration::from_secs(seconds)), expected);
        }
    }

    #[test]
    fn what_goes_on_with_a_run_names_no_secrets() {
        let given: Vec<String> =
            ["run.yml", "hf_access_token=hidden", "run_name=a", "steps=3"].map(str::to_owned).into();
        assert!(command(&given, "b").ends_with(" train run.yml steps=3 run_name=b"));
    }

    #[test]
    fn names_that_are_taken_get_a_number() {
        let runs = tempfile::tempdir().unwrap();
        assert_eq!(unused_name("a", runs.path()), "a");
        std::fs::create_dir(runs.path().join("a")).unwrap();
        std::fs::create_dir(runs.path().join("a-2")).unwrap();
        assert_eq!(unused_name("a", runs.path()), "a-3");
    }
}
