//! Calls of attention whose results for a query do not depend on what is computed beside it.

use mt_shape::kernels::attributes;

use super::{AttentionCall, View, mask_and_cap, result};
use crate::{
    Instructions,
    attention::{
        Cache, InvariantInputs, InvariantKeys, InvariantResults, Operand, Options, Outcome, Shape, Strides,
        attend_invariantly,
    },
    buffer_element::BufferElement,
    ffi::{Call, Fault},
};

/// Answers [`super::call_attention_forward`].
pub(super) fn attention_forward<E: BufferElement>(call: &Call<'_>, operands: &[View]) -> Result<(), Fault> {
    let attention = AttentionCall::new(call, operands, E::ARITHMETIC)?;
    let shape = attention.options.shape;
    let [query, key, value, ..] = operands else { return Err("arguments are missing".to_owned()) };
    let of_values = Shape { head_dim: width(value), ..shape };
    let inputs = InvariantInputs {
        query: Operand::queries(query.elements::<E>(call)?, query.strides(true), shape),
        key: Operand::keys(key.elements(call)?, key.strides(false), shape),
        value: Operand::keys(value.elements(call)?, value.strides(false), of_values),
        keys: InvariantKeys::Own { segments: &attention.segments },
        sinks: &attention.sinks,
        value_dim: of_values.head_dim,
    };
    let rows = Strides::heads_first(Shape { head_dim: 1, ..shape });
    let largest_scores = match call.integer(attributes::WITH_SCORES)? {
        1 => Some(Outcome::rows(result(call, 2)?, rows, shape)),
        _ => None,
    };
    let results = InvariantResults {
        context: Outcome::queries(result::<E>(call, 0)?, Strides::heads_first(of_values), of_values),
        log_sums: Some(Outcome::rows(result(call, 1)?, rows, shape)),
        largest_scores,
    };
    let options = Options { instructions: Instructions::best(), ..attention.options };
    attend_invariantly(&call.team(), &options, &inputs, &results);
    Ok(())
}

/// Answers the calls of attention to slots and to pages, with the shapes of the call's keys and of cached ones.
pub(super) fn attention_to_cache<E: BufferElement>(
    call: &Call<'_>,
    [query, key, value, cached_key, cached_value]: [&View; 5],
    [shape, cached]: [Shape; 2],
    cache: Cache<'_>,
    sinks: &[f32],
) -> Result<(), Fault> {
    let keys = |view: &View, shape: Shape| -> Result<Operand<'_, E>, Fault> {
        let shape = Shape { head_dim: width(view), ..shape };
        Ok(Operand::keys(view.elements(call)?, view.positions_first(), shape))
    };
    let of_values = Shape { head_dim: width(value), ..shape };
    let inputs = InvariantInputs {
        query: Operand::queries(query.elements(call)?, query.positions_first(), shape),
        key: keys(key, shape)?,
        value: keys(value, shape)?,
        keys: InvariantKeys::Cached {
            key: keys(cached_key, cached)?,
            value: keys(cached_value, cached)?,
            cache,
        },
        sinks,
        value_dim: of_values.head_dim,
    };
    let (mask, soft_cap) = mask_and_cap(call)?;
    let options = Options { shape, mask, soft_cap, instructions: Instructions::best() };
    let results = InvariantResults {
        context: Outcome::queries(result::<E>(call, 0)?, Strides::heads_first(of_values), of_values),
        log_sums: None,
        largest_scores: None,
    };
    attend_invariantly(&call.team(), &options, &inputs, &results);
    Ok(())
}

/// The size of the last dimension.
fn width(view: &View) -> usize {
    view.dims.last().map_or(1, |dim| dim.size)
}
