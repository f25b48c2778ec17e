//! What each parameter is for, by the name of its part and its layer.

use mt_nn::{LayerPlace, ParamSpec};
use mt_shape::Path;

use super::DecoderConfig;

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
    /// One layer that is not scanned. `remainder` counts from the last whole cycle, if cycles are scanned.
    Layer { index: usize, remainder: Option<usize> },
    /// The same layer of each cycle, stacked along the leading axis.
    Cycle { slot: usize, length: usize, count: usize },
}

impl Parameter {
    /// What a parameter of a decoder is for.
    pub fn of(config: &DecoderConfig, path: &Path, spec: &ParamSpec) -> Self {
        let role = role(path, spec.place);
        match spec.place {
            LayerPlace::None => Self { role, place: Place::Model },
            LayerPlace::One(index) => {
                let scanned = config.num_cycles() * config.cycle;
                let remainder = (scanned > 0).then(|| index - scanned);
                Self { role, place: Place::Layer { index, remainder } }
            }
            LayerPlace::Stacked { first, step } => {
                Self { role, place: Place::Cycle { slot: first, length: step, count: spec.axes[0].size } }
            }
        }
    }

    /// The numbers of the layers whose parameters these are, in order; empty for those of the model.
    pub fn layers(&self) -> Vec<usize> {
        match self.place {
            Place::Model => Vec::new(),
            Place::Layer { index, .. } => vec![index],
            Place::Cycle { slot, length, count } => (0..count).map(|cycle| slot + cycle * length).collect(),
        }
    }
}

/// The name of a part, without that of its layer.
pub(crate) fn role(path: &Path, place: LayerPlace) -> String {
    match place {
        LayerPlace::None => path.segments().join("."),
        LayerPlace::One(_) | LayerPlace::Stacked { .. } => path.segments()[3..].join("."),
    }
}
