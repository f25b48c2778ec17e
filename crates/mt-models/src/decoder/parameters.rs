//! What each parameter is for, by the name of its part and its layer.

use mt_nn::{LayerPlace, ParamSpec};
use mt_shape::Path;

use super::{SegmentConfig, SegmentForm};

/// A parameter by what it is for.
#[derive(Clone, Debug, PartialEq)]
pub struct Parameter {
    /// The name of the part, such as `attention.query.kernel`, without the layer.
    pub role: String,
    pub place: Place,
}

/// Which layers a parameter is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// It is of no layer.
    Model,
    /// One layer that is not scanned. `remainder` counts from the last whole cycle, if cycles of its run are scanned.
    Layer { index: usize, remainder: Option<usize> },
    /// The same layer of each cycle, stacked along the leading axis: `slot` within the cycle, which begins with the
    /// layer `first`.
    Cycle { first: usize, slot: usize, length: usize, count: usize },
}

impl Parameter {
    /// What a parameter of a decoder with these segments is for.
    pub fn of(segments: &[SegmentConfig], path: &Path, spec: &ParamSpec) -> Self {
        let segment = |layer: usize| {
            let segment = segments.iter().find(|segment| segment.layers().contains(&layer));
            segment.expect("every layer is of a segment")
        };
        let place = match spec.place {
            LayerPlace::None => Place::Model,
            LayerPlace::One(index) => {
                let segment = segment(index);
                Place::Layer { index, remainder: segment.is_remainder.then(|| index - segment.first) }
            }
            LayerPlace::Stacked { first: layer, step } => {
                let SegmentConfig { first, form, .. } = segment(layer);
                let count = match form {
                    SegmentForm::Scanned { repeats } => *repeats,
                    SegmentForm::Single => 1,
                };
                Place::Cycle { first: *first, slot: layer - first, length: step, count }
            }
        };
        Self { role: role(path, spec), place }
    }

    /// The numbers of the layers whose parameters these are, in order; empty for those of the model.
    pub fn layers(&self) -> Vec<usize> {
        match self.place {
            Place::Model => Vec::new(),
            Place::Layer { index, .. } => vec![index],
            Place::Cycle { first, slot, length, count } => {
                (0..count).map(|cycle| first + slot + cycle * length).collect()
            }
        }
    }
}

/// The name of a part, without that of its layer.
pub(crate) fn role(path: &Path, spec: &ParamSpec) -> String {
    match spec.place {
        LayerPlace::None => path.to_string(),
        LayerPlace::One(_) | LayerPlace::Stacked { .. } => spec.role.clone(),
    }
}
