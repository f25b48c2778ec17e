//! The segments of a stack of layers, each of which is scanned or unrolled.

use std::{borrow::Cow, ops::Range};

use super::{DecoderConfig, LayerConfig, Place};
use crate::ModelError;

/// Consecutive layers whose kinds repeat in a cycle. A family lists the runs of its stack; their execution follows from
/// them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerRun {
    /// The prefix of the names of the run's segments; empty if the stack has one run.
    pub name: Cow<'static, str>,
    /// The index of the first layer. The run ends where the next one begins.
    pub first: usize,
    /// The number of layers after which their kinds repeat. Whole cycles are scanned; the remainder is unrolled.
    pub cycle: usize,
    /// The names of the run's segments in MaxText's checkpoints.
    pub stored: LayerNames,
}

/// MaxText's names for the layers of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerNames {
    /// The name of scanned cycles.
    pub cycles: Cow<'static, str>,
    /// The name of the run's only layer if the stack is scanned, for layers that are never scanned.
    pub single: Option<String>,
    /// The prefix of a layer's index, within a cycle of several layers or within the remainder.
    pub layer_of_cycle: &'static str,
    /// The name of the remainder, the layers after the last whole cycle.
    pub remainder: &'static str,
    /// The prefix of an unrolled layer's index.
    pub layer: &'static str,
    /// The layer from which unrolled layers are counted.
    pub counted_from: usize,
}

impl LayerNames {
    /// `layers`, or `layers_3` if unrolled. In longer cycles `layers.layers_2`, and `layers_remainder.layers_0` after
    /// the cycles.
    pub const LAYERS: Self = Self {
        cycles: Cow::Borrowed("layers"),
        single: None,
        layer_of_cycle: "layers",
        remainder: "layers_remainder",
        layer: "layers",
        counted_from: 0,
    };

    /// A separately named run, such as `dense_layers`, or `dense_layers_0` for its first layer, `first`, if unrolled.
    pub fn named(name: &'static str, first: usize) -> Self {
        Self { cycles: Cow::Borrowed(name), layer: name, counted_from: first, ..Self::LAYERS }
    }

    /// The key of an unrolled layer of the run, or of its stacked layers.
    fn key(&self, is_scanned: bool, place: Place) -> Vec<String> {
        let numbered = |name: &str, index: usize| format!("{name}_{index}");
        match place {
            Place::Model | Place::Prediction(_) => Vec::new(),
            Place::Layer { remainder: Some(index), .. } => {
                vec![self.remainder.to_owned(), numbered(self.layer_of_cycle, index)]
            }
            Place::Layer { index, .. } => match self.single.clone().filter(|_| is_scanned) {
                Some(single) => vec![single],
                None => vec![numbered(self.layer, index - self.counted_from)],
            },
            Place::Cycle { length: 1, .. } => vec![self.cycles.to_string()],
            Place::Cycle { slot, .. } => vec![self.cycles.to_string(), numbered(self.layer_of_cycle, slot)],
        }
    }
}

/// Consecutive layers that are executed in the same way.
#[derive(Clone, Debug, PartialEq)]
pub struct SegmentConfig {
    /// The name of the segment in the paths of its parameters: `cycle` or `rest`, after the prefix of the run.
    pub name: String,
    /// The index of the first layer.
    pub first: usize,
    /// The layers of one cycle if the segment is scanned, otherwise all its layers.
    pub kinds: Vec<LayerConfig>,
    pub form: SegmentForm,
    /// Whether these layers follow the scanned cycles of a run.
    pub is_remainder: bool,
}

/// The execution of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SegmentForm {
    /// A scan over this many cycles, whose parameters are stacked along a leading axis.
    Scanned { repeats: usize },
    /// One layer after another.
    Single,
}

impl SegmentConfig {
    /// The indices of the segment's layers.
    pub fn layers(&self) -> Range<usize> {
        let repeats = match self.form {
            SegmentForm::Scanned { repeats } => repeats,
            SegmentForm::Single => 1,
        };
        self.first..self.first + repeats * self.kinds.len()
    }
}

impl LayerRun {
    /// The segment of whole cycles, if layers are scanned, and that of the remaining layers.
    fn segments(&self, layers: &[LayerConfig], scan: bool) -> Vec<SegmentConfig> {
        let same = || {
            let alike = layers.iter().enumerate();
            alike.take_while(|(index, layer)| **layer == layers[index % self.cycle]).count()
        };
        let repeats = if scan { same() / self.cycle } else { 0 };
        let scanned = repeats * self.cycle;
        let name =
            |of: &str| if self.name.is_empty() { of.to_owned() } else { format!("{}_{of}", self.name) };
        let cycles = (repeats > 0).then(|| SegmentConfig {
            name: name("cycle"),
            first: self.first,
            kinds: layers[..self.cycle].to_vec(),
            form: SegmentForm::Scanned { repeats },
            is_remainder: false,
        });
        let rest = (scanned < layers.len()).then(|| SegmentConfig {
            name: name("rest"),
            first: self.first + scanned,
            kinds: layers[scanned..].to_vec(),
            form: SegmentForm::Single,
            is_remainder: repeats > 0,
        });
        cycles.into_iter().chain(rest).collect()
    }
}

impl DecoderConfig {
    /// The segments of the stack, in the order of the layers.
    pub fn segments(&self) -> Vec<SegmentConfig> {
        let ends = self.runs.iter().skip(1).map(|run| run.first).chain([self.layers.len()]);
        let segments = self.runs.iter().zip(ends);
        segments.flat_map(|(run, end)| run.segments(&self.layers[run.first..end], self.scan_layers)).collect()
    }

    /// Makes the stack one run, whose layers repeat after `cycle` layers.
    pub fn set_cycle(&mut self, cycle: usize) {
        self.runs = vec![LayerRun { name: "".into(), first: 0, cycle, stored: LayerNames::LAYERS }];
    }

    /// The key of an unrolled layer, or of stacked layers, in MaxText's checkpoints. It is empty for parameters outside
    /// of layers.
    pub(crate) fn stored_layers(&self, place: Place) -> Vec<String> {
        let first = match place {
            Place::Model | Place::Prediction(_) => 0,
            Place::Layer { index, .. } => index,
            Place::Cycle { first, .. } => first,
        };
        let run = self.runs.iter().rev().find(|run| run.first <= first);
        run.map(|run| run.stored.key(self.scan_layers, place)).unwrap_or_default()
    }

    /// Whether another layer imports this layer's exports.
    pub fn is_imported(&self, layer: usize) -> bool {
        self.layers.iter().flat_map(LayerConfig::parts).any(|part| part.imports() == Some(layer))
    }

    /// Cuts the runs around the layers with memories of n-grams, whose sizes all differ, so that they are never scanned.
    /// Other layers stay scanned between them.
    pub(crate) fn separate_memories(&mut self) {
        let ends: Vec<usize> =
            self.runs.iter().skip(1).map(|run| run.first).chain([self.layers.len()]).collect();
        let mut runs = Vec::new();
        for (run, end) in std::mem::take(&mut self.runs).into_iter().zip(ends) {
            let has_memory = |layer: &usize| self.layers[*layer].engram.is_some();
            let mut first = run.first;
            while first < end {
                let next = (first..end).find(has_memory).unwrap_or(end);
                let stored = run.stored.clone();
                let names = (run.name.clone(), run.stored.cycles.clone());
                if next == first {
                    // A cycle longer than the run is not scanned.
                    runs.push(LayerRun {
                        name: format!("{}_engram_{first}", names.0).into(),
                        first,
                        cycle: 2,
                        stored: LayerNames { single: Some(format!("{}_engram_{first}", names.1)), ..stored },
                    });
                    first += 1;
                } else {
                    let last = next - 1;
                    runs.push(LayerRun {
                        name: format!("{}_{first}", names.0).into(),
                        first,
                        cycle: run.cycle,
                        stored: LayerNames { cycles: format!("{}_{first}_{last}", names.1).into(), ..stored },
                    });
                    first = next;
                }
            }
        }
        self.runs = runs;
    }

    /// Checks that each segment can be executed in its form.
    ///
    /// # Errors
    /// A scanned layer imports from another layer, exports to one, or has per-layer embeddings.
    pub fn check(&self) -> Result<(), ModelError> {
        let is_scanned = |segment: &SegmentConfig| matches!(segment.form, SegmentForm::Scanned { .. });
        for segment in self.segments().iter().filter(|segment| is_scanned(segment)) {
            for layer in segment.layers() {
                let imports = self.layers[layer].parts().any(|part| part.imports().is_some());
                if imports || self.is_imported(layer) {
                    return Err(ModelError::SharedLayersScanned);
                }
            }
            if self.embedding.per_layer.is_some() {
                return Err(ModelError::PerLayerVectorsScanned);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{build_decoder, decoder::MlpConfig};
    use mt_config::{Config, ModelGroup, Request};

    /// Checks the segments of layers with these MLP widths, grouped into runs.
    fn check(widths: &[usize], runs: &[(usize, usize)], expected: &[(&str, usize, usize, usize)]) {
        let arguments = ["dataset_type=synthetic", "run_name=segments", "scan_layers=true"];
        let arguments = arguments.map(str::to_owned).to_vec();
        let config = Config::resolve(&Request { arguments, ..Request::default() }).unwrap();
        let group = ModelGroup::from_config(&config).unwrap();
        let mut config = build_decoder(&group).unwrap().config().clone();
        let kind = config.layers[0].clone();
        let layer = |width: &usize| {
            let mut layer = kind.clone();
            let mlp = layer.feed_forward.as_mut().and_then(|part| part.get_mut::<MlpConfig>()).unwrap();
            mlp.width = mlp.width.with_size(*width);
            layer
        };
        config.layers = widths.iter().map(layer).collect();
        let names = ["", "second", "third"];
        let run = |(number, (first, cycle)): (usize, &(usize, usize))| LayerRun {
            name: names[number].into(),
            first: *first,
            cycle: *cycle,
            stored: LayerNames::LAYERS,
        };
        config.runs = runs.iter().enumerate().map(run).collect();
        let shown = |segment: &SegmentConfig| {
            let repeats = match segment.form {
                SegmentForm::Scanned { repeats } => repeats,
                SegmentForm::Single => 0,
            };
            (segment.name.clone(), segment.first, segment.kinds.len(), repeats)
        };
        let segments: Vec<_> = config.segments().iter().map(shown).collect();
        let expected =
            expected.iter().map(|(name, first, kinds, repeats)| (name.to_string(), *first, *kinds, *repeats));
        assert_eq!(segments, expected.collect::<Vec<_>>(), "{widths:?} {runs:?}");
    }

    #[test]
    fn whole_cycles_are_scanned_and_the_rest_is_unrolled() {
        check(&[1], &[(0, 1)], &[("cycle", 0, 1, 1)]);
        check(&[1; 4], &[(0, 1)], &[("cycle", 0, 1, 4)]);
        check(&[1, 1, 2, 1, 1, 2, 1], &[(0, 3)], &[("cycle", 0, 3, 2), ("rest", 6, 1, 0)]);
        check(&[1, 2, 1, 3], &[(0, 2)], &[("cycle", 0, 2, 1), ("rest", 2, 2, 0)]);
        check(&[1, 1, 2], &[(0, 4)], &[("rest", 0, 3, 0)]);
    }

    #[test]
    fn every_run_is_scanned_by_itself() {
        check(&[1, 1, 1, 2, 2], &[(0, 1), (3, 1)], &[("cycle", 0, 1, 3), ("second_cycle", 3, 1, 2)]);
        check(
            &[1, 2, 3, 2, 3, 2],
            &[(0, 1), (1, 2)],
            &[("cycle", 0, 1, 1), ("second_cycle", 1, 2, 2), ("second_rest", 5, 1, 0)],
        );
    }
}
