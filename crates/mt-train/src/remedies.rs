//! What would help a run that needs more memory than there is, or much less.

use mt_config::{RematGroup, RematPolicy};
use mt_runtime::{Executable, MemoryNeed, Platform, format_bytes};
use mt_shape::DType;

use crate::{TrainError, TrainPlan, placement::DATA_AXIS};

/// Bytes of each device that a training step takes, by what they depend on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// Parameters and what the optimizer keeps, and gradients.
    pub state: u64,
    /// What layers make, and what they need for it.
    pub activations: u64,
    /// Scores of tokens, as far as they take more than layers do.
    pub logits: u64,
}

/// Up to which part of a memory the default policy is said to save what need not be saved.
const PLENTY: f64 = 0.7;

impl TrainPlan {
    /// What would make steps shorter with memory that is left over by the default policy, which computes each layer twice,
    /// unless a command line asks for it.
    pub fn less_remat(&self, need: MemoryNeed) -> Option<String> {
        let remat = &self.settings.model.remat;
        if remat.remat_policy != RematPolicy::Full || remat.asked.contains(&"remat_policy") {
            return None;
        }
        let faster = RematPolicy::MinimalWithContext;
        let kept = |remat: &RematGroup| self.kept_bytes(remat).device * need.num_devices;
        let more = kept(&RematGroup { remat_policy: faster, ..remat.clone() }).saturating_sub(kept(remat));
        let available = need.available?;
        ((need.needed + more) as f64 <= PLENTY * available as f64).then(|| {
            format!(
                "`remat_policy=full` computes each layer twice; `remat_policy={}` takes about {} more memory, \
                 of which {} are left, and makes steps shorter",
                faster.name(),
                format_bytes(more),
                format_bytes(available - need.needed),
            )
        })
    }

    /// What a message says that refuses a program for its memory.
    pub(crate) fn less_memory(&self, program: &Executable) -> Result<String, TrainError> {
        let needs = self.needs(Some(program.memory()?.on_device()));
        Ok(format!("what needs less, the best first:\n  {}", self.remedies(needs, None).join("\n  ")))
    }

    /// The needs of a compiled training step that takes `total` bytes, if that is known.
    pub fn needs(&self, total: Option<u64>) -> Needs {
        let (state, logits) = (self.argument_bytes().total(), self.score_bytes());
        let others = |total: u64| total.saturating_sub(state + logits);
        Needs { state, activations: total.map_or(logits, others).max(1), logits }
    }

    /// What would help if memory is short, the best first: what is for the largest of the needs. If the state alone takes
    /// most of `available`, nothing else helps.
    pub fn remedies(&self, needs: Needs, available: Option<u64>) -> Vec<String> {
        if available.is_some_and(|available| needs.state as f64 > 0.8 * available as f64) {
            return self.smaller_state();
        }
        let mut kinds = [
            (needs.state, self.smaller_state()),
            (needs.activations, self.fewer_activations()),
            (needs.logits, self.smaller_logits()),
        ];
        kinds.sort_by_key(|(bytes, _)| std::cmp::Reverse(*bytes));
        kinds.into_iter().filter(|(bytes, _)| *bytes > 0).flat_map(|(_, remedies)| remedies).collect()
    }

    /// Scores of tokens, in their own type, and in float32 with their gradients.
    pub fn score_bytes(&self) -> u64 {
        let [rows, length] = self.batch_dims();
        let objective = &self.settings.objective;
        let scores = self.model.scores(rows / objective.gradient_accumulation_steps, length);
        let shard = self.placement.sharding(&scores.logical_axes, &scores.dims).shard_dims(&scores.dims);
        let per_score = scores.dtype.byte_size() + DType::F32.byte_size();
        (shard.iter().product::<usize>() * per_score / objective.num_vocab_tiling) as u64
    }

    fn smaller_state(&self) -> Vec<String> {
        let (settings, mesh) = (&self.settings, self.placement.mesh());
        let bytes = self.argument_bytes();
        let mut remedies = Vec::new();
        // The devices of a CPU share one memory, so that splitting what they have would be of some use, and more of
        // them of none.
        let copies = mesh.axis_size(DATA_AXIS).filter(|size| *size > 1);
        if let Some(copies) = copies {
            let state = format_bytes(bytes.parameters + bytes.optimizer);
            let over_data = match settings.placement.shard_optimizer_over_data || bytes.optimizer == 0 {
                true => "",
                false => ", or `shard_optimizer_over_data=true`",
            };
            remedies.push(format!(
                "parameters and optimizer state, {state}, are on each of the {copies} devices along `{DATA_AXIS}`: `ici_fsdp_parallelism` in place of `ici_data_parallelism` splits them{over_data}"
            ));
        }
        if bytes.optimizer >= bytes.parameters && settings.optimizer.first_moment_dtype() == DType::F32 {
            remedies.push("`mu_dtype=bfloat16` halves the first moments".to_owned());
        }
        if self.platform != Platform::Cpu {
            if bytes.optimizer > 0 && !settings.model.remat.optimizer_memory_host_offload {
                remedies.push("`optimizer_memory_host_offload=true`".to_owned());
            }
            remedies.push("more devices, over which `fsdp` splits the state".to_owned());
        }
        remedies
    }

    fn fewer_activations(&self) -> Vec<String> {
        let (settings, mesh) = (&self.settings, self.placement.mesh());
        let [rows, length] = self.batch_dims();
        let parts = settings.placement.num_batch_parts(mesh).max(1);
        let rows = rows / parts / settings.objective.gradient_accumulation_steps.max(1);
        let mut remedies = Vec::new();
        if settings.model.remat.kept().is_none_or(|kept| !kept.is_empty()) {
            remedies.push("`remat_policy=full`, which keeps only the input of each layer".to_owned());
        }
        if rows > 1 {
            remedies.push(
                "a smaller `per_device_batch_size`, with more `gradient_accumulation_steps` for the same batch"
                    .to_owned(),
            );
        } else if self.platform != Platform::Cpu && mesh.num_devices() > 1 {
            remedies.push(
                "more `ici_context_parallelism` or `ici_tensor_parallelism`, which split a sequence and layers"
                    .to_owned(),
            );
        }
        remedies.push(format!("a shorter `max_target_length` than {length}"));
        remedies
    }

    fn smaller_logits(&self) -> Vec<String> {
        match self.settings.objective.num_vocab_tiling {
            1 => vec!["`num_vocab_tiling=8`, so that scores of tokens are computed in parts".to_owned()],
            _ => Vec::new(),
        }
    }
}
