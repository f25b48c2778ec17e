//! Logical axes of activations that several layers place alike.

use mt_shape::{LogicalAxis, logical};

/// Logical axes of the residual stream: `[batch, position, embed]`.
pub const RESIDUAL: [Option<LogicalAxis>; 3] =
    [Some(logical::ACTIVATION_BATCH), Some(logical::ACTIVATION_NORM_LENGTH), Some(logical::ACTIVATION_EMBED)];

/// Logical axes of the residual stream for layers in which each token can depend on all earlier ones: a device has all
/// tokens of a sequence.
pub(crate) const WHOLE_SEQUENCES: [Option<LogicalAxis>; 3] =
    [Some(logical::ACTIVATION_KV_BATCH), None, Some(logical::ACTIVATION_EMBED)];
