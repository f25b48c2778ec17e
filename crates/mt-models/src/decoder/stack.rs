//! The layers of a decoder, one after another: whole cycles scanned, the rest unrolled.

use std::collections::HashMap;

use mt_derive::Tree;
use mt_nn::{
    Dropout, LayerIndex, LayerPlace, ParamSpec, RotaryAngles, RotaryOptions,
    attention::{AttentionInputs, CachedKeysValues, KeysValues, Segments},
    axes::LAYERS,
    constrain_to_specs,
};
use mt_shape::{Axis, DType, Tree, axis};
use mt_trace::{Key, Memory, Region, SavePolicy, ScanOptions, Tensor};

use super::{
    DecoderConfig, LayerConfig, Values,
    layer::{DecoderLayer, LayerInputs, LayerOutputs, layer_specs},
};
use crate::{LayerOutput, OfLayers};

/// All layers.
#[derive(Clone, Debug, Tree)]
pub struct Layers<L> {
    /// The layers of a cycle, each stacked over the cycles along a leading axis. Empty if nothing is scanned.
    pub cycle: Vec<DecoderLayer<L>>,
    /// The layers after the last whole cycle, one by one.
    pub rest: Vec<DecoderLayer<L>>,
}

/// What layers are given besides the residual stream.
pub(super) struct StackInputs<'t> {
    /// The angles of each kind of rotary embedding.
    pub angles: Vec<(RotaryOptions, RotaryAngles<'t>)>,
    pub segments: Segments<'t>,
    pub dropout: Option<Key<'t>>,
    /// The first slot of the cache to write, with the cache: one for each layer that has keys of its own, stacked for
    /// scanned ones.
    pub cache: Option<(Tensor<'t>, Vec<KeysValues<Tensor<'t>>>)>,
    /// The tokens' vectors for each layer: `[batch, position, layers, per_layer]`.
    pub per_layer: Option<Tensor<'t>>,
    /// What of layers is returned.
    pub wanted: Vec<LayerOutput>,
    /// The memory that the layers' parameters are in.
    pub layers_in: Memory,
}

/// What comes of all layers.
pub(super) struct StackOutputs<'t> {
    pub x: Tensor<'t>,
    /// In the order of the inputs.
    pub cache: Vec<KeysValues<Tensor<'t>>>,
    /// What was asked for.
    pub others: Vec<OfLayers<'t>>,
}

/// What a scan slices, or a layer that is computed again is given.
#[derive(Tree)]
struct Sliced<L> {
    layers: Vec<DecoderLayer<L>>,
    keys: Vec<L>,
    caches: Vec<KeysValues<L>>,
    shared: Option<KeysValues<L>>,
    per_layer: Option<L>,
}

/// The parameters of all layers.
pub(super) fn stack_specs(config: &DecoderConfig) -> Layers<ParamSpec> {
    let (cycles, length) = (config.num_cycles(), config.cycle);
    let scanned = if cycles == 0 { 0 } else { length };
    let cycle = config.layers[..scanned].iter().enumerate().map(|(slot, layer)| {
        let stacked = axis(LAYERS, cycles);
        layer_specs(config, layer).map_leaves(|_, spec| spec.stacked(stacked, slot, length))
    });
    let rest = config
        .layers
        .iter()
        .enumerate()
        .skip(cycles * length)
        .map(|(index, layer)| layer_specs(config, layer).map_leaves(|_, spec| spec.of_layer(index)));
    Layers { cycle: cycle.collect(), rest: rest.collect() }
}

/// For each cache: how many layers are stacked in it (none if it is one layer's), and that layer.
pub(super) fn caches(config: &DecoderConfig) -> Vec<(Option<Axis>, &LayerConfig)> {
    let (cycles, length) = (config.num_cycles(), config.cycle);
    let scanned = if cycles == 0 { 0 } else { length };
    let stacked = config.layers[..scanned].iter().map(|layer| (Some(axis(LAYERS, cycles)), layer));
    let single = config.layers.iter().skip(cycles * length).map(|layer| (None, layer));
    stacked.chain(single).filter(|(_, layer)| has_cache(layer)).collect()
}

fn has_cache(layer: &LayerConfig) -> bool {
    layer.attention.as_ref().is_some_and(|attention| !matches!(attention.values, Values::OfLayer(_)))
}

impl<'t> Layers<Tensor<'t>> {
    /// Applies all layers to the residual stream.
    ///
    /// # Shapes
    /// `[batch, position, embed] -> [batch, position, embed]`
    pub(super) fn forward(
        &self,
        x: Tensor<'t>,
        config: &DecoderConfig,
        inputs: &StackInputs<'t>,
    ) -> StackOutputs<'t> {
        let mut outputs = StackOutputs { x, cache: Vec::new(), others: Vec::new() };
        if !self.cycle.is_empty() {
            self.scanned(config, inputs, &mut outputs);
        }
        self.unrolled(config, inputs, &mut outputs);
        outputs
    }

    fn scanned(&self, config: &DecoderConfig, inputs: &StackInputs<'t>, outputs: &mut StackOutputs<'t>) {
        let x = outputs.x;
        let region = x.region();
        let layers = axis(LAYERS, config.num_cycles());
        let kinds = &config.layers[..config.cycle];
        let slice_specs: Vec<Vec<ParamSpec>> = kinds
            .iter()
            .map(|kind| layer_specs(config, kind).leaves().into_iter().map(|(_, spec)| spec).collect())
            .collect();
        let save = config.remat.clone().unwrap_or(SavePolicy::Everything);
        let num_caches = kinds.iter().filter(|kind| has_cache(kind)).count();
        let caches =
            inputs.cache.as_ref().map(|(_, caches)| caches[..num_caches].to_vec()).unwrap_or_default();
        let sliced = Sliced {
            layers: self.cycle.clone(),
            keys: inputs.dropout.map(|key| layer_keys(region, key, layers, config.cycle)).unwrap_or_default(),
            caches: caches.clone(),
            shared: None,
            per_layer: None,
        };
        let start = inputs.cache.as_ref().map(|(start, _)| *start);
        let options = ScanOptions::over(layers).saving(save);
        // The slot of the cycle and the kind of what is stacked besides caches.
        let mut made_by: Vec<(usize, LayerOutput)> = Vec::new();
        let ([x], stacked) = region.scan_list(options, [x], &sliced, |_, [mut x], slice| {
            let (mut written, mut others) = (Vec::new(), Vec::new());
            let mut caches = slice.caches.iter();
            for (slot, kind) in kinds.iter().enumerate() {
                let layer = constrain_to_specs(&inputs.on_device(&slice.layers[slot]), &slice_specs[slot]);
                let cache = if has_cache(kind) { caches.next() } else { None };
                let given = LayerInputs {
                    attention: inputs.attention(kind, start.zip(cache.copied()), None),
                    dropout: inputs.dropout(config, slice.keys.get(slot).copied()),
                    per_layer: None,
                };
                let made = layer.forward(x, config.norm, kind, given);
                x = made.x;
                written.extend(made.written.into_iter().flat_map(|cache| [cache.key, cache.value]));
                for (output, value) in made.wanted(&inputs.wanted) {
                    made_by.push((slot, output));
                    others.push(value);
                }
            }
            written.extend(others);
            ([x], written)
        });
        outputs.x = x;
        let (written, others) = stacked.split_at(stacked.len() - made_by.len());
        // What is new is written once for all layers: the loop only reads caches, and carries none.
        let written = written
            .chunks(2)
            .zip(caches)
            .zip(start.into_iter().cycle())
            .map(|((pair, cached), start)| CachedKeysValues { cached, start }.write(pair[0], pair[1]));
        outputs.cache.extend(written);
        outputs.others.extend(made_by.iter().zip(others).map(|((slot, output), value)| OfLayers {
            output: *output,
            place: LayerPlace::Stacked { first: *slot, step: config.cycle },
            value: *value,
        }));
    }

    fn unrolled(&self, config: &DecoderConfig, inputs: &StackInputs<'t>, outputs: &mut StackOutputs<'t>) {
        let first = config.layers.len() - self.rest.len();
        let mut caches =
            inputs.cache.as_ref().map(|(_, caches)| caches[outputs.cache.len()..].iter().copied());
        // Keys and values that later layers take.
        let mut kept: HashMap<usize, KeysValues<Tensor<'t>>> = HashMap::new();
        for (layer, index) in self.rest.iter().zip(first..) {
            let kind = &config.layers[index];
            let x = outputs.x;
            let region = x.region();
            let source = kind.attention.as_ref().and_then(|attention| match attention.values {
                Values::OfLayer(source) => Some(source),
                _ => None,
            });
            let is_source = config.attentions().any(|attention| attention.values == Values::OfLayer(index));
            let key = inputs.dropout.map(|key| key.fold_in(region.integer(DType::U64, index as i64)).value());
            let arguments = Sliced {
                layers: vec![layer.clone()],
                keys: key.into_iter().collect(),
                caches: caches
                    .as_mut()
                    .filter(|_| has_cache(kind))
                    .and_then(Iterator::next)
                    .into_iter()
                    .collect(),
                shared: source.and_then(|source| kept.get(&source).copied()),
                per_layer: inputs.per_layer.map(|vectors| vectors.at(LAYERS, index)),
            };
            let made = x.scope(&format!("layers_{index}"), |x| {
                recomputed(x, config, kind, inputs, &arguments, is_source)
            });
            outputs.x = made.x;
            let cache = inputs.cache.as_ref().map(|(start, _)| *start).zip(arguments.caches.first());
            outputs.cache.extend(made.written.zip(cache).map(|(own, (start, cached))| {
                CachedKeysValues { cached: *cached, start }.write(own.key, own.value)
            }));
            if let Some(keys_values) = made.keys_values.filter(|_| is_source) {
                kept.insert(index, keys_values);
            }
            outputs.others.extend(made.wanted(&inputs.wanted).into_iter().map(|(output, value)| OfLayers {
                output,
                place: LayerPlace::One(index),
                value,
            }));
        }
    }
}

/// One layer, which the backward pass computes again as the policy says.
fn recomputed<'t>(
    x: Tensor<'t>,
    config: &DecoderConfig,
    kind: &LayerConfig,
    inputs: &StackInputs<'t>,
    arguments: &Sliced<Tensor<'t>>,
    is_source: bool,
) -> LayerOutputs<'t> {
    let start = inputs.cache.as_ref().map(|(start, _)| *start);
    let Some(save) = config.remat.clone().filter(|_| inputs.cache.is_none()) else {
        return one(x, config, kind, inputs, start, arguments);
    };
    // What follows the residual stream, and keys and values if others take them.
    let mut kinds = Vec::new();
    let results = x.region().remat_list(save, [x], arguments, |_, [x], slice| {
        let made = one(x, config, kind, inputs, None, &slice);
        let keys_values = made.keys_values.filter(|_| is_source);
        let others =
            made.wanted(&inputs.wanted).into_iter().filter(|(kind, _)| *kind != LayerOutput::Residual);
        let mut results = vec![made.x];
        results.extend(keys_values.into_iter().flat_map(|both| [both.key, both.value]));
        for (kind, value) in others {
            kinds.push(kind);
            results.push(value);
        }
        results
    });
    let (own, others) = results.split_at(results.len() - kinds.len());
    LayerOutputs {
        x: own[0],
        keys_values: (own.len() == 3).then(|| KeysValues { key: own[1], value: own[2] }),
        written: None,
        others: kinds.into_iter().zip(others.iter().copied()).collect(),
    }
}

fn one<'b, 't: 'b>(
    x: Tensor<'b>,
    config: &DecoderConfig,
    kind: &LayerConfig,
    inputs: &StackInputs<'t>,
    start: Option<Tensor<'t>>,
    slice: &Sliced<Tensor<'b>>,
) -> LayerOutputs<'b> {
    let cache = slice.caches.first().copied();
    let given = LayerInputs {
        attention: inputs.attention(kind, start.map(|start| start as Tensor<'b>).zip(cache), slice.shared),
        dropout: inputs.dropout(config, slice.keys.first().copied()),
        per_layer: slice.per_layer,
    };
    inputs.on_device(&slice.layers[0]).forward(x, config.norm, kind, given)
}

impl<'t> StackInputs<'t> {
    /// A layer's parameters, brought to the device only now, so that there are never more than those of one layer.
    fn on_device<'b>(&self, layer: &DecoderLayer<Tensor<'b>>) -> DecoderLayer<Tensor<'b>> {
        match self.layers_in {
            Memory::Device => layer.clone(),
            Memory::Host => layer.map_leaves(|_, parameter| parameter.moved_to(Memory::Device)),
        }
    }

    fn attention<'b>(
        &self,
        kind: &LayerConfig,
        cache: Option<(Tensor<'b>, KeysValues<Tensor<'b>>)>,
        shared: Option<KeysValues<Tensor<'b>>>,
    ) -> AttentionInputs<'b>
    where
        't: 'b,
    {
        let rotary = kind.attention.as_ref().and_then(|attention| attention.rotary.as_ref());
        AttentionInputs {
            angles: rotary.map(|rotary| {
                let known = self.angles.iter().find(|(other, _)| other == rotary);
                known.expect("the angles of every layer's embedding are made").1
            }),
            segments: self.segments,
            cache: cache.map(|(start, cached)| CachedKeysValues { cached, start }),
            shared,
            with_scores: self.wanted.contains(&LayerOutput::LargestScores),
        }
    }

    /// The dropout of a layer with this key.
    fn dropout<'b>(&self, config: &DecoderConfig, key: Option<Tensor<'b>>) -> Dropout<'b> {
        let (rate, order) = (config.dropout_rate, self.segments.order);
        key.map_or(Dropout::Off, |key| Dropout::On { rate, key: Key::new(key), order })
    }
}

/// The dropout keys of scanned layers: for each slot of the cycle those of its layers, stacked.
fn layer_keys<'t>(region: Region<'t>, key: Key<'t>, layers: Axis, cycle: usize) -> Vec<Tensor<'t>> {
    let index = LayerIndex { index: region.iota(DType::U64, layers) };
    let ([], keys) = region.scan_list(ScanOptions::over(layers), [], &index, |region, [], layer| {
        let first = layer.index * region.integer(DType::U64, cycle as i64);
        let keys =
            (0..cycle).map(|slot| key.fold_in(first + region.integer(DType::U64, slot as i64)).value());
        ([], keys.collect())
    });
    keys
}
