//! Rematerialization: the activations that are kept for the backward pass, and their memory.

use super::{FromValue, choices::choice, group};
use crate::{config::Config, error::Problem, key::Choice};

choice! {
    /// Which activations the backward pass recomputes.
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
        /// The keys of the tensors decide.
        Custom = "custom",
        /// All activations that the backward pass reads are kept.
        None = "none",
    }
}

choice! {
    /// Where a tensor is kept between the forward and the backward pass.
    pub enum TensorLocation {
        /// Nowhere: it is recomputed.
        Remat = "remat",
        Device = "device",
        /// In host memory.
        Offload = "offload",
    }
}

/// The memory of a kept tensor between the forward and the backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeptIn {
    Device,
    /// Host memory.
    Host,
}

/// The tensors that a policy keeps, by memory. `quantization` is the name for quantized layers' tensors.
type Tensors = &'static [(&'static [&'static str], KeptIn)];

const DEVICE: KeptIn = KeptIn::Device;
const HOST: KeptIn = KeptIn::Host;

const QKV: &[&str] = &["query_proj", "key_proj", "value_proj"];
const OUT: &[&str] = &["out_proj"];
const CONTEXT: &[&str] = &["context"];
const MLPWI: &[&str] = &["mlpwi_0", "mlpwi_1", "mlpwi"];
const MLPWO: &[&str] = &["mlpwo"];
const QUANTIZATION: &[&str] = &["quantization"];

/// The meaning of a policy.
enum Meaning {
    /// All activations are kept.
    Everything,
    Tensors(Tensors),
    /// The keys of the tensors decide.
    Keys,
}

impl RematPolicy {
    const fn meaning(self) -> Meaning {
        let tensors: Tensors = match self {
            Self::None => return Meaning::Everything,
            Self::Custom => return Meaning::Keys,
            Self::Full => &[],
            Self::SaveOutProj => &[(OUT, DEVICE)],
            Self::SaveQkvProj => &[(QKV, DEVICE)],
            Self::SaveDotExceptMlp => &[(QKV, DEVICE), (OUT, DEVICE)],
            Self::SaveDotWithContextExceptMlp => &[(QKV, DEVICE), (CONTEXT, DEVICE), (OUT, DEVICE)],
            Self::SaveDotExceptMlpwi => &[(QKV, DEVICE), (OUT, DEVICE), (MLPWO, DEVICE)],
            Self::Minimal => &[(QKV, DEVICE), (OUT, DEVICE), (MLPWI, DEVICE), (MLPWO, DEVICE)],
            Self::MinimalWithContext => {
                &[(QKV, DEVICE), (CONTEXT, DEVICE), (OUT, DEVICE), (MLPWI, DEVICE), (MLPWO, DEVICE)]
            }
            Self::MinimalWithQuantization => {
                &[(QKV, DEVICE), (OUT, DEVICE), (MLPWI, DEVICE), (MLPWO, DEVICE), (QUANTIZATION, DEVICE)]
            }
            Self::MinimalWithContextAndQuantization => &[
                (QKV, DEVICE),
                (CONTEXT, DEVICE),
                (OUT, DEVICE),
                (MLPWI, DEVICE),
                (MLPWO, DEVICE),
                (QUANTIZATION, DEVICE),
            ],
            Self::QkvProjOffloaded => &[(QKV, HOST)],
            Self::MinimalOffloaded => &[(QKV, HOST), (OUT, HOST), (MLPWI, HOST), (MLPWO, HOST)],
        };
        Meaning::Tensors(tensors)
    }
}

impl TensorLocation {
    const fn kept_in(self) -> Option<KeptIn> {
        match self {
            Self::Remat => None,
            Self::Device => Some(DEVICE),
            Self::Offload => Some(HOST),
        }
    }
}

group! {
    /// Which activations are kept for the backward pass, and which arrays are offloaded to host memory. The keys of
    /// tensors apply only with `remat_policy=custom`.
    pub struct RematGroup {
        remat_policy: RematPolicy,
        decoder_layer_input: TensorLocation,
        context: TensorLocation,
        mlpwi: TensorLocation,
        mlpwi_0: TensorLocation,
        mlpwi_1: TensorLocation,
        mlpwo: TensorLocation,
        moe_mlpwi_0: TensorLocation,
        moe_mlpwi_1: TensorLocation,
        moe_mlpwo: TensorLocation,
        query_proj: TensorLocation,
        key_proj: TensorLocation,
        value_proj: TensorLocation,
        query_wa_proj: TensorLocation,
        kv_wa_proj: TensorLocation,
        mla_q: TensorLocation,
        mla_kv: TensorLocation,
        qkv_proj: TensorLocation,
        kv_proj: TensorLocation,
        out_proj: TensorLocation,
        attention_out: TensorLocation,
        indexer_cutoff_threshold: TensorLocation,
        engram: TensorLocation,
        optimizer_memory_host_offload: bool,
        parameter_memory_host_offload: bool,
    }
    besides {
        asked: Vec<&'static str> = |config, _| {
            Some(Self::KEYS.iter().copied().filter(|key| config.entry(key).is_asked_for()).collect())
        },
    }
}

impl RematGroup {
    fn check(&self, _config: &Config, _problems: &mut Vec<Problem>) {}

    /// The names of the tensors that are kept for the backward pass, with their memory; all other activations are
    /// recomputed. None if every activation that the backward pass reads is kept.
    pub fn kept(&self) -> Option<Vec<(&'static str, KeptIn)>> {
        match self.remat_policy.meaning() {
            Meaning::Everything => None,
            Meaning::Keys => Some(self.custom()),
            Meaning::Tensors(tensors) => {
                let named =
                    tensors.iter().flat_map(|(names, place)| names.iter().map(|name| (*name, *place)));
                Some(named.flat_map(with_experts).collect())
            }
        }
    }

    fn custom(&self) -> Vec<(&'static str, KeptIn)> {
        let query = ("query_proj", self.query_proj);
        let key = ("key_proj", self.key_proj);
        let value = ("value_proj", self.value_proj);
        let (both, all) = (("kv_proj", self.kv_proj), ("qkv_proj", self.qkv_proj));
        let own = |name, location| (name, vec![(name, location)]);
        // Each tensor with its keys, from the most specific to the most general.
        let tensors = [
            own("decoder_layer_input", self.decoder_layer_input),
            ("query_proj", vec![query, all]),
            ("key_proj", vec![key, both, all]),
            ("value_proj", vec![value, both, all]),
            own("context", self.context),
            own("attention_out", self.attention_out),
            own("engram", self.engram),
            own("out_proj", self.out_proj),
            own("indexer_cutoff_threshold", self.indexer_cutoff_threshold),
            own("mlpwi", self.mlpwi),
            own("mlpwi_0", self.mlpwi_0),
            own("mlpwi_1", self.mlpwi_1),
            own("mlpwo", self.mlpwo),
            own("query_wa_proj", self.query_wa_proj),
            own("kv_wa_proj", self.kv_wa_proj),
            own("mla_q", self.mla_q),
            own("mla_kv", self.mla_kv),
            ("moe_mlpwi_0", vec![("moe_mlpwi_0", self.moe_mlpwi_0), ("mlpwi_0", self.mlpwi_0)]),
            ("moe_mlpwi_1", vec![("moe_mlpwi_1", self.moe_mlpwi_1), ("mlpwi_1", self.mlpwi_1)]),
            ("moe_mlpwo", vec![("moe_mlpwo", self.moe_mlpwo), ("mlpwo", self.mlpwo)]),
        ];
        // The first key with a request decides. A `remat`, the default, counts as a request only if it was set by hand.
        let asks = |key: &str, location| location != TensorLocation::Remat || self.asked.contains(&key);
        let kept = tensors.into_iter().filter_map(|(name, keys)| {
            let (_, location) = keys.into_iter().find(|(key, location)| asks(key, *location))?;
            Some((name, location.kept_in()?))
        });
        kept.collect()
    }

    /// The settings that offload arrays to host memory, as `key=value`.
    pub fn offloading(&self) -> Vec<String> {
        let is_on_host = |kept: Vec<(&str, KeptIn)>| kept.iter().any(|(_, place)| *place == KeptIn::Host);
        [
            (self.kept().is_some_and(is_on_host), format!("remat_policy={}", self.remat_policy.name())),
            (self.optimizer_memory_host_offload, "optimizer_memory_host_offload=true".to_owned()),
            (self.parameter_memory_host_offload, "parameter_memory_host_offload=true".to_owned()),
        ]
        .into_iter()
        .filter_map(|(offloads, key)| offloads.then_some(key))
        .collect()
    }
}

/// A tensor of feed-forward layers, and that of experts which policies treat alike.
fn with_experts((name, place): (&'static str, KeptIn)) -> impl Iterator<Item = (&'static str, KeptIn)> {
    let of_experts = match name {
        "mlpwi_0" => Some("moe_mlpwi_0"),
        "mlpwi_1" => Some("moe_mlpwi_1"),
        "mlpwo" => Some("moe_mlpwo"),
        _ => None,
    };
    [name].into_iter().chain(of_experts).map(move |name| (name, place))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guide_has_the_table() {
        let guide = include_str!("../../../../docs/training.md");
        for word in RematPolicy::WORDS {
            let name = format!("`{word}`");
            let row = guide.lines().find(|line| line.starts_with('|') && line.contains(&name));
            let row = row.unwrap_or_else(|| panic!("{name} is not in the guide"));
            let policy = RematPolicy::from_value(&(*word).into()).unwrap();
            let Meaning::Tensors(tensors) = policy.meaning() else { continue };
            let refers = ["the same and", "the list of `minimal`", "those two lists, and"]
                .iter()
                .any(|text| row.contains(text));
            for tensor in tensors.iter().flat_map(|(names, _)| *names) {
                assert!(refers || row.contains(&format!("`{tensor}`")), "{name} keeps `{tensor}`: {row}");
            }
            let on_host = tensors.iter().any(|(_, place)| *place == HOST);
            assert_eq!(row.contains("host memory"), on_host, "{row}");
        }
    }
}
