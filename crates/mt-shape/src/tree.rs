//! Trees of leaves: one module definition serves specifications, tensors, buffers, shardings and optimizer slots.

use std::{collections::HashSet, fmt};

/// A leaf's path in its tree: field names and indices from the root.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Path(Vec<String>);

impl Path {
    /// The names from the root to the leaf.
    pub fn segments(&self) -> &[String] {
        &self.0
    }

    /// The path of the structure that holds the leaf.
    #[must_use]
    pub fn parent(&self) -> Self {
        Self(self.0.split_last().map(|(_, outer)| outer.to_vec()).unwrap_or_default())
    }

    /// Descends into a child while `visit` runs.
    pub fn within<R>(&mut self, segment: &str, visit: impl FnOnce(&mut Self) -> R) -> R {
        self.0.push(segment.to_owned());
        let result = visit(self);
        self.0.pop();
        result
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join("."))
    }
}

/// The random numbers that a structure draws in one application of a module.
#[derive(Clone, Copy, Debug)]
pub struct Noise<L> {
    /// The key of the numbers.
    pub key: L,
    /// The number of shards, if rows store pairs of chunks of text; `None` if they store tokens in the order of the
    /// text.
    pub paired_shards: Option<usize>,
}

/// The choices of a batch's rows among the adapters of weights.
#[derive(Clone, Copy, Debug)]
pub struct AdapterChoices<L> {
    /// The number of each row's adapter, from 1; 0 for none. Rows are in ascending order of their adapters, and those
    /// without come last. `i32[batch]`
    pub choices: L,
    /// The number of rows that chose each adapter: `i32[adapter]`.
    pub counts: L,
}

/// The inputs that structures receive for one application of a module, in addition to their leaves.
#[derive(Clone, Copy, Debug)]
pub enum Attached<L> {
    Noise(Noise<L>),
    Rows(AdapterChoices<L>),
}

/// A structure of leaves that can be rebuilt with leaves of another type.
///
/// Derive it with `#[derive(Tree)]` on a struct generic over its leaf. A plain leaf is a field whose type is the
/// parameter itself; every other field is a tree over the same parameter.
pub trait Tree {
    /// The type of the leaves.
    type Leaf;
    /// The same structure over leaves of type `B`.
    type With<B>;

    /// Rebuilds the structure in field order from the results of `map`.
    fn map_leaves_at<B>(
        &self,
        path: &mut Path,
        map: &mut dyn FnMut(&Path, &Self::Leaf) -> B,
    ) -> Self::With<B>;

    /// Gives each structure that needs more than its leaves the inputs of its path, until the next
    /// [`Self::map_leaves_at`]. A tree of leaves alone needs none.
    fn attach_at(&mut self, path: &mut Path, attach: &mut dyn FnMut(&Path) -> Attached<Self::Leaf>);

    /// As [`Self::attach_at`], from the root.
    fn attach(&mut self, mut attach: impl FnMut(&Path) -> Attached<Self::Leaf>)
    where
        Self: Sized,
    {
        self.attach_at(&mut Path::default(), &mut attach);
    }

    /// Rebuilds the structure from the results of `map` for each path and leaf.
    fn map_leaves<B>(&self, mut map: impl FnMut(&Path, &Self::Leaf) -> B) -> Self::With<B>
    where
        Self: Sized,
    {
        self.map_leaves_at(&mut Path::default(), &mut map)
    }

    /// The leaves in order, each with its path.
    ///
    /// # Panics
    /// Two leaves have the same path, which is possible with flattened fields.
    fn leaves(&self) -> Vec<(Path, Self::Leaf)>
    where
        Self: Sized,
        Self::Leaf: Clone,
    {
        let mut leaves = Vec::new();
        let mut paths = HashSet::new();
        self.map_leaves(|path, leaf| {
            assert!(paths.insert(path.clone()), "two leaves are at `{path}`");
            leaves.push((path.clone(), leaf.clone()));
        });
        leaves
    }

    /// Rebuilds the structure from leaves in the order of [`Tree::leaves`].
    ///
    /// # Panics
    /// `leaves` has fewer or more items than the structure has leaves.
    fn with_leaves<B>(&self, leaves: impl IntoIterator<Item = B>) -> Self::With<B>
    where
        Self: Sized,
    {
        let mut leaves = leaves.into_iter();
        let rebuilt =
            self.map_leaves(|_, _| leaves.next().expect("one leaf for every leaf of the structure"));
        assert!(leaves.next().is_none(), "more leaves than the structure has");
        rebuilt
    }
}

impl<T: Tree> Tree for Option<T> {
    type Leaf = T::Leaf;
    type With<B> = Option<T::With<B>>;

    fn map_leaves_at<B>(
        &self,
        path: &mut Path,
        map: &mut dyn FnMut(&Path, &Self::Leaf) -> B,
    ) -> Self::With<B> {
        self.as_ref().map(|tree| tree.map_leaves_at(path, map))
    }

    fn attach_at(&mut self, path: &mut Path, attach: &mut dyn FnMut(&Path) -> Attached<Self::Leaf>) {
        if let Some(tree) = self {
            tree.attach_at(path, attach);
        }
    }
}

impl<T: Tree> Tree for Vec<T> {
    type Leaf = T::Leaf;
    type With<B> = Vec<T::With<B>>;

    fn map_leaves_at<B>(
        &self,
        path: &mut Path,
        map: &mut dyn FnMut(&Path, &Self::Leaf) -> B,
    ) -> Self::With<B> {
        self.iter()
            .enumerate()
            .map(|(index, tree)| path.within(&index.to_string(), |path| tree.map_leaves_at(path, map)))
            .collect()
    }

    fn attach_at(&mut self, path: &mut Path, attach: &mut dyn FnMut(&Path) -> Attached<Self::Leaf>) {
        for (index, tree) in self.iter_mut().enumerate() {
            path.within(&index.to_string(), |path| tree.attach_at(path, attach));
        }
    }
}

impl<T: Tree> Tree for Box<T> {
    type Leaf = T::Leaf;
    type With<B> = Box<T::With<B>>;

    fn map_leaves_at<B>(
        &self,
        path: &mut Path,
        map: &mut dyn FnMut(&Path, &Self::Leaf) -> B,
    ) -> Self::With<B> {
        Box::new((**self).map_leaves_at(path, map))
    }

    fn attach_at(&mut self, path: &mut Path, attach: &mut dyn FnMut(&Path) -> Attached<Self::Leaf>) {
        (**self).attach_at(path, attach);
    }
}
