//! Low-rank adapters.

use super::{choices::BaseCodes, group};
use crate::{
    config::{Config, not_built, report},
    error::Problem,
    table::features,
};

group! {
    /// The adapters of a model's linear maps.
    pub struct LoraGroup {
        enable_lora: bool,
        lora_rank: usize,
        lora_alpha: f64,
        lora_module_path: String,
        lora_dropout: f64,
        lora_weight_qtype: Option<BaseCodes>,
        lora_tile_size: Option<usize>,
        use_rslora: bool,
        use_dora: bool,
    }
}

impl LoraGroup {
    /// The type of the frozen weights below adapters; `None` for that of the model's other weights.
    pub fn base_codes(&self) -> Option<BaseCodes> {
        self.lora_weight_qtype.filter(|_| self.enable_lora)
    }

    fn check(&self, config: &Config, problems: &mut Vec<Problem>) {
        if !self.enable_lora {
            return;
        }
        for (key, is_zero, example) in [
            ("lora_rank", self.lora_rank == 0, "lora.lora_rank=16"),
            ("lora_alpha", self.lora_alpha == 0.0, "lora.lora_alpha=32"),
        ] {
            if is_zero {
                problems.push(Problem::inconsistent(
                    format!("{}, but {}", config.stated("enable_lora"), config.stated(key)),
                    format!("set a number above 0, such as `{example}`"),
                ));
            }
        }
        let is_empty = |key| config.entry(key).value.as_str().is_none_or(str::is_empty);
        if self.lora_dropout >= 1.0 {
            problems.push(Problem::inconsistent(
                format!("{}, which drops everything", config.stated("lora_dropout")),
                "use a share below 1, such as `lora.lora_dropout=0.05`",
            ));
        }
        let has_source = ["load_parameters_path", "hf_model_path"].into_iter().any(|key| !is_empty(key));
        if self.lora_weight_qtype.is_some() && !has_source {
            report(problems, not_built(config.entry("lora_weight_qtype"), features::QUANTIZED_DRAWN_BASES));
        }
        if !is_empty("lora_restore_path") && is_empty("load_parameters_path") && is_empty("hf_model_path") {
            problems.push(Problem::inconsistent(
                format!(
                    "{}, but no key names the model of these adapters",
                    config.stated("lora_restore_path")
                ),
                "name it with `load_parameters_path` or `hf_model_path`",
            ));
        }
        for (key, what) in [
            ("use_qk_clip", "scales weights that adapters freeze"),
            ("load_full_state_path", "names a whole state, but a run with adapters saves adapters alone"),
        ] {
            if config.entry(key).is_changed() {
                problems.push(Problem::inconsistent(
                    format!("{}, but {}, which {what}", config.stated("enable_lora"), config.stated(key)),
                    format!("leave out `{key}`"),
                ));
            }
        }
        if config.entry("routed_bias_update_rate").value.as_f64().is_some_and(|rate| rate > 0.0) {
            problems.push(Problem::inconsistent(
                format!(
                    "{}, but {}, which changes biases that adapters freeze",
                    config.stated("enable_lora"),
                    config.stated("routed_bias_update_rate")
                ),
                "set `routed_bias_update_rate=0`",
            ));
        }
    }
}
