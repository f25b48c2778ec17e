//! The repositories of the Hugging Face hub with the weights of named models.

use crate::{config::Config, error::Problem, origin::Origin};

/// The key that asks for the weights of a named model.
const KEY: &str = "convert_checkpoint_if_possible";
/// The keys that name weights; a command uses one of them.
pub const WEIGHTS_KEYS: [&str; 3] = ["load_parameters_path", "hf_model_path", "load_full_state_path"];

/// Named models and their repositories, as MaxText pairs them.
const REPOSITORIES: &[(&str, &str)] = &[
    ("deepseek2-16b", "deepseek-ai/DeepSeek-V2-Lite"),
    ("deepseek3-671b", "deepseek-ai/DeepSeek-V3"),
    ("deepseek3.2-671b", "deepseek-ai/DeepSeek-V3.2"),
    ("gemma2-27b", "google/gemma-2-27b"),
    ("gemma2-2b", "google/gemma-2-2b"),
    ("gemma2-9b", "google/gemma-2-9b"),
    ("gemma3-12b", "google/gemma-3-12b-it"),
    ("gemma3-27b", "google/gemma-3-27b-it"),
    ("gemma3-4b", "google/gemma-3-4b-it"),
    ("gemma4-26b", "google/gemma-4-26b-a4b-it"),
    ("gemma4-31b", "google/gemma-4-31b-it"),
    ("gpt-oss-120b", "openai/gpt-oss-120b"),
    ("gpt-oss-20b", "openai/gpt-oss-20b"),
    ("llama3.1-405b", "meta-llama/Llama-3.1-405B"),
    ("llama3.1-70b", "meta-llama/Llama-3.1-70B"),
    ("llama3.1-8b", "meta-llama/Llama-3.1-8B"),
    ("mixtral-8x22b", "mistralai/Mixtral-8x22B-Instruct-v0.1"),
    ("mixtral-8x7b", "mistralai/Mixtral-8x7B-Instruct-v0.1"),
    ("olmo3-32b", "allenai/Olmo-3-32B-Think"),
    ("olmo3-7b", "allenai/Olmo-3-7B-Instruct"),
    ("olmo3-7b-pt", "allenai/Olmo-3-1025-7B"),
    ("qwen2.5-1.5b", "Qwen/Qwen2.5-1.5B-Instruct"),
    ("qwen2.5-14b", "Qwen/Qwen2.5-14B-Instruct"),
    ("qwen2.5-7b", "Qwen/Qwen2.5-7B-Instruct"),
    ("qwen3-0.6b", "Qwen/Qwen3-0.6B"),
    ("qwen3-14b", "Qwen/Qwen3-14B"),
    ("qwen3-235b-a22b", "Qwen/Qwen3-235B-A22B-Thinking-2507"),
    ("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B-Thinking-2507"),
    ("qwen3-30b-a3b-base", "Qwen/Qwen3-30B-A3B-Base"),
    ("qwen3-32b", "Qwen/Qwen3-32B"),
    ("qwen3-480b-a35b", "Qwen/Qwen3-Coder-480B-A35B-Instruct"),
    ("qwen3-4b", "Qwen/Qwen3-4B"),
    ("qwen3-4b-thinking-2507", "Qwen/Qwen3-4B-Thinking-2507"),
    ("qwen3-8b", "Qwen/Qwen3-8B"),
    ("qwen3-next-80b-a3b", "Qwen/Qwen3-Next-80B-A3B-Instruct"),
];

impl Config {
    /// Names the published weights of the model if the user asks for them and no other key names weights. Presets ask for
    /// them, too, but the hub is contacted for names of the user alone.
    pub(crate) fn settle_weights(&mut self, problems: &mut Vec<Problem>) {
        let asks = self.entry(KEY);
        let is_asked = asks.value == true && asks.origin.is_given();
        let is_set = |key: &&str| self.entry(key).value.as_str().is_some_and(|path| !path.is_empty());
        if !is_asked || WEIGHTS_KEYS.iter().any(is_set) {
            return;
        }
        let model = self.entry("model_name").value.as_str().unwrap_or_default();
        match REPOSITORIES.iter().find(|(name, _)| *name == model) {
            Some((_, repository)) => {
                self.replace("hf_model_path", format!("hf://{repository}").into(), Origin::Derived);
            }
            None => problems.push(Problem::inconsistent(
                format!(
                    "{}, but no repository of the Hugging Face hub is known for the model of {}",
                    self.stated(KEY),
                    self.stated("model_name")
                ),
                "name its weights: `load_parameters_path=hf://owner/name`",
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Request, model_names};

    #[test]
    fn repositories_are_those_of_named_models() {
        assert!(REPOSITORIES.is_sorted());
        for (model, repository) in REPOSITORIES {
            assert!(model_names().any(|name| name == *model), "{model}");
            assert_eq!(repository.split('/').count(), 2, "{repository}");
        }
    }

    fn path(arguments: &[&str]) -> Result<String, String> {
        let arguments = arguments.iter().map(|argument| (*argument).to_owned()).collect();
        let config = Config::resolve(&Request { arguments, ..Request::default() });
        let config = config.map_err(|error| error.to_string())?;
        Ok(config.entry("hf_model_path").value.as_str().unwrap_or_default().to_owned())
    }

    #[test]
    fn published_weights_are_named_when_they_are_asked_for() {
        let asks = "convert_checkpoint_if_possible=true";
        assert_eq!(path(&[asks, "model_name=qwen3-0.6b"]).unwrap(), "hf://Qwen/Qwen3-0.6B");
        assert_eq!(path(&["model_name=qwen3-0.6b"]).unwrap(), "");
        assert_eq!(path(&[asks, "model_name=qwen3-0.6b", "load_parameters_path=runs/a"]).unwrap(), "");
        let error = path(&[asks, "model_name=gpt3-175b"]).unwrap_err();
        assert!(error.contains("no repository of the Hugging Face hub is known"), "{error}");
    }
}
