//! What the backward pass keeps of the forward pass, and where.

use super::{FromValue, choices::choice, group};
use crate::{config::Config, error::Problem, key::Choice};

choice! {
    /// What the backward pass recomputes.
    pub enum RematPolicy {
        Full = "full",
        Minimal = "minimal",
        MinimalWithContext = "minimal_with_context",
        MinimalWithQuantization = "minimal_with_quantization",
        MinimalWithContextAndQuantization = "minimal_with_context_and_quantization",
        SaveDotWithContextExceptMlp = "save_dot_with_context_except_mlp",
        SaveDotExceptMlpwi = "save_dot_except_mlpwi",
        SaveDotExceptMlp = "save_dot_except_mlp",
        SaveQkvProj = "save_qkv_proj",
        SaveOutProj = "save_out_proj",
        QkvProjOffloaded = "qkv_proj_offloaded",
        MinimalOffloaded = "minimal_offloaded",
        /// What the keys of tensors say.
        Custom = "custom",
        /// Nothing: all that the backward pass reads is kept.
        None = "none",
    }
}

choice! {
    /// Where a tensor is between the forward and the backward pass.
    pub enum TensorLocation {
        /// Nowhere: it is computed again.
        Remat = "remat",
        Device = "device",
        /// In the host's memory.
        Offload = "offload",
    }
}

const DEVICE: TensorLocation = TensorLocation::Device;
const HOST: TensorLocation = TensorLocation::Offload;

/// The tensors that a policy keeps, and where. `quantization` is what quantized layers would name.
type Tensors = &'static [(&'static [&'static str], TensorLocation)];

const QKV: &[&str] = &["query_proj", "key_proj", "value_proj"];
const OUT: &[&str] = &["out_proj"];
const CONTEXT: &[&str] = &["context"];
const MLPWI: &[&str] = &["mlpwi_0", "mlpwi_1", "mlpwi"];
const MLPWO: &[&str] = &["mlpwo"];
const QUANTIZATION: &[&str] = &["quantization"];

/// Every policy that is a list of tensors.
const POLICIES: &[(RematPolicy, Tensors)] = &[
    (RematPolicy::Full, &[]),
    (RematPolicy::SaveOutProj, &[(OUT, DEVICE)]),
    (RematPolicy::SaveQkvProj, &[(QKV, DEVICE)]),
    (RematPolicy::SaveDotExceptMlp, &[(QKV, DEVICE), (OUT, DEVICE)]),
    (RematPolicy::SaveDotWithContextExceptMlp, &[(QKV, DEVICE), (CONTEXT, DEVICE), (OUT, DEVICE)]),
    (RematPolicy::SaveDotExceptMlpwi, &[(QKV, DEVICE), (OUT, DEVICE), (MLPWO, DEVICE)]),
    (RematPolicy::Minimal, &[(QKV, DEVICE), (OUT, DEVICE), (MLPWI, DEVICE), (MLPWO, DEVICE)]),
    (
        RematPolicy::MinimalWithContext,
        &[(QKV, DEVICE), (CONTEXT, DEVICE), (OUT, DEVICE), (MLPWI, DEVICE), (MLPWO, DEVICE)],
    ),
    (
        RematPolicy::MinimalWithQuantization,
        &[(QKV, DEVICE), (OUT, DEVICE), (MLPWI, DEVICE), (MLPWO, DEVICE), (QUANTIZATION, DEVICE)],
    ),
    (
        RematPolicy::MinimalWithContextAndQuantization,
        &[
            (QKV, DEVICE),
            (CONTEXT, DEVICE),
            (OUT, DEVICE),
            (MLPWI, DEVICE),
            (MLPWO, DEVICE),
            (QUANTIZATION, DEVICE),
        ],
    ),
    (RematPolicy::QkvProjOffloaded, &[(QKV, HOST)]),
    (RematPolicy::MinimalOffloaded, &[(QKV, HOST), (OUT, HOST), (MLPWI, HOST), (MLPWO, HOST)]),
];

group! {
    /// What the backward pass keeps of the forward pass, and what is kept in the host's memory. The keys of tensors
    /// count with `remat_policy=custom` only.
    pub struct RematGroup {
        remat_policy: RematPolicy,
        decoder_layer_input: TensorLocation,
        context: TensorLocation,
        mlpwi: TensorLocation,
        mlpwi_0: TensorLocation,
        mlpwi_1: TensorLocation,
        mlpwo: TensorLocation,
        query_proj: TensorLocation,
        key_proj: TensorLocation,
        value_proj: TensorLocation,
        qkv_proj: TensorLocation,
        kv_proj: TensorLocation,
        out_proj: TensorLocation,
        attention_out: TensorLocation,
        optimizer_memory_host_offload: bool,
        parameter_memory_host_offload: bool,
    }
}

impl RematGroup {
    fn check(&self, _config: &Config, _problems: &mut Vec<Problem>) {}

    /// The names of the tensors that are kept for the backward pass, and where; everything else is computed again.
    /// None keeps all that the backward pass reads.
    pub fn kept(&self) -> Option<Vec<(&'static str, TensorLocation)>> {
        if self.remat_policy == RematPolicy::Custom {
            return Some(self.custom());
        }
        let (_, tensors) = POLICIES.iter().find(|(policy, _)| *policy == self.remat_policy)?;
        let named = tensors.iter().flat_map(|(names, place)| names.iter().map(|name| (*name, *place)));
        Some(named.collect())
    }

    fn custom(&self) -> Vec<(&'static str, TensorLocation)> {
        // The first of several keys that asks for something.
        let first = |places: &[TensorLocation]| {
            let mut asking = places.iter().copied().filter(|place| *place != TensorLocation::Remat);
            asking.next().unwrap_or(TensorLocation::Remat)
        };
        let tensors = [
            ("decoder_layer_input", self.decoder_layer_input),
            ("query_proj", first(&[self.query_proj, self.qkv_proj])),
            ("key_proj", first(&[self.key_proj, self.kv_proj, self.qkv_proj])),
            ("value_proj", first(&[self.value_proj, self.kv_proj, self.qkv_proj])),
            ("context", self.context),
            ("attention_out", self.attention_out),
            ("out_proj", self.out_proj),
            ("mlpwi", self.mlpwi),
            ("mlpwi_0", self.mlpwi_0),
            ("mlpwi_1", self.mlpwi_1),
            ("mlpwo", self.mlpwo),
        ];
        tensors.into_iter().filter(|(_, place)| *place != TensorLocation::Remat).collect()
    }

    /// Whether anything is kept in the host's memory.
    pub fn offloads(&self) -> bool {
        let state = self.optimizer_memory_host_offload || self.parameter_memory_host_offload;
        state
            || self.kept().is_some_and(|kept| kept.iter().any(|(_, place)| *place == TensorLocation::Offload))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guide_has_the_table() {
        let guide = include_str!("../../../../docs/training.md");
        for (policy, tensors) in POLICIES {
            let name = format!("`{}`", policy.name());
            let row = guide.lines().find(|line| line.starts_with('|') && line.contains(&name));
            let row = row.unwrap_or_else(|| panic!("{name} is not in the guide"));
            let refers =
                ["the same and", "what `minimal` keeps", "those, and"].iter().any(|text| row.contains(text));
            for tensor in tensors.iter().flat_map(|(names, _)| *names) {
                assert!(refers || row.contains(&format!("`{tensor}`")), "{name} keeps `{tensor}`: {row}");
            }
            let on_host = tensors.iter().any(|(_, place)| *place == HOST);
            assert_eq!(row.contains("host's memory"), on_host, "{row}");
        }
    }
}
