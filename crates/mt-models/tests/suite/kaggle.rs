//! Gemma in the layout of Kaggle equals the Hugging Face directory with the same weights.

use std::path::Path;

use mt_models::hugging_face::{Weights, is_hugging_face, settings_of};
use serde_json::Value;

use crate::directory::Directory;

fn kaggle(name: &str) -> Directory {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/kaggle").join(name);
    Directory { name: name.to_owned(), path }
}

#[test]
fn both_layouts_hold_the_same_weights() {
    for (name, family) in
        [("gemma_multi_query", "gemma"), ("gemma2_even", "gemma2"), ("gemma3_one_layer", "gemma3")]
    {
        let (published, own) = (Directory::open(name), kaggle(name));
        assert!(is_hugging_face(&own.path), "{name}");
        let model = published.model(&[]);
        assert!(own.parameters(&model) == published.parameters(&model), "{name}");
        Weights::open(&model, &own.path).unwrap();

        // Sizes follow from the arrays; values that all published models of a generation share are assumed.
        let (settings, expected) = (settings_of(&own.path).unwrap(), settings_of(&published.path).unwrap());
        assert_eq!(settings.get("decoder_block"), Some(&Value::from(family)), "{name}");
        for key in [
            "base_emb_dim",
            "base_num_decoder_layers",
            "base_num_query_heads",
            "base_num_kv_heads",
            "base_mlp_dim",
            "head_dim",
            "vocab_size",
            "logits_via_embedding",
            "normalization_layer_epsilon",
            "mlp_activations",
        ] {
            assert_eq!(settings.get(key), expected.get(key), "{key} of {name}");
        }
    }
    let of_second = settings_of(&kaggle("gemma2_even").path).unwrap();
    for (key, expected) in [
        ("attn_logits_soft_cap", Value::from(50.0)),
        ("final_logits_soft_cap", 30.0.into()),
        ("sliding_window_size", 4096.into()),
    ] {
        assert_eq!(of_second.get(key), Some(&expected), "{key}");
    }
}
