//! Fine-tuning, preference optimization, adapters and distillation.

use super::KeyGroup;
use crate::{
    groups::{BaseCodes, FeatureLoss, SftLoss, WeightSchedule},
    key::{Choice, Key, Literal},
};

pub(super) const GROUPS: &[KeyGroup] = &[
    KeyGroup {
        name: "FineTuning",
        title: "Fine-tuning",
        prefix: None,
        keys: &[
            Key::boolean("use_dpo", false, "Train on pairs of a preferred and a rejected answer (DPO).")
                .acts_on("preference optimization"),
            Key::boolean(
                "use_reward",
                false,
                "Train a reward model, which has scores instead of logits, on pairs of answers or on judged steps.",
            )
            .acts_on("reward models")
            .own(),
            Key::boolean("use_sft", false, "Train on conversations or on pairs of a prompt and an answer.")
                .only_with("dataset_type", &["hf"])
                .acts_on("data"),
            Key::boolean(
                "sft_train_on_completion_only",
                false,
                "Exclude prompts from the loss, so that only answers are learned.",
            )
            .only_with("use_sft", &[])
            .acts_on("loss"),
            Key::of::<SftLoss>(
                "sft_loss_type",
                "nll",
                "Loss of a token: `nll` is the negative log-likelihood, which `dft` weighs by the token's probability \
                 (dynamic fine-tuning), as in TRL.",
            )
            .only_with("use_sft", &[])
            .acts_on("loss")
            .own(),
            Key::text(
                "formatting_func_path",
                "",
                "Python function, as `module.function`, that turns a row of fine-tuning data into one with \
                 `messages`. It runs in `python3`, once, before training.",
            )
            .only_with("use_sft", &[])
            .acts_on("data"),
            Key::mapping(
                "formatting_func_kwargs",
                "Arguments by name for the function of `formatting_func_path`.",
            )
            .only_with("formatting_func_path", &[])
            .acts_on("data"),
            Key::optional_boolean("use_grpo", "MaxText's earlier name of `use_rl`, for GRPO.")
                .neutral(&[Literal::Bool(false)])
                .acts_on("reinforcement learning"),
        ],
    },
    super::preference::GROUP,
    super::reward::GROUP,
    KeyGroup {
        name: "LoRA",
        title: "LoRA adapters",
        prefix: Some("lora"),
        keys: &[
            Key::boolean(
                "enable_lora",
                false,
                "Train low-rank adapters and freeze the weights of the model.",
            )
            .acts_on("fine-tuning"),
            Key::integer("lora_rank", 0, "Rank of the adapters, which must be positive with `enable_lora`.")
                .at_least(0.0)
                .only_with("enable_lora", &[])
                .acts_on("fine-tuning"),
            Key::float(
                "lora_alpha",
                0.0,
                "Scale of the adapters, which are multiplied by this over `lora_rank`, or over its root with \
                 `use_rslora`.",
            )
            .at_least(0.0)
            .only_with("enable_lora", &[])
            .acts_on("fine-tuning"),
            Key::text(
                "lora_module_path",
                "",
                "Regular expression of the linear maps that get adapters, over the whole paths of modules in \
                 MaxText's checkpoints; all of attention and of dense MLPs if empty.",
            )
            .only_with("enable_lora", &[])
            .acts_on("fine-tuning"),
            Key::float(
                "lora_dropout",
                0.0,
                "Dropout rate of adapters in training: the share of their inputs that are dropped.",
            )
            .at_least(0.0)
            .only_with("enable_lora", &[])
            .acts_on("fine-tuning")
            .own(),
            Key::optional_choice(
                "lora_weight_qtype",
                BaseCodes::WORDS,
                "Type to which the frozen weights below the adapters are quantized (QLoRA); not \
                 quantized if none.",
            )
            .refuse_choices(BaseCodes::REFUSED)
            .only_with("enable_lora", &[])
            .acts_on("quantization"),
            Key::optional_integer(
                "lora_tile_size",
                "Number of quantized weights along the last input axis that share a scale; all of \
                 them if none or 0.",
            )
            .at_least(0.0)
            .only_with("lora_weight_qtype", &[])
            .acts_on("quantization"),
            Key::text(
                "lora_restore_path",
                "",
                "Adapters to start from, or to load with a base: a PEFT directory, or a run with adapters; \
                 ignored when the run itself is resumed.",
            )
            .only_with("enable_lora", &[])
            .acts_on("checkpoint")
            .may_change(),
            Key::boolean(
                "use_rslora",
                false,
                "Divide the scale of adapters by the root of their rank (rsLoRA).",
            )
            .only_with("enable_lora", &[])
            .acts_on("fine-tuning")
            .own(),
            Key::boolean("use_dora", false, "Learn the norm of each output of adapted linear maps (DoRA).")
                .only_with("enable_lora", &[])
                .acts_on("fine-tuning")
                .own(),
        ],
    },
    KeyGroup {
        name: "Distillation",
        title: "Distillation",
        prefix: None,
        keys: &[
            Key::mapping(
                "student_overrides",
                "Configuration keys, with their values, that only the student model takes \
                 instead of the shared ones.",
            )
            .acts_on("configuration"),
            Key::mapping(
                "teacher_overrides",
                "Configuration keys, with their values, that only the teacher model takes \
                 instead of the shared ones.",
            )
            .acts_on("distillation"),
            Key::optional_text(
                "offline_data_dir",
                "Directory of a teacher's stored largest logits, written by `maxtext data save-logits` or by MaxText, \
                 which replace a running teacher and the training data; none or empty for online distillation.",
            )
            .neutral(&[Literal::Text("")])
            .may_change()
            .acts_on("distillation"),
            Key::float(
                "distill_alpha",
                0.5,
                "Weight of the loss against the teacher's outputs; the loss against the data \
                 gets 1 minus this.",
            )
            .at_least(0.0)
            .only_with("teacher_overrides", &[])
            .only_with("offline_data_dir", &[])
            .acts_on("distillation"),
            Key::float(
                "distill_temperature",
                1.0,
                "Divides the logits of teacher and student before they are compared; above 1 \
                 it softens both.",
            )
            .at_least(0.0)
            .only_with("teacher_overrides", &[])
            .only_with("offline_data_dir", &[])
            .acts_on("distillation"),
            Key::optional_float(
                "distill_jsd_beta",
                "Weight of the teacher in the generalized Jensen-Shannon divergence that then replaces the \
                 divergence of MaxText; 0 is the divergence from the teacher, 1 from the student, as in TRL.",
            )
            .at_least(0.0)
            .at_most(1.0)
            .only_with("teacher_overrides", &[])
            .only_with("offline_data_dir", &[])
            .acts_on("distillation")
            .own(),
            Key::float(
                "distill_student_answers",
                0.0,
                "Share of steps in which the student answers the prompts itself and learns the teacher's \
                 probabilities of its own answers (on-policy distillation; `lmbda` of TRL's GKD).",
            )
            .at_least(0.0)
            .at_most(1.0)
            .only_with("teacher_overrides", &[])
            .acts_on("distillation")
            .own(),
            Key::float(
                "distill_answer_temperature",
                0.9,
                "Temperature with which a student's own answers are sampled; 0 selects the most probable token.",
            )
            .at_least(0.0)
            .only_with("distill_student_answers", &[])
            .acts_on("distillation")
            .own(),
            Key::integer("distill_answer_tokens", 128, "The most tokens of a student's own answer.")
                .at_least(1.0)
                .only_with("distill_student_answers", &[])
                .acts_on("distillation")
                .own(),
            Key::float(
                "distill_beta",
                0.0,
                "Weight of the loss between hidden features of teacher and student; 0 turns it \
                 off.",
            )
            .at_least(0.0)
            .only_with("teacher_overrides", &[])
            .acts_on("distillation"),
            Key::of::<FeatureLoss>(
                "distill_feature_loss_type",
                "cosine",
                "Measure of the distance between hidden features of teacher and student.",
            )
            .only_with("distill_beta", &[])
            .only_with("distill_beta_end", &[])
            .acts_on("distillation"),
            Key::optional_integers(
                "distill_layer_indices",
                "Layers of the student, counted from 0, whose features are compared by the feature loss; all if none.",
            )
            .only_with("distill_beta", &[])
            .only_with("distill_beta_end", &[])
            .acts_on("distillation"),
            Key::optional_integers(
                "distill_teacher_layer_indices",
                "Layers of the teacher with which those of `distill_layer_indices` are compared, in their order; \
                 layers of the same numbers if none.",
            )
            .only_with("distill_layer_indices", &[])
            .acts_on("distillation")
            .own(),
            Key::optional_float(
                "distill_alpha_end",
                "Value that `distill_alpha` reaches at the last step; constant if none.",
            )
            .at_least(0.0)
            .only_with("teacher_overrides", &[])
            .only_with("offline_data_dir", &[])
            .acts_on("distillation"),
            Key::of::<WeightSchedule>(
                "distill_alpha_schedule",
                "constant",
                "Schedule of `distill_alpha` from its first to its last value.",
            )
            .only_with("teacher_overrides", &[])
            .only_with("offline_data_dir", &[])
            .acts_on("distillation"),
            Key::optional_float(
                "distill_temperature_end",
                "Value that `distill_temperature` reaches at the last step; constant if none.",
            )
            .at_least(0.0)
            .only_with("teacher_overrides", &[])
            .only_with("offline_data_dir", &[])
            .acts_on("distillation"),
            Key::of::<WeightSchedule>(
                "distill_temperature_schedule",
                "constant",
                "Schedule of `distill_temperature` from its first to its last value.",
            )
            .only_with("teacher_overrides", &[])
            .only_with("offline_data_dir", &[])
            .acts_on("distillation"),
            Key::optional_float(
                "distill_beta_end",
                "Value that `distill_beta` reaches at the last step; constant if none.",
            )
            .at_least(0.0)
            .only_with("teacher_overrides", &[])
            .acts_on("distillation"),
            Key::of::<WeightSchedule>(
                "distill_beta_schedule",
                "constant",
                "Schedule of `distill_beta` from its first to its last value.",
            )
            .only_with("teacher_overrides", &[])
            .acts_on("distillation"),
            Key::boolean(
                "learn_to_init_mode",
                false,
                "Compute the student's attention projections from the teacher's by linear maps of heads and of their \
                 width, and train the maps.",
            )
            .only_with("teacher_overrides", &[])
            .acts_on("distillation"),
            Key::boolean(
                "lti_use_general_linear_map",
                false,
                "Learn one linear map of heads and their width together instead of one of each, which is smaller.",
            )
            .only_with("learn_to_init_mode", &[])
            .acts_on("distillation"),
            Key::mapping(
                "distill_weights_copy_map",
                "Map from regular expressions of names of teacher parameters to the student parameters that begin with \
                 their values, such as `{\"token_embedder/embedding\": \"token_embedder/embedding\"}`.",
            )
            .only_with("teacher_overrides", &[])
            .acts_on("distillation"),
            Key::mapping(
                "distill_student_weights_share_map",
                "Map from regular expressions of names of student parameters to the student parameters that always have \
                 their values.",
            )
            .only_with("teacher_overrides", &[])
            .only_with("offline_data_dir", &[])
            .acts_on("distillation"),
            Key::optional_texts(
                "student_params_to_update",
                "Regular expressions of the student parameters to train; all parameters if none. It sets \
                 `trainable_parameters_mask`.",
            )
            .only_with("teacher_overrides", &[])
            .only_with("offline_data_dir", &[])
            .acts_on("distillation"),
            Key::optional_text(
                "attn_module_name",
                "Name of the attention modules whose projections are computed from the teacher's, such as \
                 `self_attention`; all if none.",
            )
            .only_with("learn_to_init_mode", &[])
            .acts_on("distillation"),
            Key::optional_integers(
                "lti_layer_indices",
                "Layers, counted from 0, whose projections are computed from the teacher's; all if none. It needs \
                 `scan_layers=false`.",
            )
            .only_with("learn_to_init_mode", &[])
            .acts_on("distillation"),
        ],
    },
];
