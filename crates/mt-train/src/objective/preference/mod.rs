//! Objectives on preference data: pairs of answers, and single judged answers.

mod answers;
mod judged;
mod losses;
mod pairs;

pub(super) use answers::{SEQUENCE, answer_tokens, arrays, model_tokens, present};
pub use judged::JudgedAnswers;
pub(super) use losses::log_sigmoid;
pub use pairs::PreferencePairs;
