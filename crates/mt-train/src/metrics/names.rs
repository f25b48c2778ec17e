//! The names under which metrics are recorded: MaxText's, and three of ours, which are marked.

/// The loss that is differentiated, per unit of weight.
pub const LOSS: &str = "learning/loss";
/// The language-modelling part of [`LOSS`], where other terms are added to it.
pub const LM_LOSS: &str = "learning/lm_loss";
/// The z-loss, as it is added to [`LOSS`].
pub const Z_LOSS: &str = "learning/z_loss";
/// The exponential of the language-modelling loss.
pub const PERPLEXITY: &str = "learning/perplexity";
/// The sum of the weights of the tokens that count.
pub const TOTAL_WEIGHTS: &str = "learning/total_weights";
/// The norm of the gradient that the optimizer received, after clipping.
pub const GRADIENT_NORM: &str = "learning/grad_norm";
/// The norm of the gradient before clipping.
pub const RAW_GRADIENT_NORM: &str = "learning/raw_grad_norm";
/// The norm of the parameters after the update.
pub const PARAMETER_NORM: &str = "learning/param_norm";
/// The learning rate of the step.
pub const LEARNING_RATE: &str = "learning/current_learning_rate";
/// The largest score of any head of attention in the step, before it is capped, if queries and keys are clipped.
pub const LARGEST_SCORE: &str = "learning/max_logits";
/// 1 if the step counted as a spike and changed nothing, else 0.
pub const STEP_SKIPPED: &str = "optim/step_skipped";

/// From the start of one step to the start of the next, in seconds.
pub const STEP_TIME: &str = "perf/step_time_seconds";
/// What the step computes on each device, in units of 10¹² floating-point operations.
pub const TFLOPS: &str = "perf/per_device_tflops";
/// [`TFLOPS`] a second.
pub const TFLOPS_PER_SECOND: &str = "perf/per_device_tflops_per_sec";
/// The tokens that the step processes on each device.
pub const TOKENS: &str = "perf/per_device_tokens";
/// [`TOKENS`] a second.
pub const TOKENS_PER_SECOND: &str = "perf/per_device_tokens_per_sec";
/// Ours: model FLOP/s utilization, the share of the device's peak; absent where the peak is unknown.
pub const MODEL_FLOPS_UTILIZATION: &str = "perf/mfu";
/// Ours: the share of the step's time that was spent waiting for input.
pub const DATA_WAIT_SHARE: &str = "perf/data_wait_share";

/// The loss of an evaluation, per unit of weight.
pub const EVALUATION_LOSS: &str = "eval/avg_loss";
/// The part of [`EVALUATION_LOSS`] that is the z-loss, if there is one.
pub const EVALUATION_Z_LOSS: &str = "eval/avg_z_loss";
/// The exponential of [`EVALUATION_LOSS`] without [`EVALUATION_Z_LOSS`].
pub const EVALUATION_PERPLEXITY: &str = "eval/avg_perplexity";
/// The sum of the weights of the tokens that count in an evaluation.
pub const EVALUATION_TOTAL_WEIGHTS: &str = "eval/total_weights";
/// The sum of the losses of the tokens of an evaluation.
pub const EVALUATION_TOTAL_LOSS: &str = "eval/total_loss";
/// The sum of the z-losses of the tokens of an evaluation, if they count.
pub const EVALUATION_TOTAL_Z_LOSS: &str = "eval/total_z_loss";
/// Ours: the cross-entropy in bits for each byte of the text, which compares across tokenizers; absent where the bytes are
/// not known.
pub const EVALUATION_BITS_PER_BYTE: &str = "eval/bits_per_byte";
