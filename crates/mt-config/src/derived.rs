//! Values that follow from other keys: dimensions, mesh sizes, batch sizes, directories.
//!
//! They are shown with the configuration and cannot be set. Values that depend on the number of devices are none until
//! it is known; the keys determine it for CPUs only.

use mt_shape::logical;
use serde_json::{Value, json};

use crate::{
    config::Config,
    groups::{
        BatchSchedule, KeptIn, Parallelism, RematGroup, RematPolicy, RunGroup, Scales, ramp, whole_batch,
    },
};

/// Every derived key with its value.
pub(crate) fn values(config: &Config) -> Vec<(&'static str, Value)> {
    let mut values = Vec::new();
    dimensions(config, &mut values);
    mesh(config, &mut values);
    batches(config, &mut values);
    directories(config, &mut values);
    memory(config, &mut values);
    values
}

type Values = Vec<(&'static str, Value)>;

fn integer(config: &Config, name: &str) -> i64 {
    config.entry(name).value.as_i64().unwrap_or_default()
}

fn float(config: &Config, name: &str) -> f64 {
    config.entry(name).value.as_f64().unwrap_or_default()
}

fn is_set(config: &Config, name: &str) -> bool {
    config.entry(name).value == true
}

fn dimensions(config: &Config, values: &mut Values) {
    let scales = u64::try_from(integer(config, "global_parameter_scale")).ok().and_then(Scales::of);
    let mut push = |name: &'static str, base: i64, scale: fn(&Scales) -> u32| {
        let value = scales.as_ref().and_then(|scales| base.checked_mul(1_i64.checked_shl(scale(scales))?));
        values.push((name, value.into()));
    };
    let mlp = integer(config, "base_mlp_dim");
    // Experts without a width of their own have the width of the feed-forward layers.
    let experts = Some(integer(config, "base_moe_mlp_dim")).filter(|width| *width > 0).unwrap_or(mlp);
    push("emb_dim", integer(config, "base_emb_dim"), |scales| scales.embedding);
    push("num_query_heads", integer(config, "base_num_query_heads"), |scales| scales.heads_and_mlp);
    push("num_kv_heads", integer(config, "base_num_kv_heads"), |scales| scales.heads_and_mlp);
    push("mlp_dim", mlp, |scales| scales.heads_and_mlp);
    push("moe_mlp_dim", experts, |scales| scales.heads_and_mlp);
    push("num_decoder_layers", integer(config, "base_num_decoder_layers"), |scales| scales.layers);
}

fn mesh(config: &Config, values: &mut Values) {
    let devices = config.known_devices();
    values.push(("num_target_devices", devices.into()));
    let slices = integer(config, if devices.is_some() { "num_cpu_slices" } else { "num_slices" });
    let slices = usize::try_from(slices).unwrap_or_default().max(1);
    let axes = config.entry("mesh_axes").value.as_array().cloned().unwrap_or_default();
    let [within_slice, over_slices] =
        ["ici", "dcn"].map(|network| Parallelism::read(network, config, &mut Vec::new()));
    let slice_size = devices.map(|devices| devices / slices);
    let ici = |axis: &str| within_slice.size(axis, slice_size);
    let dcn = |axis: &str| over_slices.size(axis, Some(slices));
    let sizes = |size: &dyn Fn(&str) -> Option<usize>| -> Value {
        axes.iter().filter_map(Value::as_str).map(size).collect::<Option<Vec<usize>>>().into()
    };
    // Queries are split over the mesh axes of the first rule that names any axis of this mesh.
    let rules = config.entry("logical_axis_rules").value.as_array().cloned().unwrap_or_default();
    let split =
        rules.iter().filter(|rule| rule[0] == logical::ACTIVATION_LENGTH_ATTN.name()).find_map(|rule| {
            let of_rule = rule[1].as_array()?.iter().filter(|axis| axes.contains(axis));
            let of_rule: Vec<&str> = of_rule.filter_map(Value::as_str).collect();
            (!of_rule.is_empty()).then_some(of_rule)
        });
    let context = split
        .unwrap_or_default()
        .into_iter()
        .try_fold(1_usize, |all, axis| Some(all.saturating_mul(ici(axis)?).saturating_mul(dcn(axis)?)));
    values.push(("ici_parallelism", sizes(&ici)));
    values.push(("dcn_parallelism", sizes(&dcn)));
    let both = |axis: &str| {
        let size = |network: &str| integer(config, &format!("{network}_{axis}_parallelism")).max(1);
        size("ici").saturating_mul(size("dcn"))
    };
    values.push(("num_diloco_replicas", both("diloco").into()));
    values.push(("using_pipeline_parallelism", (both("pipeline") > 1).into()));
    values.push(("context_parallel_size", context.into()));
}

/// Batch sizes in sequences, over all devices: of a micro-batch, of a step, and as loaded for a step.
struct Batch {
    micro: i64,
    step: i64,
    loaded: i64,
}

fn batches(config: &Config, values: &mut Values) {
    let devices = config.known_devices();
    let accumulation = integer(config, "gradient_accumulation_steps").max(1);
    let batch = |per_device: f64, accumulation: i64| -> Option<Batch> {
        let micro = whole_batch(per_device, devices?)?;
        let micro = i64::try_from(micro).ok()?;
        // One process loads the data of all devices, so it loads exactly the sequences that it trains on.
        let step = micro.saturating_mul(accumulation);
        Some(Batch { micro, step, loaded: step })
    };
    let train = batch(float(config, "per_device_batch_size"), accumulation);
    let evaluation = match float(config, "eval_per_device_batch_size") {
        0.0 => float(config, "per_device_batch_size"),
        per_device => per_device,
    };
    let evaluation = batch(evaluation, 1);
    let of = |batch: &Option<Batch>, size: fn(&Batch) -> i64| Value::from(batch.as_ref().map(size));
    values.push(("micro_batch_size_to_train_on", of(&train, |batch| batch.micro)));
    values.push(("global_batch_size_to_train_on", of(&train, |batch| batch.step)));
    values.push(("global_batch_size_to_load", of(&train, |batch| batch.loaded)));
    values.push(("micro_batch_size_to_eval_on", of(&evaluation, |batch| batch.micro)));
    values.push(("global_batch_size_to_eval_on", of(&evaluation, |batch| batch.step)));
    values.push(("global_batch_size_to_load_eval", of(&evaluation, |batch| batch.loaded)));

    let growing = is_set(config, "enable_rampup_batch_size");
    let start = batch(float(config, "per_device_batch_size_start"), accumulation).filter(|_| growing);
    let increment = batch(float(config, "per_device_batch_size_increment"), accumulation).filter(|_| growing);
    values.push(("global_batch_size_to_load_start", of(&start, |batch| batch.loaded)));
    values.push(("global_batch_size_to_load_increment", of(&increment, |batch| batch.loaded)));
    let sizes = [&start, &increment, &train].map(|batch| usize::try_from(batch.as_ref()?.loaded).ok());
    let samples = u64::try_from(integer(config, "global_rampup_samples")).unwrap_or_default();
    let (share, schedule) = match sizes {
        [Some(start), Some(increment), Some(full)] => (
            ramp::share(start, increment, full, samples),
            BatchSchedule::growing(start, increment, full, samples),
        ),
        _ => (None, None),
    };
    values.push(("rampup_samples_per_increment_to_load", share.into()));
    values.push(("rampup_end_step", schedule.map(|schedule| schedule.end_step()).into()));
}

fn directories(config: &Config, values: &mut Values) {
    let run = RunGroup::from_config(config).ok().filter(|run| !run.run_name.is_empty());
    let path = |path: Option<std::path::PathBuf>| json!(path.map(|path| path.display().to_string()));
    values.push(("checkpoint_dir", path(run.as_ref().map(RunGroup::checkpoint_directory))));
    values.push(("metrics_dir", path(run.as_ref().map(|run| run.directory().join("metrics")))));
    values.push(("tensorboard_dir", path(run.as_ref().map(RunGroup::tensorboard_directory))));
    let diagnostics = run.as_ref().filter(|_| is_set(config, "managed_mldiagnostics"));
    values.push((
        "managed_mldiagnostics_dir",
        path(diagnostics.map(|run| run.directory().join("managed-mldiagnostics"))),
    ));
}

/// The named tensors that a custom remat policy keeps, by memory.
fn memory(config: &Config, values: &mut Values) {
    let group = RematGroup::from_config(config).ok();
    let kept = group.filter(|group| group.remat_policy == RematPolicy::Custom).and_then(|group| group.kept());
    let names = |of: KeptIn| -> Value {
        let in_place = |kept: &Vec<(&'static str, KeptIn)>| {
            kept.iter().filter(|(_, place)| *place == of).map(|(name, _)| *name).collect::<Vec<_>>()
        };
        kept.as_ref().map(in_place).into()
    };
    values.push(("tensors_on_device", names(KeptIn::Device)));
    values.push(("tensors_to_offload", names(KeptIn::Host)));
}
