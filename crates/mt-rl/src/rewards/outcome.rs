//! Outcomes of reward functions outside of this program.

use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use serde::Deserialize;
use serde_json::{Value, json};

use super::Judged;

/// A reward of a function outside of this program.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Outcome {
    Reward(f64),
    /// The function does not apply to the answer.
    NotApplicable,
    /// All attempts failed.
    Failed,
}

/// The failures of a function.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Failures {
    pub count: u64,
    /// The reason of the last one.
    pub last: String,
}

impl Failures {
    pub(crate) fn add(&mut self, reason: String) {
        self.count += 1;
        self.last = reason;
    }
}

/// The outcomes of answers, of which `workers` are judged at once. `judge` reports failures to the function that it is given.
pub(super) fn at_once(
    answers: &[Judged<'_>],
    workers: usize,
    failures: &mut Failures,
    judge: impl Fn(&Judged<'_>, &dyn Fn(String)) -> Outcome + Sync,
) -> Vec<Outcome> {
    let made = Mutex::new((vec![Outcome::Failed; answers.len()], failures));
    let lock = || made.lock().unwrap_or_else(PoisonError::into_inner);
    let next = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..workers.min(answers.len()) {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(answer) = answers.get(index) else { return };
                    let outcome = judge(answer, &|reason| lock().1.add(reason));
                    lock().0[index] = outcome;
                }
            });
        }
    });
    made.into_inner().unwrap_or_else(PoisonError::into_inner).0
}

/// An object with a reward.
#[derive(Deserialize)]
struct Reply {
    reward: f64,
}

/// The reward in an object of JSON.
pub(super) fn reward_of(text: &str) -> Result<f64, String> {
    let reply: Reply = serde_json::from_str(text)
        .map_err(|error| format!("its line is no object with a number `reward`: {error}"))?;
    if reply.reward.is_finite() { Ok(reply.reward) } else { Err("its reward is not finite".to_owned()) }
}

/// An answer as an object of JSON, with the further columns of its prompt.
pub(super) fn request(answer: &Judged<'_>) -> Value {
    let mut object = json!({
        "prompt": answer.prompt,
        "completion": answer.completion,
        "answer": answer.answer,
    });
    if let Some(object) = object.as_object_mut() {
        for (name, value) in answer.columns {
            object.entry(name.clone()).or_insert_with(|| value.clone());
        }
    }
    object
}
