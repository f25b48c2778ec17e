//! Compressed attention (DeepSeek-V4, 2026): each query sees the keys of a window, and blocks of earlier keys that are
//! pooled into one each. All heads share one key, which is also the value.

mod pool;
mod scores;

use mt_derive::Tree;
use mt_shape::{Axis, DType, LogicalAxis, axis, logical};
use mt_trace::Tensor;

use super::{AttentionOptions, Segments, in_core};
use crate::{
    Linear, RESIDUAL, RmsNorm, Rotary, RotaryAngles, RotaryOptions, WHOLE_SEQUENCES,
    axes::{BATCH, EMBED, HEAD_DIM, INDEX_HEADS, KV_HEADS, KV_POSITION, POSITION, QUERY_HEADS, QUERY_LATENT},
    rms_normalize,
};
use pool::{Blocks, Extended, Pool};
use scores::{Local, Pooled, best};

/// The parameters of compressed attention.
#[derive(Clone, Debug, Tree)]
pub struct CompressedAttention<L> {
    /// `[embed, query_latent]`
    pub wq_a: Linear<L>,
    /// `[query_latent]`
    pub q_norm: RmsNorm<L>,
    /// `[query_latent, q_heads, head_dim]`
    pub wq_b: Linear<L>,
    /// `[embed, kv_heads, head_dim]`, with one head
    pub wkv: Linear<L>,
    /// `[head_dim]`
    pub kv_norm: RmsNorm<L>,
    /// `[q_heads]`: an additional logit per head, of a key whose value is zero.
    pub sinks: L,
    /// `[output_group, group_features, output_latent]`: a map for each group of heads.
    pub o_a_proj: Linear<L>,
    /// `[output_latents, embed]`
    pub o_b_proj: Linear<L>,
    /// Present if a query sees chosen blocks of pooled keys.
    pub csa_compressor: Option<Compressor<L>>,
    /// Present if a query sees all earlier blocks of pooled keys.
    pub hca_compressor: Option<Pooling<L>>,
}

/// The parameters that pool keys, and choose the blocks that a query sees.
#[derive(Clone, Debug, Tree)]
pub struct Compressor<L> {
    #[tree(flatten)]
    pub pooling: Pooling<L>,
    pub indexer: BlockIndexer<L>,
}

/// A pooling of the vectors of consecutive tokens: their mean, weighted by a softmax over the tokens for each dimension.
#[derive(Clone, Debug, Tree)]
pub struct Pooling<L> {
    /// `[embed, pooled_width]`: the vectors. With overlapping blocks, a token's first half enters the block after its
    /// own, and its second half its own block.
    pub kv_proj: Linear<L>,
    /// `[embed, pooled_width]`: the logits of the weights.
    pub gate_proj: Linear<L>,
    /// `[block_slot, pooled_width]`: added to the logits at each place of a block.
    pub position_bias: L,
    /// `[head_dim]`
    pub kv_norm: RmsNorm<L>,
}

/// The parameters that score blocks for each query.
#[derive(Clone, Debug, Tree)]
pub struct BlockIndexer<L> {
    #[tree(flatten)]
    pub pooling: Pooling<L>,
    /// `[query_latent, index_query]`, with the heads of the indexer one after the other
    pub q_proj: Linear<L>,
    /// `[embed, index_heads]`: the weight of each head.
    pub weights_proj: Linear<L>,
}

/// The function of compressed attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CompressedOptions {
    pub attention: AttentionOptions,
    /// The number of keys, up to its own, that a query sees by themselves.
    pub window: usize,
    /// The rotary embedding of the last dimensions of heads, whose pairs are neighbors.
    pub rotary: RotaryOptions,
    /// The number of groups of the output projection.
    pub groups: usize,
    pub blocks: Option<BlockOptions>,
}

/// The blocks of pooled keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockOptions {
    /// The number of tokens of a block. Documents are cut into blocks from their beginning, and a query sees a block
    /// from the block's last token on.
    pub size: usize,
    /// The choice of blocks. Such blocks overlap: each also pools the tokens of the block before.
    pub indexer: Option<BlockIndexerOptions>,
}

/// The choice of blocks for each query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockIndexerOptions {
    pub heads: usize,
    pub head_dim: usize,
    /// The number of blocks that a query sees.
    pub num_chosen: usize,
}

/// The tokens that attention processes, other than activations.
#[derive(Clone, Copy)]
pub struct CompressedInputs<'t> {
    /// `i32[batch, position]`: places within documents.
    pub positions: Tensor<'t>,
    pub segments: Segments<'t>,
    /// The angles of the rotary embedding at these positions.
    pub angles: RotaryAngles<'t>,
}

/// The results of compressed attention.
pub struct Compressed<'t> {
    /// `[batch, position, embed]`
    pub output: Tensor<'t>,
    /// The state after the tokens, as [`CompressedOptions::state`] lists it; empty without a state.
    pub state: Vec<Tensor<'t>>,
}

/// The features of a group of heads: all dimensions of its first head, then those of its second one.
pub const GROUP_FEATURES: &str = "group_features";
/// The groups of the output projection.
pub const OUTPUT_GROUP: &str = "output_group";
/// The width of a group's latent vector.
pub const OUTPUT_LATENT: &str = "output_latent";
/// The latent vectors of all groups.
pub const OUTPUT_LATENTS: &str = "output_latents";
/// The width of a token's vector before pooling.
pub const POOLED_WIDTH: &str = "pooled_width";
/// The tokens of a block.
pub const BLOCK_SLOT: &str = "block_slot";
/// Queries of all heads of the indexer.
pub const INDEX_QUERY: &str = "index_query";
/// Tokens that the state keeps.
pub const KEPT_TOKENS: &str = "kept_token";

const HEADS_OF_GROUP: &str = "heads_of_group";
const NEIGHBOR: &str = "neighbor";
const PAIR: &str = "head_pair";

/// Logical axes of keys, all of which each device has: queries of all devices see pooled keys of any tokens.
const OF_KEYS: [Option<LogicalAxis>; 3] = [Some(logical::ACTIVATION_KV_BATCH), None, None];
/// Logical axes of tensors of queries alone, which devices split. All chunks of queries see equally many keys, so devices
/// take consecutive tokens, whatever the order in which tokens are stored.
const OF_QUERIES: [Option<LogicalAxis>; 3] =
    [Some(logical::ACTIVATION_KV_BATCH), Some(logical::ACTIVATION_LENGTH_ATTN), None];
/// Logical axes of the residual stream of queries.
const QUERY_INPUT: [Option<LogicalAxis>; 3] = [
    Some(logical::ACTIVATION_KV_BATCH),
    Some(logical::ACTIVATION_LENGTH_ATTN),
    Some(logical::ACTIVATION_EMBED),
];
/// Logical axes of queries, and of the context.
pub const COMPRESSED_QUERY: [Option<LogicalAxis>; 4] = [
    Some(logical::ACTIVATION_KV_BATCH),
    Some(logical::ACTIVATION_LENGTH_ATTN),
    Some(logical::ACTIVATION_HEADS),
    None,
];

/// An array of the state of compressed attention.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CompressedState {
    pub name: &'static str,
    pub axes: [Axis; 3],
    /// The number of tokens of each slot along `kv_position`; none in arrays whose size does not depend on the row's.
    pub stride: Option<usize>,
}

impl CompressedOptions {
    /// The arrays of the state for sequences of up to `slots` tokens with heads of this width: the keys of the window; the
    /// tokens of unfinished blocks before pooling and the pooled blocks; and both once more for the indexer.
    pub fn state(&self, batch: usize, slots: usize, head_dim: usize) -> Vec<CompressedState> {
        let batch = axis(BATCH, batch);
        let array = |name, tokens: Axis, width, stride| CompressedState {
            name,
            axes: [batch, tokens, axis(HEAD_DIM, width)],
            stride,
        };
        let mut arrays = vec![array("window", axis(KEPT_TOKENS, self.window), head_dim, None)];
        let Some(blocks) = self.blocks else { return arrays };
        let mut pooled = |tokens, pooled, width: usize| {
            arrays.push(array(tokens, axis(KEPT_TOKENS, blocks.span()), 2 * blocks.halves() * width, None));
            let slots = axis(KV_POSITION, (slots / blocks.size).max(1));
            arrays.push(array(pooled, slots, width, Some(blocks.size)));
        };
        pooled("unpooled", "pooled", head_dim);
        if let Some(indexer) = blocks.indexer {
            pooled("index_unpooled", "index_pooled", indexer.head_dim);
        }
        arrays
    }
}

impl BlockOptions {
    /// Whether each block also pools the tokens of the block before.
    fn overlaps(self) -> bool {
        self.indexer.is_some()
    }

    /// The number of tokens that a block pools.
    fn span(self) -> usize {
        self.size * self.halves()
    }

    /// The number of vectors of a token, one for each block that it enters.
    pub fn halves(self) -> usize {
        1 + usize::from(self.overlaps())
    }
}

/// The tokens of a call, in the order of the text.
struct Call<'t> {
    /// The residual stream, of which each device has all tokens.
    x: Tensor<'t>,
    /// The residual stream again, of which each device has the tokens whose queries it computes.
    of_queries: Tensor<'t>,
    /// The normalized latent vectors of queries.
    latent: Tensor<'t>,
    positions: Tensor<'t>,
    segments: Tensor<'t>,
    angles: RotaryAngles<'t>,
}

impl<'t> CompressedAttention<Tensor<'t>> {
    /// Applies attention to whole sequences, or to the tokens that follow those of a state. With a state, each row is one
    /// document, and padding follows its tokens.
    ///
    /// # Shapes
    /// `[batch, position, embed] -> [batch, position, embed]`
    #[track_caller]
    pub fn forward(
        &self,
        x: Tensor<'t>,
        inputs: &CompressedInputs<'t>,
        state: Option<&[Tensor<'t>]>,
        options: &CompressedOptions,
    ) -> Compressed<'t> {
        let order = inputs.segments.order;
        let read = |tensor: Tensor<'t>| order.read(tensor, POSITION);
        let x = read(x).constrain(&WHOLE_SEQUENCES);
        let of_queries = x.constrain(&QUERY_INPUT);
        let latent = self.wq_a.forward(of_queries, &[EMBED]).constrain(&OF_QUERIES).named("query_wa_proj");
        let call = Call {
            x,
            of_queries,
            latent: self.q_norm.forward(latent, QUERY_LATENT, options.attention.norm),
            positions: read(inputs.positions),
            segments: read(inputs.segments.query),
            angles: inputs.angles.read(order),
        };
        let query = self.wq_b.forward(call.latent, &[QUERY_LATENT]);
        let query = rms_normalize(query, &[HEAD_DIM], options.attention.norm.epsilon);
        let query = rotated(query, call.angles, options) * options.attention.scale;
        let query = query.constrain(&COMPRESSED_QUERY).named("query_proj");
        let key = self.wkv.forward(x, &[EMBED]).squeeze(KV_HEADS);
        let key = rotated(self.kv_norm.forward(key, HEAD_DIM, options.attention.norm), call.angles, options);
        let key = key.constrain(&OF_KEYS).named("key_proj");
        let mut state = state.map(|state| state.iter().copied());
        let mut after = Vec::new();
        let window = state.as_mut().and_then(Iterator::next);
        let extended = Extended::new(key, window, options.window, call.positions, call.segments);
        after.extend(window.map(|_| extended.last(options.window)));
        let local = Local { key: extended.values, segments: extended.segments, window: options.window };
        let mut next = || {
            let state = state.as_mut()?;
            Some([state.next()?, state.next()?])
        };
        let states = [next(), next()];
        let pooled =
            options.blocks.and_then(|blocks| self.pooled(&call, blocks, states, options, &mut after));
        let context = in_core(query, || {
            scores::attend(query, call.segments, &local, pooled, self.sinks, &options.attention)
        });
        let context = context.constrain(&COMPRESSED_QUERY).named("context").named("attention_out");
        let output = self.output(restored(context, call.angles, options), options);
        let output = order.store(output.constrain(&QUERY_INPUT), POSITION);
        let output = output.constrain(&RESIDUAL).named("out_proj");
        Compressed { output, state: after }
    }

    /// The output projection: a map for each group of heads, then one of all groups together.
    fn output(&self, context: Tensor<'t>, options: &CompressedOptions) -> Tensor<'t> {
        let groups = axis(OUTPUT_GROUP, options.groups);
        let heads = axis(HEADS_OF_GROUP, context.axis(QUERY_HEADS).size / options.groups);
        let features = [heads, context.axis(HEAD_DIM)];
        let latents = self
            .o_a_proj
            .with_split(GROUP_FEATURES, &features)
            .forward(context.split(QUERY_HEADS, &[groups, heads]), &[HEADS_OF_GROUP, HEAD_DIM]);
        let of_groups = [groups, latents.axis(OUTPUT_LATENT)];
        let latents = latents.order(&[BATCH, POSITION, OUTPUT_GROUP, OUTPUT_LATENT]);
        self.o_b_proj.with_split(OUTPUT_LATENTS, &of_groups).forward(latents, &[OUTPUT_GROUP, OUTPUT_LATENT])
    }
}

impl<'t> CompressedAttention<Tensor<'t>> {
    /// The pooled keys, and which of them each query sees; none if no block can be whole. `states` are those of the keys
    /// and of the indexer, each before the call: tokens before pooling, and pooled blocks.
    fn pooled(
        &self,
        call: &Call<'t>,
        blocks: BlockOptions,
        states: [Option<[Tensor<'t>; 2]>; 2],
        options: &CompressedOptions,
        after: &mut Vec<Tensor<'t>>,
    ) -> Option<Pooled<'t>> {
        let [own, of_indexer] = states;
        let ended = Blocks::ending(call.positions, call.segments, blocks, own.is_some())?;
        let pool = |pooling: &Pooling<Tensor<'t>>, state, after: &mut Vec<Tensor<'t>>| {
            Pool { pooling, blocks, ended: &ended, options }.run(call, state, after)
        };
        let indexer = self.csa_compressor.as_ref().map(|compressor| &compressor.indexer);
        let own_pooling = self.csa_compressor.as_ref().map(|compressor| &compressor.pooling);
        let key = pool(own_pooling.or(self.hca_compressor.as_ref())?, own, after);
        let visible = match own {
            None => ended.visible(call.positions, call.segments),
            Some(_) => blocks.visible_of_state(key.axis(KV_POSITION), call.positions, call.segments),
        };
        let visible = visible.constrain(&OF_QUERIES);
        let visible = match (indexer, blocks.indexer) {
            (Some(indexer), Some(choice)) => {
                let index_key = pool(&indexer.pooling, of_indexer, after);
                if choice.num_chosen < index_key.axis(KV_POSITION).size {
                    let scores = indexer.scores(call, index_key, choice, options);
                    best(scores, visible, choice.num_chosen)
                } else {
                    visible
                }
            }
            _ => visible,
        };
        Some(Pooled { key: key.cast(call.x.dtype()), visible })
    }
}

impl<'t> BlockIndexer<Tensor<'t>> {
    /// The score of each block for each query, without a gradient.
    ///
    /// # Shapes
    /// `[batch, kv_position, head_dim] -> f32[batch, position, kv_position]`
    fn scores(
        &self,
        call: &Call<'t>,
        key: Tensor<'t>,
        choice: BlockIndexerOptions,
        options: &CompressedOptions,
    ) -> Tensor<'t> {
        let heads = [axis(INDEX_HEADS, choice.heads), axis(HEAD_DIM, choice.head_dim)];
        let query =
            self.q_proj.forward(call.latent.stop_gradient(), &[QUERY_LATENT]).split(INDEX_QUERY, &heads);
        let query = rotated(query, call.angles, options).cast(DType::F32);
        let products = query.contract(key.stop_gradient().cast(DType::F32), &[HEAD_DIM]).relu();
        let weights = self.weights_proj.forward(call.of_queries.stop_gradient(), &[EMBED]).cast(DType::F32);
        let scale = ((choice.heads * choice.head_dim) as f64).powf(-0.5);
        let scores = (products * (weights * scale)).sum(&[INDEX_HEADS]);
        scores.order(&[BATCH, POSITION, KV_POSITION]).constrain(&OF_QUERIES).stop_gradient()
    }
}

/// Rotates the last dimensions, whose pairs are neighbors. The results are in the order of [`RotaryAngles::rotate`].
fn rotated<'t>(x: Tensor<'t>, angles: RotaryAngles<'t>, options: &CompressedOptions) -> Tensor<'t> {
    with_last(x, options, |turned| angles.rotate_neighbors(turned))
}

/// Undoes [`rotated`], in the original order of dimensions.
fn restored<'t>(x: Tensor<'t>, angles: RotaryAngles<'t>, options: &CompressedOptions) -> Tensor<'t> {
    with_last(x, options, |turned| {
        let back = angles.opposite().rotate(turned);
        let pairs = [axis(NEIGHBOR, 2), axis(PAIR, options.rotary.head_dim / 2)];
        let split = back.split(HEAD_DIM, &pairs);
        let mut order: Vec<&'static str> = split.axes().iter().map(|own| own.name).collect();
        let last = order.len() - 1;
        order.swap(last - 1, last);
        split.order(&order).merge(&[PAIR, NEIGHBOR], HEAD_DIM)
    })
}

/// Changes the rotated dimensions, which are the last ones.
fn with_last<'t>(
    x: Tensor<'t>,
    options: &CompressedOptions,
    change: impl FnOnce(Tensor<'t>) -> Tensor<'t>,
) -> Tensor<'t> {
    let (size, turned) = (x.axis(HEAD_DIM).size, options.rotary.head_dim);
    let changed = change(x.slice(HEAD_DIM, size - turned, size));
    if size == turned {
        changed
    } else {
        x.slice(HEAD_DIM, 0, size - turned).concatenate(&[changed], HEAD_DIM)
    }
}

/// The angles at positions other than those of the call's tokens.
fn angles_at<'t>(positions: Tensor<'t>, options: &CompressedOptions) -> RotaryAngles<'t> {
    Rotary::new(&options.rotary).angles(positions)
}
