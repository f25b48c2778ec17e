//! The loss and how its gradients are computed.

use super::group;
use crate::{config::Config, error::Problem, origin::Origin};

group! {
    /// The objective, how its computation is divided into tiles and micro-batches, and what is recorded of it.
    pub struct ObjectiveGroup {
        z_loss_multiplier: f64,
        cast_logits_to_fp32: bool,
        num_vocab_tiling: usize,
        vocab_tiling_ag_once: bool,
        gradient_accumulation_steps: usize,
        max_target_length: usize,
        record_internal_nn_metrics: u64,
        mtp_num_layers: usize,
        mtp_loss_scaling_factor: f64,
        mtp_eval_target_module: usize,
    }
    besides {
        tiling_origin: Origin = |config, _| Some(config.entry("num_vocab_tiling").origin.clone()),
    }
}

impl ObjectiveGroup {
    fn check(&self, config: &Config, problems: &mut Vec<Problem>) {
        if self.mtp_eval_target_module > self.mtp_num_layers {
            problems.push(Problem::inconsistent(
                format!(
                    "{}, but {}",
                    config.stated("mtp_eval_target_module"),
                    config.stated("mtp_num_layers")
                ),
                format!("use a number from 0 to {}", self.mtp_num_layers),
            ));
        }
        let (tiles, length) = (self.num_vocab_tiling, self.max_target_length);
        if !length.is_multiple_of(tiles) {
            let smaller = (1..tiles).rev().find(|tiles| length.is_multiple_of(*tiles)).unwrap_or(1);
            problems.push(Problem::inconsistent(
                format!(
                    "{}, but {}, which {tiles} equal tiles do not make up",
                    config.stated("num_vocab_tiling"),
                    config.stated("max_target_length")
                ),
                format!("use a number of tiles that divides {length}, such as `num_vocab_tiling={smaller}`"),
            ));
        }
    }
}
