//! Multi-head latent attention (DeepSeek-V2, 2024): keys and values of all heads are linear maps of one latent vector.

use mt_derive::Tree;
use mt_shape::{LogicalAxis, Tree, axis, logical};
use mt_trace::{DeviceGroup, Tensor};

use super::{
    ACTIVATION, Additions, AttentionInputs, AttentionOptions, CACHED, CONTEXT, CONTEXT_OF_CACHE,
    CachedKeysValues, Context, INPUT, Indexer, IndexerOptions, KeysValues, QUERY, attend, cache, dense,
    in_core,
    indexer::{AttendedChosen, Choices, IndexQueries, attend_to_chosen},
    largest_of_rows,
};
use crate::{
    Linear, RESIDUAL, RmsNorm, RotaryAngles,
    axes::{
        EMBED, GROUP, HEAD_DIM, KV_HEADS, KV_POSITION, LATENT, POSITION, QUERY_HEADS, QUERY_LATENT, VALUE_DIM,
    },
};

/// The parameters of latent attention.
#[derive(Clone, Debug, Tree)]
pub struct LatentAttention<L> {
    /// `[embed, q_heads, head_dim]`; absent if queries have a latent vector.
    pub query: Option<Linear<L>>,
    /// `[embed, query_latent]`
    pub wq_a: Option<Linear<L>>,
    /// `[query_latent]`
    pub q_norm: Option<RmsNorm<L>>,
    /// `[query_latent, q_heads, head_dim]`
    pub wq_b: Option<Linear<L>>,
    /// `[embed, latent + rotated]`: the latent vector, and the rotated dimensions of the keys of all heads.
    pub wkv_a: Linear<L>,
    /// `[latent]`
    pub kv_norm: RmsNorm<L>,
    /// `[latent, kv_heads, plain + value]`: the other dimensions of keys, and values.
    pub wkv_b: Linear<L>,
    /// `[q_heads, value_dim, embed]`
    pub out: Linear<L>,
    /// Chooses the keys that queries attend to; absent if they attend to all keys.
    pub indexer: Option<Indexer<L>>,
}

/// The dimensions and the computation of latent attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LatentOptions {
    pub sizes: LatentSizes,
    /// The choice of keys, if there is an indexer.
    pub indexer: Option<IndexerOptions>,
    pub attention: AttentionOptions,
}

/// The widths of latent attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LatentSizes {
    pub latent: usize,
    /// Dimensions of queries and keys without a rotary embedding.
    pub plain: usize,
    /// Dimensions of queries and keys with a rotary embedding.
    pub rotated: usize,
    pub value: usize,
    /// Whether pairs of rotated dimensions are neighbors.
    pub is_interleaved: bool,
}

/// The state of a token: what its keys and values are made from.
#[derive(Clone, Copy, Debug, Tree)]
pub struct Latents<L> {
    /// `[batch, kv_position, latent]`, normalized
    pub latent: L,
    /// `[batch, kv_position, head_dim]`, rotated
    pub rotated: L,
    /// `[batch, kv_position, head_dim]`: the indexer's key, if there is an indexer.
    pub index_key: Option<L>,
}

/// A cache, and the slots that the next tokens take.
#[derive(Clone, Copy)]
pub struct CachedLatents<'t> {
    pub cached: Latents<Tensor<'t>>,
    /// The first slot to write: an `i32` scalar.
    pub start: Tensor<'t>,
}

/// A cache, by what it holds of each token.
#[derive(Clone, Copy)]
pub enum LatentCache<'t> {
    /// The latent vector and the rotated key that all heads share.
    Latents(CachedLatents<'t>),
    /// The keys and values of all heads, which take more memory and less computation.
    Expanded(CachedKeysValues<'t>),
}

/// The results of latent attention.
pub struct LatentlyAttended<'t> {
    /// `[batch, position, embed]`
    pub output: Tensor<'t>,
    /// The arrays that a cache keeps of this call's tokens; latents without a cache.
    pub written: Vec<Tensor<'t>>,
    /// As [`super::Attended::largest_scores`].
    pub largest_scores: Option<Tensor<'t>>,
    /// `f32[]`: the loss that trains the indexer, if requested.
    pub indexer_loss: Option<Tensor<'t>>,
}

/// Projected queries.
struct Queries<'t> {
    /// `[batch, position, q_heads, head_dim]`
    query: Tensor<'t>,
    /// `[batch, position, query_latent]`, normalized, if queries have a latent vector.
    latent: Option<Tensor<'t>>,
}

/// An indexer's queries and how they choose keys.
#[derive(Clone, Copy)]
struct Indexing<'t> {
    queries: IndexQueries<Tensor<'t>>,
    options: IndexerOptions,
}

/// Logical axes of latent vectors in a cache.
pub const CACHED_LATENTS: [Option<LogicalAxis>; 3] =
    [Some(logical::DECODE_BATCH), Some(logical::CACHE_SEQUENCE), Some(logical::CACHE_KV)];
const LATENTS: [Option<LogicalAxis>; 3] =
    [Some(logical::ACTIVATION_KV_BATCH), Some(logical::ACTIVATION_LENGTH_ATTN), None];
const EXPANDED: &str = "expanded";

impl<'t> LatentAttention<Tensor<'t>> {
    /// Applies attention within whole sequences, or to a cache.
    ///
    /// With a cache of latent vectors, queries and contexts are mapped into their space, so keys and values are never
    /// expanded.
    ///
    /// # Shapes
    /// `[batch, position, embed] -> [batch, position, embed]`
    #[track_caller]
    pub fn forward(
        &self,
        x: Tensor<'t>,
        angles: RotaryAngles<'t>,
        cache: Option<LatentCache<'t>>,
        inputs: &AttentionInputs<'t>,
        latent_options: &LatentOptions,
    ) -> LatentlyAttended<'t> {
        let LatentOptions { sizes, indexer: indexing, attention: options } = latent_options;
        let (sizes, with_scores, segments) = (*sizes, inputs.with_scores, inputs.segments);
        let x = x.constrain(&INPUT);
        let Queries { query, latent: query_latent } = self.queries(x, angles, sizes, options);
        let query = (query * options.scale).constrain(&QUERY).named("query_proj");
        let latents = self.latents(x, angles, sizes, options);
        let indexer = self.indexer.as_ref().zip(query_latent).zip(*indexing);
        let indexer = indexer.map(|((indexer, latent), indexing)| Indexing {
            queries: indexer.queries(x, latent, angles),
            options: indexing,
        });
        let is_cached = segments.first_query.is_some();
        let of_latents = [latents.latent, latents.rotated].into_iter().chain(latents.index_key).collect();
        let in_groups = [axis(KV_HEADS, query.axis(QUERY_HEADS).size), axis(GROUP, 1)];
        let mut indexer_loss = None;
        let (Context { context, largest_scores }, written): (_, Vec<Tensor<'t>>) = match cache {
            Some(LatentCache::Latents(cache)) if is_cached => {
                let all = cache.write(latents);
                let chosen = indexer.zip(all.index_key).map(|(indexer, index_key)| {
                    let visible = segments.mask(options.mask);
                    indexer.queries.chosen(index_key, visible, segments, &indexer.options)
                });
                (self.attend_to_latents(query, all, chosen, inputs, latent_options), of_latents)
            }
            Some(LatentCache::Expanded(cache)) => {
                let own = self.expanded(latents, sizes);
                let query_shards = query.shards(&QUERY).along(QUERY_HEADS).map_or(1, DeviceGroup::size);
                let query = query.split(QUERY_HEADS, &in_groups);
                let made = attend_to_expanded(query, own, cache, inputs, options, query_shards == 1);
                (made, vec![own.key, own.value])
            }
            _ => {
                let query = query.split(QUERY_HEADS, &in_groups);
                let keys_values = self.expanded(latents, sizes);
                let is_all = |indexing: &IndexerOptions| {
                    indexing.loss.is_none() && indexing.chooses_all_of(segments.key.axis(KV_POSITION).size)
                };
                let context =
                    match indexer.zip(latents.index_key).filter(|(indexer, _)| !is_all(&indexer.options)) {
                        Some((Indexing { queries, options: indexing }, index_key)) => {
                            let choices = Choices { index_key, keys_values };
                            let AttendedChosen { context, loss } = attend_to_chosen(
                                query,
                                queries,
                                choices,
                                segments,
                                &indexing,
                                options,
                                with_scores,
                            );
                            indexer_loss = loss;
                            context
                        }
                        None => attend(query, keys_values, None, inputs, options),
                    };
                (context, of_latents)
            }
        };
        let context = context.constrain(if is_cached { &CONTEXT_OF_CACHE } else { &CONTEXT });
        let context = context.named("context").named("attention_out");
        let in_groups = [context.axis(KV_HEADS), context.axis(GROUP)];
        let output =
            self.out.with_split(QUERY_HEADS, &in_groups).forward(context, &[KV_HEADS, GROUP, VALUE_DIM]);
        LatentlyAttended {
            output: output.constrain(&RESIDUAL).named("out_proj"),
            written,
            largest_scores: largest_scores.map(|scores| largest_of_rows(scores, segments.query)),
            indexer_loss,
        }
    }

    /// Queries, whose last dimensions are rotated.
    fn queries(
        &self,
        x: Tensor<'t>,
        angles: RotaryAngles<'t>,
        sizes: LatentSizes,
        options: &AttentionOptions,
    ) -> Queries<'t> {
        let (query, latent) = match (&self.query, &self.wq_a, &self.q_norm, &self.wq_b) {
            (Some(query), ..) => (query.forward(x, &[EMBED]), None),
            (None, Some(wq_a), Some(norm), Some(wq_b)) => {
                let latent = wq_a.forward(x, &[EMBED]).named("query_wa_proj");
                let latent = norm.forward(latent, QUERY_LATENT, options.norm).named("mla_q");
                (wq_b.forward(latent, &[QUERY_LATENT]), Some(latent))
            }
            _ => unreachable!("queries have a latent vector or a projection"),
        };
        let LatentSizes { plain, rotated, .. } = sizes;
        let turned = sizes.rotate(angles, query.slice(HEAD_DIM, plain, plain + rotated));
        Queries { query: query.slice(HEAD_DIM, 0, plain).concatenate(&[turned], HEAD_DIM), latent }
    }

    fn latents(
        &self,
        x: Tensor<'t>,
        angles: RotaryAngles<'t>,
        sizes: LatentSizes,
        options: &AttentionOptions,
    ) -> Latents<Tensor<'t>> {
        let LatentSizes { latent, rotated, .. } = sizes;
        let both = self.wkv_a.forward(x, &[EMBED]).constrain(&LATENTS).named("kv_wa_proj");
        let latent_vector = self.kv_norm.forward(both.slice(LATENT, 0, latent), LATENT, options.norm);
        let latent_vector = latent_vector.named("mla_kv");
        let keys = both.slice(LATENT, latent, latent + rotated).rename(LATENT, HEAD_DIM);
        Latents {
            latent: latent_vector.rename(POSITION, KV_POSITION),
            rotated: sizes.rotate(angles, keys).rename(POSITION, KV_POSITION),
            index_key: self.indexer.as_ref().map(|indexer| indexer.keys(x, angles)),
        }
    }

    /// The keys and values of all heads.
    fn expanded(&self, latents: Latents<Tensor<'t>>, sizes: LatentSizes) -> KeysValues<Tensor<'t>> {
        let LatentSizes { plain, value, .. } = sizes;
        let both = self.wkv_b.forward(latents.latent, &[LATENT]);
        let columns = |start, end, name| both.slice(EXPANDED_HEAD, start, end).rename(EXPANDED_HEAD, name);
        let plain_keys = columns(0, plain, HEAD_DIM);
        let axes: Vec<_> = plain_keys
            .axes()
            .iter()
            .map(|own| if own.name == HEAD_DIM { latents.rotated.axis(HEAD_DIM) } else { *own })
            .collect();
        let key = plain_keys.concatenate(&[latents.rotated.broadcast(&axes)], HEAD_DIM);
        KeysValues {
            key: key.constrain(&ACTIVATION).named("key_proj"),
            value: columns(plain, plain + value, VALUE_DIM).constrain(&ACTIVATION).named("value_proj"),
        }
    }

    /// Attention to latent vectors, as if all heads shared one key and one value. `chosen` replaces the mask.
    fn attend_to_latents(
        &self,
        query: Tensor<'t>,
        all: Latents<Tensor<'t>>,
        chosen: Option<Tensor<'t>>,
        inputs: &AttentionInputs<'t>,
        LatentOptions { sizes, attention: options, .. }: &LatentOptions,
    ) -> Context<'t> {
        let LatentSizes { plain, rotated, value, .. } = *sizes;
        let kernel = self.wkv_b.whole().cast(query.dtype());
        let columns = |start, end, name| {
            kernel.slice(EXPANDED_HEAD, start, end).rename(EXPANDED_HEAD, name).rename(KV_HEADS, QUERY_HEADS)
        };
        let into_latents = columns(0, plain, HEAD_DIM);
        let from_latents = columns(plain, plain + value, EXPANDED);
        let latent_query = into_latents.dot(query.slice(HEAD_DIM, 0, plain), &[HEAD_DIM]);
        let heads = query.axis(QUERY_HEADS);
        let dtype = query.dtype();
        let [latent, keys] = [all.latent, all.rotated].map(|cached| cached.cast(dtype));
        let order = |tensor: Tensor<'t>| tensor.rename(LATENT, HEAD_DIM);
        let query = order(latent_query.order(&[query.axes()[0].name, POSITION, QUERY_HEADS, LATENT]))
            .concatenate(&[query.slice(HEAD_DIM, plain, plain + rotated)], HEAD_DIM)
            .rename(QUERY_HEADS, GROUP)
            .unsqueeze(KV_HEADS);
        let key = order(latent).concatenate(&[keys], HEAD_DIM).unsqueeze(KV_HEADS);
        let keys_values = KeysValues { key, value: latent.rename(LATENT, VALUE_DIM).unsqueeze(KV_HEADS) };
        let made = match chosen {
            Some(mask) => in_core(query, || {
                dense(query, keys_values, mask, Additions::default(), options, inputs.with_scores)
            }),
            None => attend(query, keys_values, None, inputs, options),
        };
        let context = made.context.squeeze(KV_HEADS).rename(GROUP, QUERY_HEADS).rename(VALUE_DIM, LATENT);
        let context = from_latents.dot(context, &[LATENT]).rename(EXPANDED, VALUE_DIM);
        let rows = context
            .axes()
            .iter()
            .find(|own| ![QUERY_HEADS, POSITION, VALUE_DIM].contains(&own.name))
            .map(|own| own.name);
        let rows = rows.expect("there is an axis of sequences");
        let context = context.order(&[rows, QUERY_HEADS, POSITION, VALUE_DIM]);
        let context = context.rename(QUERY_HEADS, KV_HEADS);
        let axes = [
            context.axis(rows),
            axis(KV_HEADS, heads.size),
            context.axis(POSITION),
            axis(GROUP, 1),
            context.axis(VALUE_DIM),
        ];
        let largest_scores = made.largest_scores.map(|scores| {
            let by_head = scores.squeeze(KV_HEADS).rename(GROUP, KV_HEADS);
            by_head.unsqueeze(GROUP).order(&[rows, KV_HEADS, POSITION, GROUP])
        });
        Context { context: context.unsqueeze(GROUP).broadcast(&axes), largest_scores }
    }
}

/// Attention to a cache of keys and values, or to the values of this call if they fill it. `is_whole`: whether each
/// device holds all heads.
fn attend_to_expanded<'t>(
    query: Tensor<'t>,
    own: KeysValues<Tensor<'t>>,
    cache: CachedKeysValues<'t>,
    inputs: &AttentionInputs<'t>,
    options: &AttentionOptions,
    is_whole: bool,
) -> Context<'t> {
    let dtype = query.dtype();
    let is_attended = inputs.segments.first_query.is_some();
    if is_attended && is_whole && !inputs.with_scores && options.chosen_chunks.is_none() {
        return in_core(query, || cache::attend(query, own, cache, None, inputs.segments, options));
    }
    // Constraining the cache keeps it in place; otherwise the loop over layers would carry it whole.
    let all = match is_attended {
        true => cache.write(own.key, own.value).map_leaves(|_, all| all.constrain(&CACHED)),
        false => own.map_leaves(|_, own| own.cast(cache.cached.key.dtype())),
    };
    attend(query, all.map_leaves(|_, all| all.cast(dtype)), None, inputs, options)
}

/// The width of an expanded head: the plain dimensions of its key, and its value.
pub const EXPANDED_HEAD: &str = "expanded_head";

impl LatentSizes {
    fn rotate<'t>(self, angles: RotaryAngles<'t>, x: Tensor<'t>) -> Tensor<'t> {
        if self.is_interleaved { angles.rotate_neighbors(x) } else { angles.rotate(x) }
    }
}

impl<'t> CachedLatents<'t> {
    /// The cache with new latent vectors written to the slots from `start`.
    fn write(self, new: Latents<Tensor<'t>>) -> Latents<Tensor<'t>> {
        let write = |cache: Tensor<'t>, new: Tensor<'t>| {
            let all = cache.dynamic_update(KV_POSITION, self.start, new.cast(cache.dtype()));
            // Constraining the cache keeps it in place; otherwise the loop over layers would carry it whole.
            all.constrain(&CACHED_LATENTS)
        };
        Latents {
            latent: write(self.cached.latent, new.latent),
            rotated: write(self.cached.rotated, new.rotated),
            index_key: self.cached.index_key.zip(new.index_key).map(|(cache, new)| write(cache, new)),
        }
    }
}
