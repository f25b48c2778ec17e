//! Compressed attention: keys of a window, and blocks of pooled keys.

use mt_nn::{
    Initializer, ParamSpec, RotaryOptions,
    attention::{
        BLOCK_SLOT, BlockIndexer, BlockIndexerOptions, BlockOptions, CACHED_LATENTS, COMPRESSED_QUERY,
        CompressedAttention, CompressedInputs, CompressedOptions, Compressor, GROUP_FEATURES, INDEX_QUERY,
        OUTPUT_GROUP, OUTPUT_LATENT, OUTPUT_LATENTS, POOLED_WIDTH, Pooling,
    },
    axes::{HEAD_DIM, INDEX_HEADS, KV_HEADS, QUERY_HEADS, QUERY_LATENT},
};
use mt_shape::{DType, Tree, axis, logical};
use mt_trace::Tensor;

use crate::{
    AttentionFlops, Kept, StateSpec,
    decoder::{
        Activation,
        part::{BatchDims, Part, PartDescription, PartInputs, PartOutputs, SpecBuilder, StateDims},
    },
};

/// Compressed attention. Its cache holds the keys of a window and the pooled blocks.
#[derive(Clone, Debug, PartialEq)]
pub struct CompressedAttentionConfig {
    pub heads: usize,
    pub head_dim: usize,
    /// The width of the latent vector of queries.
    pub query_latent: usize,
    /// The width of the latent vector of each group of heads in the output projection.
    pub output_latent: usize,
    pub options: CompressedOptions,
}

impl CompressedAttentionConfig {
    fn pooling(&self, builder: &SpecBuilder, blocks: BlockOptions, width: usize) -> Pooling<ParamSpec> {
        let embed = (builder.embed, logical::EMBED);
        let pooled = (axis(POOLED_WIDTH, blocks.halves() * width), logical::KV);
        Pooling {
            kv_proj: builder.linear(1, [embed, pooled]),
            gate_proj: builder.linear(1, [embed, pooled]),
            position_bias: builder
                .array([(axis(BLOCK_SLOT, blocks.size), logical::KV), pooled], Initializer::Zeros),
            kv_norm: builder.rms(axis(HEAD_DIM, width)),
        }
    }

    /// The widths of keys and of the indexer's keys, if the layer pools them.
    fn pooled_widths(&self) -> Vec<usize> {
        let Some(blocks) = self.options.blocks else { return Vec::new() };
        std::iter::once(self.head_dim).chain(blocks.indexer.map(|indexer| indexer.head_dim)).collect()
    }

    /// The choice of blocks in rows of this length, if they have more blocks than a query may choose.
    fn chooses(&self, length: usize) -> Option<BlockIndexerOptions> {
        let blocks = self.options.blocks?;
        blocks.indexer.filter(|choice| length / blocks.size > choice.num_chosen)
    }
}

impl Part for CompressedAttentionConfig {
    type Parameters<L> = CompressedAttention<L>;

    fn specs(&self, builder: &SpecBuilder) -> CompressedAttention<ParamSpec> {
        let embed = (builder.embed, logical::EMBED);
        let heads = (axis(QUERY_HEADS, self.heads), logical::Q_HEADS);
        let head_dim = axis(HEAD_DIM, self.head_dim);
        let query_latent = axis(QUERY_LATENT, self.query_latent);
        let groups = self.options.groups;
        let features = axis(GROUP_FEATURES, self.heads / groups * self.head_dim);
        let of_group = builder.array(
            [
                (axis(OUTPUT_GROUP, groups), logical::HEADS),
                (features, logical::EMBED),
                (axis(OUTPUT_LATENT, self.output_latent), logical::KV),
            ],
            Initializer::fan_in(builder.init_scale, features.size),
        );
        let latents = (axis(OUTPUT_LATENTS, groups * self.output_latent), logical::HEADS);
        let blocks = self.options.blocks;
        let indexed = blocks.and_then(|blocks| Some((blocks, blocks.indexer?)));
        let compressor = indexed.map(|(blocks, choice)| {
            let queries = axis(INDEX_QUERY, choice.heads * choice.head_dim);
            let indexer = BlockIndexer {
                pooling: self.pooling(builder, blocks, choice.head_dim),
                q_proj: builder.linear(1, [(query_latent, logical::Q_LORA), (queries, logical::Q_HEADS)]),
                weights_proj: builder.linear(1, [embed, (axis(INDEX_HEADS, choice.heads), logical::Q_HEADS)]),
            };
            Compressor {
                pooling: self.pooling(builder, blocks, self.head_dim),
                // A choice has no gradient.
                indexer: indexer.map_leaves(|_, spec| ParamSpec { is_trainable: false, ..spec.clone() }),
            }
        });
        CompressedAttention {
            wq_a: builder.linear(1, [embed, (query_latent, logical::Q_LORA_UP_PROJ)]),
            q_norm: builder.rms(query_latent),
            wq_b: builder.linear(1, [(query_latent, logical::Q_LORA), heads, (head_dim, logical::KV)]),
            wkv: builder
                .linear(1, [embed, (axis(KV_HEADS, 1), logical::KV), (head_dim, logical::KV_HEAD_DIM)]),
            kv_norm: builder.rms(head_dim),
            sinks: builder.array([heads], Initializer::Zeros),
            o_a_proj: mt_nn::Linear::dense(of_group.with_groups(1, 1)),
            o_b_proj: builder.linear(1, [latents, embed]),
            csa_compressor: compressor,
            hca_compressor: blocks
                .filter(|blocks| blocks.indexer.is_none())
                .map(|blocks| self.pooling(builder, blocks, self.head_dim)),
        }
    }

    fn forward<'t>(
        &self,
        parameters: &CompressedAttention<Tensor<'t>>,
        x: Tensor<'t>,
        inputs: &PartInputs<'_, 't>,
    ) -> PartOutputs<'t> {
        let given = CompressedInputs {
            positions: inputs.positions,
            segments: inputs.segments,
            angles: inputs.angles(&self.options.rotary),
        };
        let state = inputs.state.as_ref().map(|state| state.arrays);
        let made = parameters.forward(x, &given, state, &self.options);
        PartOutputs { state: made.state, ..PartOutputs::only(made.output) }
    }

    fn differs_from(&self, other: &Self) -> bool {
        // These options do not change the mathematics.
        let mut other = other.clone();
        other.options.rotary = self.options.rotary;
        other.options.attention = self.options.attention;
        *self != other
    }
}

impl PartDescription for CompressedAttentionConfig {
    fn state(&self, dims: &StateDims) -> Vec<StateSpec> {
        let arrays = self.options.state(dims.batch, dims.slots, self.head_dim);
        let spec = |array: mt_nn::attention::CompressedState| StateSpec {
            group: 0,
            name: array.name,
            axes: array.axes.to_vec(),
            logical_axes: CACHED_LATENTS.to_vec(),
            dtype: dims.dtype,
            kept: match array.stride {
                Some(stride) => Kept::WholeSlots { stride },
                None => Kept::Whole,
            },
        };
        arrays.into_iter().map(spec).collect()
    }

    fn activations(&self, batch: &BatchDims) -> Vec<Activation> {
        let &BatchDims { rows, length, dtype, .. } = batch;
        let of_keys = [Some(logical::ACTIVATION_KV_BATCH), None, None];
        let of_queries = [Some(logical::ACTIVATION_KV_BATCH), Some(logical::ACTIVATION_LENGTH_ATTN), None];
        let narrow = |name, width| Activation::new(name, &[rows, length, width], &of_queries, dtype);
        let key = |name, width| Activation::new(name, &[rows, length, width], &of_keys, dtype);
        let of_heads = |name, width, dtype| {
            Activation::new(name, &[rows, length, self.heads, width], &COMPRESSED_QUERY, dtype)
        };
        let mut made = vec![
            narrow(Some("query_wa_proj"), self.query_latent),
            of_heads(Some("query_proj"), self.head_dim, dtype),
            key(Some("key_proj"), self.head_dim),
        ];
        let halves = self.options.blocks.map_or(1, BlockOptions::halves);
        let blocks = self.options.blocks.map_or(0, |blocks| length / blocks.size);
        for width in self.pooled_widths() {
            // Vectors and logits, both again in blocks, and the pooled keys.
            let wide = || key(Some("kv_proj"), halves * width);
            made.extend([wide(), wide(), key(None, 2 * halves * width)]);
            made.push(Activation::new(None, &[rows, blocks, width], &of_keys, dtype));
        }
        if let Some(choice) = self.chooses(length) {
            let pairs =
                |heads| Activation::new(None, &[rows, length, heads * blocks], &of_queries, DType::F32);
            // Queries of the indexer, their products with all pooled keys, and the scores.
            let queries = [rows, length, choice.heads * choice.head_dim];
            made.extend([
                Activation::new(None, &queries, &of_queries, DType::F32),
                pairs(choice.heads),
                pairs(1),
            ]);
        }
        let window = self.options.window;
        let keys = blocks + if length <= window { length + window } else { 2 * window };
        // Attention logits, and the attention weights.
        made.extend([of_heads(None, keys, DType::F32), of_heads(None, keys, dtype)]);
        made.push(of_heads(Some("context"), self.head_dim, dtype));
        made.push(narrow(None, self.options.groups * self.output_latent));
        made.push(batch.residual(Some("out_proj")));
        made
    }

    fn scope(&self) -> &'static str {
        "self_attention"
    }

    fn pair_operations(&self) -> Vec<AttentionFlops> {
        let products = 2 * self.heads * self.head_dim;
        let of_window = AttentionFlops {
            width: products,
            window: Some(self.options.window),
            is_causal: true,
            block: None,
            above: 0,
        };
        let Some(blocks) = self.options.blocks else { return vec![of_window] };
        let choice = blocks.indexer;
        // A block counts as its tokens, with a share of the width each.
        let tokens = |chosen: BlockIndexerOptions| chosen.num_chosen * blocks.size;
        let of_blocks =
            AttentionFlops { width: products / blocks.size, window: choice.map(tokens), ..of_window };
        let index = choice.map(|choice| AttentionFlops {
            // A product of two vectors, and its weight in the sum over heads. Without a gradient, only the forward pass
            // computes them: a third of the operations of a step.
            width: choice.heads * (choice.head_dim + 1) / (3 * blocks.size),
            window: None,
            above: tokens(choice),
            ..of_window
        });
        [of_window, of_blocks].into_iter().chain(index).collect()
    }

    fn token_operations(&self) -> usize {
        // The means of blocks.
        let halves = self.options.blocks.map_or(0, BlockOptions::halves);
        self.pooled_widths().iter().map(|width| halves * width).sum()
    }

    fn rotary(&self) -> Option<&RotaryOptions> {
        Some(&self.options.rotary)
    }
}
