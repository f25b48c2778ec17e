//! Training data that a model writes itself: new instructions, critiques and revisions, and preferences. This module
//! holds the requests to the model and reads its answers.

mod constitution;
mod instructions;

pub use constitution::{Principle, Side, verdict};
pub use instructions::{InstructionPool, InstructionRules, Refused};
