//! Logs, metrics and diagnostics.

use super::{KeyGroup, features};
use crate::{
    groups::ProfilerChoice,
    key::{Key, Literal},
};

pub(super) const GROUPS: &[KeyGroup] = &[
    KeyGroup {
        name: "Metrics",
        title: "Metrics",
        prefix: None,
        keys: &[
            Key::optional_text(
                "metrics_file",
                "File of metrics, with one JSON object per step; `metrics/metrics.jsonl` in the run's \
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
            Key::integer(
                "record_internal_nn_metrics",
                0,
                "Record, if above 0, statistics of each layer's output at every training step: \
                 `activ_mean/layer_NNN`, `activ_stdev/layer_NNN` and `activ_fraction_zero/layer_NNN`, each of a \
                 whole batch, or averaged over its micro-batches.",
            )
            .at_least(0.0)
            .acts_on("metrics")
            .may_change(),
            Key::boolean(
                "enable_goodput_recording",
                false,
                "Record how the time of the run is spent, over all its processes, in \
                 `metrics/goodput.jsonl` of its directory.",
            )
            .acts_on("metrics")
            .run_level(),
            Key::boolean(
                "monitor_goodput",
                false,
                "Report goodput and badput, the shares of the time in which the run progressed or did not, \
                 among its metrics. Records them as well, as `enable_goodput_recording` does.",
            )
            .acts_on("metrics")
            .run_level(),
            Key::boolean("use_vertex_tensorboard", false, "Upload TensorBoard events to a cloud service.")
                .no_effect_here("TensorBoard events are written to local files only")
                .acts_on("metrics")
                .run_level(),
            Key::integer(
                "prometheus_port",
                0,
                "Network port from which Prometheus reads the server's metrics; 0 turns it off.",
            )
            .at_least(0.0)
            .at_most(65535.0)
            .refused("a Prometheus endpoint")
            .acts_on("server")
            .run_level(),
            Key::boolean(
                "enable_checkpoint_cloud_logger",
                false,
                "Report how long saving and restoring take to a cloud service.",
            )
            .no_effect_here("this program uses no monitoring service of Google")
            .acts_on("checkpoint")
            .run_level(),
            Key::boolean("enable_tunix_perf_metrics", false, "Record the performance of the Tunix trainer.")
                .no_effect_here(
                    "it belongs to Tunix, which is not used; `metrics_file` holds the times of \
                     steps",
                )
                .acts_on("metrics")
                .run_level(),
            Key::boolean("enable_wandb", false, "Send metrics to Weights & Biases.")
                .refused(features::WANDB)
                .acts_on("metrics")
                .run_level(),
            Key::text(
                "wandb_project_name",
                "maxtext",
                "Project of Weights & Biases that the run belongs to.",
            )
            .refused(features::WANDB)
            .only_with("enable_wandb", &[])
            .acts_on("metrics")
            .run_level(),
            Key::text("wandb_run_name", "", "Name of the run in Weights & Biases; `run_name` if empty.")
                .refused(features::WANDB)
                .only_with("enable_wandb", &[])
                .acts_on("metrics")
                .run_level(),
        ],
    },
    KeyGroup {
        name: "DevelopmentAndDebugging",
        title: "Debugging",
        prefix: None,
        keys: &[
            Key::boolean("debug_sharding", false, "Print the placement of each parameter.")
                .acts_on("placement")
                .run_level(),
            Key::optional_text(
                "jax_cache_dir",
                "Directory of the executable cache; one in the user's cache directory if none.",
            )
            .maxtext_default(Literal::Text("~/jax_cache"))
            .acts_on("runtime")
            .run_level(),
            Key::floats(
                "constant_bound_config",
                "Six fixed bounds of the operands of fp8 products, forward and backward; measured if empty.",
            )
            .refused(features::QUANTIZATION)
            .acts_on("quantization"),
            Key::integer(
                "jax_distributed_initialization_timeout",
                300,
                "Seconds that a process waits at the start until all others have joined.",
            )
            .at_least(0.0)
            .refused(features::PROCESSES)
            .acts_on("runtime")
            .may_change(),
            Key::text(
                "jax_debug_log_modules",
                "",
                "JAX modules whose debug messages are printed, separated by commas.",
            )
            .no_effect_here("it sets the level of Python's loggers, which this program does not have")
            .acts_on("logging")
            .run_level(),
            Key::boolean(
                "skip_jax_distributed_system",
                false,
                "Do not connect to other processes at the start.",
            )
            .no_effect_here("a run has one process; several are not built yet")
            .acts_on("runtime")
            .may_change(),
            Key::boolean("enable_single_controller", false, "Let one Pathways process control all devices.")
                .no_effect_here("it runs MaxText under Pathways, which this program does not use")
                .acts_on("runtime")
                .may_change(),
            Key::text(
                "subslice_shape",
                "",
                "Shape in chips of the subslice to use, such as `2,2,1`; empty for the whole slice.",
            )
            .refused(features::CUSTOM_DEVICE_ORDERS)
            .acts_on("mesh")
            .may_change(),
            Key::boolean("max_checkify", false, "Check batches while training, which slows it down.")
                .no_effect_here(
                    "JAX's run-time checks do not exist here; `abort_on_nan_loss` and \
                     `abort_on_inf_loss` stop a bad run",
                )
                .acts_on("training loop")
                .may_change(),
        ],
    },
    KeyGroup {
        name: "HloDump",
        title: "Dumps of programs",
        prefix: None,
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
                "Dump only programs whose name contains this. A command that has no such program dumps all.",
            )
            .acts_on("runtime")
            .run_level(),
            Key::text(
                "dump_hlo_module_name",
                "jit_train_step",
                "Upload only programs whose name contains this.",
            )
            .no_effect_here("dumps are not uploaded")
            .acts_on("runtime")
            .run_level(),
            Key::boolean("dump_hlo_delete_local_after", true, "Delete the dump once it is uploaded.")
                .no_effect_here("dumps are not uploaded, so they are kept")
                .acts_on("runtime")
                .run_level(),
            Key::text("dump_hlo_gcs_dir", "", "Location in cloud storage to which dumps are uploaded.")
                .no_effect_here("dumps are not uploaded")
                .acts_on("runtime")
                .run_level(),
            Key::boolean("dump_hlo_upload_all", false, "Upload the dumps of all hosts.")
                .no_effect_here("dumps are not uploaded")
                .acts_on("runtime")
                .run_level(),
            Key::integer(
                "dump_step",
                -1,
                "Step at which the dumped programs are uploaded; -1 for the first.",
            )
            .no_effect_here("a program is dumped once, when it is compiled")
            .acts_on("runtime")
            .run_level(),
            Key::text(
                "dump_hlo_xla_flags",
                "",
                "Compiler options for dumping programs, instead of the usual ones.",
            )
            .no_effect_here("`compile_xla_flags` passes options to the compiler, including those for dumps")
            .acts_on("runtime")
            .run_level(),
            Key::boolean(
                "dump_jaxpr",
                false,
                "Write the traced training step, before it becomes StableHLO, to a file.",
            )
            .refused(features::DUMPS_OF_TRACED_PROGRAMS)
            .acts_on("runtime")
            .run_level(),
            Key::text(
                "dump_jaxpr_local_dir",
                "/tmp/jaxpr_dump/",
                "Directory of the dumps of traced programs.",
            )
            .refused(features::DUMPS_OF_TRACED_PROGRAMS)
            .acts_on("runtime")
            .run_level(),
            Key::boolean(
                "dump_jaxpr_delete_local_after",
                true,
                "Delete the dump of the traced program once it is uploaded.",
            )
            .neutral(&[Literal::Bool(false)])
            .no_effect_here("dumps are not uploaded, so they are kept")
            .acts_on("runtime")
            .run_level(),
            Key::text(
                "dump_jaxpr_gcs_dir",
                "",
                "Location in cloud storage to which dumps of traced programs are uploaded.",
            )
            .no_effect_here("dumps are not uploaded")
            .acts_on("runtime")
            .run_level(),
        ],
    },
    KeyGroup {
        name: "Profiling",
        title: "Profiling",
        prefix: None,
        keys: &[
            Key::of::<ProfilerChoice>(
                "profiler",
                "",
                "The profiler that records some steps: `xplane` writes what the training loop does and what the \
                 plugin records of devices into `tensorboard/plugins/profile` of the run's directory, for XProf \
                 and for Perfetto.",
            )
            .acts_on("training loop")
            .run_level(),
            Key::boolean(
                "upload_all_profiler_results",
                false,
                "Record and keep a profile of every host instead of only the first.",
            )
            .no_effect_here("training runs on one host, whose profile is always kept")
            .only_with("profiler", &[])
            .acts_on("profiling")
            .run_level(),
            Key::integer(
                "skip_first_n_steps_for_profiler",
                1,
                "Number of steps before the profiler begins, so that compilation stays out of \
                 the profile.",
            )
            .at_least(0.0)
            .only_with("profiler", &[])
            .acts_on("profiling")
            .run_level(),
            Key::integer("profiler_steps", 5, "Number of steps that one profile covers.")
                .at_least(0.0)
                .only_with("profiler", &[])
                .acts_on("profiling")
                .run_level(),
            Key::boolean(
                "profile_cleanly",
                true,
                "Wait for the devices before and after a profile, so that it contains whole steps.",
            )
            .only_with("profiler", &[])
            .acts_on("profiling")
            .run_level(),
            Key::integer(
                "profile_periodically_period",
                -1,
                "Number of steps from the start of one profile to the next; -1 or 0 for a \
                 single one.",
            )
            .at_least(-1.0)
            .only_with("profiler", &[])
            .acts_on("profiling")
            .run_level(),
            Key::boolean(
                "hide_profiler_step_metric",
                false,
                "Leave the times of steps at which the profiler starts or stops out of the log.",
            )
            .only_with("profiler", &[])
            .acts_on("profiling")
            .run_level(),
            Key::boolean(
                "enable_jax_profiler",
                false,
                "Allow profiles on demand over a network port.",
            )
            .refused(features::PROFILES_OVER_A_PORT)
            .only_with("profiler", &[])
            .acts_on("profiling")
            .run_level(),
            Key::integer(
                "jax_profiler_port",
                9999,
                "Network port for profiles on demand.",
            )
            .at_least(0.0)
            .at_most(65535.0)
            .refused(features::PROFILES_OVER_A_PORT)
            .only_with("profiler", &[])
            .acts_on("profiling")
            .run_level(),
            Key::boolean(
                "enable_tpu_profiling_options",
                false,
                "Apply the options of TPU profiles, the keys `tpu_num_*`.",
            )
            .refused(features::PROFILE_OPTIONS_OF_TPUS)
            .only_with("profiler", &[])
            .acts_on("profiling")
            .run_level(),
            Key::integer(
                "tpu_num_chips_to_profile_per_task",
                1,
                "Number of TPU chips of each process that are profiled.",
            )
            .at_least(0.0)
            .refused(features::PROFILE_OPTIONS_OF_TPUS)
            .only_with("profiler", &[])
            .acts_on("profiling")
            .run_level(),
            Key::integer(
                "tpu_num_sparse_cores_to_trace",
                2,
                "Number of SparseCores of a TPU chip that are in a profile.",
            )
            .at_least(0.0)
            .refused(features::PROFILE_OPTIONS_OF_TPUS)
            .only_with("profiler", &[])
            .acts_on("profiling")
            .run_level(),
            Key::integer(
                "tpu_num_sparse_core_tiles_to_trace",
                1,
                "Number of tiles of each SparseCore that are in a profile.",
            )
            .at_least(0.0)
            .refused(features::PROFILE_OPTIONS_OF_TPUS)
            .only_with("profiler", &[])
            .acts_on("profiling")
            .run_level(),
            Key::integer(
                "xprof_tpu_power_trace_level",
                0,
                "Level of detail of a TPU's power trace: 0 is off, 1 normal, 2 the finest.",
            )
            .at_least(0.0)
            .at_most(2.0)
            .refused(features::PROFILE_OPTIONS_OF_TPUS)
            .only_with("profiler", &[])
            .acts_on("profiling")
            .run_level(),
            Key::boolean(
                "xprof_e2e_enable_fw_throttle_event",
                false,
                "Record in a profile when a TPU's firmware slows the chip down.",
            )
            .refused(features::PROFILE_OPTIONS_OF_TPUS)
            .only_with("profiler", &[])
            .acts_on("profiling")
            .run_level(),
            Key::boolean(
                "xprof_e2e_enable_fw_power_level_event",
                false,
                "Record in a profile when a TPU's firmware changes the power level.",
            )
            .refused(features::PROFILE_OPTIONS_OF_TPUS)
            .only_with("profiler", &[])
            .acts_on("profiling")
            .run_level(),
            Key::boolean(
                "xprof_e2e_enable_fw_thermal_event",
                false,
                "Record in a profile when a TPU's firmware reports heat.",
            )
            .refused(features::PROFILE_OPTIONS_OF_TPUS)
            .only_with("profiler", &[])
            .acts_on("profiling")
            .run_level(),
            Key::boolean("profile_power_events", false, "Add a TPU's power and heat events to the profile.")
            .refused(features::PROFILE_OPTIONS_OF_TPUS)
                .only_with("profiler", &[])
                .acts_on("profiling")
                .run_level(),
        ],
    },
    KeyGroup {
        name: "AOT",
        title: "Compiling ahead of time",
        prefix: None,
        keys: &[
            Key::text(
                "compiled_trainstep_file",
                "",
                "File of the training step compiled ahead of time, which `compile` writes and `train` \
                 reads; empty for none.",
            )
            .acts_on("compilation")
            .may_change(),
            Key::text(
                "compile_topology",
                "",
                "Name of absent hardware for which a run is compiled or estimated, such as `v5p-128`; empty \
                 for this machine.",
            )
            .acts_on("compilation")
            .run_level(),
            Key::integer(
                "compile_topology_num_slices",
                -1,
                "Number of slices of `compile_topology`; -1 for one.",
            )
            .at_least(-1.0)
            .at_most(1024.0)
            .only_with("compile_topology", &[])
            .acts_on("compilation")
            .run_level(),
            Key::boolean(
                "write_estimator_result",
                false,
                "Write the commands suggested by a search for batch size and remat policy to a file.",
            )
            .refused(features::MEMORY_ESTIMATES)
            .acts_on("runtime")
            .run_level(),
        ],
    },
];
