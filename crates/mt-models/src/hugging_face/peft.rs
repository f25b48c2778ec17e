//! Directories of adapters in the format of the PEFT library.

use std::{collections::BTreeMap, fs, path::Path};

use mt_nn::AdapterArray;
use serde_json::{Map, Value, json};

use super::{FileTensor, source::TensorSource};
use crate::{AdapterOptions, Model, ModelError, StateError, decoder::AdapterConfig, families::Layout};

/// The files of a directory.
pub(super) const CONFIG: &str = "adapter_config.json";
pub(super) const WEIGHTS: &str = "adapter_model.safetensors";

/// Whether a path is a PEFT directory.
pub fn is_peft(path: &Path) -> bool {
    path.join(CONFIG).is_file() || path.join(WEIGHTS).is_file()
}

/// Initial values of adapters that leave the base as it was. Others subtract them from the weights, so that the
/// adapters belong to no published base.
const PLAIN_INITIAL_VALUES: [&str; 3] = ["gaussian", "eva", "orthogonal"];

/// PEFT's defaults of `r` and `lora_alpha`.
const DEFAULT_RANK: u64 = 8;
const DEFAULT_ALPHA: f64 = 8.0;

/// Options of PEFT that are not built, unless they are empty.
const REFUSED: [&str; 12] = [
    "rank_pattern",
    "alpha_pattern",
    "trainable_token_indices",
    "lora_bias",
    "target_parameters",
    "use_qalora",
    "use_bdlora",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
    "layer_replication",
];

/// Checks that the adapters of a directory have the options of the model's.
pub(super) fn check_config(model: &dyn Model, directory: &Path) -> Result<(), StateError> {
    let adapters = model.adapters().expect("the model has adapters");
    peft_options(directory)?.check(&AdapterOptions::of(adapters), directory)?;
    let named = read_config(directory)?.remove("modules_to_save").unwrap_or_default();
    let refused = |problem| refused(directory, problem, "save the adapters without other whole modules");
    check_whole_modules(model, &named).map_err(refused)
}

fn refused(directory: &Path, problem: String, hint: &str) -> StateError {
    StateError::Peft { path: directory.join(CONFIG), problem, hint: hint.to_owned() }
}

/// The contents of `adapter_config.json`.
fn read_config(directory: &Path) -> Result<Map<String, Value>, StateError> {
    let text = fs::read_to_string(directory.join(CONFIG)).map_err(|error| {
        refused(directory, error.to_string(), "name a directory that PEFT's `save_pretrained` wrote")
    })?;
    serde_json::from_str(&text)
        .map_err(|error| refused(directory, format!("it is not JSON: {error}"), "save the adapters again"))
}

/// The options of the adapters in a directory. Those that `adapter_config.json` leaves out have PEFT's defaults.
///
/// # Errors
/// The file cannot be read, or an option is not built.
pub(crate) fn peft_options(directory: &Path) -> Result<AdapterOptions, StateError> {
    let refused = |problem: String, hint: &str| refused(directory, problem, hint);
    let config = read_config(directory)?;
    let of = |key: &str| config.get(key).unwrap_or(&Value::Null);
    if of("peft_type") != "LORA" {
        return Err(refused(format!("`peft_type` is `{}`", of("peft_type")), "only LoRA adapters are built"));
    }
    let is_empty = |value: &Value| match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(items) => items.is_empty(),
        Value::Object(items) => items.is_empty(),
        _ => false,
    };
    if let Some(key) = REFUSED.into_iter().find(|key| !is_empty(of(key))) {
        let hint = "save the adapters without it; all adapters have one rank and one scale";
        return Err(refused(format!("`{key}` is `{}`, which is not built", of(key)), hint));
    }
    if of("bias") != "none" && !of("bias").is_null() {
        let hint = "train the adapters with `bias=\"none\"`";
        return Err(refused(format!("`bias` is {}, which is not built", of("bias")), hint));
    }
    let initial = of("init_lora_weights");
    let is_plain = initial
        .as_str()
        .map_or(initial.is_boolean() || initial.is_null(), |name| PLAIN_INITIAL_VALUES.contains(&name));
    if !is_plain {
        let hint = "convert the adapters with `path_initial_model_for_weight_conversion` of PEFT's \
                    `save_pretrained`, or merge them into their base";
        let problem = format!("`init_lora_weights` is {initial}, whose adapters need a changed base");
        return Err(refused(problem, hint));
    }
    let wrong = |key: &str| refused(format!("`{key}` is `{}`", of(key)), "save the adapters again");
    let or_default = |key: &str| Some(of(key)).filter(|value| !value.is_null());
    let rank = or_default("r").map_or(Some(DEFAULT_RANK), Value::as_u64).filter(|rank| *rank > 0);
    let alpha = or_default("lora_alpha").map_or(Some(DEFAULT_ALPHA), Value::as_f64);
    let flag = |key: &str| or_default(key).map_or(Some(false), Value::as_bool).ok_or_else(|| wrong(key));
    Ok(AdapterOptions {
        rank: rank.ok_or_else(|| wrong("r"))? as usize,
        alpha: alpha.ok_or_else(|| wrong("lora_alpha"))?,
        use_rslora: flag("use_rslora")?,
        use_dora: flag("use_dora")?,
        module_path: None,
    })
}

/// The tensors of the weights that have adapters in a directory, by the names of published models.
///
/// # Errors
/// The file of tensors cannot be read.
pub(crate) fn adapted_tensors(directory: &Path) -> Result<Vec<String>, StateError> {
    let source = TensorSource::open(&directory.join(WEIGHTS))?;
    let modules = source.names().into_iter().filter_map(module_of).map(|module| format!("{module}.weight"));
    Ok(modules.collect())
}

/// The modules that are trained and saved whole.
fn whole_modules(model: &dyn Model) -> Vec<String> {
    let whole = model.parameters().into_iter().filter(|(_, spec)| spec.adapter == Some(AdapterArray::Whole));
    let mut modules: Vec<String> = whole.map(|(path, _)| path.parent().to_string()).collect();
    modules.dedup();
    modules
}

/// Compares the modules that PEFT saved whole with the model's. PEFT names those that a classifier may have, by
/// default.
fn check_whole_modules(model: &dyn Model, named: &Value) -> Result<(), String> {
    const OF_CLASSIFIERS: [&str; 2] = ["classifier", "score"];
    let named: Vec<&str> = named.as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let own = whole_modules(model);
    let is_known = |name: &&str| {
        own.iter().any(|module| module == name) || (!own.is_empty() && OF_CLASSIFIERS.contains(name))
    };
    match named.iter().find(|name| !is_known(name)) {
        Some(name) => Err(format!("`modules_to_save` names `{name}`, which this model does not train whole")),
        None => Ok(()),
    }
}

/// The contents of `adapter_config.json` for a model's adapters. `base` is the path of the base.
pub(super) fn config_text(model: &dyn Model, base: &str) -> Result<String, ModelError> {
    let AdapterConfig { adapter, alpha, is_rank_stabilized, .. } =
        model.adapters().expect("the model has adapters");
    let of_base = model.file_tensors()?;
    let adapted = model.adapter_tensors()?;
    let modules: Vec<&str> = adapted.iter().filter_map(|tensor| module_of(&tensor.name)).collect();
    let is_turned = |tensor: &FileTensor| {
        let module = tensor.name.strip_suffix(".weight");
        let is_adapted = module.is_some_and(|module| modules.contains(&module));
        is_adapted && tensor.sections.iter().any(|section| matches!(section.layout, Layout::Same(1..)))
    };
    let whole = whole_modules(model);
    let has_bias = |(path, _): &(mt_shape::Path, mt_nn::ParamSpec)| path.to_string() == "score.bias";
    let task_type = match (whole.is_empty(), model.parameters().iter().any(has_bias)) {
        (true, _) => "CAUSAL_LM",
        (false, false) => "SEQ_CLS",
        (false, true) => "TOKEN_CLS",
    };
    let alpha = if alpha.fract() == 0.0 { json!(*alpha as u64) } else { json!(alpha) };
    let config = json!({
        "alpha_pattern": {},
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": of_base.iter().any(is_turned),
        "inference_mode": true,
        "init_lora_weights": true,
        "layers_pattern": null,
        "layers_to_transform": null,
        "lora_alpha": alpha,
        "lora_dropout": adapter.dropout,
        "modules_to_save": if whole.is_empty() { Value::Null } else { json!(whole) },
        "peft_type": "LORA",
        "r": adapter.rank,
        "rank_pattern": {},
        "target_modules": target_modules(&modules, &of_base),
        "task_type": task_type,
        "use_dora": adapter.has_magnitude,
        "use_rslora": is_rank_stabilized,
    });
    Ok(serde_json::to_string_pretty(&config).expect("values of JSON have a text") + "\n")
}

/// The module of the tensor that holds `A`.
fn module_of(tensor: &str) -> Option<&str> {
    tensor.strip_prefix(super::tensors::PEFT_PREFIX)?.strip_suffix(".lora_A.weight")
}

/// The names by which PEFT chooses these modules: the last component of a name if all modules with it have adapters,
/// whole names otherwise.
fn target_modules(modules: &[&str], of_base: &[FileTensor]) -> Vec<String> {
    let last = |module: &str| module.rsplit('.').next().unwrap_or_default().to_owned();
    let mut counts: BTreeMap<String, [usize; 2]> = BTreeMap::new();
    for module in modules {
        counts.entry(last(module)).or_default()[0] += 1;
    }
    for module in of_base.iter().filter_map(|tensor| tensor.name.strip_suffix(".weight")) {
        if let Some(count) = counts.get_mut(&last(module)) {
            count[1] += 1;
        }
    }
    let mut names = Vec::new();
    for (name, [adapted, all]) in counts {
        match adapted == all {
            true => names.push(name),
            false => {
                names.extend(modules.iter().filter(|module| last(module) == name).map(|m| (*m).to_owned()));
            }
        }
    }
    names
}
