//! Saving and restoring.

use super::KeyGroup;
use crate::key::{Key, Literal};

pub(super) const GROUPS: &[KeyGroup] = &[
    KeyGroup {
        name: "Checkpointing",
        title: "Checkpoints",
        keys: &[
            Key::boolean("enable_checkpointing", true, "Save checkpoints, and continue from the newest one.")
                .acts_on("checkpoint")
                .run_level(),
            Key::boolean("async_checkpointing", true, "Write checkpoints while training goes on.")
                .acts_on("checkpoint")
                .run_level(),
            Key::integer("checkpoint_period", 10_000, "Steps between checkpoints.")
                .at_least(1.0)
                .acts_on("checkpoint")
                .run_level(),
            Key::optional_integer(
                "max_num_checkpoints_to_keep",
                "How many of the newest checkpoints are kept; all if none.",
            )
            .at_least(1.0)
            .acts_on("checkpoint")
            .run_level(),
            Key::boolean("save_checkpoint_on_completion", true, "Save a checkpoint after the last step.")
                .acts_on("checkpoint")
                .run_level(),
            Key::text(
                "load_parameters_path",
                "",
                "Take the weights from this checkpoint or run, and begin at step 0.",
            )
            .acts_on("checkpoint"),
            Key::text(
                "load_full_state_path",
                "",
                "Take weights, optimizer state and step from this checkpoint or run.",
            )
            .acts_on("checkpoint"),
            Key::choice(
                "source_checkpoint_layout",
                "orbax",
                &["orbax", "safetensors"],
                "Format of the checkpoint that is loaded.",
            )
            .refused("loading safetensors")
            .acts_on("checkpoint"),
            Key::boolean(
                "enable_continuous_checkpointing",
                false,
                "Begin each checkpoint when the last is written.",
            )
            .refused("continuous checkpoints")
            .acts_on("checkpoint")
            .may_change(),
            Key::boolean(
                "checkpoint_is_quantized",
                false,
                "The checkpoint that is loaded holds quantized weights.",
            )
            .refused("quantized checkpoints")
            .acts_on("checkpoint"),
            Key::text("lora_input_adapters_path", "", "Adapters to load beside the weights.")
                .refused("LoRA adapters")
                .acts_on("checkpoint"),
            Key::boolean(
                "enable_single_replica_ckpt_restoring",
                false,
                "Let one replica read a checkpoint and send it to the others.",
            )
            .refused("restoring on one replica")
            .acts_on("checkpoint")
            .may_change(),
        ],
    },
    KeyGroup {
        name: "OrbaxStorage",
        title: "Checkpoint format",
        keys: &[
            Key::boolean(
                "checkpoint_storage_use_ocdbt",
                false,
                "Keep the chunks of all arrays in one database instead of one file each.",
            )
            .maxtext_default(Literal::Bool(true))
            .refused("OCDBT storage")
            .acts_on("checkpoint")
            .may_change(),
            Key::boolean("checkpoint_storage_use_zarr3", true, "Write Zarr version 3 instead of 2.")
                .refused("writing Zarr version 2")
                .acts_on("checkpoint")
                .may_change(),
            Key::integer(
                "checkpoint_storage_target_data_file_size_bytes",
                2_147_483_648,
                "Size of the data files of an OCDBT database.",
            )
            .no_effect_here("it belongs to OCDBT storage, which is not built yet")
            .acts_on("checkpoint")
            .may_change(),
        ],
    },
];
