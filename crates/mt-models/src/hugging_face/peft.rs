//! Directories of adapters in the format of the PEFT library.

use std::{collections::BTreeMap, fs, path::Path};

use mt_nn::AdapterArray;
use serde_json::{Map, Value, json};

use super::FileTensor;
use crate::{Model, ModelError, StateError, decoder::AdapterConfig, families::Layout};

/// The files of a directory.
pub(super) const CONFIG: &str = "adapter_config.json";
pub(super) const WEIGHTS: &str = "adapter_model.safetensors";

/// Whether a path is a PEFT directory.
pub fn is_peft(path: &Path) -> bool {
    path.join(CONFIG).is_file() || path.join(WEIGHTS).is_file()
}

/// Checks that the adapters of a directory have the options of the model's.
pub(super) fn check_config(model: &dyn Model, directory: &Path) -> Result<(), StateError> {
    let path = directory.join(CONFIG);
    let refused =
        |problem: String, hint: &str| StateError::Peft { path: path.clone(), problem, hint: hint.to_owned() };
    let text = fs::read_to_string(&path).map_err(|error| {
        refused(error.to_string(), "name a directory that PEFT's `save_pretrained` wrote")
    })?;
    let config: Map<String, Value> = serde_json::from_str(&text)
        .map_err(|error| refused(format!("it is not JSON: {error}"), "save the adapters again"))?;
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
    for key in [
        "rank_pattern",
        "alpha_pattern",
        "trainable_token_indices",
        "lora_bias",
        "target_parameters",
        "use_qalora",
        "alora_invocation_tokens",
        "arrow_config",
    ] {
        if !is_empty(of(key)) {
            let hint = "save the adapters without it; all adapters have one rank and one scale";
            return Err(refused(format!("`{key}` is `{}`, which is not built", of(key)), hint));
        }
    }
    check_whole_modules(model, of("modules_to_save"))
        .map_err(|problem| refused(problem, "save the adapters without other whole modules"))?;
    if of("bias") != "none" && !of("bias").is_null() {
        let hint = "train the adapters with `bias=\"none\"`";
        return Err(refused(format!("`bias` is {}, which is not built", of("bias")), hint));
    }
    let adapters = model.adapters().expect("the model has adapters");
    check_options(adapters, &of, directory)
}

/// The modules that are trained and saved whole.
fn whole_modules(model: &dyn Model) -> Vec<String> {
    let whole =
        model.parameters().into_iter().filter(|(_, spec)| spec.adapter == Some(AdapterArray::Whole));
    let mut modules: Vec<String> = whole.map(|(path, _)| path.parent().to_string()).collect();
    modules.dedup();
    modules
}

/// Compares the modules that PEFT saved whole with the model's. PEFT names those that a classifier may have, by default.
fn check_whole_modules(model: &dyn Model, named: &Value) -> Result<(), String> {
    const OF_CLASSIFIERS: [&str; 2] = ["classifier", "score"];
    let named: Vec<&str> = named.as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let own = whole_modules(model);
    let is_known = |name: &&str| own.iter().any(|module| module == name) || (!own.is_empty() && OF_CLASSIFIERS.contains(name));
    match named.iter().find(|name| !is_known(name)) {
        Some(name) => Err(format!("`modules_to_save` names `{name}`, which this model does not train whole")),
        None => Ok(()),
    }
}

/// Compares the options of a directory's adapters with those of the model's.
fn check_options<'a>(
    adapters: &AdapterConfig,
    of: &impl Fn(&str) -> &'a Value,
    directory: &Path,
) -> Result<(), StateError> {
    let (mut differences, mut remedies) = (Vec::new(), Vec::new());
    let numbers = [
        ("r", "lora_rank", of("r").as_f64(), adapters.adapter.rank as f64),
        ("lora_alpha", "lora_alpha", of("lora_alpha").as_f64(), adapters.alpha),
    ];
    for (theirs, ours, found, expected) in numbers {
        let Some(found) = found.filter(|found| *found != expected) else { continue };
        differences.push(format!("`{theirs}` {found}, but `lora.{ours}` is {expected}"));
        remedies.push(format!("`lora.{ours}={found}`"));
    }
    let flags = [("use_rslora", adapters.is_rank_stabilized), ("use_dora", adapters.adapter.has_magnitude)];
    for (key, expected) in flags {
        let found = of(key).as_bool().unwrap_or(false);
        if found != expected {
            differences.push(format!("`{key}` {found}, but `lora.{key}` is {expected}"));
            remedies.push(format!("`lora.{key}={found}`"));
        }
    }
    if differences.is_empty() {
        return Ok(());
    }
    Err(StateError::OtherAdapters { path: directory.to_owned(), differences, remedies })
}

/// The contents of `adapter_config.json` for a model's adapters. `base` is the path of the base.
pub(super) fn config_text(model: &dyn Model, base: &str) -> Result<String, ModelError> {
    let AdapterConfig { adapter, alpha, is_rank_stabilized, .. } =
        model.adapters().expect("the model has adapters");
    let of_base = model.file_tensors()?;
    let adapted = model.adapter_tensors()?;
    let modules: Vec<&str> = adapted.iter().filter_map(module_of).collect();
    let is_turned = |tensor: &FileTensor| {
        let module = tensor.name.strip_suffix(".weight");
        let is_adapted = module.is_some_and(|module| modules.contains(&module));
        is_adapted && tensor.parts.iter().any(|part| matches!(part.layout, Layout::Same(1..)))
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
        "lora_dropout": 0.0,
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
fn module_of(tensor: &FileTensor) -> Option<&str> {
    tensor.name.strip_prefix(super::tensors::PEFT_PREFIX)?.strip_suffix(".lora_A.weight")
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
