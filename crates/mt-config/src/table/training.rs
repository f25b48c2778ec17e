//! The training loop and the optimizer.

use super::{KeyGroup, features};
use crate::{
    groups::{LearningRateSchedule, OptimizerSpaceChoice, OptimizerType, WsdDecayStyle},
    key::{Key, Literal},
};

pub(super) const GROUPS: &[KeyGroup] = &[
    KeyGroup {
        name: "TrainingLoop",
        title: "Training loop",
        prefix: None,
        keys: &[
            Key::integer(
                "steps",
                150_001,
                "Number of steps to train, those of earlier parts of the run included; those of \
                 `learning_rate_schedule_steps` if -1.",
            )
            .at_least(-1.0)
            .acts_on("training loop")
            .run_level(),
            Key::integer(
                "log_period",
                100,
                "Steps between flushes of the TensorBoard events, which evaluations and checkpoints \
                 flush, too. The console has a line for each step.",
            )
            .at_least(1.0)
            .acts_on("training log")
            .run_level(),
            Key::integer("eval_interval", -1, "Steps between evaluations; none if -1.")
                .at_least(-1.0)
                .neutral(&[Literal::Integer(0)])
                .acts_on("evaluation")
                .may_change(),
            Key::integer("eval_steps", -1, "Batches in one evaluation; all of the evaluation data if -1.")
                .at_least(-1.0)
                .neutral(&[Literal::Integer(0)])
                .acts_on("evaluation")
                .may_change(),
            Key::float("target_eval_loss", 0.0, "Stop once the evaluation loss is this low.")
                .only_with("eval_interval", &[])
                .at_least(0.0)
                .acts_on("evaluation")
                .may_change(),
            Key::boolean(
                "abort_on_nan_loss",
                true,
                "Stop when the loss is not a number, unless `skip_step_on_spikes` skips the step.",
            )
            .acts_on("training loop")
            .may_change(),
            Key::boolean(
                "abort_on_inf_loss",
                true,
                "Stop when the loss is infinite, unless `skip_step_on_spikes` skips the step.",
            )
            .acts_on("training loop")
            .may_change(),
            Key::boolean("enable_dropout", true, "Drop activations while training, as `dropout_rate` says.")
                .acts_on("model"),
            Key::float("dropout_rate", 0.0, "Share of activations that are dropped.")
                .only_with("enable_dropout", &["true"])
                .at_least(0.0)
                .at_most(1.0)
                .acts_on("model"),
            Key::boolean("enable_data_shuffling", true, "Shuffle the training data.").acts_on("data"),
            Key::integer("data_shuffle_seed", 0, "Seed of the order of the training data.")
                .at_least(0.0)
                .acts_on("data"),
            Key::integer("init_weights_seed", 0, "Seed of the initial weights and of dropout.")
                .at_least(0.0)
                .acts_on("initialization"),
            Key::choice(
                "training_objective",
                "causal_lm",
                &["causal_lm", "block_diffusion"],
                "What the model learns: to predict the next token, or to fill in masked tokens \
                 block by block.",
            )
            .refused(features::BLOCK_DIFFUSION)
            .acts_on("loss"),
            Key::integer(
                "block_diffusion_mask_id",
                -1,
                "Token id that stands for a masked token in block diffusion; -1 leaves it \
                 unset.",
            )
            .at_least(-1.0)
            .refused(features::BLOCK_DIFFUSION)
            .only_with("training_objective", &["block_diffusion"])
            .acts_on("data"),
            Key::float(
                "block_diffusion_min_noise",
                0.001,
                "Smallest probability of masking that is drawn for a block of tokens; must be \
                 above 0.",
            )
            .at_least(0.0)
            .at_most(1.0)
            .refused(features::BLOCK_DIFFUSION)
            .only_with("training_objective", &["block_diffusion"])
            .acts_on("data"),
            Key::choice(
                "block_diffusion_logit_alignment",
                "same_position",
                &["same_position", "shifted"],
                "Whether logits predict the token at their own position or, when `shifted`, at \
                 the next one.",
            )
            .refused(features::BLOCK_DIFFUSION)
            .only_with("training_objective", &["block_diffusion"])
            .acts_on("loss"),
            Key::choice(
                "block_diffusion_canvas_policy",
                "all_masked",
                &["all_masked", "seed_and_mask"],
                "How a block starts out: with every token masked, or with its first token \
                 given.",
            )
            .refused(features::BLOCK_DIFFUSION)
            .only_with("training_objective", &["block_diffusion"])
            .acts_on("data"),
            Key::integer(
                "eval_start_step",
                0,
                "First step with an evaluation, from which `eval_interval` counts. Evaluations come \
                 before their step, and at the end; MaxText's come after it.",
            )
            .at_least(0.0)
            .only_with("eval_interval", &[])
            .acts_on("evaluation")
            .may_change(),
            Key::integer(
                "max_inflight_computations",
                2,
                "Most steps that are under way at once: the loop then waits for the oldest before it \
                 starts another.",
            )
            .at_least(1.0)
            .acts_on("training loop")
            .may_change(),
        ],
    },
    KeyGroup {
        name: "Optimizer",
        title: "Optimizer and learning rate",
        prefix: None,
        keys: &[
            Key::of::<OptimizerType>(
                "opt_type",
                "adamw",
                "The optimizer that updates the weights. `adafactor` is not MaxText's: optax's, with second \
                 moments of matrices kept by rows and columns, no momentum and no weight decay.",
            )
            .acts_on("optimizer"),
            Key::of::<OptimizerSpaceChoice>(
                "optimizer_space",
                "auto",
                "Form of the weights in which gradients are clipped, weights decay and the optimizer steps: as \
                 MaxText's checkpoints store them, or as published models have them. `auto` is `published` \
                 for a run that begins with published weights, and else `maxtext`; a run goes on in the space \
                 that it began in.",
            )
            .acts_on("optimizer")
            .own(),
            Key::float(
                "learning_rate",
                3e-5,
                "Learning rate at its peak, which is reached at the end of the warm-up.",
            )
            .at_least(0.0)
            .acts_on("optimizer"),
            Key::of::<LearningRateSchedule>(
                "lr_schedule_type",
                "cosine",
                "How the learning rate falls after the warm-up; `linear` and `constant` are not MaxText's.",
            )
            .acts_on("optimizer"),
            Key::float(
                "warmup_steps_fraction",
                0.1,
                "Share of the schedule in which the learning rate rises from 0 to its peak.",
            )
            .at_least(0.0)
            .at_most(1.0)
            .acts_on("optimizer"),
            Key::float(
                "learning_rate_final_fraction",
                0.1,
                "Learning rate at the end of the schedule, as a share of the peak.",
            )
            .at_least(0.0)
            .acts_on("optimizer"),
            Key::integer(
                "learning_rate_schedule_steps",
                -1,
                "Length of the schedule, after which the learning rate is 0; `steps` if -1.",
            )
            .at_least(-1.0)
            .acts_on("optimizer"),
            Key::float(
                "gradient_clipping_threshold",
                1.0,
                "Largest norm of all gradients together; larger ones are scaled down. 0 turns \
                 it off.",
            )
            .at_least(0.0)
            .acts_on("optimizer"),
            Key::integer(
                "gradient_accumulation_steps",
                1,
                "Batches whose gradients are summed before the weights change.",
            )
            .at_least(1.0)
            .at_most(1e6)
            .acts_on("training loop"),
            Key::boolean(
                "skip_step_on_spikes",
                false,
                "Leave the weights alone when the loss or the norm of the gradients, before they are \
                 clipped, jumps.",
            )
            .acts_on("optimizer"),
            Key::texts(
                "trainable_parameters_mask",
                &[],
                "Regular expressions; only parameters one of them fits, such as \
                 `decoder/decoder_norm/scale`, are trained. All if empty.",
            )
            .acts_on("optimizer"),
            Key::integer(
                "skip_step_interval",
                128,
                "Number of past steps from which mean and deviation of loss and gradients are \
                 taken.",
            )
            .at_least(1.0)
            .at_most(1e6)
            .only_with("skip_step_on_spikes", &[])
            .acts_on("optimizer"),
            Key::float(
                "skip_step_scaling_factor",
                6.0,
                "Deviations above the mean from which on a loss or a gradient norm counts as a \
                 spike.",
            )
            .at_least(0.0)
            .only_with("skip_step_on_spikes", &[])
            .acts_on("optimizer"),
            Key::boolean(
                "use_tunix_gradient_accumulation",
                false,
                "Let the Tunix trainer accumulate gradients instead of the training step.",
            )
            .no_effect_here(
                "it belongs to Tunix, which is not used; `gradient_accumulation_steps` is the \
                 key for it",
            )
            .acts_on("training loop"),
            Key::float(
                "wsd_decay_steps_fraction",
                0.1,
                "Share of the `wsd` schedule, at its end, in which the learning rate falls.",
            )
            .at_least(0.0)
            .at_most(1.0)
            .only_with("lr_schedule_type", &["wsd"])
            .acts_on("optimizer"),
            Key::of::<WsdDecayStyle>(
                "wsd_decay_style",
                "linear",
                "Shape of the fall of the learning rate at the end of the `wsd` schedule.",
            )
            .only_with("lr_schedule_type", &["wsd"])
            .acts_on("optimizer"),
        ],
    },
    KeyGroup {
        name: "AdamW",
        title: "AdamW",
        prefix: None,
        keys: &[
            Key::float("adam_b1", 0.9, "Decay of the running mean of gradients.")
                .at_least(0.0)
                .at_most(1.0)
                .acts_on("optimizer"),
            Key::float("adam_b2", 0.95, "Decay of the running mean of squared gradients.")
                .at_least(0.0)
                .at_most(1.0)
                .acts_on("optimizer"),
            Key::float("adam_eps", 1e-8, "Added to the root of the second moment.")
                .at_least(0.0)
                .acts_on("optimizer"),
            Key::float("adam_eps_root", 0.0, "Added to the second moment under the root.")
                .at_least(0.0)
                .acts_on("optimizer"),
            Key::float(
                "adam_weight_decay",
                0.1,
                "Share of each weight that is taken off at every step, times the learning rate.",
            )
            .at_least(0.0)
            .acts_on("optimizer"),
            Key::texts(
                "adamw_mask",
                &[],
                "Regular expressions; parameters that one of them fits, such as \
                 `decoder/decoder_norm/scale`, do not decay. With `opt_type=muon` of those that \
                 Adam treats, which in MaxText all decay.",
            )
            .only_with("opt_type", &["adamw", "adam_pax", "muon"])
            .acts_on("optimizer"),
            Key::choice(
                "mu_dtype",
                "",
                &["", "float32", "bfloat16"],
                "Type of the first moment; that of the weights if empty.",
            )
            .acts_on("optimizer"),
        ],
    },
    KeyGroup {
        name: "DilocoParams",
        title: "DiLoCo",
        prefix: None,
        keys: &[
            Key::boolean(
                "enable_diloco",
                false,
                "Train replicas apart and average them every `diloco_sync_period` steps.",
            )
            .refused(features::DILOCO)
            .acts_on("training loop"),
            Key::integer(
                "diloco_sync_period",
                36,
                "Number of steps that replicas train apart before an outer update brings them \
                 together.",
            )
            .at_least(1.0)
            .refused(features::DILOCO)
            .only_with("enable_diloco", &[])
            .acts_on("training loop"),
            Key::float(
                "diloco_outer_lr",
                0.3,
                "Learning rate of the outer update, which moves the shared weights towards the \
                 replicas' mean.",
            )
            .at_least(0.0)
            .refused(features::DILOCO)
            .only_with("enable_diloco", &[])
            .acts_on("optimizer"),
            Key::float(
                "diloco_outer_momentum",
                0.9,
                "Nesterov momentum of the outer update, as the share of the last one that is \
                 kept.",
            )
            .at_least(0.0)
            .at_most(1.0)
            .refused(features::DILOCO)
            .only_with("enable_diloco", &[])
            .acts_on("optimizer"),
            Key::text(
                "dcn_bandwidth_limit",
                "",
                "Slow the network between slices down to this rate, such as `10gbit`; empty \
                 for no limit.",
            )
            .no_effect_here("the network is not throttled from here; `tc` limits an interface")
            .acts_on("runtime")
            .may_change(),
            Key::text(
                "dcn_bandwidth_burst",
                "10mb",
                "Amount of data that may pass at once when the network between slices is \
                 slowed down.",
            )
            .no_effect_here("the network is not throttled from here; `tc` limits an interface")
            .acts_on("runtime")
            .may_change(),
            Key::text(
                "dcn_bandwidth_latency",
                "50ms",
                "Longest time a packet waits when the network between slices is slowed down.",
            )
            .no_effect_here("the network is not throttled from here; `tc` limits an interface")
            .acts_on("runtime")
            .may_change(),
            Key::text(
                "dcn_bandwidth_interface",
                "eth0",
                "Network interface whose traffic between slices is slowed down.",
            )
            .no_effect_here("the network is not throttled from here; `tc` limits an interface")
            .acts_on("runtime")
            .may_change(),
            Key::boolean(
                "enable_streaming_diloco",
                false,
                "Bring the replicas' weights together fragment by fragment instead of all at \
                 once.",
            )
            .refused(features::DILOCO)
            .only_with("enable_diloco", &[])
            .acts_on("training loop"),
            Key::optional_integer(
                "num_diloco_fragments",
                "Number of fragments that streaming DiLoCo splits the weights into; chosen by \
                 itself if none.",
            )
            .at_least(1.0)
            .refused(features::DILOCO)
            .only_with("enable_diloco", &[])
            .acts_on("training loop"),
            Key::boolean(
                "use_sequential_layers",
                false,
                "Make a fragment of layers that follow each other instead of layers taken at \
                 even distances.",
            )
            .refused(features::DILOCO)
            .only_with("enable_diloco", &[])
            .acts_on("training loop"),
            Key::integer(
                "num_communication_overlapping_steps",
                0,
                "Steps that pass between the start of a fragment's exchange and the use of its \
                 result.",
            )
            .at_least(0.0)
            .refused(features::DILOCO)
            .only_with("enable_diloco", &[])
            .acts_on("training loop"),
            Key::float(
                "communication_overlapping_alpha",
                0.0,
                "Share of a replica's own weights that is kept when an exchanged fragment is \
                 merged into them.",
            )
            .at_least(0.0)
            .at_most(1.0)
            .refused(features::DILOCO)
            .only_with("enable_diloco", &[])
            .acts_on("training loop"),
        ],
    },
    KeyGroup {
        name: "Muon",
        title: "Muon",
        prefix: None,
        keys: &[
            Key::float("muon_beta", 0.95, "Decay of the running mean of gradients in Muon.")
                .at_least(0.0)
                .at_most(1.0)
                .only_with("opt_type", &["muon"])
                .acts_on("optimizer"),
            Key::float(
                "muon_weight_decay",
                0.0,
                "Share of each weight that Muon takes off at every step, times the learning \
                 rate.",
            )
            .at_least(0.0)
            .only_with("opt_type", &["muon"])
            .acts_on("optimizer"),
            Key::optional_float(
                "muon_consistent_rms",
                "Root mean square that Muon scales its updates to, 0.2 to match AdamW; scaled \
                 by width if none.",
            )
            .at_least(0.0)
            .only_with("opt_type", &["muon"])
            .acts_on("optimizer"),
        ],
    },
];
