//! What a person sees while a run goes on.

use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write};

use indicatif::{ProgressBar, ProgressStyle};

use super::{EvaluationRecord, Metrics, StepRecord, names};

/// How a run shows on the console.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ConsoleStyle {
    /// A progress bar if standard output and standard error are a terminal, lines otherwise.
    #[default]
    Automatic,
    /// A progress bar on standard error.
    Bar,
    /// One line every `log_period` steps on standard output.
    Lines,
    /// Nothing but what [`super::MetricLogger::print`] is asked to print.
    Quiet,
}

/// Shows records on the console.
pub(crate) struct Console {
    display: Display,
    output: Box<dyn Write + Send>,
    total_steps: u64,
    log_period: u64,
}

enum Display {
    Bar { bar: ProgressBar, evaluation: Option<f64> },
    Lines,
    Quiet,
}

impl Console {
    pub(crate) fn new(style: ConsoleStyle, total_steps: u64, first_step: u64, log_period: u64) -> Self {
        let interactive = || io::stdout().is_terminal() && io::stderr().is_terminal();
        let display = match style {
            ConsoleStyle::Bar => Display::bar(total_steps, first_step),
            ConsoleStyle::Automatic if interactive() => Display::bar(total_steps, first_step),
            ConsoleStyle::Automatic | ConsoleStyle::Lines => Display::Lines,
            ConsoleStyle::Quiet => Display::Quiet,
        };
        Self { display, output: Box::new(io::stdout()), total_steps, log_period: log_period.max(1) }
    }

    pub(crate) fn step(&mut self, record: &StepRecord) {
        match &mut self.display {
            Display::Bar { bar, evaluation } => {
                bar.set_message(summary(&record.metrics, *evaluation));
                bar.set_position(record.step + 1);
            }
            Display::Lines => {
                if record.step.is_multiple_of(self.log_period) || record.step + 1 == self.total_steps {
                    self.line(&step_line(record));
                }
            }
            Display::Quiet => {}
        }
    }

    pub(crate) fn evaluation(&mut self, record: &EvaluationRecord) {
        match &mut self.display {
            Display::Bar { bar, evaluation } => {
                // It joins the message with the next step.
                *evaluation = record.metrics.get(names::EVALUATION_LOSS);
                bar.println(evaluation_line(record));
            }
            Display::Lines => self.line(&evaluation_line(record)),
            Display::Quiet => {}
        }
    }

    /// A line of its own, above the progress bar if there is one.
    pub(crate) fn print(&mut self, text: &str) {
        match &self.display {
            Display::Bar { bar, .. } => bar.println(text),
            Display::Lines | Display::Quiet => self.line(text),
        }
    }

    /// Leaves the progress bar as it is and the cursor below it.
    pub(crate) fn finish(&mut self) {
        if let Display::Bar { bar, .. } = &self.display {
            bar.abandon();
        }
    }

    /// A reader that went away, like `head`, does not end a training run.
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
        // Otherwise the estimate counts the steps before a resumed run's first as done in no time.
        bar.reset_eta();
        bar.set_message("first step");
        Self::Bar { bar, evaluation: None }
    }
}

/// What stands beside the progress bar, the most important first: a narrow terminal cuts it off.
fn summary(step: &Metrics, evaluation_loss: Option<f64>) -> String {
    let parts = [
        step.get(names::LOSS).map(|loss| format!("loss {loss:.3}")),
        evaluation_loss.map(|loss| format!("eval {loss:.3}")),
        step.get(names::TOKENS_PER_SECOND).map(|tokens| format!("{tokens:.0} tokens/s/device")),
    ];
    parts.into_iter().flatten().collect::<Vec<_>>().join(" · ")
}

/// The line that MaxText prints for a step, so that programs which read its logs read ours.
fn step_line(record: &StepRecord) -> String {
    let parts = [
        ("seconds", names::STEP_TIME),
        ("TFLOP/s/device", names::TFLOPS_PER_SECOND),
        ("Tokens/s/device", names::TOKENS_PER_SECOND),
        ("total_weights", names::TOTAL_WEIGHTS),
        ("loss", names::LOSS),
        ("lm_loss", names::LM_LOSS),
        ("perplexity", names::PERPLEXITY),
    ];
    let mut line = format!("completed step: {}", record.step);
    for (label, name) in parts {
        if let Some(value) = record.metrics.get(name) {
            let _ = match name {
                names::TOTAL_WEIGHTS => write!(line, ", {label}: {value}"),
                _ => write!(line, ", {label}: {value:.3}"),
            };
        }
    }
    line
}

/// The line that MaxText prints for an evaluation, and what we add to it.
fn evaluation_line(record: &EvaluationRecord) -> String {
    let parts = [
        ("loss", names::EVALUATION_LOSS),
        ("total_weights", names::EVALUATION_TOTAL_WEIGHTS),
        ("perplexity", names::EVALUATION_PERPLEXITY),
        ("bits_per_byte", names::EVALUATION_BITS_PER_BYTE),
    ];
    let mut line = format!("eval metrics after step: {}", record.step);
    for (label, name) in parts {
        if let Some(value) = record.metrics.get(name) {
            let _ = match name {
                names::EVALUATION_TOTAL_WEIGHTS => write!(line, ", {label}={value}"),
                _ => write!(line, ", {label}={value:.3}"),
            };
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::super::record::tests::{evaluation, measured_step};
    use super::*;

    #[derive(Clone, Default)]
    struct Screen(Arc<Mutex<Vec<u8>>>);

    impl Write for Screen {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn check(style: ConsoleStyle, log_period: u64, expected: &[&str]) {
        let screen = Screen::default();
        let mut console = Console::new(style, 6, 0, log_period);
        console.output = Box::new(screen.clone());
        for step in 0..6 {
            console.step(&measured_step(step, 2.0).record());
        }
        console.evaluation(&evaluation(5, 2.0));
        console.print("done");
        console.finish();
        let bytes = screen.0.lock().unwrap().clone();
        assert_eq!(String::from_utf8(bytes).unwrap().lines().collect::<Vec<_>>(), expected);
    }

    #[test]
    fn lines_come_every_log_period_and_at_the_end() {
        let step = |step| step_line(&measured_step(step, 2.0).record());
        let evaluation = "eval metrics after step: 5, loss=2.000, total_weights=1000, perplexity=7.389, bits_per_byte=0.721";
        check(ConsoleStyle::Lines, 2, &[&step(0), &step(2), &step(4), &step(5), evaluation, "done"]);
        check(ConsoleStyle::Lines, 100, &[&step(0), &step(5), evaluation, "done"]);
        check(ConsoleStyle::Quiet, 1, &["done"]);
    }

    #[test]
    fn the_summary_names_losses_and_speed() {
        let metrics = measured_step(3, 2.0).record().metrics;
        assert_eq!(summary(&metrics, None), "loss 2.000 · 8192 tokens/s/device");
        assert_eq!(summary(&metrics, Some(2.5)), "loss 2.000 · eval 2.500 · 8192 tokens/s/device");
    }

    #[test]
    fn step_lines_read_as_maxtext_writes_them() {
        assert_eq!(
            step_line(&measured_step(3, 2.0).record()),
            "completed step: 3, seconds: 0.500, TFLOP/s/device: 0.500, Tokens/s/device: 8192.000, \
             total_weights: 4096, loss: 2.000, perplexity: 7.389"
        );
        let mut with_terms = measured_step(3, 2.0);
        with_terms.values.set(names::LM_LOSS, 1.0);
        assert!(step_line(&with_terms.record()).ends_with("loss: 2.000, lm_loss: 1.000, perplexity: 2.718"));
    }
}
