//! The training loop and the optimizer.

use super::KeyGroup;
use crate::key::Key;

pub(super) const GROUPS: &[KeyGroup] = &[
    KeyGroup {
        name: "TrainingLoop",
        title: "Training loop",
        keys: &[
            Key::integer(
                "steps",
                150_001,
                "Number of steps to train, those of earlier parts of the run included.",
            )
            .at_least(0.0)
            .acts_on("training loop")
            .run_level(),
            Key::integer("log_period", 100, "Steps between flushes of the TensorBoard events.")
                .at_least(1.0)
                .acts_on("training log")
                .run_level(),
            Key::integer("eval_interval", -1, "Steps between evaluations; none if -1.")
                .at_least(-1.0)
                .acts_on("evaluation")
                .may_change(),
            Key::integer("eval_steps", -1, "Batches in one evaluation; all of the evaluation data if -1.")
                .at_least(-1.0)
                .acts_on("evaluation")
                .may_change(),
            Key::float("target_eval_loss", 0.0, "Stop once the evaluation loss is this low.")
                .refused("stopping at a target loss")
                .acts_on("evaluation")
                .may_change(),
            Key::boolean("abort_on_nan_loss", true, "Stop when the loss is not a number.")
                .acts_on("training loop")
                .may_change(),
            Key::boolean("abort_on_inf_loss", true, "Stop when the loss is infinite.")
                .acts_on("training loop")
                .may_change(),
            Key::boolean("enable_dropout", true, "Drop activations while training, as `dropout_rate` says.")
                .acts_on("model"),
            Key::float("dropout_rate", 0.0, "Share of activations that are dropped.")
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
        ],
    },
    KeyGroup {
        name: "Optimizer",
        title: "Optimizer and learning rate",
        keys: &[
            Key::choice(
                "opt_type",
                "adamw",
                &["adamw", "adam_pax", "sgd", "muon"],
                "The optimizer that updates the weights.",
            )
            .refuse_choices(&[
                ("adam_pax", "the optimizer `adam_pax`"),
                ("sgd", "the optimizer `sgd`"),
                ("muon", "the optimizer `muon`"),
            ])
            .acts_on("optimizer"),
            Key::float(
                "learning_rate",
                3e-5,
                "Learning rate at its peak, which is reached at the end of the warm-up.",
            )
            .at_least(0.0)
            .acts_on("optimizer"),
            Key::choice(
                "lr_schedule_type",
                "cosine",
                &["cosine", "wsd"],
                "How the learning rate falls after the warm-up.",
            )
            .refuse_choices(&[("wsd", "the schedule `wsd`")])
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
                "Largest norm of all gradients together; larger ones are scaled down. 0 turns it off.",
            )
            .at_least(0.0)
            .acts_on("optimizer"),
            Key::integer(
                "gradient_accumulation_steps",
                1,
                "Batches whose gradients are summed before the weights change.",
            )
            .at_least(1.0)
            .refused("gradient accumulation")
            .acts_on("training loop"),
            Key::boolean(
                "skip_step_on_spikes",
                false,
                "Leave the weights alone when the loss or the gradients jump.",
            )
            .refused("skipping steps on spikes")
            .acts_on("optimizer"),
            Key::texts("trainable_parameters_mask", &[], "Patterns of the parameters that are trained.")
                .refused("training some of the parameters")
                .acts_on("optimizer"),
        ],
    },
    KeyGroup {
        name: "AdamW",
        title: "AdamW",
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
            Key::texts("adamw_mask", &[], "Patterns of the parameters that do not decay.")
                .refused("weight decay of some of the parameters")
                .acts_on("optimizer"),
            Key::choice(
                "mu_dtype",
                "",
                &["", "float32", "bfloat16"],
                "Type of the first moment; that of the weights if empty.",
            )
            .refuse_choices(&[("bfloat16", "bfloat16 moments")])
            .acts_on("optimizer"),
        ],
    },
];
