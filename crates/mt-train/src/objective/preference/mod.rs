//! Objectives on preference data: pairs of answers, and single judged answers.

mod answers;
mod judged;
mod losses;
mod pairs;

pub use judged::JudgedAnswers;
pub use pairs::PreferencePairs;
