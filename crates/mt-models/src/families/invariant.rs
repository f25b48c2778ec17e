//! Models whose results for a token do not depend on the other tokens of a program (`batch_invariant`).

use mt_config::ModelGroup;
use mt_nn::{
    attention::{AttentionKernel, AttentionOptions, PassBlocks},
    experts::ExpertComputation,
};

use crate::{
    ModelError,
    decoder::{
        AttentionConfig, AttentionThenExpertsConfig, DecoderConfig, ExpertsConfig, FeedForwardConfig,
        LayerConfig, MixerConfig, MlpAndExpertsConfig, ResidualConnection,
    },
};

/// Chooses the computations that kernels do in one order, whatever the number of tokens, if the key is
/// set.
///
/// # Errors
/// A layer has no such computation.
pub(super) fn make_invariant(group: &ModelGroup, config: &mut DecoderConfig) -> Result<(), ModelError> {
    if !group.batch_invariant {
        return Ok(());
    }
    let refuse = |computation: &str| Err(ModelError::NotInvariant { computation: computation.to_owned() });
    if config.encoder.is_some() {
        return refuse("an encoder");
    }
    if config.dynamic_ntk.is_some() {
        return refuse("dynamic NTK, whose frequencies follow the length of a program");
    }
    if config.residual != ResidualConnection::Added {
        return refuse("hyper-connections (`mhc_expansion_rate`)");
    }
    let drops = config.dropout_rate > 0.0;
    for (index, layer) in config.layers.iter_mut().chain(&mut config.predictions).enumerate() {
        if let Some(computation) = variable(layer, drops) {
            return refuse(&format!("{computation} in layer {index}"));
        }
        match &mut layer.mixer {
            Some(MixerConfig::Attention(attention)) => fix(&mut attention.options),
            Some(MixerConfig::WithExperts(both)) => fix(&mut both.attention.options),
            Some(MixerConfig::Latent(latent)) => {
                // Attention to latent vectors sums products in another order than attention to keys and values, from
                // which log-probabilities of whole sequences are computed.
                latent.caches_expanded = true;
                fix(&mut latent.options);
            }
            // A chunk of several tokens sums in an order that depends on its length.
            Some(MixerConfig::Mamba2(mamba)) => mamba.options.chunk = 1,
            _ => {}
        }
    }
    Ok(())
}

/// Chooses the computation of whole sequences that is a kernel at every length.
fn fix(options: &mut AttentionOptions) {
    options.kernel = AttentionKernel::Blockwise;
    (options.blocks, options.local_blocks) = (PassBlocks::NONE, PassBlocks::NONE);
}

/// The computation that depends on the other tokens of a program, if the layer has one.
fn variable(layer: &LayerConfig, drops: bool) -> Option<&'static str> {
    if layer.engram.is_some() {
        return Some("memories of n-grams");
    }
    if layer.cross.is_some() {
        return Some("cross-attention");
    }
    let of_mixer = layer.mixer.as_ref().and_then(|mixer| of_mixer(mixer, drops));
    of_mixer.or_else(|| layer.feed_forward.as_ref().and_then(of_feed_forward))
}

fn of_mixer(mixer: &MixerConfig, drops: bool) -> Option<&'static str> {
    if let Some(attention) = mixer.get::<AttentionConfig>() {
        return of_attention(attention, drops);
    }
    if let Some(AttentionThenExpertsConfig { attention, experts, .. }) = mixer.get() {
        return of_attention(attention, drops).or_else(|| of_experts(experts));
    }
    match mixer {
        MixerConfig::Latent(latent) => latent.indexer.map(|_| "attention to keys that an indexer chooses"),
        MixerConfig::Mamba2(_) => None,
        _ => Some(mixer.scope()),
    }
}

fn of_attention(attention: &AttentionConfig, drops: bool) -> Option<&'static str> {
    let options = &attention.options;
    [
        (attention.relative.is_some(), "attention with biases by distance"),
        (options.is_gated, "attention with gates"),
        (options.chosen_chunks.is_some(), "attention to chosen chunks"),
        (options.mask.block.is_some(), "attention within blocks"),
        (drops && attention.drops_weights, "dropout of attention weights"),
    ]
    .into_iter()
    .find_map(|(varies, computation)| varies.then_some(computation))
}

fn of_feed_forward(feed_forward: &FeedForwardConfig) -> Option<&'static str> {
    if let Some(experts) = feed_forward.get::<ExpertsConfig>() {
        return of_experts(experts);
    }
    feed_forward.get::<MlpAndExpertsConfig>().and_then(|both| of_experts(&both.experts))
}

fn of_experts(experts: &ExpertsConfig) -> Option<&'static str> {
    if matches!(experts.routed.computation, ExpertComputation::Capacity(_)) {
        return Some("experts that drop tokens (`capacity_factor`)");
    }
    let is_gated = experts.shared.as_ref().is_some_and(|shared| shared.gated);
    is_gated.then_some("shared experts with a gate")
}
