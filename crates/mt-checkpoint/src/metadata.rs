//! The JSON files of Orbax: the tree of an item and the metadata of a step.

use serde_json::{Map, Value, json};

use crate::keys::{KeySegment, python_tuple};

pub(crate) const TREE_FILE: &str = "_METADATA";
pub(crate) const STEP_FILE: &str = "_CHECKPOINT_METADATA";
pub(crate) const SUCCESS_FILE: &str = "commit_success.txt";
/// The item that holds the state.
pub(crate) const STATE_ITEM: &str = "items";
/// Orbax ignores directories whose names contain this.
pub(crate) const TEMPORARY_SUFFIX: &str = ".orbax-checkpoint-tmp";

/// Key of the step's custom metadata that records the step, so that a renamed or copied directory is noticed.
pub(crate) const STEP_MARK: &str = "maxtext_step";

/// Arrays are declared as NumPy's. Orbax restores these on any machine, and into `jax.Array`s on request, which MaxText
/// makes. Arrays declared as `jax.Array` restore without arguments only where a device of the recorded name exists.
const ARRAY_TYPE: &str = "np.ndarray";
const HANDLER: &str = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler";

/// Whether a name is valid for a file or directory of a step.
pub(crate) fn is_plain(name: &str) -> bool {
    !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\0'])
}

/// A node of the tree without contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Empty {
    /// Python's `None`, such as the state of an optimizer transformation that has none.
    None,
    /// `{}`
    Dict,
    /// `[]`
    List,
    /// `()`
    Tuple,
}

impl Empty {
    const ALL: [Self; 4] = [Self::None, Self::Dict, Self::List, Self::Tuple];

    fn type_name(self) -> &'static str {
        match self {
            Self::None => "None",
            Self::Dict => "Dict",
            Self::List => "List",
            Self::Tuple => "Tuple",
        }
    }
}

/// The record of `_METADATA` about the value at a key path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Array,
    Empty(Empty),
    /// A type with another storage format, such as `string`.
    Other(String),
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct TreeMetadata {
    pub entries: Vec<(Vec<KeySegment>, Kind)>,
    pub ocdbt: bool,
    pub zarr3: bool,
    /// Whether a chunk without a file is damaged, as opposed to a chunk of zeros.
    pub stores_every_chunk: bool,
}

impl TreeMetadata {
    pub fn to_json(&self) -> Value {
        let mut tree = Map::new();
        for (key, kind) in &self.entries {
            let segments: Vec<Value> = key
                .iter()
                .map(|segment| {
                    let key_type = if matches!(segment, KeySegment::Index(_)) { 1 } else { 2 };
                    json!({"key": segment.text(), "key_type": key_type})
                })
                .collect();
            let (value_type, skip) = match kind {
                Kind::Array => (ARRAY_TYPE, false),
                Kind::Empty(empty) => (empty.type_name(), true),
                Kind::Other(name) => (name.as_str(), false),
            };
            tree.insert(
                python_tuple(key),
                json!({
                    "key_metadata": segments,
                    "value_metadata": {"value_type": value_type, "skip_deserialize": skip},
                }),
            );
        }
        json!({
            "tree_metadata": tree,
            "use_ocdbt": self.ocdbt,
            "use_zarr3": self.zarr3,
            "store_array_data_equal_to_fill_value": self.stores_every_chunk,
            "custom_metadata": null,
        })
    }

    pub fn from_json(json: &Value) -> Result<Self, String> {
        let tree = json["tree_metadata"].as_object().ok_or("`tree_metadata` is missing")?;
        let mut entries = Vec::with_capacity(tree.len());
        for (name, entry) in tree {
            let malformed = || format!("the entry of `{name}` is malformed");
            let segments = entry["key_metadata"].as_array().ok_or_else(malformed)?;
            let key: Option<Vec<KeySegment>> = segments.iter().map(segment).collect();
            let value = &entry["value_metadata"];
            let value_type = value["value_type"].as_str().ok_or_else(malformed)?;
            let kind = match value_type {
                "jax.Array" | "np.ndarray" | "scalar" => Kind::Array,
                other => match Empty::ALL.into_iter().find(|empty| empty.type_name() == other) {
                    Some(empty) => Kind::Empty(empty),
                    None => Kind::Other(other.to_owned()),
                },
            };
            entries.push((key.ok_or_else(malformed)?, kind));
        }
        let flag = |key: &str| json[key].as_bool().unwrap_or(false);
        Ok(Self {
            entries,
            ocdbt: flag("use_ocdbt"),
            zarr3: flag("use_zarr3"),
            stores_every_chunk: flag("store_array_data_equal_to_fill_value"),
        })
    }
}

fn segment(json: &Value) -> Option<KeySegment> {
    let key = json["key"].as_str()?;
    match json["key_type"].as_u64()? {
        1 => key.parse().ok().map(KeySegment::Index),
        _ => Some(KeySegment::Key(key.to_owned())),
    }
}

/// The contents of `_CHECKPOINT_METADATA`. Times are nanoseconds since 1970.
pub(crate) fn step_metadata(started: u64, committed: u64, custom: &Map<String, Value>) -> Value {
    json!({
        "item_handlers": {STATE_ITEM: HANDLER},
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": started,
        "commit_timestamp_nsecs": committed,
        "custom_metadata": custom,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trees_keep_their_order_and_kinds() {
        let tree = TreeMetadata {
            entries: vec![
                (vec!["step".into()], Kind::Array),
                (vec!["opt_state".into(), 0.into(), "mu".into()], Kind::Array),
                (vec!["opt_state".into(), 1.into()], Kind::Empty(Empty::None)),
                (vec!["opt_state".into(), 2.into()], Kind::Empty(Empty::Dict)),
                (vec!["note".into()], Kind::Other("string".to_owned())),
            ],
            ocdbt: false,
            zarr3: true,
            stores_every_chunk: true,
        };
        let json = tree.to_json();
        assert_eq!(json["tree_metadata"]["('opt_state', '1')"]["value_metadata"]["skip_deserialize"], true);
        assert_eq!(TreeMetadata::from_json(&json), Ok(tree));
    }

    #[test]
    fn malformed_trees_are_refused() {
        assert!(TreeMetadata::from_json(&json!({})).is_err());
        let entry = json!({"key_metadata": [{"key": "x", "key_type": 1}], "value_metadata": {"value_type": "scalar"}});
        assert!(TreeMetadata::from_json(&json!({"tree_metadata": {"('x',)": entry}})).is_err());
    }
}
