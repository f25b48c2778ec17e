//! From the parsed structure to its implementation.

use proc_macro2::{Span, TokenStream, TokenTree};
use quote::{ToTokens, format_ident, quote};
use syn::ext::IdentExt;
use syn::meta::ParseNestedMeta;
use syn::spanned::Spanned;
use syn::{
    Attribute, Data, DeriveInput, Error, Field, Fields, GenericArgument, GenericParam, Generics, Ident,
    Index, LitStr, Member, PathArguments, Result, Type, TypeParam, Variant,
};

/// The implementation of `Tree`, or what is wrong with the input, at the place where it is wrong.
pub(crate) fn tree(input: &DeriveInput) -> Result<TokenStream> {
    let is_tagged = is_tagged(input)?;
    let leaf = leaf_parameter(input)?;
    let name = &input.ident;
    let (arms, attach_arms) = match &input.data {
        Data::Struct(data) => {
            let constructor = quote!(#name);
            (
                arm(&constructor, &data.fields, leaf, None)?,
                attach_arm(&constructor, &data.fields, leaf, None)?,
            )
        }
        Data::Enum(data) => {
            let (mut arms, mut attach_arms) = (TokenStream::new(), TokenStream::new());
            let mut tags: Vec<String> = Vec::new();
            for variant in &data.variants {
                let tag = tag(variant, is_tagged)?;
                if let Some(tag) = &tag {
                    if tags.contains(tag) {
                        return Err(Error::new_spanned(variant, format!("two variants are at `{tag}`")));
                    }
                    tags.push(tag.clone());
                }
                let variant_name = &variant.ident;
                let constructor = quote!(#name::#variant_name);
                arms.extend(arm(&constructor, &variant.fields, leaf, tag.as_deref())?);
                attach_arms.extend(attach_arm(&constructor, &variant.fields, leaf, tag.as_deref())?);
            }
            (arms, attach_arms)
        }
        Data::Union(data) => {
            return Err(Error::new(data.union_token.span, "`Tree` cannot be derived for a union"));
        }
    };
    let (implementation_generics, type_generics, where_clause) = input.generics.split_for_impl();
    let with_generics = with_generics(&input.generics);
    Ok(quote! {
        #[automatically_derived]
        impl #implementation_generics ::mt_shape::Tree for #name #type_generics #where_clause {
            type Leaf = #leaf;
            type With<__B> = #name #with_generics;

            #[allow(unused_variables)]
            fn map_leaves_at<__B>(
                &self,
                path: &mut ::mt_shape::Path,
                map: &mut dyn ::core::ops::FnMut(&::mt_shape::Path, &Self::Leaf) -> __B,
            ) -> Self::With<__B> {
                match self { #arms }
            }

            #[allow(unused_variables)]
            fn attach_at(
                &mut self,
                path: &mut ::mt_shape::Path,
                attach: &mut dyn ::core::ops::FnMut(&::mt_shape::Path) -> ::mt_shape::Attached<Self::Leaf>,
            ) {
                match self { #attach_arms }
            }
        }
    })
}

/// Whether `#[tree(tagged)]` is on an enum.
fn is_tagged(input: &DeriveInput) -> Result<bool> {
    let mut is_tagged = false;
    for attribute in tree_attributes(&input.attrs) {
        if !matches!(input.data, Data::Enum(_)) {
            return Err(misplaced(attribute));
        }
        attribute.parse_nested_meta(|meta| {
            if !meta.path.is_ident("tagged") {
                return Err(meta.error("expected `tagged`; `#[tree(…)]` otherwise belongs on a field"));
            }
            is_tagged = true;
            Ok(())
        })?;
    }
    Ok(is_tagged)
}

/// The path segment that a variant of a tagged enum adds.
fn tag(variant: &Variant, is_tagged: bool) -> Result<Option<String>> {
    let mut tag = snake_case(&variant.ident.unraw().to_string());
    for attribute in tree_attributes(&variant.attrs) {
        if !is_tagged {
            return Err(misplaced(attribute));
        }
        attribute.parse_nested_meta(|meta| {
            if !meta.path.is_ident("rename") {
                return Err(meta.error("expected `rename = \"…\"`"));
            }
            tag = path_segment(&meta)?.value();
            Ok(())
        })?;
    }
    Ok(is_tagged.then_some(tag))
}

fn snake_case(name: &str) -> String {
    let mut snake = String::new();
    for character in name.chars() {
        if character.is_uppercase() && !snake.is_empty() {
            snake.push('_');
        }
        snake.extend(character.to_lowercase());
    }
    snake
}

/// The one type parameter, which stands alone: `With<B>` must exist for every `B`.
fn leaf_parameter(input: &DeriveInput) -> Result<&Ident> {
    let mut parameters = input.generics.type_params();
    let Some(TypeParam { ident: leaf, bounds, .. }) = parameters.next() else {
        let message = format!(
            "`Tree` needs one type parameter, the leaf: `{}<L>`\nhint: give it a parameter, or leave `Tree` out \
             and mark fields of this type `#[tree(skip)]`",
            input.ident.unraw()
        );
        return Err(Error::new(input.ident.span(), message));
    };
    if let Some(second) = parameters.next() {
        let message =
            format!("`Tree` needs exactly one type parameter, but `{}` follows `{leaf}`", second.ident);
        return Err(Error::new(second.ident.span(), message));
    }
    let unbounded = |span: Span| {
        let message = format!(
            "the leaf `{leaf}` of a tree cannot have bounds, because the tree must exist over any other leaf\n\
             hint: put the bound on the `impl` blocks that need it"
        );
        Error::new(span, message)
    };
    if !bounds.is_empty() {
        return Err(unbounded(bounds.span()));
    }
    let predicates = input.generics.where_clause.iter().flat_map(|clause| &clause.predicates);
    match predicates.into_iter().find(|predicate| mentions(predicate, leaf)) {
        Some(predicate) => Err(unbounded(predicate.span())),
        None => Ok(leaf),
    }
}

/// The arguments of the same type over `__B`.
fn with_generics(generics: &Generics) -> TokenStream {
    let arguments = generics.params.iter().map(|parameter| match parameter {
        GenericParam::Lifetime(lifetime) => lifetime.lifetime.to_token_stream(),
        GenericParam::Const(constant) => constant.ident.to_token_stream(),
        GenericParam::Type(_) => quote!(__B),
    });
    quote!(<#(#arguments),*>)
}

/// The match arm that takes one struct or variant apart and rebuilds it, in field order.
fn arm(constructor: &TokenStream, fields: &Fields, leaf: &Ident, tag: Option<&str>) -> Result<TokenStream> {
    let transparent = matches!(fields, Fields::Unnamed(unnamed) if unnamed.unnamed.len() == 1);
    let mut members = Vec::new();
    let mut bindings = Vec::new();
    let mut values = Vec::new();
    let mut segments: Vec<String> = Vec::new();
    for (position, field) in fields.iter().enumerate() {
        let options = FieldOptions::of(field)?;
        let member = member(field, position);
        // Not the field's own name, which may be `map` or `path`.
        let binding = format_ident!("field_{}", position);
        values.push(if options.skip {
            if mentions(&field.ty, leaf) {
                let message =
                    format!("a skipped field cannot mention the leaf `{leaf}`: its leaves would be lost");
                return Err(Error::new_spanned(&field.ty, message));
            }
            quote!(::core::clone::Clone::clone(#binding))
        } else {
            let segment = options.segment(&member, transparent);
            if let Some(segment) = &segment {
                if segments.contains(segment) {
                    return Err(Error::new_spanned(field, format!("two fields are at `{segment}`")));
                }
                segments.push(segment.clone());
            }
            mapped_field(field, &binding, segment, leaf)?
        });
        members.push(member);
        bindings.push(binding);
    }
    let rebuilt = quote!(#constructor { #(#members: #values),* });
    let rebuilt = match tag {
        Some(tag) => quote!(path.within(#tag, |path| #rebuilt)),
        None => rebuilt,
    };
    Ok(quote!(#constructor { #(#members: #bindings),* } => #rebuilt,))
}

/// The match arm that gives the fields of one struct or variant their inputs. [`arm`] has checked the fields.
fn attach_arm(
    constructor: &TokenStream,
    fields: &Fields,
    leaf: &Ident,
    tag: Option<&str>,
) -> Result<TokenStream> {
    let transparent = matches!(fields, Fields::Unnamed(unnamed) if unnamed.unnamed.len() == 1);
    let (mut patterns, mut attached) = (TokenStream::new(), TokenStream::new());
    for (position, field) in fields.iter().enumerate() {
        let options = FieldOptions::of(field)?;
        // Leaves need no inputs.
        if options.skip || !matches!(Shape::of(&field.ty, leaf), Shape::Tree) {
            continue;
        }
        let (member, binding) = (member(field, position), format_ident!("field_{}", position));
        let inner = quote!(::mt_shape::Tree::attach_at(#binding, path, &mut *attach));
        attached.extend(match options.segment(&member, transparent) {
            Some(segment) => quote!(path.within(#segment, |path| #inner);),
            None => quote!(#inner;),
        });
        patterns.extend(quote!(#member: #binding,));
    }
    let attached = match tag {
        Some(tag) => quote!(path.within(#tag, |path| { #attached })),
        None => attached,
    };
    Ok(quote!(#constructor { #patterns .. } => { #attached }))
}

fn member(field: &Field, position: usize) -> Member {
    match &field.ident {
        Some(name) => Member::Named(name.clone()),
        None => Member::Unnamed(Index::from(position)),
    }
}

/// The expression that maps one field of the tree.
fn mapped_field(
    field: &Field,
    binding: &Ident,
    segment: Option<String>,
    leaf: &Ident,
) -> Result<TokenStream> {
    if !mentions(&field.ty, leaf) {
        let message = format!(
            "this field is not a tree: its type does not mention the leaf `{leaf}`\n\
             hint: mark it `#[tree(skip)]` if it is no part of the tree"
        );
        return Err(Error::new_spanned(&field.ty, message));
    }
    let mapped = mapped(&field.ty, &quote!(#binding), leaf);
    Ok(match segment {
        Some(segment) => quote!(path.within(#segment, |path| #mapped)),
        None => mapped,
    })
}

/// The expression that maps `value`, a reference to a `field_type`.
fn mapped(field_type: &Type, value: &TokenStream, leaf: &Ident) -> TokenStream {
    match Shape::of(field_type, leaf) {
        Shape::Leaf => quote!(map(&*path, #value)),
        Shape::Tree => quote!(::mt_shape::Tree::map_leaves_at(#value, path, &mut *map)),
        Shape::Option(inner) => {
            let inner = mapped(inner, &quote!(value), leaf);
            quote!(match #value {
                ::core::option::Option::Some(value) => ::core::option::Option::Some(#inner),
                ::core::option::Option::None => ::core::option::Option::None,
            })
        }
        Shape::Vec(inner) => {
            let inner = mapped(inner, &quote!(value), leaf);
            quote!(#value
                .iter()
                .enumerate()
                .map(|(index, value)| path.within(&::std::string::ToString::to_string(&index), |path| #inner))
                .collect())
        }
        Shape::Box(inner) => {
            let inner = mapped(inner, &quote!((&**#value)), leaf);
            quote!(::std::boxed::Box::new(#inner))
        }
    }
}

/// How a field holds its leaves.
///
/// The containers have `Tree` implementations over trees; over plain leaves, which are no trees, the code is
/// written out.
enum Shape<'a> {
    Leaf,
    Tree,
    Option(&'a Type),
    Vec(&'a Type),
    Box(&'a Type),
}

impl<'a> Shape<'a> {
    fn of(field_type: &'a Type, leaf: &Ident) -> Self {
        let field_type = ungrouped(field_type);
        if is_leaf(field_type, leaf) {
            return Self::Leaf;
        }
        let Some((container, inner)) = container(field_type) else { return Self::Tree };
        if let Self::Tree = Self::of(inner, leaf) {
            return Self::Tree;
        }
        if container == "Option" {
            Self::Option(inner)
        } else if container == "Vec" {
            Self::Vec(inner)
        } else if container == "Box" {
            Self::Box(inner)
        } else {
            Self::Tree
        }
    }
}

/// The name and the only argument of a type like `Option<T>`.
fn container(field_type: &Type) -> Option<(&Ident, &Type)> {
    let Type::Path(path) = field_type else { return None };
    let last = path.path.segments.last()?;
    let PathArguments::AngleBracketed(arguments) = &last.arguments else { return None };
    match (arguments.args.first()?, arguments.args.len()) {
        (GenericArgument::Type(inner), 1) => Some((&last.ident, inner)),
        _ => None,
    }
}

fn is_leaf(field_type: &Type, leaf: &Ident) -> bool {
    matches!(field_type, Type::Path(path) if path.qself.is_none() && path.path.is_ident(leaf))
}

/// The type without parentheses and the invisible groups that `macro_rules` leaves.
fn ungrouped(field_type: &Type) -> &Type {
    match field_type {
        Type::Group(group) => ungrouped(&group.elem),
        Type::Paren(paren) => ungrouped(&paren.elem),
        other => other,
    }
}

/// Whether the leaf's name, or `Self`, occurs in `syntax`.
fn mentions(syntax: &impl ToTokens, leaf: &Ident) -> bool {
    fn occurs(tokens: TokenStream, leaf: &Ident) -> bool {
        tokens.into_iter().any(|token| match token {
            TokenTree::Ident(name) => name == *leaf || name == "Self",
            TokenTree::Group(group) => occurs(group.stream(), leaf),
            TokenTree::Punct(_) | TokenTree::Literal(_) => false,
        })
    }
    occurs(syntax.to_token_stream(), leaf)
}

/// The options that `#[tree(…)]` gives a field.
#[derive(Default)]
struct FieldOptions {
    skip: bool,
    flatten: bool,
    rename: Option<LitStr>,
}

impl FieldOptions {
    fn of(field: &Field) -> Result<Self> {
        let mut options = Self::default();
        for attribute in tree_attributes(&field.attrs) {
            attribute.parse_nested_meta(|meta| {
                if meta.path.is_ident("skip") {
                    options.skip = true;
                } else if meta.path.is_ident("flatten") {
                    options.flatten = true;
                } else if meta.path.is_ident("rename") {
                    options.rename = Some(path_segment(&meta)?);
                } else {
                    return Err(meta.error("expected `skip`, `flatten` or `rename = \"…\"`"));
                }
                Ok(())
            })?;
        }
        match &options.rename {
            Some(rename) if options.skip => {
                Err(Error::new(rename.span(), "a skipped field has no place in the tree to rename"))
            }
            Some(rename) if options.flatten => {
                Err(Error::new(rename.span(), "a flattened field adds no path segment to rename"))
            }
            None if options.skip && options.flatten => {
                Err(Error::new_spanned(field, "a skipped field has no place in the tree to flatten"))
            }
            _ => Ok(options),
        }
    }
}

impl FieldOptions {
    /// The path segment that the field adds.
    fn segment(&self, member: &Member, transparent: bool) -> Option<String> {
        let segment = self.rename.as_ref().map(LitStr::value).or_else(|| match member {
            Member::Named(name) => Some(name.unraw().to_string()),
            Member::Unnamed(_) if transparent => None,
            Member::Unnamed(index) => Some(index.index.to_string()),
        });
        segment.filter(|_| !self.flatten)
    }
}

/// The value of `rename = "…"`.
fn path_segment(meta: &ParseNestedMeta<'_>) -> Result<LitStr> {
    let segment: LitStr = meta.value()?.parse()?;
    // Paths are printed with periods between their segments.
    if segment.value().is_empty() || segment.value().contains('.') {
        return Err(Error::new(segment.span(), "a path segment is not empty and has no period"));
    }
    Ok(segment)
}

fn tree_attributes(attributes: &[Attribute]) -> impl Iterator<Item = &Attribute> {
    attributes.iter().filter(|attribute| attribute.path().is_ident("tree"))
}

/// `#[tree(…)]` belongs on fields and tagged enums; elsewhere it would be silently without effect.
fn misplaced(attribute: &Attribute) -> Error {
    Error::new_spanned(attribute, "`#[tree(…)]` belongs on a field")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(source: &str, expected: &str) {
        let input: DeriveInput = syn::parse_str(source).expect("the test's source parses");
        let message = tree(&input).expect_err(source).to_string();
        assert!(message.contains(expected), "{source}: {message}");
    }

    #[test]
    fn refusals_say_what_is_wrong() {
        check("union U<L> { a: L }", "cannot be derived for a union");
        check("struct S { a: f32 }", "`Tree` needs one type parameter, the leaf: `S<L>`");
        check("struct S<'a> { a: &'a str }", "needs one type parameter");
        check("struct S<L, M> { a: L, b: M }", "exactly one type parameter, but `M` follows `L`");
        check("struct S<L: Clone> { a: L }", "cannot have bounds");
        check("struct S<L> where L: Clone { a: L }", "cannot have bounds");
        check("struct S<L> { a: L, width: usize }", "does not mention the leaf `L`");
        check("enum E<L> { A(L), B(usize) }", "does not mention the leaf `L`");
        check("struct S<L> { a: L, #[tree(skip)] b: Vec<L> }", "a skipped field cannot mention the leaf `L`");
        check("struct S<L> { #[tree(rename = \"b\")] a: L, b: L }", "two fields are at `b`");
        check("struct S<L> { #[tree(rename = \"a.b\")] a: L }", "no period");
        check("struct S<L> { #[tree(rename = \"\")] a: L }", "not empty");
        check("struct S<L> { #[tree(rename)] a: L }", "expected `=`");
        check("struct S<L> { #[tree(leaf)] a: L }", "expected `skip`, `flatten` or `rename");
        check("struct S<L> { a: L, #[tree(skip, flatten)] b: u8 }", "no place in the tree to flatten");
        check("struct S<L> { #[tree(flatten, rename = \"c\")] a: L }", "adds no path segment");
        check("#[tree(tagged)] struct S<L> { a: L }", "belongs on a field");
        check("#[tree(tag)] enum E<L> { A(L) }", "expected `tagged`");
        check("#[tree(tagged)] enum E<L> { A(L), #[tree(rename = \"a\")] B(L) }", "two variants are at `a`");
        check("#[tree(tagged)] enum E<L> { #[tree(skip)] A(L) }", "expected `rename");
        check("struct S<L> { a: L, #[tree(skip, rename = \"c\")] b: u8 }", "no place in the tree");
        check("#[tree(skip)] struct S<L> { a: L }", "belongs on a field");
        check("enum E<L> { #[tree(skip)] A(L) }", "belongs on a field");
    }
}
