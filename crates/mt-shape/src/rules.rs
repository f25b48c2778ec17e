//! Rules that place logical axes on mesh axes.

use std::{
    collections::BTreeSet,
    fmt,
    sync::{Arc, Mutex},
};

use crate::{DType, LogicalAxis, Mesh, PartitionSpec, Sharding};

/// Ordered rules from a logical axis name to mesh axes. A name may have several rules; the first that fits is used.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogicalRules(pub Vec<(String, Vec<String>)>);

/// A mesh axis that a rule names but that does not divide the dimension.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PlacementNote {
    pub logical_axis: String,
    pub mesh_axis: String,
    pub mesh_axis_size: usize,
    pub dimension: usize,
}

impl fmt::Display for PlacementNote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "logical axis `{}` of size {} is not split over mesh axis `{}`, whose size {} does not divide it",
            self.logical_axis, self.dimension, self.mesh_axis, self.mesh_axis_size
        )
    }
}

/// The sharding that code requested for an intermediate value by its logical axes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PlacedValue {
    /// The enclosing scopes, such as `decoder/mlp`.
    pub scope: String,
    /// The value's own name, or else the operation that computes it.
    pub name: String,
    pub logical_axes: Vec<Option<LogicalAxis>>,
    pub dims: Vec<usize>,
    pub dtype: DType,
    /// The mesh axes, in the display form of a partition specification.
    pub spec: String,
    /// Bytes of the value's shard on one device.
    pub bytes: usize,
}

/// A mesh together with the rules that place arrays on it.
#[derive(Debug)]
pub struct Placement {
    mesh: Arc<Mesh>,
    rules: LogicalRules,
    notes: Mutex<BTreeSet<PlacementNote>>,
    values: Mutex<Vec<PlacedValue>>,
    seen: Mutex<Seen>,
}

/// A record of the arrays placed so far.
#[derive(Debug, Default)]
struct Seen {
    /// Logical axes of these arrays.
    logical_axes: BTreeSet<LogicalAxis>,
    /// Mesh axes over which these arrays are split.
    mesh_axes: BTreeSet<String>,
}

impl Placement {
    /// A placement of arrays on `mesh` by `rules`.
    pub fn new(mesh: Mesh, rules: LogicalRules) -> Self {
        Self {
            mesh: Arc::new(mesh),
            rules,
            notes: Mutex::default(),
            values: Mutex::default(),
            seen: Mutex::default(),
        }
    }

    /// A placement on the same mesh by rules that name some mesh axes after all others.
    pub fn naming_last(&self, is_last: impl Fn(&str) -> bool) -> Self {
        let mut rules = self.rules.clone();
        rules.0.iter_mut().for_each(|(_, mesh_axes)| mesh_axes.sort_by_key(|axis| is_last(axis)));
        Self::new((*self.mesh).clone(), rules)
    }

    /// The placement of everything on one device.
    pub fn single() -> Self {
        Self::new(Mesh::single(), LogicalRules::default())
    }

    /// The mesh.
    pub fn mesh(&self) -> &Arc<Mesh> {
        &self.mesh
    }

    /// The mesh axes that rules requested and indivisible dimensions rejected, so far.
    pub fn notes(&self) -> Vec<PlacementNote> {
        self.notes.lock().expect("no panic while the notes are held").iter().cloned().collect()
    }

    /// Whether a rule exists for this name.
    pub fn has_rule(&self, logical_axis: &str) -> bool {
        self.rules.0.iter().any(|(known, _)| known == logical_axis)
    }

    /// The first name without a rule. A rule without mesh axes requests replication. On one device all names are
    /// accepted, because they place nothing.
    pub fn unknown_axis(&self, logical_axes: &[Option<LogicalAxis>]) -> Option<LogicalAxis> {
        let mut axes = logical_axes.iter().copied().flatten();
        axes.find(|axis| self.mesh.num_devices() > 1 && !self.has_rule(axis.name()))
    }

    /// The logical axes of the arrays placed so far.
    pub fn logical_axes(&self) -> BTreeSet<LogicalAxis> {
        self.seen.lock().expect("no panic while this is held").logical_axes.clone()
    }

    /// Names and sizes of mesh axes with several devices over which no array has been split so far.
    pub fn idle_mesh_axes(&self) -> Vec<(String, usize)> {
        let seen = self.seen.lock().expect("no panic while this is held");
        let axes = self.mesh.axes().iter().filter(|(axis, size)| *size > 1 && !seen.mesh_axes.contains(axis));
        axes.cloned().collect()
    }

    /// The distinct intermediate values that code has placed so far.
    pub fn values(&self) -> BTreeSet<PlacedValue> {
        self.values.lock().expect("no panic while the values are held").iter().cloned().collect()
    }

    /// Names the value that was added last to [`Self::values`].
    pub fn name_last_value(&self, name: &str) {
        if let Some(last) = self.values.lock().expect("no panic while the values are held").last_mut() {
            name.clone_into(&mut last.name);
        }
    }

    /// Adds an intermediate value with sharding `spec` to [`Self::values`].
    pub fn note_value(
        &self,
        (scope, name): (&str, &str),
        dtype: DType,
        logical_axes: &[Option<LogicalAxis>],
        dims: &[usize],
        spec: &PartitionSpec,
    ) {
        let sharding = Sharding { mesh: self.mesh.clone(), spec: spec.clone() };
        let value = PlacedValue {
            scope: scope.to_owned(),
            name: name.to_owned(),
            logical_axes: logical_axes.to_vec(),
            dims: dims.to_vec(),
            dtype,
            spec: spec.to_string(),
            bytes: sharding.shard_dims(dims).iter().product::<usize>() * dtype.byte_size(),
        };
        self.values.lock().expect("no panic while the values are held").push(value);
    }

    /// The sharding of an array whose dimensions have these logical axes (`None`: never split).
    ///
    /// As in MaxText, rules are tried in order, and a rule is skipped if another dimension uses one of its mesh axes.
    /// Axes of size 1 and axes that do not divide the dimension are dropped from the chosen rule. MaxText drops them at
    /// the end, after they have blocked other dimensions. Here they remain free for later rules, and if no axis of a
    /// rule is left, the next rule for the dimension is tried.
    pub fn sharding(&self, logical_axes: &[Option<LogicalAxis>], dims: &[usize]) -> Sharding {
        assert_eq!(logical_axes.len(), dims.len(), "one logical axis for each dimension");
        let mut spec: Vec<Vec<String>> = vec![Vec::new(); dims.len()];
        let mut is_placed = vec![false; dims.len()];
        let mut taken: BTreeSet<&str> = BTreeSet::new();
        for (name, mesh_axes) in &self.rules.0 {
            let Some(dim) = logical_axes.iter().position(|axis| axis.is_some_and(|axis| axis.name() == name))
            else {
                continue;
            };
            if is_placed[dim] || mesh_axes.iter().any(|axis| taken.contains(axis.as_str())) {
                continue;
            }
            let mut remaining = dims[dim];
            let mut is_whole = true;
            for axis in mesh_axes {
                let num_shards = self.mesh.axis_size(axis).unwrap_or(1);
                if !remaining.is_multiple_of(num_shards) {
                    is_whole = false;
                    self.notes.lock().expect("no panic while the notes are held").insert(PlacementNote {
                        logical_axis: name.clone(),
                        mesh_axis: axis.clone(),
                        mesh_axis_size: num_shards,
                        dimension: dims[dim],
                    });
                    continue;
                }
                remaining /= num_shards;
                taken.insert(axis);
                if num_shards > 1 {
                    spec[dim].push(axis.clone());
                }
            }
            is_placed[dim] = is_whole || !spec[dim].is_empty();
        }
        let mut seen = self.seen.lock().expect("no panic while this is held");
        seen.logical_axes.extend(logical_axes.iter().flatten());
        seen.mesh_axes.extend(spec.iter().flatten().cloned());
        drop(seen);
        Sharding { spec: PartitionSpec(spec), mesh: self.mesh.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::logical;

    fn named(names: &[Option<&str>]) -> Vec<Option<LogicalAxis>> {
        names.iter().map(|name| name.map(LogicalAxis::named)).collect()
    }

    fn placement() -> Placement {
        let mesh =
            Mesh::new([("fsdp".to_owned(), 4), ("tensor".to_owned(), 2), ("expert".to_owned(), 1)]).unwrap();
        let rules = [("embed", vec!["fsdp", "expert"]), ("embed_two", vec!["fsdp"]), ("mlp", vec!["tensor"])];
        let owned =
            rules.map(|(name, axes)| (name.to_owned(), axes.into_iter().map(str::to_owned).collect()));
        Placement::new(mesh, LogicalRules(owned.into()))
    }

    #[track_caller]
    fn check(logical: &[Option<&str>], dims: &[usize], expected: &str) {
        assert_eq!(placement().sharding(&named(logical), dims).spec.to_string(), expected);
    }

    #[test]
    fn first_fitting_rule_wins() {
        check(&[Some("embed"), Some("mlp")], &[8, 6], "(fsdp, tensor)");
        check(&[Some("embed"), Some("embed_two")], &[8, 8], "(fsdp, -)");
        check(&[None, Some("unknown")], &[8, 8], "(-, -)");
    }

    #[test]
    fn names_without_a_rule_are_found() {
        for unknown in [logical::ACTIVATION_BATCH, LogicalAxis::named("activation_bach")] {
            let names = [None, Some(LogicalAxis::named("embed_two")), Some(unknown)];
            assert_eq!(placement().unknown_axis(&names), Some(unknown));
            assert_eq!(placement().unknown_axis(&names[..2]), None);
            assert_eq!(Placement::single().unknown_axis(&names), None);
        }
    }

    #[test]
    fn axes_that_do_not_fit_are_free_for_others() {
        check(&[Some("embed"), Some("embed_two")], &[6, 8], "(-, fsdp)");
        // They are free for the next rule of the same name, too.
        let mesh = Mesh::new([("fsdp".to_owned(), 4), ("tensor".to_owned(), 2)]).unwrap();
        let rule = |name: &str, axis: &str| (name.to_owned(), vec![axis.to_owned()]);
        let rules = LogicalRules(vec![rule("mlp", "fsdp"), rule("mlp", "tensor"), rule("embed", "fsdp")]);
        let sharding =
            Placement::new(mesh, rules).sharding(&[Some(logical::MLP), Some(logical::EMBED)], &[6, 8]);
        assert_eq!(sharding.spec.to_string(), "(tensor, fsdp)");
    }

    #[test]
    fn axes_can_be_named_last() {
        let mesh = Mesh::new(["data", "fsdp", "tensor"].map(|name| (name.to_owned(), 2))).unwrap();
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        let rules = LogicalRules(vec![("batch".to_owned(), names(&["data", "tensor", "fsdp"]))]);
        let placement = Placement::new(mesh, rules).naming_last(|axis| axis == "data");
        assert_eq!(
            placement.sharding(&named(&[Some("batch")]), &[8]).spec,
            PartitionSpec(vec![names(&["tensor", "fsdp", "data"])])
        );
    }

    #[test]
    fn what_is_placed_is_remembered() {
        let placement = placement();
        let idle = |placement: &Placement| -> Vec<String> {
            placement.idle_mesh_axes().into_iter().map(|(axis, _)| axis).collect()
        };
        assert_eq!(idle(&placement), ["fsdp", "tensor"]);
        placement.sharding(&[Some(logical::EMBED), Some(logical::HEADS), None], &[8, 6, 2]);
        assert_eq!(idle(&placement), ["tensor"]);
        assert!(placement.logical_axes().into_iter().eq([logical::EMBED, logical::HEADS]));
    }

    #[test]
    fn indivisible_axes_are_dropped_with_a_note() {
        let placement = placement();
        assert!(placement.sharding(&[Some(logical::EMBED)], &[6]).spec.is_replicated());
        let notes = placement.notes();
        assert_eq!(notes.len(), 1);
        assert_eq!((notes[0].mesh_axis.as_str(), notes[0].dimension), ("fsdp", 6));
    }
}
