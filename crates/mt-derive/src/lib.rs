//! `#[derive(Tree)]`: writes the `mt_shape::Tree` implementation of a structure that is generic over its leaf.
//!
//! Phase: build of the other crates. The expansion names `::mt_shape`, so a crate that derives depends on it;
//! `mt_shape::Tree` (the trait) and `mt_derive::Tree` (the macro) are imported side by side.

#![forbid(unsafe_code)]

mod expand;

use proc_macro::TokenStream;
use syn::{DeriveInput, parse_macro_input};

/// Implements `mt_shape::Tree` for a struct or an enum with exactly one type parameter, its leaf.
///
/// ```ignore
/// #[derive(Tree)]
/// struct Mlp<L> {
///     gate: L,                  // a leaf, at `gate`
///     bias: Option<L>,          // a leaf that may be absent
///     experts: Vec<Expert<L>>,  // a tree, at `experts.0.…`, `experts.1.…`
///     #[tree(rename = "wo")]
///     down: L,                  // a leaf, at `wo`
///     #[tree(skip)]
///     width: usize,             // not part of the tree: cloned
/// }
/// ```
///
/// - A field whose type is the parameter is a leaf, and so are the contents of any nesting of `Option`, `Vec` and
///   `Box` around the parameter. Every other field that mentions the parameter must itself be a `Tree` over it.
/// - A field adds its name to the path, an unnamed one its index; a single unnamed field adds nothing, so that
///   newtypes and enum variants that hold one module are transparent.
/// - `#[tree(rename = "…")]` changes what a field adds to the path.
/// - `#[tree(flatten)]` on a field adds nothing to the path: what the field holds stands beside the other fields. Two
///   leaves at one path are refused where the tree is first walked with `Tree::leaves`.
/// - `#[tree(tagged)]` on an enum adds the name of the variant in snake case to the path; `#[tree(rename = "…")]` on a
///   variant changes it. With a flattened field, the variant's name stands where the field's would.
/// - `#[tree(skip)]` keeps a field out of the tree; its type must be `Clone` and not mention the parameter.
/// - The parameter carries no bounds, since `With<B>` is the same type over any `B`. Lifetimes and constants are
///   free.
#[proc_macro_derive(Tree, attributes(tree))]
pub fn derive_tree(input: TokenStream) -> TokenStream {
    let input = parse_macro_input!(input as DeriveInput);
    expand::tree(&input).unwrap_or_else(|error| error.to_compile_error()).into()
}
