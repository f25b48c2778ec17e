//! GPT-3 in the layout of Pax equals the Hugging Face directory of GPT-2 with the same weights.

use std::path::Path;

use mt_models::hugging_face::{Weights, is_hugging_face, settings_of};

use crate::directory::Directory;

fn pax(name: &str) -> Directory {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/pax").join(name);
    Directory { name: name.to_owned(), path }
}

#[test]
fn both_layouts_hold_the_same_weights() {
    for name in ["gpt2_two_layers", "gpt2_narrow_one_layer"] {
        let (published, own) = (Directory::open(name), pax(name));
        assert!(is_hugging_face(&own.path), "{name}");
        let (settings, expected) = (settings_of(&own.path).unwrap(), settings_of(&published.path).unwrap());
        for (key, value) in expected.into_pairs() {
            // Arrays do not tell it; all models of Pax have one.
            if key == "normalization_layer_epsilon" {
                assert_eq!(settings.get(key), Some(&1e-5.into()));
                continue;
            }
            assert_eq!(settings.get(key), Some(&value), "{key} of {name}");
        }
        let model = published.model(&[]);
        assert!(own.parameters(&model) == published.parameters(&model), "{name}");
        Weights::open(&model, &own.path).unwrap();
    }
    // The directory with the arrays is one, too.
    assert!(is_hugging_face(&pax("gpt2_two_layers").path.join("state")));
}

#[test]
fn what_is_missing_or_too_much_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let copy = |from: &Path, to: &Path| {
        for (file, _) in mt_storage::files_below(from).unwrap() {
            std::fs::create_dir_all(to.join(&file).parent().unwrap()).unwrap();
            std::fs::copy(from.join(&file), to.join(&file)).unwrap();
        }
    };
    let original = pax("gpt2_narrow_one_layer");
    copy(&original.path, directory.path());
    let model = Directory::open("gpt2_narrow_one_layer").model(&[]);
    let array = directory.path().join("mdl_vars.params.lm.final_ln.bias");
    std::fs::rename(&array, directory.path().join("mdl_vars.params.lm.final_ln.other")).unwrap();
    let error = Weights::open(&model, directory.path()).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("ln_f.bias") && error.contains("mdl_vars.params.lm.final_ln.other"), "{error}");
    std::fs::write(directory.path().join("mdl_vars.params.lm.final_ln.other/.zarray"), "{").unwrap();
    let error = Weights::open(&model, directory.path()).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("final_ln.other/.zarray"), "{error}");
}
