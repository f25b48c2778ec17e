//! Tasks with verifiable answers that the program generates.

use std::collections::HashSet;

use serde_json::json;

use crate::seeds::{Draws, key};

/// A kind of task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TaskKind {
    /// Sums of two numbers.
    Addition,
    /// Differences of two numbers.
    Subtraction,
    /// Products of two numbers.
    Multiplication,
    /// The larger of two numbers.
    Comparison,
    /// Sums and differences of three numbers.
    Chain,
    /// The value of an expression of `and`, `or` and `not`.
    Logic,
}

impl TaskKind {
    /// All kinds with their names.
    pub const ALL: [(&'static str, Self); 6] = [
        ("addition", Self::Addition),
        ("subtraction", Self::Subtraction),
        ("multiplication", Self::Multiplication),
        ("comparison", Self::Comparison),
        ("chain", Self::Chain),
        ("logic", Self::Logic),
    ];

    /// The kind of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().find(|(known, _)| *known == name).map(|(_, kind)| *kind)
    }
}

/// The kind and the difficulty of tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskOptions {
    pub kind: TaskKind,
    /// The most digits of an operand, or the depth of a logical expression.
    pub difficulty: u32,
    pub seed: u64,
}

/// A task with its answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Task {
    pub prompt: String,
    pub answer: String,
    /// The operands, in order of size: held-out tasks share them with no task of training.
    operands: String,
}

impl Task {
    /// The task as a line of JSON.
    pub fn line(&self) -> String {
        json!({"prompt": self.prompt, "answer": self.answer}).to_string()
    }
}

/// The share of operands that are held out, as one in this number.
const HELD_OUT: u64 = 5;

impl TaskOptions {
    /// Up to `counts[0]` tasks for training and `counts[1]` held-out ones, all different. Held-out tasks share their
    /// operands with no task of training. Fewer tasks are returned if there are no more.
    pub fn generate(&self, counts: [usize; 2]) -> [Vec<Task>; 2] {
        let mut draws = Draws::new(key(&[self.seed, self.difficulty.into(), self.kind as u64]));
        let mut made = [Vec::new(), Vec::new()];
        let mut seen = HashSet::new();
        let mut fruitless = 0;
        // After many known tasks in a row, hardly any new ones are left.
        while fruitless < 2_000 && made.iter().zip(counts).any(|(made, count)| made.len() < count) {
            let task = self.draw(&mut draws);
            let side = usize::from(is_held_out(&task.operands));
            fruitless += 1;
            if made[side].len() < counts[side] && seen.insert(task.prompt.clone()) {
                made[side].push(task);
                fruitless = 0;
            }
        }
        made
    }

    fn draw(&self, draws: &mut Draws) -> Task {
        let mut number = || -> i64 {
            // Numbers of fewer digits occur as often as those of the most.
            let digits = 1 + draws.below(self.difficulty.clamp(1, 9).into()) as u32;
            draws.below(10_u64.pow(digits)) as i64
        };
        let (prompt, answer, mut operands) = match self.kind {
            TaskKind::Addition => {
                let (a, b) = (number(), number());
                (format!("{a}+{b}="), a + b, vec![a, b])
            }
            TaskKind::Subtraction => {
                let (a, b) = (number(), number());
                (format!("{a}-{b}="), a - b, vec![a, b])
            }
            TaskKind::Multiplication => {
                let (a, b) = (number(), number());
                (format!("{a}*{b}="), a * b, vec![a, b])
            }
            TaskKind::Comparison => {
                let (a, b) = (number(), number());
                (format!("max({a},{b})="), a.max(b), vec![a, b])
            }
            TaskKind::Chain => {
                let (a, b, c) = (number(), number(), number());
                let (first, second) = (draws.below(2) == 0, draws.below(2) == 0);
                let sign = |is_plus: bool| if is_plus { '+' } else { '-' };
                let signed = |value: i64, is_plus: bool| if is_plus { value } else { -value };
                let answer = a + signed(b, first) + signed(c, second);
                (format!("{a}{}{b}{}{c}=", sign(first), sign(second)), answer, vec![a, b, c])
            }
            TaskKind::Logic => return self.logic(draws),
        };
        operands.sort_unstable();
        Task { prompt, answer: answer.to_string(), operands: format!("{operands:?}") }
    }

    fn logic(&self, draws: &mut Draws) -> Task {
        let (text, value) = logical(draws, self.difficulty.clamp(1, 9));
        Task { prompt: format!("{text}="), answer: word(value).to_owned(), operands: text }
    }
}

fn word(value: bool) -> &'static str {
    if value { "true" } else { "false" }
}

/// An expression with its value.
fn logical(draws: &mut Draws, depth: u32) -> (String, bool) {
    if depth == 0 || draws.below(5) == 0 {
        let value = draws.below(2) == 0;
        return (word(value).to_owned(), value);
    }
    let kind = draws.below(3);
    let (left, one) = logical(draws, depth - 1);
    if kind == 0 {
        return (format!("not {left}"), !one);
    }
    let (right, other) = logical(draws, depth - 1);
    match kind {
        1 => (format!("({left} and {right})"), one && other),
        _ => (format!("({left} or {right})"), one || other),
    }
}

fn is_held_out(operands: &str) -> bool {
    let bytes = operands.bytes().fold(0, |hash: u64, byte| key(&[hash, byte.into()]));
    bytes.is_multiple_of(HELD_OUT)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::math;

    /// The value of an arithmetic prompt, by the checker's own parser.
    fn value(prompt: &str) -> f64 {
        let text = prompt.trim_end_matches('=');
        match text.strip_prefix("max(") {
            Some(rest) => {
                let (a, b) = rest.trim_end_matches(')').split_once(',').unwrap();
                math::number(a).unwrap().max(math::number(b).unwrap())
            }
            None => math::number(text).unwrap(),
        }
    }

    #[test]
    fn tasks_are_right_and_held_out_ones_are_new() {
        for (name, kind) in TaskKind::ALL {
            let options = TaskOptions { kind, difficulty: 3, seed: 7 };
            let made = options.generate([400, 100]);
            assert_eq!([made[0].len(), made[1].len()], [400, 100], "{name}");
            assert_eq!(options.generate([400, 100]), made);
            let operands = |side: usize| -> HashSet<&str> {
                made[side].iter().map(|task| task.operands.as_str()).collect()
            };
            assert!(operands(0).is_disjoint(&operands(1)), "{name}");
            for task in made.iter().flatten().filter(|_| kind != TaskKind::Logic) {
                assert_eq!(task.answer.parse::<f64>().unwrap(), value(&task.prompt), "{task:?}");
            }
        }
        let other = TaskOptions { kind: TaskKind::Addition, difficulty: 3, seed: 8 }.generate([9, 0]);
        let one = TaskOptions { kind: TaskKind::Addition, difficulty: 3, seed: 7 }.generate([9, 0]);
        assert_ne!(other, one);
    }

    #[test]
    fn few_tasks_end() {
        let options = TaskOptions { kind: TaskKind::Addition, difficulty: 1, seed: 1 };
        let made = options.generate([1_000, 1_000]);
        // 100 ordered pairs of digits.
        assert_eq!(made[0].len() + made[1].len(), 100);
    }

    #[test]
    fn logic_has_both_values() {
        let options = TaskOptions { kind: TaskKind::Logic, difficulty: 2, seed: 1 };
        let [tasks, _] = options.generate([50, 0]);
        assert!(["true", "false"].iter().all(|value| tasks.iter().any(|task| task.answer == *value)));
        let (text, value) = logical(&mut Draws::new(4), 3);
        // Rust's own words have the same precedence once they are signs.
        assert!(text.matches('(').count() == text.matches(')').count(), "{text} is {value}");
    }
}
