//! The value model of PPO: a second model whose parameters are trained beside those of the first.
//!
//! In checkpoints it is a tree of its own, so that readers of parameters see the policy alone.

use std::{fmt, sync::Arc};

use mt_models::{Model, StateArray, StoredParameter};
use mt_nn::ParamSpec;
use mt_shape::Path;

/// The tree in checkpoints, and the begin of the names of parameters.
const TREE: &str = "value_model";

/// A model of values.
#[derive(Clone)]
pub(crate) struct ValueModel(pub Arc<dyn Model>);

impl fmt::Debug for ValueModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a value model of {} parameters", self.0.parameters().len())
    }
}

/// The same key within the tree.
fn within(key: &[String]) -> Vec<String> {
    [TREE.to_owned()].into_iter().chain(key.iter().cloned()).collect()
}

/// The same parameter within the tree, also in the form of earlier versions.
fn stored_within(stored: &StoredParameter) -> StoredParameter {
    let earlier = stored.earlier.as_ref().map(|earlier| Box::new(stored_within(earlier)));
    StoredParameter { key: within(&stored.key), earlier, ..stored.clone() }
}

impl ValueModel {
    /// The parameters.
    pub fn specs(&self) -> Vec<(Path, ParamSpec)> {
        let inside = |(path, spec): (Path, ParamSpec)| {
            let named = within(path.segments())
                .iter()
                .fold(Path::default(), |mut path, segment| path.within(segment, |path| path.clone()));
            (named, spec)
        };
        self.0.parameters().into_iter().map(inside).collect()
    }

    /// The parameters as checkpoints hold them.
    pub fn arrays(&self) -> Vec<StateArray> {
        let inside = |array: StateArray| {
            let stored = stored_within(&array.stored);
            let key = stored.key.iter().map(|segment| segment.clone().into()).collect();
            StateArray { key, stored, ..array }
        };
        StateArray::parameters(&*self.0).into_iter().map(inside).collect()
    }

    /// The names by which masks select the parameters.
    pub fn names(&self) -> Vec<String> {
        self.0.storage().iter().map(|stored| within(&stored.key).join("/")).collect()
    }
}
