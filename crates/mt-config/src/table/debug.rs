//! Logs, metrics and what helps when something goes wrong.

use super::KeyGroup;
use crate::key::{Key, Literal};

pub(super) const GROUPS: &[KeyGroup] = &[
    KeyGroup {
        name: "Metrics",
        title: "Metrics",
        keys: &[
            Key::optional_text(
                "metrics_file",
                "File that receives one JSON object a step; `metrics/metrics.jsonl` in the run's \
                 directory if none.",
            )
            .acts_on("metrics")
            .run_level(),
            Key::boolean("enable_tensorboard", true, "Write TensorBoard events into the run's directory.")
                .acts_on("metrics")
                .run_level(),
            Key::boolean("gcs_metrics", false, "Write metrics to cloud storage.")
                .no_effect_here("metrics are written to local files only")
                .acts_on("metrics")
                .run_level(),
            Key::boolean("save_config_to_gcs", false, "Write the configuration to cloud storage.")
                .no_effect_here("the configuration is always saved in the run's directory")
                .acts_on("run directory")
                .run_level(),
            Key::integer("record_internal_nn_metrics", 0, "Record statistics of the activations.")
                .refused("statistics of activations")
                .acts_on("metrics")
                .may_change(),
            Key::boolean(
                "enable_goodput_recording",
                false,
                "Record how the time of a job was spent, in a cloud service.",
            )
            .no_effect_here("the cloud service it reports to is not used")
            .acts_on("metrics")
            .run_level(),
            Key::boolean(
                "monitor_goodput",
                false,
                "Report how the time of a job is spent, to a cloud service.",
            )
            .no_effect_here("the cloud service it reports to is not used")
            .acts_on("metrics")
            .run_level(),
            Key::boolean("use_vertex_tensorboard", false, "Upload TensorBoard events to a cloud service.")
                .no_effect_here("TensorBoard events are written to local files only")
                .acts_on("metrics")
                .run_level(),
        ],
    },
    KeyGroup {
        name: "DevelopmentAndDebugging",
        title: "Debugging",
        keys: &[
            Key::boolean("debug_sharding", false, "Print how each parameter is placed.")
                .acts_on("placement")
                .run_level(),
            Key::optional_text(
                "jax_cache_dir",
                "Directory of compiled programs; one in the user's cache directory if none.",
            )
            .maxtext_default(Literal::Text("~/jax_cache"))
            .acts_on("runtime")
            .run_level(),
        ],
    },
    KeyGroup {
        name: "HloDump",
        title: "Dumps of programs",
        keys: &[
            Key::boolean(
                "dump_hlo",
                false,
                "Write the StableHLO and the optimized HLO of compiled programs to files.",
            )
            .acts_on("runtime")
            .run_level(),
            Key::text("dump_hlo_local_dir", "/tmp/xla_dump/", "Directory of the dumped programs.")
                .acts_on("runtime")
                .run_level(),
            Key::text(
                "dump_hlo_local_module_name",
                "jit_train_step",
                "Only programs whose name contains this are dumped.",
            )
            .acts_on("runtime")
            .run_level(),
            Key::text(
                "dump_hlo_module_name",
                "jit_train_step",
                "Only programs whose name contains this are uploaded.",
            )
            .no_effect_here("dumps are not uploaded")
            .acts_on("runtime")
            .run_level(),
            Key::boolean("dump_hlo_delete_local_after", true, "Delete the dump once it is uploaded.")
                .no_effect_here("dumps are not uploaded, so they are kept")
                .acts_on("runtime")
                .run_level(),
            Key::text("dump_hlo_gcs_dir", "", "Where in cloud storage dumps are uploaded to.")
                .no_effect_here("dumps are not uploaded")
                .acts_on("runtime")
                .run_level(),
            Key::boolean("dump_hlo_upload_all", false, "Upload the dumps of all hosts.")
                .no_effect_here("dumps are not uploaded")
                .acts_on("runtime")
                .run_level(),
        ],
    },
    KeyGroup {
        name: "Profiling",
        title: "Profiling",
        keys: &[Key::choice(
            "profiler",
            "",
            &["", "xplane", "nsys"],
            "The profiler that records some steps.",
        )
        .refused("profiling")
        .acts_on("training loop")
        .may_change()],
    },
];
