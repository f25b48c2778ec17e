//! The packages gguf, transformers and llama.cpp itself read exported GGUF files.

use std::path::Path;

use serde_json::Value;

use crate::{python, transformers::maxtext};

/// llama.cpp is built from source, which needs a C++ compiler and takes about ten minutes once.
const PACKAGES: &[&str] = &[
    "gguf==0.19.0",
    "llama-cpp-python==0.3.36",
    "transformers==5.23.0",
    "torch==2.15.0",
    "safetensors==0.8.0",
    "sentencepiece==0.2.3",
    "numpy==2.4.6",
];

const FAMILIES: [&str; 8] =
    ["llama", "llama_scaled", "llama_biases", "qwen2", "qwen3", "gemma2", "gemma3", "mixtral"];

#[test]
fn exported_files_hold_the_models() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    python::python(PACKAGES, "gguf_files.py", &[Path::new("write"), root]);
    for family in FAMILIES {
        for dtype in ["float32", "bfloat16", "q8_0"] {
            let (published, output) =
                (format!("load_parameters_path={family}"), format!("{family}.{dtype}.gguf"));
            let export = ["checkpoint", "export", "--format", "gguf", "--dtype", dtype, "--output", &output];
            maxtext(root, &[&export[..], &[&published]].concat());
        }
    }
    let report = python::python(PACKAGES, "gguf_files.py", &[Path::new("check"), root]);
    let report: Value = serde_json::from_str(report.lines().last().unwrap()).unwrap();
    assert_eq!(report["problems"], serde_json::json!({}), "{report:#}");
    assert_eq!(report["counts"], serde_json::json!({ "gguf": 24, "transformers": 5, "llama.cpp": 8 }));
}
