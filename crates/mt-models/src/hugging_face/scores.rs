//! Reward models in Hugging Face's format: models that classify sequences or tokens.

use mt_config::RewardType;
use serde_json::{Map, Value, json};

use super::{HuggingFaceConfig, Settings};
use crate::ModelError;

const SEQUENCES: &str = "ForSequenceClassification";
const TOKENS: &str = "ForTokenClassification";

/// The keys of `config.json` that describe scores.
pub(super) const KEYS: &[&str] = &["architectures", "id2label", "label2id", "num_labels"];

/// The architectures of language models whose layers transformers also uses to classify, with the beginnings of the names
/// of these classes, and whether tokens can be classified. Their heads are named `score`.
const CLASSIFIERS: &[(&str, &str, bool)] = &[
    ("LlamaForCausalLM", "Llama", true),
    ("MistralForCausalLM", "Mistral", true),
    ("MixtralForCausalLM", "Mixtral", true),
    ("GemmaForCausalLM", "Gemma", true),
    ("Gemma2ForCausalLM", "Gemma2", true),
    ("Gemma3ForCausalLM", "Gemma3Text", false),
    ("Qwen2ForCausalLM", "Qwen2", true),
    ("Qwen3ForCausalLM", "Qwen3", true),
    ("Qwen3MoeForCausalLM", "Qwen3Moe", true),
    ("Qwen3NextForCausalLM", "Qwen3Next", true),
    ("GptOssForCausalLM", "GptOss", true),
    ("DeepseekV2ForCausalLM", "DeepseekV2", false),
    ("DeepseekV3ForCausalLM", "DeepseekV3", true),
    ("Olmo3ForCausalLM", "Olmo3", false),
    // Scores of tokens have another name there.
    ("GPT2LMHeadModel", "GPT2", false),
];

/// The class of transformers that loads a reward model on the layers of `language_model`; `None` if there is none.
pub(super) fn architecture(language_model: &str, reward_type: RewardType) -> Option<String> {
    let (_, name, classifies_tokens) = CLASSIFIERS.iter().find(|(known, ..)| *known == language_model)?;
    match reward_type {
        RewardType::Outcome => Some(format!("{name}{SEQUENCES}")),
        RewardType::Process => classifies_tokens.then(|| format!("{name}{TOKENS}")),
    }
}

/// The fields that describe `count` scores.
pub(super) fn labels(count: usize) -> Map<String, Value> {
    let names = || (0..count).map(|index| (index.to_string(), format!("LABEL_{index}")));
    let by_index: Map<String, Value> = names().map(|(index, name)| (index, name.into())).collect();
    let by_name: Map<String, Value> =
        (0..count).zip(names()).map(|(index, (_, name))| (name, index.into())).collect();
    Map::from_iter([("id2label".to_owned(), by_index.into()), ("label2id".to_owned(), by_name.into())])
}

/// Sets the keys of a reward model if the file describes one.
pub(super) fn read(config: &HuggingFaceConfig, settings: &mut Settings) -> Result<(), ModelError> {
    let architecture = config.texts("architectures")?.and_then(|names| names.into_iter().next());
    let Some(architecture) = architecture else { return Ok(()) };
    let reward_type = match () {
        () if architecture.ends_with(SEQUENCES) => RewardType::Outcome,
        () if architecture.ends_with(TOKENS) => RewardType::Process,
        () => return Ok(()),
    };
    // Files of two labels may name none.
    let count = match (config.integer("num_labels")?, config.object("id2label")?) {
        (Some(count), _) => count,
        (None, Some(labels)) => labels.len() as i64,
        (None, None) => 2,
    };
    if reward_type == RewardType::Process && count != 2 {
        return Err(config.wrong("id2label", &json!(count), "two labels: a step is wrong or right"));
    }
    settings.set("use_reward", true);
    settings.set("reward_type", reward_type.name());
    if reward_type == RewardType::Outcome {
        settings.set("num_reward_heads", count);
    }
    Ok(())
}
