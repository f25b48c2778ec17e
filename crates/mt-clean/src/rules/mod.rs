//! Rules about the quality of a text.

mod c4;
mod fineweb;
mod gopher;

use serde::{Deserialize, Serialize};

pub use c4::C4;
pub use fineweb::FineWeb;
pub use gopher::{GopherQuality, GopherRepetition};

/// A set of rules that were published together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RuleSet {
    GopherRepetition,
    GopherQuality,
    C4,
    #[serde(rename = "fineweb")]
    FineWeb,
}

impl RuleSet {
    /// All sets with their names, in the order of FineWeb's pipeline.
    pub const NAMES: [(&'static str, Self); 4] = [
        ("gopher_repetition", Self::GopherRepetition),
        ("gopher_quality", Self::GopherQuality),
        ("c4", Self::C4),
        ("fineweb", Self::FineWeb),
    ];

    /// The name of the set.
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(_, set)| *set == self).map_or("", |(name, _)| name)
    }
}

/// The thresholds of all rules; those that a file does not name are the published ones.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Thresholds {
    pub gopher_repetition: GopherRepetition,
    pub gopher_quality: GopherQuality,
    pub c4: C4,
    pub fineweb: FineWeb,
}

impl Thresholds {
    /// The text that a set of rules leaves, `None` if it is unchanged.
    ///
    /// # Errors
    /// The rule that removes the document.
    pub fn apply(&self, set: RuleSet, text: &str) -> Result<Option<String>, Finding> {
        let found = match set {
            RuleSet::GopherRepetition => self.gopher_repetition.check(text),
            RuleSet::GopherQuality => self.gopher_quality.check(text),
            RuleSet::FineWeb => self.fineweb.check(text),
            RuleSet::C4 => {
                let kept = self.c4.apply(text)?;
                return Ok((kept != text).then_some(kept));
            }
        };
        found.map_or(Ok(None), Err)
    }
}

/// The rule that removes a document, with what it measured and its threshold.
#[derive(Debug, Clone, PartialEq)]
pub struct Finding {
    pub rule: &'static str,
    pub measured: f64,
    pub threshold: f64,
}

impl Finding {
    pub(crate) fn new(rule: &'static str, measured: f64, threshold: f64) -> Self {
        Self { rule, measured, threshold }
    }
}

/// A finding if the value is over the threshold.
fn over(rule: &'static str, measured: f64, threshold: f64) -> Option<Finding> {
    (measured > threshold).then(|| Finding::new(rule, measured, threshold))
}

/// A finding if the value is under the threshold.
fn under(rule: &'static str, measured: f64, threshold: f64) -> Option<Finding> {
    (measured < threshold).then(|| Finding::new(rule, measured, threshold))
}
