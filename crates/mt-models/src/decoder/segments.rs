//! The segments of a stack of layers: which layers run as one scan, and which one by one.

use std::ops::Range;

use super::{DecoderConfig, LayerConfig};
use crate::ModelError;

/// Consecutive layers whose kinds repeat in a cycle. A family names the runs of its stack; how they are executed follows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerRun {
    /// Precedes the names of the run's segments; a stack of one run has none.
    pub name: &'static str,
    /// The number of its first layer. It ends where the next begins.
    pub first: usize,
    /// After how many layers their kinds repeat. Scanning takes whole cycles; the remainder is unrolled.
    pub cycle: usize,
}

/// Consecutive layers that are executed in one way.
#[derive(Clone, Debug, PartialEq)]
pub struct SegmentConfig {
    /// The name of the segment in the paths of its parameters: `cycle` or `rest`, after the name of the run if it has one.
    pub name: String,
    /// The number of its first layer.
    pub first: usize,
    /// The layers of one cycle if they are scanned, or else all layers.
    pub kinds: Vec<LayerConfig>,
    pub form: SegmentForm,
    /// If these are the layers after the scanned cycles of a run.
    pub is_remainder: bool,
}

/// How a segment is executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SegmentForm {
    /// As a scan of this many cycles, whose parameters are stacked along a leading axis.
    Scanned { repeats: usize },
    /// Layer by layer.
    Single,
}

impl SegmentConfig {
    /// The numbers of its layers.
    pub fn layers(&self) -> Range<usize> {
        let repeats = match self.form {
            SegmentForm::Scanned { repeats } => repeats,
            SegmentForm::Single => 1,
        };
        self.first..self.first + repeats * self.kinds.len()
    }
}

impl LayerRun {
    /// Whole cycles, if layers are scanned, then the rest.
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

    /// Makes the stack one run, whose layers repeat after `cycle`.
    pub fn set_cycle(&mut self, cycle: usize) {
        self.runs = vec![LayerRun { name: "", first: 0, cycle }];
    }

    /// Whether another layer takes what this layer exports.
    pub fn is_imported(&self, layer: usize) -> bool {
        self.layers.iter().flat_map(LayerConfig::parts).any(|part| part.imports() == Some(layer))
    }

    /// Checks that each segment can be executed in its form.
    ///
    /// # Errors
    /// A scanned layer takes something from another layer or gives it to one, or it has vectors of its own.
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

    /// Layers of these widths, in runs.
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
            name: names[number],
            first: *first,
            cycle: *cycle,
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
