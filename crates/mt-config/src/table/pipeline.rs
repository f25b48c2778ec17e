//! Pipeline parallelism.

use super::{KeyGroup, features};
use crate::key::{Key, Literal};

pub(super) const GROUPS: &[KeyGroup] = &[KeyGroup {
    name: "PipelineParallelism",
    title: "Pipeline parallelism",
    prefix: None,
    keys: &[
        Key::boolean(
            "pipeline_fsdp_ag_per_repeat",
            false,
            "All-gather the weights of the next repeat of the pipeline in advance.",
        )
        .refused(features::PIPELINE_PARALLELISM)
        .only_with("using_pipeline_parallelism", &[])
        .acts_on("placement")
        .may_change(),
        Key::integer(
            "num_layers_per_pipeline_stage",
            1,
            "Number of layers that a pipeline stage computes in one go.",
        )
        .at_least(1.0)
        .refused(features::PIPELINE_PARALLELISM)
        .only_with("using_pipeline_parallelism", &[])
        .acts_on("placement")
        .may_change(),
        Key::integer(
            "num_pipeline_repeats",
            -1,
            "Number of times a micro-batch passes through all stages; -1 derives it from the number of \
             layers.",
        )
        .at_least(-1.0)
        .refused(features::PIPELINE_PARALLELISM)
        .only_with("using_pipeline_parallelism", &[])
        .acts_on("placement")
        .may_change(),
        Key::integer(
            "pipeline_parallel_layers",
            -1,
            "Number of layers that are spread over pipeline stages; -1 for all of them.",
        )
        .at_least(-1.0)
        .refused(features::PIPELINE_PARALLELISM)
        .only_with("using_pipeline_parallelism", &[])
        .acts_on("placement")
        .may_change(),
        Key::integer(
            "num_pipeline_microbatches",
            -1,
            "Number of micro-batches in the pipeline; -1 for one per stage.",
        )
        .at_least(-1.0)
        .refused(features::PIPELINE_PARALLELISM)
        .only_with("using_pipeline_parallelism", &[])
        .acts_on("training loop")
        .may_change(),
        Key::boolean(
            "pipeline_delay_activation_forwarding",
            false,
            "Pass activations on one iteration later, so that transfers overlap with \
             computation.",
        )
        .refused(features::PIPELINE_PARALLELISM)
        .only_with("using_pipeline_parallelism", &[])
        .acts_on("placement")
        .may_change(),
        Key::boolean(
            "pipeline_fsdp_ag_once",
            false,
            "All-gather weights once before the pipeline starts, rather than in each iteration.",
        )
        .refused(features::PIPELINE_PARALLELISM)
        .only_with("using_pipeline_parallelism", &[])
        .acts_on("placement")
        .may_change(),
        Key::boolean(
            "scan_pipeline_iterations",
            true,
            "Compile one iteration of the pipeline and loop over it, rather than all of \
             them.",
        )
        .refused(features::PIPELINE_PARALLELISM)
        .only_with("using_pipeline_parallelism", &[])
        .acts_on("compilation")
        .may_change(),
        Key::boolean(
            "scan_pipeline_repeats",
            true,
            "Compile one repeat of the pipeline and loop over it, rather than all of them.",
        )
        .neutral(&[Literal::Bool(false)])
        .refused(features::PIPELINE_PARALLELISM)
        .only_with("using_pipeline_parallelism", &[])
        .acts_on("compilation")
        .may_change(),
        Key::boolean(
            "scan_layers_per_stage",
            false,
            "Compile one layer of a pipeline stage and loop over the layers of the stage.",
        )
        .refused(features::PIPELINE_PARALLELISM)
        .only_with("using_pipeline_parallelism", &[])
        .acts_on("compilation")
        .may_change(),
        Key::boolean(
            "set_remat_policy_on_pipeline_iterations",
            true,
            "Apply `remat_policy` to each iteration of the pipeline.",
        )
        .refused(features::PIPELINE_PARALLELISM)
        .only_with("using_pipeline_parallelism", &[])
        .acts_on("remat")
        .may_change(),
        Key::boolean(
            "set_remat_policy_on_layers_per_stage",
            false,
            "Apply `remat_policy` to each layer inside a pipeline stage.",
        )
        .refused(features::PIPELINE_PARALLELISM)
        .only_with("using_pipeline_parallelism", &[])
        .acts_on("remat")
        .may_change(),
    ],
}];
