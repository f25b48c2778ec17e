//! The packages gguf, transformers and llama.cpp itself read exported GGUF files.

use std::path::Path;

use serde_json::{Value, json};

use crate::{
    python,
    transformers::{TRANSFORMERS, maxtext},
};

/// llama.cpp is built from source, which needs a C++ compiler and takes about ten minutes once.
#[cfg(feature = "clients")]
const LLAMA_CPP: python::Environment =
    python::Environment { packages: &["llama-cpp-python==0.3.36"], base: Some(&TRANSFORMERS) };

const FAMILIES: [&str; 8] =
    ["llama", "llama_scaled", "llama_biases", "qwen2", "qwen3", "gemma2", "gemma3", "mixtral"];

/// Exports models of random weights, and compares what the environment's packages read with the originals.
fn check(environment: &python::Environment, counts: &Value) {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    python::python(environment, "gguf_files.py", &[Path::new("write"), root]);
    for family in FAMILIES {
        for dtype in ["float32", "bfloat16", "q8_0"] {
            let (published, output) =
                (format!("load_parameters_path={family}"), format!("{family}.{dtype}.gguf"));
            let export = ["checkpoint", "export", "--format", "gguf", "--dtype", dtype, "--output", &output];
            maxtext(root, &[&export[..], &[&published]].concat());
        }
    }
    let report = python::python(environment, "gguf_files.py", &[Path::new("check"), root]);
    let report: Value = serde_json::from_str(report.lines().last().unwrap()).unwrap();
    assert_eq!(report["problems"], json!({}), "{report:#}");
    assert_eq!(report["counts"], *counts);
}

#[test]
fn exported_files_hold_the_models() {
    check(&TRANSFORMERS, &json!({ "gguf": 24, "transformers": 5, "llama.cpp": 0 }));
}

/// `.ci/full` runs this test.
#[cfg(feature = "clients")]
#[test]
fn llama_cpp_generates_the_tokens_of_transformers() {
    check(&LLAMA_CPP, &json!({ "gguf": 24, "transformers": 5, "llama.cpp": 8 }));
}
