//! Checkpoints.

use super::{KeyGroup, features};
use crate::key::{Key, Literal};

pub(super) const GROUPS: &[KeyGroup] = &[
    KeyGroup {
        name: "Checkpointing",
        title: "Checkpoints",
        prefix: None,
        keys: &[
            Key::boolean("enable_checkpointing", true, "Save checkpoints, and resume from the newest one.")
                .acts_on("checkpoint")
                .run_level(),
            Key::boolean("async_checkpointing", true, "Write checkpoints while training continues.")
                .acts_on("checkpoint")
                .run_level(),
            Key::integer("checkpoint_period", 10_000, "Steps between checkpoints.")
                .at_least(1.0)
                .acts_on("checkpoint")
                .run_level(),
            Key::optional_integer(
                "max_num_checkpoints_to_keep",
                "Number of newest checkpoints to keep; all if none.",
            )
            .at_least(1.0)
            .acts_on("checkpoint")
            .run_level(),
            Key::optional_integer(
                "checkpoint_keep_period",
                "Steps that are multiples of this number keep their checkpoints, in addition to the newest ones.",
            )
            .at_least(1.0)
            .only_with("max_num_checkpoints_to_keep", &[])
            .acts_on("checkpoint")
            .run_level()
            .own(),
            Key::integer(
                "checkpoint_keep_best",
                0,
                "Number of checkpoints with the lowest evaluation losses to keep, in addition to the newest ones; \
                 an evaluation among the best saves a checkpoint.",
            )
            .at_least(0.0)
            .only_with("max_num_checkpoints_to_keep", &[])
            .acts_on("checkpoint")
            .run_level()
            .own(),
            Key::integer(
                "preemption_deadline_seconds",
                0,
                "Seconds after SIGTERM, SIGINT, SIGUSR1 or SIGUSR2 within which the run ends: a checkpoint that \
                 is not written by then is given up; 0 for no deadline.",
            )
            .at_least(0.0)
            .acts_on("checkpoint")
            .run_level()
            .own(),
            Key::boolean(
                "stop_on_checkpoint_failure",
                true,
                "End the run when a checkpoint cannot be written, such as when a disk is full, a server cannot be \
                 reached or credentials expire; otherwise the run warns, goes on, and tries again when the next one \
                 is due. The last checkpoint of a run must be written in any case.",
            )
            .acts_on("checkpoint")
            .run_level()
            .own(),
            Key::boolean("save_checkpoint_on_completion", true, "Save a checkpoint after the last step.")
                .acts_on("checkpoint")
                .run_level(),
            Key::text(
                "hf_model_path",
                "",
                "Directory of a published model in Hugging Face's format, which provides the architecture \
                 and the initial weights.",
            )
            .acts_on("checkpoint")
            .own(),
            Key::text(
                "load_parameters_path",
                "",
                "Load the weights of this checkpoint or run, and start at step 0.",
            )
            .acts_on("checkpoint"),
            Key::text(
                "load_full_state_path",
                "",
                "Load weights, optimizer state and step of this checkpoint or run.",
            )
            .acts_on("checkpoint"),
            Key::choice(
                "source_checkpoint_layout",
                "orbax",
                &["orbax", "safetensors"],
                "Format of the checkpoint that is loaded.",
            )
            .no_effect_here("the format is detected from the directory's files")
            .acts_on("checkpoint"),
            Key::boolean(
                "enable_continuous_checkpointing",
                false,
                "Start each checkpoint as soon as the previous one is written, instead of every `checkpoint_period` steps.",
            )
            .acts_on("checkpoint")
            .run_level(),
            Key::boolean(
                "checkpoint_is_quantized",
                false,
                "The checkpoint that is loaded holds quantized weights.",
            )
            .refused(features::QUANTIZED_CHECKPOINTS)
            .acts_on("checkpoint"),
            Key::text("lora_input_adapters_path", "", "Adapters to load with the weights.")
                .refused(features::ADAPTERS_BY_OTHER_KEYS)
                .acts_on("checkpoint"),
            Key::boolean(
                "enable_single_replica_ckpt_restoring",
                false,
                "Let one replica read a checkpoint and send it to the others.",
            )
            .no_effect_here("a process reads each shard once, whatever the number of replicas, and copies it to all of them")
            .acts_on("checkpoint")
            .may_change(),
            Key::boolean(
                "load_checkpoint_only_once",
                false,
                "Copy the reference model into the policy instead of reading the checkpoint a \
                 second time.",
            )
            .no_effect_here("it saves time of loading alone, and the program reads a checkpoint as often as it needs")
            .acts_on("reinforcement learning")
            .may_change(),
            Key::optional_text(
                "checkpoint_todelete_subdir",
                "Subdirectory that old checkpoints are moved to instead of being deleted; they \
                 are deleted if none.",
            )
            .neutral(&[Literal::Text("")])
            .only_with("max_num_checkpoints_to_keep", &[])
            .acts_on("checkpoint")
            .run_level(),
            Key::optional_text(
                "checkpoint_todelete_full_path",
                "Full path of the directory that old checkpoints are moved to; they are \
                 deleted if none.",
            )
            .neutral(&[Literal::Text("")])
            .only_with("max_num_checkpoints_to_keep", &[])
            .acts_on("checkpoint")
            .run_level(),
            Key::boolean(
                "force_unroll",
                false,
                "Write every layer on its own into a checkpoint of parameters only, even if \
                 the layers are stacked.",
            )
            .refused(features::CONVERSION_OF_CHECKPOINTS)
            .acts_on("checkpoint")
            .may_change(),
            Key::text(
                "save_quantized_params_path",
                "",
                "Directory for the weights after they are quantized on load; not saved if empty.",
            )
            .refused(features::QUANTIZED_CHECKPOINTS)
            .acts_on("checkpoint")
            .run_level(),
            Key::boolean("enable_orbax_v1", false, "Handle checkpoints with version 1 of the Orbax library.")
                .no_effect_here(
                    "it selects a version of the Orbax library; this program reads and writes the format \
                     itself",
                )
                .acts_on("checkpoint")
                .may_change(),
            Key::optional_text(
                "checkpoint_conversion_fn",
                "Function that turns a loaded checkpoint of another layout into parameters; \
                 none by default.",
            )
            .no_effect_here("it names a Python function; weights are renamed by the model family's own map")
            .acts_on("checkpoint"),
            Key::boolean(
                "colocated_python_checkpointing",
                false,
                "Write checkpoints on the accelerators' hosts under a single controller.",
            )
            .no_effect_here(
                "it runs Python beside the accelerators of Pathways; this program writes \
                 checkpoints from its own process",
            )
            .acts_on("checkpoint")
            .may_change(),
            Key::boolean(
                "enable_autocheckpoint",
                false,
                "Save a checkpoint when the machine announces that the job will be stopped.",
            )
            .no_effect_here("a run that SIGTERM, SIGINT, SIGUSR1 or SIGUSR2 stops always saves a checkpoint")
            .acts_on("checkpoint")
            .run_level(),
            Key::text(
                "hf_lora_adapter_path",
                "",
                "Directory or hub name of a Hugging Face adapter that is converted with the \
                 weights.",
            )
            .refused(features::ADAPTERS_BY_OTHER_KEYS)
            .acts_on("checkpoint"),
            Key::boolean("save_checkpoint_on_start", true, "Save a checkpoint at step 0 as well.")
                .acts_on("checkpoint")
                .run_level(),
            Key::boolean(
                "convert_checkpoint_if_possible",
                false,
                "Begin with the published weights of `model_name`, from the Hugging Face hub, if no key names weights. \
                 They are read as they are, without a conversion. Presets do not ask for them.",
            )
            .acts_on("checkpoint")
            .may_change(),
        ],
    },
    KeyGroup {
        name: "OrbaxStorage",
        title: "Checkpoint format",
        prefix: None,
        keys: &[
            Key::boolean(
                "checkpoint_storage_use_ocdbt",
                true,
                "Save all arrays of a checkpoint in one OCDBT database; a directory of files for each array if \
                 false. Both are read.",
            )
            .acts_on("checkpoint")
            .may_change(),
            Key::boolean(
                "checkpoint_storage_use_zarr3",
                true,
                "Save arrays in version 3 of Zarr, or in version 2 if false. Both are read.",
            )
            .acts_on("checkpoint")
            .may_change(),
            Key::integer(
                "checkpoint_storage_target_data_file_size_bytes",
                2_147_483_648,
                "Size at which a data file of an OCDBT database is full, and the maximum size of a chunk; 0 for no limit.",
            )
            .at_least(0.0)
            .acts_on("checkpoint")
            .may_change(),
            Key::integer(
                "checkpoint_storage_concurrent_gb",
                96,
                "Gigabytes of arrays that are read or written concurrently.",
            )
            .no_effect_here(
                "it bounds the memory of the Orbax library; this program schedules its own \
                 reads and writes",
            )
            .acts_on("checkpoint")
            .may_change(),
        ],
    },
    KeyGroup {
        name: "EmergencyCheckpointing",
        title: "Emergency and multi-tier checkpoints",
        prefix: None,
        keys: &[
            Key::boolean(
                "enable_multi_tier_checkpointing",
                false,
                "Save often to local storage and copy some of those checkpoints to persistent \
                 storage.",
            )
            .acts_on("checkpoint")
            .run_level(),
            Key::text(
                "local_checkpoint_directory",
                "",
                "Directory on fast local storage that holds emergency or multi-tier \
                 checkpoints; each run has a directory of its name in it.",
            )
            .only_with("enable_emergency_checkpoint", &[])
            .only_with("enable_multi_tier_checkpointing", &[])
            .acts_on("checkpoint")
            .run_level(),
            Key::integer(
                "local_checkpoint_period",
                0,
                "Number of steps between checkpoints on local storage; 0 for none.",
            )
            .at_least(0.0)
            .only_with("enable_emergency_checkpoint", &[])
            .only_with("enable_multi_tier_checkpointing", &[])
            .acts_on("checkpoint")
            .run_level(),
            Key::integer(
                "multi_tier_checkpointing_backup_interval_minutes",
                0,
                "Minutes between copies of local checkpoints to persistent storage; 0 turns it \
                 off.",
            )
            .at_least(0.0)
            .or_none()
            .neutral(&[Literal::None])
            .only_with("enable_multi_tier_checkpointing", &[])
            .acts_on("checkpoint")
            .run_level(),
            Key::integer(
                "mtc_data_parallelism",
                0,
                "Number of identical replicas that can restore each other; 0 for one per slice.",
            )
            .at_least(0.0)
            .refused(features::PROCESSES)
            .acts_on("checkpoint")
            .may_change(),
            Key::boolean(
                "enable_emergency_checkpoint",
                false,
                "Save to local storage between the persistent checkpoints, for a quick restart \
                 after a failure.",
            )
            .acts_on("checkpoint")
            .run_level(),
            Key::boolean(
                "use_replicator_service",
                false,
                "Let a service of Google Kubernetes Engine copy emergency checkpoints between hosts and to \
                 persistent storage; refused, because the service is not part of this program.",
            )
            .acts_on("checkpoint")
            .run_level(),
            Key::integer(
                "replicator_backup_interval_minutes",
                0,
                "Minutes between the backups that the replicator service makes; 0 turns it off.",
            )
            .at_least(0.0)
            .only_with("use_replicator_service", &[])
            .acts_on("checkpoint")
            .run_level(),
            Key::optional_integer(
                "multi_tier_checkpointing_backup_interval_steps",
                "Number of steps between copies of local checkpoints to persistent storage; \
                 off if none.",
            )
            .at_least(1.0)
            .only_with("enable_multi_tier_checkpointing", &[])
            .acts_on("checkpoint")
            .run_level(),
        ],
    },
];
