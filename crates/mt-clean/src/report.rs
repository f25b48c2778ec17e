//! Counts of removed documents, with samples.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::classifier::Measured;
use crate::error::Result;
use crate::options::read_json;

/// The characters of a sample.
const SAMPLE_CHARACTERS: usize = 240;

/// The result of cleaning.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// The documents that were read, and their bytes of text.
    pub documents: u64,
    pub bytes: u64,
    /// The documents that remain, and their bytes of text.
    pub kept: u64,
    pub kept_bytes: u64,
    /// Records that could not be read.
    pub damaged: u64,
    /// The steps in the order in which documents pass them.
    pub steps: Vec<StepReport>,
    /// The documents of each language that was found.
    pub languages: BTreeMap<String, u64>,
    /// The marks that replace personal data.
    pub masks: BTreeMap<String, u64>,
    /// The documents from which lines were removed, and the bytes of these lines.
    pub shortened: u64,
    pub shortened_bytes: u64,
    /// The classifier on documents that were held out.
    pub classifier: Option<Measured>,
    pub duplicates: Option<Duplicates>,
    pub files: Vec<String>,
}

/// Documents that meet others under a key.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Duplicates {
    pub exact: u64,
    pub near: u64,
    /// The groups of equal or similar documents, of each of which the first remains, and the size of the largest.
    pub clusters: u64,
    pub largest: u64,
}

/// The documents that a step removed.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct StepReport {
    pub step: String,
    /// The documents that reached the step.
    pub seen: u64,
    pub removed: u64,
    pub removed_bytes: u64,
    pub rules: BTreeMap<String, RuleReport>,
}

/// The documents that a rule removed.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RuleReport {
    pub removed: u64,
    pub samples: Vec<Sample>,
}

/// A document that a rule removed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    pub place: String,
    /// The beginning of the text.
    pub text: String,
    /// The measured value and its threshold.
    pub note: String,
}

impl Sample {
    pub(crate) fn new(place: String, text: &str, note: String) -> Self {
        Self { place, text: text.chars().take(SAMPLE_CHARACTERS).collect(), note }
    }
}

impl Report {
    /// The report of complete work.
    pub(crate) fn load(directory: &Path) -> Result<Option<Self>> {
        let path = directory.join("report.json");
        if !path.is_file() {
            return Ok(None);
        }
        read_json(&path).map(Some)
    }

    /// The entry of a step, which is added if it is new.
    pub(crate) fn step(&mut self, name: &str) -> &mut StepReport {
        let place = self.steps.iter().position(|step| step.step == name).unwrap_or_else(|| {
            self.steps.push(StepReport { step: name.to_owned(), ..StepReport::default() });
            self.steps.len() - 1
        });
        &mut self.steps[place]
    }

    /// Counts a document that a rule removed; `sample` is called as long as samples are missing.
    pub(crate) fn remove(
        &mut self,
        step: &str,
        rule: &str,
        bytes: u64,
        most: usize,
        sample: impl FnOnce() -> Sample,
    ) {
        let step = self.step(step);
        step.removed += 1;
        step.removed_bytes += bytes;
        let rule = step.rules.entry(rule.to_owned()).or_default();
        rule.removed += 1;
        if rule.samples.len() < most {
            rule.samples.push(sample());
        }
    }

    /// Adds the counts of a later section.
    pub(crate) fn add(&mut self, other: &Self, most: usize) {
        for (own, more) in [
            (&mut self.documents, other.documents),
            (&mut self.bytes, other.bytes),
            (&mut self.kept, other.kept),
            (&mut self.kept_bytes, other.kept_bytes),
            (&mut self.damaged, other.damaged),
            (&mut self.shortened, other.shortened),
            (&mut self.shortened_bytes, other.shortened_bytes),
        ] {
            *own += more;
        }
        for (own, more) in [(&mut self.languages, &other.languages), (&mut self.masks, &other.masks)] {
            for (name, count) in more {
                *own.entry(name.clone()).or_default() += count;
            }
        }
        for step in &other.steps {
            let own = self.step(&step.step);
            own.seen += step.seen;
            own.removed += step.removed;
            own.removed_bytes += step.removed_bytes;
            for (name, rule) in &step.rules {
                let own = own.rules.entry(name.clone()).or_default();
                own.removed += rule.removed;
                let room = most.saturating_sub(own.samples.len());
                own.samples.extend(rule.samples.iter().take(room).cloned());
            }
        }
    }

    /// The report for people.
    pub fn text(&self) -> String {
        let share = |count: u64, all: u64| 100.0 * count as f64 / (all as f64).max(1.0);
        let mut text = format!(
            "{} of {} documents remain ({:.2}%), {} of {} bytes of text ({:.2}%)\n",
            self.kept,
            self.documents,
            share(self.kept, self.documents),
            self.kept_bytes,
            self.bytes,
            share(self.kept_bytes, self.bytes)
        );
        let mut line = |line: String| {
            text.push_str(&line);
            text.push('\n');
        };
        if self.damaged > 0 {
            line(format!("{} records could not be read", self.damaged));
        }
        for step in &self.steps {
            line(format!(
                "{}: removed {} of {} documents ({:.2}%), {} bytes",
                step.step,
                step.removed,
                step.seen,
                share(step.removed, step.seen),
                step.removed_bytes
            ));
            let mut rules: Vec<_> = step.rules.iter().collect();
            rules.sort_by_key(|(name, rule)| (std::cmp::Reverse(rule.removed), (*name).clone()));
            for (name, rule) in rules {
                line(format!("  {name}: {}", rule.removed));
            }
        }
        if self.shortened > 0 {
            line(format!(
                "lines were removed from {} documents, {} bytes",
                self.shortened, self.shortened_bytes
            ));
        }
        for (name, count) in &self.masks {
            line(format!("masked: {name} {count} times"));
        }
        if let Some(measured) = &self.classifier {
            line(format!(
                "classifier of quality: accuracy {:.4}, area under the curve {:.4}, on {} good and {} bad documents that were held out",
                measured.accuracy, measured.area_under_curve, measured.good, measured.bad
            ));
        }
        if let Some(found) = &self.duplicates {
            line(format!(
                "duplicates: {} equal, {} similar, in {} groups, the largest of {}",
                found.exact, found.near, found.clusters, found.largest
            ));
        }
        if self.languages.len() > 1 {
            let mut languages: Vec<_> = self.languages.iter().collect();
            languages.sort_by_key(|(name, count)| (std::cmp::Reverse(**count), (*name).clone()));
            let shown: Vec<String> =
                languages.iter().take(10).map(|(name, count)| format!("{name} {count}")).collect();
            line(format!("languages: {}", shown.join(", ")));
        }
        text.trim_end().to_owned()
    }

    /// The report for people, followed by the samples of each rule.
    pub fn text_with_samples(&self) -> String {
        let mut text = self.text();
        for step in &self.steps {
            for (name, rule) in &step.rules {
                // Writing to a string cannot fail.
                _ = write!(text, "\n\n{}, {name}: {} documents", step.step, rule.removed);
                for sample in &rule.samples {
                    _ = write!(text, "\n  {} ({}): {:?}", sample.place, sample.note, sample.text);
                }
            }
        }
        text.push('\n');
        text
    }
}
