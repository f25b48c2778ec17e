//! Console output of a training run.

use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write};
use std::sync::{Mutex, PoisonError};

use indicatif::{ProgressBar, ProgressStyle};
use mt_config::Difference;
use mt_train::{
    Event,
    metrics::{EvaluationRecord, Metrics, StepRecord, names},
};

use crate::progress::DataProgress;

/// Shows the events of a run.
pub struct Console {
    /// Lines for standard error that are printed once the input is known to be valid.
    announcement: Vec<String>,
    screen: Mutex<Screen>,
    /// The progress of long work before the first step.
    before: DataProgress,
}

impl Console {
    /// A console that prints `announcement` once the input is known to be valid.
    pub fn new(announcement: Vec<String>) -> Self {
        Self {
            announcement,
            screen: Mutex::new(Screen::new(Box::new(io::stdout()))),
            before: DataProgress::default(),
        }
    }

    /// Shows an event.
    pub fn show(&self, event: &Event) {
        if let Event::Progress(progress) = event {
            return self.before.show(*progress);
        }
        self.before.end();
        let mut screen = self.screen.lock().unwrap_or_else(PoisonError::into_inner);
        match event {
            Event::Progress(_) => {}
            Event::Installing(installation) => screen.message(&installation.to_string()),
            Event::Accepted => self.announcement.iter().for_each(|line| screen.message(line)),
            Event::Notice(notice) => screen.message(&notice.to_string()),
            Event::Report(text) => screen.message(text),
            Event::Resumed { step, checkpoint, changes } => {
                screen.message(&resumption(*step, &checkpoint.display().to_string(), changes));
            }
            Event::Started { first_step, total_steps } => {
                let is_terminal = io::stdout().is_terminal() && io::stderr().is_terminal();
                screen.start(is_terminal, *first_step, *total_steps);
            }
            Event::Step(record) => screen.step(record),
            Event::Evaluation(record) => screen.evaluation(record),
            Event::Ended => screen.finish(),
        }
    }
}

/// Reports the step from which a run resumes, and the changed values.
fn resumption(step: u64, checkpoint: &str, changes: &[Difference]) -> String {
    let mut text = format!("resuming at step {step} from `{checkpoint}`");
    for Difference { key, left, right } in changes {
        let _ = write!(text, "\n  `{}` was `{left}` and is now `{right}`", key.name);
    }
    text
}

struct Screen {
    display: Display,
    output: Box<dyn Write + Send>,
}

enum Display {
    Bar {
        bar: ProgressBar,
        evaluation: Option<f64>,
    },
    Lines,
    /// No step was shown yet.
    None,
}

impl Screen {
    fn new(output: Box<dyn Write + Send>) -> Self {
        Self { display: Display::None, output }
    }

    /// Shows a progress bar on a terminal, and elsewhere one line per step, as programs that parse MaxText's logs
    /// expect.
    fn start(&mut self, is_terminal: bool, first_step: u64, total_steps: u64) {
        self.display = if is_terminal { Display::bar(total_steps, first_step) } else { Display::Lines };
    }

    fn step(&mut self, record: &StepRecord) {
        match &mut self.display {
            Display::Bar { bar, evaluation } => {
                bar.set_message(summary(&record.metrics, *evaluation));
                bar.set_position(record.step + 1);
            }
            Display::Lines => self.line(&step_line(record)),
            Display::None => {}
        }
    }

    fn evaluation(&mut self, record: &EvaluationRecord) {
        match &mut self.display {
            Display::Bar { bar, evaluation } => {
                // The next step's message includes the loss.
                *evaluation = record.metrics.get(names::EVALUATION_LOSS);
                bar.println(evaluation_line(record));
            }
            Display::Lines => self.line(&evaluation_line(record)),
            Display::None => {}
        }
    }

    /// Prints a line to standard error, above the progress bar if one is shown.
    fn message(&self, text: &str) {
        match &self.display {
            Display::Bar { bar, .. } => bar.suspend(|| say!("{text}")),
            Display::Lines | Display::None => say!("{text}"),
        }
    }

    /// Leaves the progress bar on the screen and moves the cursor below it.
    fn finish(&mut self) {
        if let Display::Bar { bar, .. } = &self.display {
            bar.abandon();
        }
    }

    /// A closed standard output, as with `head`, does not end a training run.
    fn line(&mut self, text: &str) {
        let _ = writeln!(self.output, "{text}").and_then(|()| self.output.flush());
    }
}

impl Display {
    fn bar(total_steps: u64, first_step: u64) -> Self {
        let bar = ProgressBar::new(total_steps).with_position(first_step);
        let template = "{bar:16} {pos}/{len} · {eta} left · {msg}";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("━╸─"));
        }
        // Otherwise the estimate of the remaining time would count the steps before a resumption as done instantly.
        bar.reset_eta();
        bar.set_message("first step");
        Self::Bar { bar, evaluation: None }
    }
}

/// The text beside the progress bar, most important first, since a narrow terminal truncates it.
fn summary(step: &Metrics, evaluation_loss: Option<f64>) -> String {
    let fields = [
        step.get(names::LOSS).map(|loss| format!("loss {loss:.3}")),
        step.get(names::REWARD).map(|reward| format!("reward {reward:.3}")),
        evaluation_loss.map(|loss| format!("eval {loss:.3}")),
        step.get(names::TOKENS_PER_SECOND).map(|tokens| format!("{tokens:.0} tokens/s/device")),
    ];
    fields.into_iter().flatten().collect::<Vec<_>>().join(" · ")
}

/// A step's line in MaxText's format, for programs that parse its logs.
fn step_line(record: &StepRecord) -> String {
    let fields = [
        ("seconds", names::STEP_TIME),
        ("TFLOP/s/device", names::TFLOPS_PER_SECOND),
        ("Tokens/s/device", names::TOKENS_PER_SECOND),
        ("total_weights", names::TOTAL_WEIGHTS),
        ("loss", names::LOSS),
        ("lm_loss", names::LM_LOSS),
        ("perplexity", names::PERPLEXITY),
        ("reward", names::REWARD),
    ];
    format!("completed step: {}{}", record.step, values(&record.metrics, &fields, ": "))
}

/// An evaluation's line in MaxText's format, with additional metrics.
fn evaluation_line(record: &EvaluationRecord) -> String {
    let fields = [
        ("loss", names::EVALUATION_LOSS),
        ("total_weights", names::EVALUATION_TOTAL_WEIGHTS),
        ("perplexity", names::EVALUATION_PERPLEXITY),
        ("bits_per_byte", names::EVALUATION_BITS_PER_BYTE),
        ("accuracy", names::EVALUATION_ACCURACY),
        ("reward", names::EVALUATION_REWARD),
    ];
    format!("eval metrics after step: {}{}", record.step, values(&record.metrics, &fields, "="))
}

/// The recorded metrics in `fields`, each preceded by a comma, with `separator` between label and value. Weights are
/// printed as counts.
fn values(metrics: &Metrics, fields: &[(&str, &str)], separator: &str) -> String {
    let shown = |(label, name): &(&str, &str)| {
        let value = metrics.get(name)?;
        Some(match *name {
            names::TOTAL_WEIGHTS | names::EVALUATION_TOTAL_WEIGHTS => format!(", {label}{separator}{value}"),
            _ => format!(", {label}{separator}{value:.3}"),
        })
    };
    fields.iter().filter_map(shown).collect()
}

#[cfg(test)]
mod tests {
    use std::{
        sync::{Arc, Mutex},
        time::Duration,
    };

    use mt_train::metrics::{EvaluationMeasurements, StepMeasurements};

    use super::*;

    #[derive(Clone, Default)]
    struct Paper(Arc<Mutex<Vec<u8>>>);

    impl Write for Paper {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// A step of half a second with round values.
    fn measured_step(step: u64) -> StepMeasurements {
        let mut values = Metrics::default();
        values.set(names::LOSS, 2.0);
        values.set(names::TOTAL_WEIGHTS, 4096.0);
        StepMeasurements {
            step,
            values,
            step_time: Duration::from_millis(500),
            data_wait: Duration::ZERO,
            tflops_per_device: 0.25,
            tokens_per_device: 4096.0,
            peak_tflops_per_device: None,
            is_cross_entropy: true,
        }
    }

    fn evaluation() -> EvaluationRecord {
        let mut sums = Metrics::default();
        sums.set(names::EVALUATION_TOTAL_LOSS, 2000.0);
        sums.set(names::EVALUATION_TOTAL_WEIGHTS, 1000.0);
        EvaluationMeasurements { step: 5, sums, total_bytes: Some(4000.0), is_cross_entropy: true }.record()
    }

    fn check(expected: &[&str]) {
        let paper = Paper::default();
        let mut screen = Screen::new(Box::new(paper.clone()));
        screen.start(false, 0, 3);
        for step in 0..3 {
            screen.step(&measured_step(step).record());
        }
        screen.evaluation(&evaluation());
        screen.finish();
        let bytes = paper.0.lock().unwrap().clone();
        assert_eq!(String::from_utf8(bytes).unwrap().lines().collect::<Vec<_>>(), expected);
    }

    #[test]
    fn each_step_has_a_line() {
        let step = |step| step_line(&measured_step(step).record());
        let evaluation = "eval metrics after step: 5, loss=2.000, total_weights=1000, perplexity=7.389, bits_per_byte=0.721";
        check(&[&step(0), &step(1), &step(2), evaluation]);
    }

    #[test]
    fn a_resumption_says_what_changed() {
        let key = mt_config::table::lookup("learning_rate").unwrap();
        let change = Difference { key, left: "1".into(), right: "2".into() };
        assert_eq!(
            resumption(7, "run/checkpoints/6", &[change]),
            "resuming at step 7 from `run/checkpoints/6`\n  `learning_rate` was `1` and is now `2`"
        );
    }

    #[test]
    fn the_summary_names_losses_and_speed() {
        let metrics = measured_step(3).record().metrics;
        assert_eq!(summary(&metrics, None), "loss 2.000 · 8192 tokens/s/device");
        assert_eq!(summary(&metrics, Some(2.5)), "loss 2.000 · eval 2.500 · 8192 tokens/s/device");
    }

    #[test]
    fn step_lines_read_as_maxtext_writes_them() {
        assert_eq!(
            step_line(&measured_step(3).record()),
            "completed step: 3, seconds: 0.500, TFLOP/s/device: 0.500, Tokens/s/device: 8192.000, \
             total_weights: 4096, loss: 2.000, perplexity: 7.389"
        );
        let mut with_terms = measured_step(3);
        with_terms.values.set(names::LM_LOSS, 1.0);
        assert!(step_line(&with_terms.record()).ends_with("loss: 2.000, lm_loss: 1.000, perplexity: 2.718"));
    }
}
