//! Keys that follow from other keys and cannot be set; `crate::derived` computes them.

use super::KeyGroup;
use crate::key::{Key, Literal};

pub(super) const GROUPS: &[KeyGroup] = &[KeyGroup {
    name: "DerivedValues",
    title: "Derived values",
    prefix: None,
    keys: &[
        Key::optional_integer("emb_dim", "Width of the residual stream.")
            .derived(&["base_emb_dim", "global_parameter_scale"])
            .acts_on("model"),
        Key::optional_integer("num_query_heads", "Number of query heads.")
            .derived(&["base_num_query_heads", "global_parameter_scale"])
            .acts_on("attention"),
        Key::optional_integer("num_kv_heads", "Number of key and value heads.")
            .derived(&["base_num_kv_heads", "global_parameter_scale"])
            .acts_on("attention"),
        Key::optional_integer("mlp_dim", "Width of the feed-forward layers.")
            .derived(&["base_mlp_dim", "global_parameter_scale"])
            .acts_on("feed-forward layers"),
        Key::optional_integer("moe_mlp_dim", "Width of each expert.")
            .derived(&["base_moe_mlp_dim", "global_parameter_scale"])
            .acts_on("experts"),
        Key::optional_integer("num_decoder_layers", "Number of decoder layers.")
            .derived(&["base_num_decoder_layers", "global_parameter_scale"])
            .acts_on("model"),
        Key::optional_integer("num_target_devices", "Number of devices, if the configuration determines it.")
            .derived(&["num_cpu_devices", "hardware"])
            .acts_on("mesh"),
        Key::optional_integers(
            "ici_parallelism",
            "Sizes of the mesh axes within a slice, in the order of `mesh_axes`; none while the number of \
             devices is unknown.",
        )
        .derived(&["mesh_axes", "ici_fsdp_parallelism"])
        .acts_on("mesh"),
        Key::optional_integers(
            "dcn_parallelism",
            "Sizes of the mesh axes over slices, in the order of `mesh_axes`.",
        )
        .derived(&["mesh_axes", "dcn_data_parallelism"])
        .acts_on("mesh"),
        Key::optional_integer("num_diloco_replicas", "Number of replicas that train separately.")
            .derived(&["ici_diloco_parallelism", "dcn_diloco_parallelism"])
            .acts_on("mesh"),
        Key::optional_boolean("using_pipeline_parallelism", "Whether layers are split into stages.")
            .derived(&["ici_pipeline_parallelism", "dcn_pipeline_parallelism"])
            .acts_on("mesh")
            .neutral(&[Literal::Bool(false)]),
        Key::optional_integer("context_parallel_size", "Number of shards of a sequence.")
            .derived(&["logical_axis_rules", "ici_context_parallelism", "dcn_context_parallelism"])
            .acts_on("mesh")
            .neutral(&[Literal::Integer(1)]),
        Key::optional_integer(
            "micro_batch_size_to_train_on",
            "Micro-batch size in sequences, over all devices.",
        )
        .derived(&["per_device_batch_size"])
        .acts_on("data"),
        Key::optional_integer(
            "global_batch_size_to_train_on",
            "Batch size of a training step in sequences, over all devices.",
        )
        .derived(&["per_device_batch_size", "gradient_accumulation_steps"])
        .acts_on("data"),
        Key::optional_integer("global_batch_size_to_load", "Sequences loaded for a training step.")
            .derived(&["per_device_batch_size", "gradient_accumulation_steps"])
            .acts_on("data"),
        Key::optional_integer(
            "micro_batch_size_to_eval_on",
            "Micro-batch size of evaluation in sequences, over all devices.",
        )
        .derived(&["eval_per_device_batch_size"])
        .acts_on("evaluation"),
        Key::optional_integer(
            "global_batch_size_to_eval_on",
            "Batch size of an evaluation step in sequences, over all devices.",
        )
        .derived(&["eval_per_device_batch_size"])
        .acts_on("evaluation"),
        Key::optional_integer("global_batch_size_to_load_eval", "Sequences loaded for an evaluation step.")
            .derived(&["eval_per_device_batch_size"])
            .acts_on("evaluation"),
        Key::optional_integer(
            "global_batch_size_to_load_start",
            "Sequences loaded for a step at the first batch size of the ramp-up.",
        )
        .derived(&["per_device_batch_size_start"])
        .acts_on("data"),
        Key::optional_integer(
            "global_batch_size_to_load_increment",
            "Increment of the loaded batch size in the ramp-up, in sequences.",
        )
        .derived(&["per_device_batch_size_increment"])
        .acts_on("data"),
        Key::optional_float(
            "rampup_samples_per_increment_to_load",
            "Sequences trained on at each batch size of the ramp-up.",
        )
        .derived(&["global_rampup_samples"])
        .acts_on("data"),
        Key::optional_integer("rampup_end_step", "First step with the full batch size.")
            .derived(&["global_rampup_samples"])
            .acts_on("data"),
        Key::optional_text("checkpoint_dir", "Directory of the run's checkpoints.")
            .derived(&["base_output_directory", "run_name"])
            .acts_on("checkpoint"),
        Key::optional_text("metrics_dir", "Directory of the run's metrics.")
            .derived(&["base_output_directory", "run_name"])
            .acts_on("metrics"),
        Key::optional_text("tensorboard_dir", "Directory of the run's TensorBoard events.")
            .derived(&["base_output_directory", "run_name"])
            .acts_on("metrics"),
        Key::optional_text("managed_mldiagnostics_dir", "Directory of managed diagnostics.")
            .derived(&["managed_mldiagnostics"])
            .acts_on("monitoring"),
        Key::optional_texts(
            "tensors_on_device",
            "Named tensors that a custom remat policy keeps on the device.",
        )
        .derived(&["remat_policy"])
        .acts_on("remat"),
        Key::optional_texts(
            "tensors_to_offload",
            "Named tensors that a custom remat policy offloads to host memory.",
        )
        .derived(&["remat_policy"])
        .acts_on("remat"),
    ],
}];
