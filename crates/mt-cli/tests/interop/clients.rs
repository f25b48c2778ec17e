//! Programs that evaluate and measure servers, as they are published, against `maxtext serve`. Their environments have
//! several gigabytes, so that the feature `clients` and `.ci/full` run these tests.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::Value;

use crate::{
    python::{self, Environment},
    server::Server,
    transformers::TRANSFORMERS,
};

const LM_EVAL: Environment = Environment { packages: &["lm-eval[api]==0.4.13"], base: Some(&TRANSFORMERS) };
const GUIDELLM: Environment = Environment { packages: &["guidellm==0.8.1"], base: Some(&TRANSFORMERS) };
const AIPERF: Environment = Environment { packages: &["aiperf==0.13.0", "transformers==5.23.0"], base: None };

/// Serves a Llama of random weights. A file has the server's URL.
fn start(directory: &Path) -> (Server, PathBuf, PathBuf) {
    let model = directory.join("tiny");
    python::python(&TRANSFORMERS, "tiny_model.py", &[&model]);
    let server = Server::start(
        Command::new(env!("CARGO_BIN_EXE_maxtext"))
            .args(["serve", "dtype=float32", "max_target_length=512", "max_prefill_predict_length=511"])
            .arg(format!("hf_model_path={}", model.display())),
    );
    let url = directory.join("url.txt");
    fs::write(&url, server.url()).unwrap();
    (server, url, model)
}

/// Scores and answers of `lm-eval` through the server equal those of transformers with the same weights.
#[test]
fn lm_eval_finds_the_scores_of_transformers() {
    let directory = tempfile::tempdir().unwrap();
    let (server, url, model) = start(directory.path());
    let found = python::python(&LM_EVAL, "lm_eval_tasks.py", &[&url, &model, directory.path()]);
    let found: Value = serde_json::from_str(found.lines().next_back().unwrap()).unwrap();
    // The answers differ from each other, so that their equality says something.
    assert!(found["texts"].as_u64().unwrap() >= 8, "{found}");
    server.end();
}

fn measure(program: &str, environment: &Environment) {
    let directory = tempfile::tempdir().unwrap();
    let (server, url, model) = start(directory.path());
    let arguments = [Path::new(program), &url, &model, directory.path()];
    let found = python::python(environment, "load_generators.py", &arguments);
    let found: Value = serde_json::from_str(found.lines().next_back().unwrap()).unwrap();
    assert!(found.as_object().unwrap().len() >= 6, "{found}");
    server.end();
}

#[test]
fn guidellm_measures_the_server() {
    measure("guidellm", &GUIDELLM);
}

#[test]
fn aiperf_measures_the_server() {
    measure("aiperf", &AIPERF);
}
