//! The description of a model in a GGUF file.

use mt_checkpoint::{GgufType, GgufValue};
use serde_json::{Map, Value};

use super::names::{self, Named};
use crate::ModelError;

/// The exported architectures: Hugging Face's name, llama.cpp's name, and their rules.
const ARCHITECTURES: &[Architecture] = &[
    Architecture::new("llama", "llama", Rules::Llama),
    Architecture::new("mistral", "llama", Rules::Llama),
    Architecture::new("mixtral", "llama", Rules::Llama),
    Architecture::new("qwen2", "qwen2", Rules::Qwen),
    Architecture::new("qwen3", "qwen3", Rules::Qwen),
    Architecture::new("gemma2", "gemma2", Rules::Gemma { cycle: 2, layers_of_largest: 46 }),
    Architecture::new("gemma3_text", "gemma3", Rules::Gemma { cycle: 6, layers_of_largest: 62 }),
];

/// Keys of `config.json` that say nothing about the mathematics, or whose value the tensors show.
const UNNEEDED: &[&str] = &[
    "architectures",
    "attention_dropout",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "initializer_range",
    "max_window_layers",
    "model_type",
    "output_router_logits",
    "pad_token_id",
    "pretraining_tp",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "_sliding_window_pattern",
];

#[derive(Debug)]
struct Architecture {
    model_type: &'static str,
    name: &'static str,
    rules: Rules,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rules {
    /// Dimensions of heads are rotated in adjacent pairs. Projections may have biases, layers may have experts.
    Llama,
    Qwen,
    /// Norms before and after each layer part, whose files hold `1 + weight`. All but the last of each `cycle` layers
    /// have a window. llama.cpp recognizes the largest model, whose attention has another scale, by its number of
    /// layers.
    Gemma {
        cycle: usize,
        layers_of_largest: usize,
    },
}

impl Architecture {
    const fn new(model_type: &'static str, name: &'static str, rules: Rules) -> Self {
        Self { model_type, name, rules }
    }
}

/// A model as GGUF describes it.
#[derive(Debug)]
pub struct GgufModel {
    architecture: &'static Architecture,
    metadata: Vec<(String, GgufValue)>,
    heads: usize,
    kv_heads: usize,
    experts: usize,
    vocab_size: usize,
    rope_factors: Option<Vec<f32>>,
}

impl GgufModel {
    /// The description of the model of a `config.json`.
    ///
    /// # Errors
    /// llama.cpp does not know the family, or computes something else than the model.
    pub fn of(config: &Map<String, Value>) -> Result<Self, ModelError> {
        let model_type = config.get("model_type").and_then(Value::as_str).unwrap_or_default();
        let Some(architecture) = ARCHITECTURES.iter().find(|known| known.model_type == model_type) else {
            return Err(ModelError::NoGgufFamily {
                model_type: model_type.to_owned(),
                known: ARCHITECTURES.iter().map(|known| known.model_type).collect(),
            });
        };
        let mut keys = Keys { rest: config.clone(), lost: Vec::new(), made: Vec::new(), architecture };
        let described = keys.common();
        match architecture.rules {
            Rules::Llama => keys.llama(&described),
            Rules::Qwen => keys.qwen(),
            Rules::Gemma { cycle, layers_of_largest } => keys.gemma(&described, cycle, layers_of_largest),
        }
        let rope_factors = keys.rope(&described);
        let others = keys.rest.keys().filter(|key| !UNNEEDED.contains(&key.as_str()));
        let others: Vec<String> = others.map(|key| format!("`{key}`")).collect();
        keys.lost.extend(others);
        if !keys.lost.is_empty() {
            let name = architecture.name.to_owned();
            return Err(ModelError::NotInGguf { architecture: name, lost: keys.lost });
        }
        let Sizes { heads, kv_heads, experts, vocab_size, .. } = described;
        Ok(Self { architecture, metadata: keys.made, heads, kv_heads, experts, vocab_size, rope_factors })
    }

    /// The number of rows of the embedding table.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The metadata of a file whose matrices have the type `kind`.
    pub(super) fn metadata(&self, kind: GgufType) -> Vec<(String, GgufValue)> {
        let text = |text: &str| GgufValue::Text(text.to_owned());
        // llama.cpp's numbers of file types.
        let file_type = match kind {
            GgufType::F32 => 0,
            GgufType::F16 => 1,
            GgufType::Q8_0 => 7,
            GgufType::Bf16 => 32,
        };
        let mut metadata = vec![
            ("general.architecture".to_owned(), text(self.architecture.name)),
            ("general.type".to_owned(), text("model")),
            ("general.name".to_owned(), text(self.architecture.model_type)),
            ("general.file_type".to_owned(), GgufValue::U32(file_type)),
            ("general.quantization_version".to_owned(), GgufValue::U32(2)),
        ];
        metadata.extend(self.metadata.iter().cloned());
        metadata
    }

    pub(super) fn tensor_name(&self, tensor: &str) -> Result<Named, ModelError> {
        let has_norms_around = matches!(self.architecture.rules, Rules::Gemma { .. });
        names::named(tensor, has_norms_around).ok_or_else(|| ModelError::NotInGguf {
            architecture: self.architecture.name.to_owned(),
            lost: vec![format!("the tensor `{tensor}`")],
        })
    }

    pub(super) fn num_experts(&self) -> usize {
        self.experts
    }

    pub(super) fn rope_factors(&self) -> Option<&[f32]> {
        self.rope_factors.as_deref()
    }

    /// The number of heads of a projection whose rows are interleaved.
    pub(super) fn interleaved_heads(&self, name: &str) -> Option<usize> {
        let is_interleaved = self.architecture.rules == Rules::Llama;
        let heads = [(".attn_q.", self.heads), (".attn_k.", self.kv_heads)];
        heads.iter().find(|(part, _)| is_interleaved && name.contains(part)).map(|(_, heads)| *heads)
    }

    /// Whether a tensor is stored plus 1.
    pub(super) fn adds_one(&self, name: &str) -> bool {
        matches!(self.architecture.rules, Rules::Gemma { .. }) && name.ends_with("norm.weight")
    }
}

/// Sizes that several rules need.
struct Sizes {
    width: usize,
    layers: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    experts: usize,
    vocab_size: usize,
}

/// The keys of a `config.json` that are left to describe, and the metadata made of the others.
struct Keys {
    rest: Map<String, Value>,
    /// Features of the model that GGUF does not describe.
    lost: Vec<String>,
    made: Vec<(String, GgufValue)>,
    architecture: &'static Architecture,
}

impl Keys {
    fn add(&mut self, key: &str, value: GgufValue) {
        self.made.push((format!("{}.{key}", self.architecture.name), value));
    }

    fn add_number(&mut self, key: &str, number: usize) {
        // A size of a model that exceeds 32 bits exceeds every memory.
        self.add(key, GgufValue::U32(u32::try_from(number).unwrap_or(u32::MAX)));
    }

    /// Takes a size; 0 if there is none.
    fn size(&mut self, key: &str) -> usize {
        self.rest.remove(key).and_then(|value| value.as_u64()).unwrap_or_default() as usize
    }

    /// Takes a number; `None` if it is absent or null.
    fn number(&mut self, key: &str) -> Option<f64> {
        self.rest.remove(key).and_then(|value| value.as_f64())
    }

    /// Takes a key that has to have one of these values or to be absent.
    fn only(&mut self, key: &str, allowed: &[Value]) {
        if let Some(value) = self.rest.remove(key)
            && !allowed.contains(&value)
        {
            self.lost.push(format!("`{key}` of {value}"));
        }
    }

    fn common(&mut self) -> Sizes {
        let sizes = Sizes {
            width: self.size("hidden_size"),
            layers: self.size("num_hidden_layers"),
            heads: self.size("num_attention_heads"),
            kv_heads: self.size("num_key_value_heads"),
            head_dim: self.size("head_dim"),
            experts: self.size("num_local_experts"),
            vocab_size: self.size("vocab_size"),
        };
        let context = self.size("max_position_embeddings");
        let intermediate = self.size("intermediate_size");
        self.add_number("block_count", sizes.layers);
        self.add_number("context_length", context);
        self.add_number("embedding_length", sizes.width);
        self.add_number("feed_forward_length", intermediate);
        self.add_number("attention.head_count", sizes.heads);
        self.add_number("attention.head_count_kv", sizes.kv_heads);
        self.add_number("attention.key_length", sizes.head_dim);
        self.add_number("attention.value_length", sizes.head_dim);
        self.add_number("rope.dimension_count", sizes.head_dim);
        self.add_number("vocab_size", sizes.vocab_size);
        let epsilon = self.number("rms_norm_eps").unwrap_or(1e-6);
        self.add("attention.layer_norm_rms_epsilon", GgufValue::F32(epsilon as f32));
        sizes
    }

    fn llama(&mut self, sizes: &Sizes) {
        self.only("hidden_act", &["silu".into()]);
        self.only("sliding_window", &[Value::Null]);
        // Biases are tensors of their own, and a tied head is one tensor less.
        for key in ["attention_bias", "mlp_bias", "tie_word_embeddings"] {
            self.rest.remove(key);
        }
        let per_token = self.size("num_experts_per_tok");
        if sizes.experts > 0 {
            self.add_number("expert_count", sizes.experts);
            self.add_number("expert_used_count", per_token);
        }
    }

    fn qwen(&mut self) {
        self.only("hidden_act", &["silu".into()]);
        self.only("attention_bias", &[false.into()]);
        self.only("use_sliding_window", &[false.into()]);
        self.rest.remove("tie_word_embeddings");
        self.rest.remove("sliding_window");
        let has_window = |types: &Value| {
            types.as_array().is_some_and(|types| types.iter().any(|kind| kind != "full_attention"))
        };
        if self.rest.remove("layer_types").as_ref().is_some_and(has_window) {
            self.lost.push("`layer_types` with windows".to_owned());
        }
    }

    fn gemma(&mut self, sizes: &Sizes, cycle: usize, layers_of_largest: usize) {
        let is_gemma2 = self.architecture.name == "gemma2";
        self.only("hidden_activation", &["gelu_pytorch_tanh".into()]);
        self.only("hidden_act", &["gelu_pytorch_tanh".into()]);
        self.only("attention_bias", &[false.into()]);
        self.only("use_bidirectional_attention", &[false.into(), Value::Null]);
        if is_gemma2 {
            // llama.cpp reads no head of its own for this architecture.
            self.only("tie_word_embeddings", &[true.into()]);
        } else {
            self.rest.remove("tie_word_embeddings");
        }
        let window = self.size("sliding_window");
        self.add_number("attention.sliding_window", window);
        let expected = (0..sizes.layers).map(|layer| {
            Value::from(if layer % cycle + 1 < cycle { "sliding_attention" } else { "full_attention" })
        });
        if self.rest.remove("layer_types").is_some_and(|types| types != Value::Array(expected.collect())) {
            let text = format!("`layer_types` other than windows in {} of {cycle} layers", cycle - 1);
            self.lost.push(text);
        }
        let scalar = self.number("query_pre_attn_scalar");
        let expected = match sizes.layers == layers_of_largest {
            true => sizes.width as f64 / sizes.heads.max(1) as f64,
            false => sizes.head_dim as f64,
        };
        if let Some(scalar) = scalar.filter(|scalar| *scalar != expected) {
            self.lost
                .push(format!("`query_pre_attn_scalar` of {scalar}, which llama.cpp takes to be {expected}"));
        }
        let (attention, logits) =
            (self.number("attn_logit_softcapping"), self.number("final_logit_softcapping"));
        match (is_gemma2, attention, logits) {
            (true, Some(attention), Some(logits)) => {
                self.add("attn_logit_softcapping", GgufValue::F32(attention as f32));
                self.add("final_logit_softcapping", GgufValue::F32(logits as f32));
            }
            (true, ..) => self.lost.push("attention or logits without a soft cap".to_owned()),
            (false, Some(cap), _) => self.lost.push(format!("`attn_logit_softcapping` of {cap}")),
            (false, None, Some(logits)) => {
                self.add("final_logit_softcapping", GgufValue::F32(logits as f32));
            }
            (false, None, None) => {}
        }
    }

    /// Describes the rotary embedding. Returns the factors of frequencies, if they are scaled one by one.
    fn rope(&mut self, sizes: &Sizes) -> Option<Vec<f32>> {
        let Some(Value::Object(mut rope)) = self.rest.remove("rope_parameters") else {
            self.lost.push("a missing `rope_parameters`".to_owned());
            return None;
        };
        if let Some(of_windows) = rope.remove("sliding_attention") {
            let expected = (Some(10_000.0), Some("default"));
            let found = (
                of_windows.get("rope_theta").and_then(Value::as_f64),
                of_windows.get("rope_type").and_then(Value::as_str),
            );
            if found != expected {
                self.lost.push(
                    "rotary embeddings of layers with a window other than those of base 10000".to_owned(),
                );
            }
            rope = match rope.remove("full_attention") {
                Some(Value::Object(rope)) => rope,
                _ => Map::new(),
            };
        }
        let mut take = |key: &str| rope.remove(key);
        let theta = take("rope_theta").and_then(|theta| theta.as_f64()).unwrap_or(10_000.0);
        let kind = take("rope_type");
        let kind = kind.as_ref().and_then(Value::as_str).unwrap_or("default");
        let [factor, low, high, original] =
            ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
                .map(|key| take(key).and_then(|value| value.as_f64()).unwrap_or(1.0));
        self.add("rope.freq_base", GgufValue::F32(theta as f32));
        self.lost.extend(rope.keys().map(|key| format!("`{key}` of `rope_parameters`")));
        match kind {
            "default" => None,
            "linear" => {
                self.add("rope.scaling.type", GgufValue::Text("linear".to_owned()));
                self.add("rope.scaling.factor", GgufValue::F32(factor as f32));
                None
            }
            "llama3" if self.architecture.rules == Rules::Llama => {
                let divisors = llama3_factors(theta, sizes.head_dim, [factor, low, high, original]);
                Some(divisors)
            }
            other => {
                self.lost.push(format!("`rope_type` of `{other}`"));
                None
            }
        }
    }
}

/// The divisors of Llama 3.1's rotary frequencies: 1 for short wavelengths, `factor` for long ones, and between the two in
/// the middle.
fn llama3_factors(theta: f64, head_dim: usize, [factor, low, high, original]: [f64; 4]) -> Vec<f32> {
    let divisor = |index: usize| {
        let wavelength = std::f64::consts::TAU * theta.powf(2.0 * index as f64 / head_dim as f64);
        if wavelength < original / high {
            1.0
        } else if wavelength > original / low {
            factor
        } else {
            let smooth = (original / wavelength - low) / (high - low);
            1.0 / ((1.0 - smooth) / factor + smooth)
        }
    };
    (0..head_dim / 2).map(|index| divisor(index) as f32).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn config(model_type: &str, more: Value) -> Map<String, Value> {
        let mut config = json!({
            "model_type": model_type, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 80, "max_position_embeddings": 64,
            "intermediate_size": 32, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": false,
            "rope_parameters": { "rope_type": "default", "rope_theta": 500.0 },
        });
        let (Value::Object(config), Value::Object(more)) = (&mut config, more) else { unreachable!() };
        config.extend(more);
        config.clone()
    }

    #[track_caller]
    fn check_lost(model_type: &str, more: Value, expected: &[&str]) {
        let found = match GgufModel::of(&config(model_type, more)) {
            Err(ModelError::NotInGguf { lost, .. }) => lost,
            Ok(_) => Vec::new(),
            Err(other) => panic!("{other}"),
        };
        assert_eq!(found, expected);
    }

    #[test]
    fn what_llama_cpp_computes_otherwise_is_refused_by_name() {
        check_lost("llama", json!({}), &[]);
        check_lost("mistral", json!({ "sliding_window": null }), &[]);
        check_lost("mistral", json!({ "sliding_window": 6 }), &["`sliding_window` of 6"]);
        check_lost("llama", json!({ "hidden_act": "relu" }), &["`hidden_act` of \"relu\""]);
        check_lost("llama", json!({ "new_key": 1 }), &["`new_key`"]);
        let yarn = json!({ "rope_parameters": { "rope_type": "yarn", "rope_theta": 5.0, "beta_fast": 4 } });
        check_lost("qwen3", yarn, &["`beta_fast` of `rope_parameters`", "`rope_type` of `yarn`"]);
        let windows = json!({ "layer_types": ["full_attention", "sliding_attention"] });
        check_lost("qwen2", windows, &["`layer_types` with windows"]);
        let unknown = GgufModel::of(&config("granite", json!({}))).unwrap_err();
        assert!(matches!(unknown, ModelError::NoGgufFamily { .. }), "{unknown}");
    }

    #[test]
    fn gemma_has_to_be_as_published() {
        let gemma = |more: Value| {
            let mut whole = json!({
                "hidden_act": null, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 5,
                "tie_word_embeddings": true, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 50.0,
                "final_logit_softcapping": 30.0, "layer_types": ["sliding_attention", "full_attention"],
            });
            let (Value::Object(keys), Value::Object(more)) = (&mut whole, more) else { unreachable!() };
            keys.remove("hidden_act");
            keys.extend(more);
            let mut whole = config("gemma2", whole);
            whole.remove("hidden_act");
            whole
        };
        assert!(GgufModel::of(&gemma(json!({}))).is_ok());
        for (more, expected) in [
            (json!({ "query_pre_attn_scalar": 20 }), "query_pre_attn_scalar"),
            (json!({ "attn_logit_softcapping": null }), "soft cap"),
            (json!({ "tie_word_embeddings": false }), "tie_word_embeddings"),
            (json!({ "layer_types": ["full_attention", "full_attention"] }), "layer_types"),
        ] {
            let error = GgufModel::of(&gemma(more)).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn frequencies_of_llama3_are_divided() {
        let factors = llama3_factors(500_000.0, 128, [8.0, 1.0, 4.0, 8192.0]);
        assert_eq!((factors.len(), factors[0], factors[63]), (64, 1.0, 8.0));
        assert!(factors.windows(2).all(|pair| pair[0] <= pair[1]));
    }
}
