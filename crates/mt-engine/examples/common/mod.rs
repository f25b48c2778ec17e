//! The model of measurements, with random weights.

use mt_config::{Config, ModelGroup, Request as ConfigRequest};
use mt_engine::PromptBounds;
use mt_ir::Target;
use mt_models::Model;
use mt_nn::initialize;
use mt_runtime::{Array, CompileSettings, Runtime};
use mt_trace::{ProgramOptions, program};

/// About 66 million weights.
const MODEL: [&str; 9] = [
    "base_emb_dim=512",
    "base_mlp_dim=2048",
    "base_num_decoder_layers=12",
    "base_num_query_heads=8",
    "base_num_kv_heads=4",
    "head_dim=64",
    "vocab_size=16384",
    "max_target_length=1024",
    "logits_via_embedding=true",
];

/// The length of texts.
const LONGEST: usize = 1024;

/// The model in a type, with further keys, which replace those of the model.
pub fn described(dtype: &str, keys: &[String]) -> ModelGroup {
    let types = ["dtype", "weight_dtype"].map(|key| format!("{key}={dtype}"));
    let name = |argument: &str| argument.split('=').next().map(str::to_owned);
    let is_given = |own: &&str| keys.iter().any(|key| name(key) == name(own));
    let model: Vec<String> = MODEL.into_iter().filter(|own| !is_given(own)).map(str::to_owned).collect();
    let request =
        ConfigRequest { arguments: [&model[..], &types, keys].concat(), ..ConfigRequest::default() };
    let config = Config::resolve(&request).expect("the keys are right");
    ModelGroup::from_config(&config).expect("the model is complete")
}

pub fn bounds(vocab_size: usize) -> PromptBounds {
    PromptBounds { vocab_size, max_target_length: LONGEST, max_prefill_length: LONGEST, source: None }
}

/// Parameters from a program for this target.
pub fn random_parameters(runtime: &Runtime, target: Target, model: &dyn Model) -> Vec<Array> {
    let program = program(&ProgramOptions::new("initialize", target), |inputs| {
        let region = inputs.region();
        let parameters = initialize(region, region.key(7), &model.parameters());
        parameters.into_iter().map(|parameter| inputs.replicated("parameter", parameter)).collect()
    });
    let program = program.expect("parameters can be drawn");
    let executable = runtime.compile(&program, &CompileSettings::default()).expect("the program compiles");
    executable.run(Vec::new()).expect("the program runs")
}
