//! Objectives of reward models: pairs of answers, and the steps of an answer.

mod outcome;
mod process;

pub use outcome::RankedAnswers;
pub use process::JudgedSteps;
