//! Keys that a `config.json` may leave out, compared with the defaults of transformers. `goldens/usual.py` generates
//! the golden.

use std::{collections::BTreeMap, fs, path::Path};

use mt_models::hugging_face::settings_of;
use serde_json::Value;

#[test]
fn absent_keys_mean_what_transformers_assumes() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/usual.json");
    let families: BTreeMap<String, BTreeMap<String, Value>> =
        serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    assert_eq!(families.len(), 9);
    let directory = tempfile::tempdir().unwrap();
    let settings = |config: &Value| {
        fs::write(directory.path().join("config.json"), config.to_string()).unwrap();
        let settings = settings_of(directory.path()).unwrap();
        assert_eq!(settings.unread(), &[] as &[String], "{config}");
        settings.into_pairs().into_iter().collect::<BTreeMap<_, _>>()
    };
    for (model_type, configs) in families {
        assert_eq!(settings(&configs["minimal"]), settings(&configs["whole"]), "{model_type}");
    }
}

#[test]
fn unread_keys_are_listed() {
    let directory = tempfile::tempdir().unwrap();
    let check = |changes: Value, expected: &[&str]| {
        let mut config = serde_json::json!({
            "model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", "hidden_size": 8,
            "num_attention_heads": 2, "intermediate_size": 8, "num_hidden_layers": 2, "vocab_size": 9,
        });
        config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        fs::write(directory.path().join("config.json"), config.to_string()).unwrap();
        assert_eq!(settings_of(directory.path()).unwrap().unread(), expected, "{config}");
    };
    check(serde_json::json!({}), &[]);
    check(serde_json::json!({"mlp_gain": 2.0, "unset": null, "use_cache": true}), &["mlp_gain"]);
    check(serde_json::json!({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}), &[]);
    let rope = serde_json::json!({"rope_type": "linear", "factor": 2.0, "beta_fast": 3.0});
    check(serde_json::json!({"rope_parameters": rope}), &["rope_parameters.beta_fast"]);
    // The factors of Granite mean nothing in a Llama.
    check(serde_json::json!({"logits_scaling": 2.0}), &["logits_scaling"]);
    check(serde_json::json!({"text_config": "none"}), &["text_config"]);
}

#[test]
fn keys_outside_of_the_text_model_are_read() {
    let directory = tempfile::tempdir().unwrap();
    let settings = |outside: Value, inside: Value| {
        let mut text = serde_json::json!({
            "model_type": "gemma3_text", "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1,
            "head_dim": 4, "intermediate_size": 8, "num_hidden_layers": 2, "vocab_size": 9, "sliding_window": 4,
            "query_pre_attn_scalar": 4,
        });
        text.as_object_mut().unwrap().extend(inside.as_object().unwrap().clone());
        let mut config = serde_json::json!({
            "model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "image_token_index": 7,
            "vision_config": {"hidden_size": 4}, "text_config": text,
        });
        config.as_object_mut().unwrap().extend(outside.as_object().unwrap().clone());
        fs::write(directory.path().join("config.json"), config.to_string()).unwrap();
        settings_of(directory.path())
    };
    let (none, tied) = (serde_json::json!({}), serde_json::json!({"tie_word_embeddings": true}));
    let untied = serde_json::json!({"tie_word_embeddings": false});
    let check = |outside: &Value, inside: &Value, is_tied: bool, unread: &[&str]| {
        let settings = settings(outside.clone(), inside.clone()).unwrap();
        assert_eq!(settings.get("logits_via_embedding"), Some(&is_tied.into()), "{outside} {inside}");
        assert_eq!(settings.unread(), unread, "{outside} {inside}");
    };
    check(&none, &none, true, &[]);
    check(&untied, &none, false, &[]);
    check(&untied, &untied, false, &[]);
    // The text model's own value counts.
    check(&tied, &untied, false, &["tie_word_embeddings"]);
    check(&serde_json::json!({"logits_scaling": 2.0, "mlp_gain": null}), &none, true, &["logits_scaling"]);
    check(&none, &serde_json::json!({"mlp_gain": 2.0}), true, &["mlp_gain"]);

    let quantized = serde_json::json!({"quantization_config": {"quant_method": "gptq"}});
    for (outside, inside) in [(&quantized, &none), (&none, &quantized)] {
        let error = settings(outside.clone(), inside.clone()).unwrap_err().to_string();
        assert!(
            error.contains("`quantization_config.quant_method`") && error.contains("`\"gptq\"`"),
            "{error}"
        );
    }
}
