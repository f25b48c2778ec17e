//! The derived implementations: paths, order, and rebuilding.

#![forbid(unsafe_code)]

use std::fmt::Debug;

use mt_derive::Tree;
use mt_shape::Tree;

#[derive(Clone, Debug, PartialEq, Tree)]
struct Norm<L> {
    scale: L,
}

#[derive(Clone, Debug, PartialEq, Tree)]
struct Block<L> {
    norm: Norm<L>,
    bias: Option<L>,
    gates: Vec<L>,
    experts: Option<Vec<Box<L>>>,
    head: Option<Norm<L>>,
    #[tree(rename = "wo")]
    down: Box<Norm<L>>,
    #[tree(skip)]
    width: usize,
    r#type: L,
}

#[derive(Clone, Debug, PartialEq, Tree)]
enum Layers<L> {
    Scanned(Block<L>),
    Unrolled(Vec<Norm<L>>),
    Pair(L, Norm<L>),
    Named {
        path: L,
        map: Box<L>,
        #[tree(skip)]
        index: u32,
    },
    Renamed(#[tree(rename = "only")] L),
    Empty,
}

#[derive(Clone, Debug, PartialEq, Tree)]
struct Transparent<L>(Norm<L>);

#[derive(Clone, Debug, PartialEq, Tree)]
struct Borrowing<'a, const N: usize, Leaf>
where
    'a: 'static,
{
    first: Leaf,
    #[tree(skip)]
    name: &'a str,
    #[tree(skip)]
    sizes: [usize; N],
    children: Vec<Self>,
}

fn block(width: usize) -> Block<i32> {
    Block {
        norm: Norm { scale: 1 },
        bias: Some(2),
        gates: vec![3, 4],
        experts: Some(vec![Box::new(5), Box::new(6)]),
        head: None,
        down: Box::new(Norm { scale: 7 }),
        width,
        r#type: 8,
    }
}

/// Checks the paths, that mapping visits them in order, and that rebuilding from the leaves gives the same tree.
fn check<T>(tree: &T, expected: &[&str])
where
    T: Tree<Leaf = i32, With<i32> = T> + PartialEq + Debug,
{
    let leaves = tree.leaves();
    let paths: Vec<String> = leaves.iter().map(|(path, _)| path.to_string()).collect();
    assert_eq!(paths, expected);
    let rebuilt = tree.with_leaves(leaves.into_iter().map(|(_, leaf)| leaf));
    assert_eq!(&rebuilt, tree);
    assert_eq!(&tree.map_leaves(|_, leaf| *leaf), tree);
}

#[test]
fn structs_name_their_leaves_in_field_order() {
    check(
        &block(3),
        &["norm.scale", "bias", "gates.0", "gates.1", "experts.0", "experts.1", "wo.scale", "type"],
    );
    let without =
        Block { bias: None, gates: vec![], experts: None, head: Some(Norm { scale: 9 }), ..block(3) };
    check(&without, &["norm.scale", "head.scale", "wo.scale", "type"]);
    check(&Transparent(Norm { scale: 1 }), &["scale"]);
}

#[test]
fn variants_with_one_unnamed_field_add_no_segment() {
    check(
        &Layers::Scanned(block(1)),
        &["norm.scale", "bias", "gates.0", "gates.1", "experts.0", "experts.1", "wo.scale", "type"],
    );
    check(&Layers::Unrolled(vec![Norm { scale: 1 }, Norm { scale: 2 }]), &["0.scale", "1.scale"]);
    check(&Layers::Pair(1, Norm { scale: 2 }), &["0", "1.scale"]);
    check(&Layers::Named { path: 1, map: Box::new(2), index: 3 }, &["path", "map"]);
    check(&Layers::Renamed(1), &["only"]);
    check(&Layers::Empty, &[]);
}

#[test]
fn lifetimes_constants_and_recursion_are_kept() {
    let leaf = Borrowing { first: 2, name: "leaf", sizes: [1], children: vec![] };
    let tree = Borrowing { first: 1, name: "root", sizes: [2], children: vec![leaf] };
    check(&tree, &["first", "children.0.first"]);
}

#[test]
fn mapping_changes_the_leaf_type_and_keeps_the_rest() {
    let named: Layers<String> = Layers::Scanned(block(5)).map_leaves(|path, leaf| format!("{path}={leaf}"));
    let Layers::Scanned(block) = named else { panic!("the variant changed") };
    assert_eq!(block.width, 5);
    assert_eq!(block.norm.scale, "norm.scale=1");
    assert_eq!(block.down.scale, "wo.scale=7");
    assert_eq!(
        block.experts,
        Some(vec![Box::new("experts.0=5".to_owned()), Box::new("experts.1=6".to_owned())])
    );
}

#[test]
fn macro_made_structs_derive_too() {
    macro_rules! module {
        ($name:ident, $field:ty) => {
            #[derive(Clone, Debug, PartialEq, Tree)]
            struct $name<L> {
                inner: $field,
                outer: L,
            }
        };
    }
    module!(Wrapper, Norm<L>);
    check(&Wrapper { inner: Norm { scale: 1 }, outer: 2 }, &["inner.scale", "outer"]);
}

#[derive(Clone, Debug, PartialEq, Tree)]
#[tree(tagged)]
enum Mixer<L> {
    GatedDelta(Norm<L>),
    #[tree(rename = "mlp")]
    Dense(L),
    Pair(L, L),
}

#[derive(Clone, Debug, PartialEq, Tree)]
struct Flattened<L> {
    #[tree(flatten)]
    mixer: Option<Mixer<L>>,
    #[tree(flatten)]
    others: Vec<Norm<L>>,
    scale: L,
}

#[test]
fn tagged_variants_and_flattened_fields_change_paths() {
    let flattened = |mixer| Flattened { mixer, others: vec![Norm { scale: 2 }], scale: 3 };
    check(&flattened(Some(Mixer::GatedDelta(Norm { scale: 1 }))), &["gated_delta.scale", "0.scale", "scale"]);
    check(&flattened(Some(Mixer::Dense(1))), &["mlp", "0.scale", "scale"]);
    check(&flattened(Some(Mixer::Pair(1, 2))), &["pair.0", "pair.1", "0.scale", "scale"]);
    check(&flattened(None), &["0.scale", "scale"]);
}

#[test]
fn leaves_at_one_path_are_refused() {
    #[derive(Clone, Debug, PartialEq, Tree)]
    struct Twice<L> {
        #[tree(flatten)]
        first: L,
        #[tree(flatten)]
        second: L,
    }
    let leaves = std::panic::catch_unwind(|| Twice { first: 1, second: 2 }.leaves());
    let message = leaves.unwrap_err();
    let message = message.downcast_ref::<String>().unwrap();
    assert_eq!(message, "two leaves are at ``");
}
