//! What a `config.json` may leave out, against what transformers assumes. `goldens/usual.py` makes the golden.

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
        settings.into_pairs().into_iter().collect::<BTreeMap<_, _>>()
    };
    for (model_type, configs) in families {
        assert_eq!(settings(&configs["minimal"]), settings(&configs["whole"]), "{model_type}");
    }
}
