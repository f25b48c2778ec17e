//! Rollouts: prompts, rewards and evaluations of reinforcement learning.

use std::path::PathBuf;

use serde_json::{Map, Value};

use super::group;
use crate::{config::Config, error::Problem};

group! {
    /// The prompts, the rewards of answers, and their evaluation.
    pub struct RolloutGroup {
        use_rl: bool,
        system_prompt: String,
        decode_seed: u64,
        enable_data_shuffling: bool,
        data_shuffle_seed: u64,
        max_prefill_predict_length: usize,
        reward_exact_answer: f64,
        reward_exact_format_match: f64,
        reward_white_space_format_match: f64,
        reward_partial_format_match: f64,
        reward_ratio_guess_to_answer_high: f64,
        reward_ratio_guess_to_answer_low: f64,
        penalty_incorrect_format: f64,
        penalty_incorrect_answer: f64,
        reward_functions: String,
        reward_command: Option<String>,
        reward_url: Option<String>,
        reward_model_path: Option<PathBuf>,
        reward_functions_path: Option<PathBuf>,
        code_tests_column: String,
        sandbox_memory_mb: u64,
        sandbox_processes: u64,
        sandbox_files_mb: u64,
        tools: String,
        tool_command: Option<String>,
        max_tool_calls: usize,
        tool_processes: usize,
        tool_start_token: String,
        tool_end_token: String,
        tool_response_start_token: String,
        tool_response_end_token: String,
        stop_strings: Option<Vec<String>>,
        max_num_seqs: Option<usize>,
        reward_timeout: f64,
        reward_retries: usize,
        overlong_buffer_length: usize,
        reasoning_start_token: String,
        reasoning_end_token: String,
        solution_start_token: String,
        solution_end_token: String,
        reasoning_start_token_in_prompt: bool,
        eval_sampling_strategy: String,
        generation_configs: Map<String, Value>,
        num_eval_passes: usize,
    }
}

/// How answers are drawn in evaluations.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EvaluationSampling {
    /// 0 selects the most probable token.
    pub temperature: f64,
    pub top_k: Option<usize>,
    pub top_p: Option<f64>,
}

/// The names of reward functions.
const FUNCTIONS: &[&str] = &[
    "format_exact",
    "format_partial",
    "answer",
    "exact",
    "numeric",
    "math",
    "overlong",
    "command",
    "endpoint",
    "code",
    "model",
];

/// The strategy that draws the most probable tokens.
const GREEDY: &str = "greedy";

impl RolloutGroup {
    /// The names of the reward functions.
    pub fn functions(&self) -> Vec<&str> {
        let named: Vec<&str> =
            self.reward_functions.split(',').map(str::trim).filter(|name| !name.is_empty()).collect();
        if !named.is_empty() {
            return named;
        }
        let command = self.reward_command.as_ref().map(|_| "command");
        let endpoint = self.reward_url.as_ref().map(|_| "endpoint");
        let model = self.reward_model_path.as_ref().map(|_| "model");
        let built_in = ["format_exact", "format_partial", "answer"].into_iter();
        built_in.chain(command).chain(endpoint).chain(model).collect()
    }

    /// The names of the functions in `reward_functions_path`.
    pub fn python_functions(&self) -> Vec<&str> {
        match self.reward_functions_path {
            Some(_) => self.functions().into_iter().filter(|name| !FUNCTIONS.contains(name)).collect(),
            None => Vec::new(),
        }
    }

    /// The names of tools.
    pub fn tools(&self) -> Vec<&str> {
        self.tools.split(',').map(str::trim).filter(|name| !name.is_empty()).collect()
    }

    /// How answers are drawn in evaluations.
    pub fn evaluation_sampling(&self) -> EvaluationSampling {
        let chosen = self.generation_configs.get(&self.eval_sampling_strategy).and_then(Value::as_object);
        let number = |key: &str| chosen.and_then(|chosen| chosen.get(key)).and_then(Value::as_f64);
        // MaxText's greedy settings have a low temperature and the best token alone, which is the same.
        let is_greedy = number("eval_top_k") == Some(1.0) || chosen.is_none();
        EvaluationSampling {
            temperature: if is_greedy { 0.0 } else { number("eval_temperature").unwrap_or(1.0) },
            top_k: number("eval_top_k").filter(|k| *k >= 1.0 && !is_greedy).map(|k| k as usize),
            top_p: number("eval_top_p").filter(|p| *p < 1.0 && !is_greedy),
        }
    }

    fn check(&self, config: &Config, problems: &mut Vec<Problem>) {
        if !self.use_rl {
            return;
        }
        let stated = |key: &str| config.stated(key);
        for name in self.functions() {
            if !FUNCTIONS.contains(&name) && self.reward_functions_path.is_none() {
                problems.push(Problem::inconsistent(
                    format!("{}, but there is no function `{name}`", stated("reward_functions")),
                    format!(
                        "use names among `{}`, or name the Python file that has it with `reward_functions_path`",
                        FUNCTIONS.join("`, `")
                    ),
                ));
            }
        }
        let names = |name: &str| self.functions().contains(&name);
        for (name, key, is_set) in [
            ("command", "reward_command", self.reward_command.is_some()),
            ("endpoint", "reward_url", self.reward_url.is_some()),
            ("model", "reward_model_path", self.reward_model_path.is_some()),
        ] {
            if names(name) != is_set {
                problems.push(Problem::inconsistent(
                    format!("{}, but {}", stated("reward_functions"), stated(key)),
                    format!("name the function `{name}`, and what it asks with `{key}`, or neither"),
                ));
            }
        }
        if self.reward_functions_path.is_some() && self.python_functions().is_empty() {
            problems.push(Problem::inconsistent(
                format!("{}, but {}", stated("reward_functions_path"), stated("reward_functions")),
                "name functions of the file, as in `reward_functions=exact,my_function`",
            ));
        }
        let sandboxed = ["code_tests_column", "sandbox_memory_mb", "sandbox_processes", "sandbox_files_mb"];
        let given = sandboxed.into_iter().find(|key| config.entry(key).origin.is_given());
        if let Some(key) = given.filter(|_| !names("code") && !self.tools().contains(&"python")) {
            problems.push(Problem::inconsistent(
                format!("{}, but {}, which run no code", stated(key), stated("reward_functions")),
                format!("name the function `code`, or leave out `{key}`"),
            ));
        }
        self.check_tools(config, problems);
        if self.functions().contains(&"overlong") && self.overlong_buffer_length == 0 {
            problems.push(Problem::inconsistent(
                format!("{}, but {}", stated("reward_functions"), stated("overlong_buffer_length")),
                "set the tokens over which the penalty grows, such as `overlong_buffer_length=64`",
            ));
        }
        let marks = [
            ("reasoning_start_token", &self.reasoning_start_token),
            ("reasoning_end_token", &self.reasoning_end_token),
            ("solution_start_token", &self.solution_start_token),
            ("solution_end_token", &self.solution_end_token),
        ];
        if let Some((key, _)) = marks.into_iter().find(|(_, mark)| mark.is_empty()) {
            problems.push(Problem::inconsistent(
                format!("{}, so that answers cannot have it", stated(key)),
                "use a text that marks the place",
            ));
        }
        self.check_evaluation(config, problems);
    }

    /// The tools of environments.
    fn check_tools(&self, config: &Config, problems: &mut Vec<Problem>) {
        let stated = |key: &str| config.stated(key);
        if self.tools().contains(&"command") != self.tool_command.is_some() {
            problems.push(Problem::inconsistent(
                format!("{}, but {}", stated("tools"), stated("tool_command")),
                "name the tool `command`, and its process with `rl.tool_command`, or neither",
            ));
        }
        let marks = [("tool_start_token", &self.tool_start_token), ("tool_end_token", &self.tool_end_token)];
        if let Some((key, _)) = marks.into_iter().find(|(_, mark)| mark.is_empty() && !self.tools.is_empty())
        {
            problems.push(Problem::inconsistent(
                format!("{}, so that answers cannot have it", stated(key)),
                "use a text that marks calls of tools",
            ));
        }
        if self.stop_strings.iter().flatten().any(String::is_empty) {
            problems.push(Problem::inconsistent(
                format!("{}, so that each answer would end at once", stated("stop_strings")),
                "leave out the empty text",
            ));
        }
    }

    fn check_evaluation(&self, config: &Config, problems: &mut Vec<Problem>) {
        let (configs, strategy) = (&self.generation_configs, &self.eval_sampling_strategy);
        let stated = |key: &str| config.stated(key);
        match configs.get(strategy) {
            Some(Value::Object(_)) => {}
            None if strategy == GREEDY => {}
            _ => problems.push(Problem::inconsistent(
                format!(
                    "{}, but {} has no such settings",
                    stated("eval_sampling_strategy"),
                    stated("generation_configs")
                ),
                "use `eval_sampling_strategy=greedy`, or describe it, as in \
                 `generation_configs={standard: {eval_temperature: 0.7, eval_top_k: 50, eval_top_p: 0.95}}`",
            )),
        }
        if self.num_eval_passes > 1 && self.evaluation_sampling().temperature == 0.0 {
            problems.push(Problem::inconsistent(
                format!(
                    "{}, but {}, so that all answers to a prompt would be equal",
                    stated("num_eval_passes"),
                    stated("eval_sampling_strategy")
                ),
                "use another `eval_sampling_strategy`, or one pass",
            ));
        }
    }
}
