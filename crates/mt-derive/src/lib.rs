//! `#[derive(Tree)]`: writes the `mt_shape::Tree` implementation of a structure that is generic over its leaf.
//!
//! Phase: build of the other crates. The expansion names `::mt_shape`, so a crate that derives must depend on it.
//! Import `mt_shape::Tree` (the trait) and `mt_derive::Tree` (the macro) side by side.

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
/// - A field whose type is the parameter is a leaf, and so are the contents of any nesting of `Option`, `Vec` and `Box`
///   around the parameter. Every other field that mentions the parameter must itself be a `Tree` over it.
/// - A field adds its name to the path, an unnamed field its index. A single unnamed field adds nothing, so newtypes
///   and enum variants that hold one module are transparent.
/// - `#[tree(rename = "…")]` changes the path segment of a field.
/// - `#[tree(skip)]` excludes a field from the tree; its type must be `Clone` and must not mention the parameter.
/// - The parameter has no bounds, because `With<B>` is the same type over any `B`. Lifetimes and constant parameters
///   are unrestricted.
#[proc_macro_derive(Tree, attributes(tree))]
pub fn derive_tree(input: TokenStream) -> TokenStream {
    let input = parse_macro_input!(input as DeriveInput);
    expand::tree(&input).unwrap_or_else(|error| error.to_compile_error()).into()
}
