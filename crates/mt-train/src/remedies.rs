//! Advice for a run that needs more memory than is available, or much less.

use mt_config::{RematGroup, RematPolicy};
use mt_models::Model;
use mt_runtime::{Executable, MemoryNeed, Platform, format_bytes};
use mt_shape::DType;

use crate::{TrainError, TrainPlan, placement::DATA_AXIS};

/// Bytes of a training step on each device, by the quantity that they scale with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// Parameters, optimizer state and gradients.
    pub state: u64,
    /// Activations of layers, and temporaries to compute them.
    pub activations: u64,
    /// Logits, as far as they exceed the activations of layers.
    pub logits: u64,
}

/// The fraction of memory up to which a run may grow if it keeps more activations than the default policy.
const PLENTY: f64 = 0.7;

impl TrainPlan {
    /// Suggests a faster remat policy if the memory that the default policy leaves free suffices. The default
    /// recomputes each layer in the backward pass. A policy that the user has chosen is not questioned.
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

    /// The hint for a program that is refused because it needs too much memory.
    pub(crate) fn less_memory(&self, program: &Executable) -> Result<String, TrainError> {
        let needs = self.needs(Some(program.memory()?.on_device()));
        Ok(format!(
            "to reduce memory, the most effective remedy first:\n  {}",
            self.remedies(needs, None).join("\n  ")
        ))
    }

    /// The needs of a compiled training step that takes `total` bytes, if the total is known.
    pub fn needs(&self, total: Option<u64>) -> Needs {
        let (state, logits) = (self.argument_bytes().total(), self.score_bytes());
        let others = |total: u64| total.saturating_sub(state + logits);
        Needs { state, activations: total.map_or(logits, others).max(1), logits }
    }

    /// Remedies for a lack of memory, those for the largest need first. If the state alone takes most of `available`,
    /// only remedies that shrink the state can help.
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

    /// Bytes on each device of the logits in their own type and, with their gradients, in `f32`.
    pub fn score_bytes(&self) -> u64 {
        let [rows, length] = self.batch_dims();
        let objective = &self.settings.objective;
        let of_model = |model: &dyn Model, gradient: usize| {
            let scores = model.scores(rows / objective.gradient_accumulation_steps, length);
            let shard = self.placement.sharding(&scores.logical_axes, &scores.dims).shard_dims(&scores.dims);
            let per_score = scores.dtype.byte_size() + gradient;
            (shard.iter().product::<usize>() * per_score / objective.num_vocab_tiling) as u64
        };
        let frozen = self.loss.frozen.iter().filter(|_| self.objective().keeps_logits_of_frozen());
        let of_frozen: u64 = frozen.map(|frozen| of_model(frozen.model(&*self.model), 0)).sum();
        of_model(&*self.model, DType::F32.byte_size()) + of_frozen
    }

    fn smaller_state(&self) -> Vec<String> {
        let (settings, mesh) = (&self.settings, self.placement.mesh());
        let bytes = self.argument_bytes();
        let mut remedies = Vec::new();
        // The virtual devices of a CPU share one memory: splitting replicated state saves memory, adding devices does
        // not.
        let copies = mesh.axis_size(DATA_AXIS).filter(|size| *size > 1);
        if let Some(copies) = copies {
            let state = format_bytes(bytes.parameters + bytes.optimizer);
            let over_data = match settings.placement.shard_optimizer_over_data || bytes.optimizer == 0 {
                true => "",
                false => ", or `shard_optimizer_over_data=true`",
            };
            remedies.push(format!(
                "parameters and optimizer state, {state}, are replicated on the {copies} devices along `{DATA_AXIS}`: `ici_fsdp_parallelism` in place of `ici_data_parallelism` splits them{over_data}"
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
        let shards = settings.placement.num_batch_shards(mesh).max(1);
        let rows = rows / shards / settings.objective.gradient_accumulation_steps.max(1);
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
            1 => vec!["`num_vocab_tiling=8`, which computes logits in tiles".to_owned()],
            _ => Vec::new(),
        }
    }
}
