//! What run this is, on what hardware.

use super::KeyGroup;
use crate::key::{Key, Literal};

pub(super) const GROUPS: &[KeyGroup] = &[
    KeyGroup {
        name: "RunInfo",
        title: "The run",
        keys: &[
            Key::optional_text(
                "base_config",
                "A YAML file, or the name of a preset, that this YAML file builds on.",
            )
            .acts_on("configuration"),
            Key::text(
                "run_name",
                "",
                "Name of the run and of its directory; left empty, a new run is named by model and \
                 time.",
            )
            .acts_on("run directory")
            .run_level(),
            Key::text(
                "model_name",
                "default",
                "A named model, whose dimensions then come from its own YAML file.",
            )
            .acts_on("configuration"),
            Key::boolean(
                "override_model_config",
                false,
                "Let the command line and the environment change what a named model sets.",
            )
            .acts_on("configuration")
            .may_change(),
            Key::boolean(
                "override_logical_axis_rules",
                false,
                "Replace all placement rules by the given ones instead of only those of the same \
                 names.",
            )
            .acts_on("configuration")
            .may_change(),
            Key::boolean(
                "resolved",
                false,
                "Marks a saved configuration: it already holds what its model and presets set, which \
                 are not applied again.",
            )
            .acts_on("configuration")
            .may_change()
            .own(),
            Key::boolean(
                "log_config",
                true,
                "Print at the start which keys were given and where each comes from.",
            )
            .acts_on("training log")
            .run_level(),
            Key::text(
                "base_output_directory",
                "",
                "Directory that holds the directories of runs; `maxtext_output` in the current \
                 directory if empty.",
            )
            .acts_on("run directory")
            .run_level(),
        ],
    },
    KeyGroup {
        name: "HardwareAndMesh",
        title: "Hardware",
        keys: &[
            Key::choice(
                "hardware",
                "auto",
                &["auto", "tpu", "gpu", "gpu_multiprocess", "cpu"],
                "The kind of device to run on; `auto` takes the best whose plugin is installed.",
            )
            .maxtext_default(Literal::Text("tpu"))
            .refuse_choices(&[("gpu_multiprocess", "training over several GPU processes")])
            .acts_on("runtime")
            .run_level(),
            Key::integer("num_cpu_devices", 1, "Number of virtual devices that the CPU is divided into.")
                .at_least(1.0)
                .at_most(4096.0)
                .acts_on("runtime")
                .run_level()
                .own(),
            Key::text("pjrt_plugin_path", "", "The PJRT plugin to load, instead of searching for one.")
                .acts_on("runtime")
                .run_level()
                .own(),
            Key::boolean("enable_nnx", true, "Use MaxText's NNX modules.")
                .no_effect_here("models here are Rust modules, of which there is one kind")
                .acts_on("model")
                .may_change(),
            Key::boolean("pure_nnx", true, "Use NNX modules throughout.")
                .no_effect_here("models here are Rust modules, of which there is one kind")
                .acts_on("model")
                .may_change(),
            Key::boolean("pure_nnx_decoder", true, "Use the NNX decoder.")
                .no_effect_here("models here are Rust modules, of which there is one kind")
                .acts_on("model")
                .may_change(),
        ],
    },
];
