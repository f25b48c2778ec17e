//! The built-in reward functions.

use crate::math;

/// The rewards of solutions and formats, as MaxText's keys name them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AnswerRewards {
    /// The reward of a solution that is, or means, the expected answer.
    pub exact: f64,
    /// The reward of a solution that differs from it by white space only.
    pub white_space: f64,
    /// The reward of an answer with all marks in their order.
    pub exact_format: f64,
    /// The reward of each mark that appears once.
    pub partial_format: f64,
    /// The reward of a number within 10 percent of the expected one.
    pub within_10_percent: f64,
    /// The reward of a number within 20 percent.
    pub within_20_percent: f64,
    /// The reward of each mark that is missing or repeated.
    pub wrong_format: f64,
    /// The reward of a wrong solution.
    pub wrong: f64,
}

impl AnswerRewards {
    pub(super) fn of_exact_format(&self, is_exact: bool) -> f64 {
        if is_exact { self.exact_format } else { 0.0 }
    }

    pub(super) fn of_marks(&self, counts: &[usize]) -> f64 {
        counts.iter().map(|count| if *count == 1 { self.partial_format } else { self.wrong_format }).sum()
    }

    /// The reward of a solution; 0 without one.
    pub(super) fn of_solution(&self, expected: &str, solution: Option<&str>) -> f64 {
        let Some(solution) = solution else { return 0.0 };
        if solution == expected {
            return self.exact;
        }
        let bare = |text: &str| text.split_whitespace().collect::<String>();
        if bare(solution) == bare(expected) {
            return self.white_space;
        }
        if math::equal(expected, solution) {
            return self.exact;
        }
        let ratio = match (math::number(expected), math::number(solution)) {
            (Some(expected), Some(given)) if expected != 0.0 => given / expected,
            _ => f64::NAN,
        };
        if (0.9..=1.1).contains(&ratio) {
            self.within_10_percent
        } else if (0.8..=1.2).contains(&ratio) {
            self.within_20_percent
        } else {
            self.wrong
        }
    }
}

/// The soft punishment of long answers (DAPO).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overlong {
    /// The maximum length of an answer in tokens.
    pub limit: usize,
    /// The tokens before the limit over which the penalty grows to 1.
    pub buffer: usize,
}

impl Overlong {
    pub(super) fn penalty(&self, tokens: usize) -> f64 {
        let free = self.limit.saturating_sub(self.buffer);
        let over = tokens.saturating_sub(free);
        -(over as f64 / self.buffer.max(1) as f64).min(1.0)
    }
}

/// 1 if the last number of the completion equals the expected one.
pub(super) fn numeric(expected: &str, completion: &str) -> f64 {
    let found = math::last_number(completion).and_then(math::number);
    let is_equal = found.is_some() && found == math::number(expected);
    f64::from(u8::from(is_equal))
}

/// Whether a completion without marks is the expected answer: as a whole, or, if that is a number, its last number.
pub(super) fn is_plain_match(expected: &str, completion: &str) -> bool {
    if completion.trim().is_empty() {
        return false;
    }
    let of_number = || {
        let found = math::last_number(completion);
        math::number(expected).is_some() && found.is_some_and(|found| math::equal(expected, found))
    };
    math::equal(expected, completion) || of_number()
}
