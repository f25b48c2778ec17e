//! Reinforcement learning on the host: rollouts and their files, advantages, rewards and tasks.
//!
//! Phase: run. Knows neither models nor devices. `mt-train` turns the rows of a [`RolloutBatch`] into steps, the engine
//! samples answers, and this crate does all that happens between both.

#![forbid(unsafe_code)]

pub mod advantages;
mod batch;
mod error;
mod file;
mod log;
pub mod math;
mod position;
mod prompts;
pub mod rewards;
mod rollout;
mod seeds;
pub mod synthesis;
mod tasks;
mod tools;

pub use batch::{AdvantageRule, BatchRules, RolloutBatch, RowShape, arrays};
pub use error::RlError;
pub use file::{RecordedOptions, RecordedRollouts, RolloutFile};
pub use log::RolloutLog;
pub use prompts::{PROMPTS, Prompt, PromptForm, PromptOrder, PromptSet, PromptSource};
pub use rollout::{Advantage, Finish, Rollout};
pub use seeds::key;
pub use tasks::{Task, TaskKind, TaskOptions};
pub use tools::{Tool, ToolCall, ToolSettings, Tools};
