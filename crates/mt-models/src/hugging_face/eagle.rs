//! Published decoders that draft from states of several layers (EAGLE-3): what their `config.json` says beside their layer.
//!
//! Two forms are published. The authors' form describes the layer at the top, and may have an object `eagle_config` with the
//! layers whose outputs are read. In vLLM's `speculators`, an object describes the layer, and the top names the layers whose
//! inputs are read.

use std::path::Path;

use serde_json::Value;

use super::{HuggingFaceConfig, config::LAYER};
use crate::ModelError;

/// The object with the choice of layers in the authors' form.
const NESTED: &str = "eagle_config";
const LAYERS: &str = "eagle_aux_hidden_state_layer_ids";
const BEGINS_NORMALIZED: &str = "norm_before_residual";

/// The keys of such a `config.json` that are no keys of the model's type.
pub(super) const KEYS: &[&str] = &[
    NESTED,
    LAYERS,
    BEGINS_NORMALIZED,
    LAYER,
    "draft_vocab_size",
    "target_hidden_size",
    "speculators_config",
    "speculators_model_type",
    "speculators_version",
];

/// The keys beside those of the decoder's layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EagleDescription {
    /// The numbers of the other model's layers whose inputs are read; `None` for the authors' choice.
    pub layers: Option<Vec<usize>>,
    /// Whether the residual stream of the decoder's layer begins with the normalized states.
    pub begins_normalized: bool,
}

impl EagleDescription {
    /// Reads the `config.json` of a directory.
    ///
    /// # Errors
    /// The file cannot be read, or a value has another type.
    pub fn read(directory: &Path) -> Result<Self, ModelError> {
        let config = HuggingFaceConfig::read_whole(directory)?;
        let layers_of = |config: &HuggingFaceConfig, distance: usize| {
            let number = |value: &Value| usize::try_from(value.as_u64()?).ok()?.checked_add(distance);
            let list = |value: &Value| value.as_array()?.iter().map(number).collect::<Option<Vec<usize>>>();
            let layers = config.get(LAYERS, "a list of layers' numbers", list);
            layers.map(|layers| layers.filter(|layers| !layers.is_empty()))
        };
        let nested = config.object(NESTED)?.map(|values| config.nested(NESTED, values));
        // The output of a layer is the input of the next one.
        let of_nested = nested.map(|nested| layers_of(&nested, 1)).transpose()?.flatten();
        Ok(Self {
            layers: layers_of(&config, 0)?.or(of_nested),
            begins_normalized: config.boolean(BEGINS_NORMALIZED)?.unwrap_or(false),
        })
    }
}
