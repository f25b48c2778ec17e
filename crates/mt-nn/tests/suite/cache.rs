//! Attention to a cache compared with attention within whole sequences.

use mt_ir::{CpuKernels, Target};
use mt_nn::{
    Dropout, Linear, RmsNorm, Rotary, RotaryOptions, SequenceOrder,
    attention::{
        Attention, AttentionInputs, AttentionOptions, CachedKeysValues, KeysValues, MaskSpec, Segments,
    },
    axes::{BATCH, EMBED, HEAD_DIM, KV_HEADS, KV_POSITION, POSITION, QUERY_HEADS, VALUE_DIM},
};
use mt_shape::{Axis, DType, axis};
use mt_trace::Tensor;

use crate::{
    harness::{Argument, CAUSAL_ATTENTION, assert_close, integers, numbers, run_for},
    reference_rotary::PLAIN,
};

/// Tokens in the prompt of each row. The shorter prompt leaves slots of the cache empty.
const PROMPTS: [usize; 2] = [6, 4];
const STEPS: usize = 8;
const LENGTH: usize = PROMPTS[0] + STEPS;

const OPTIONS: AttentionOptions = AttentionOptions { scale: 0.4, ..CAUSAL_ATTENTION };

/// The arguments of a pair of layers. The last one is a value projection of this width.
fn arguments(value_width: usize) -> Vec<Argument> {
    let tensor = |seed: u64, axes: &[Axis]| {
        let dims: Vec<usize> = axes.iter().map(|axis| axis.size).collect();
        (axes.to_vec(), numbers(seed, &dims))
    };
    let [batch, length, embed] = [axis(BATCH, 2), axis(POSITION, LENGTH), axis(EMBED, 9)];
    let value_dim = axis(VALUE_DIM, value_width);
    let [heads, kv_heads, head_dim] = [axis(QUERY_HEADS, 6), axis(KV_HEADS, 2), axis(HEAD_DIM, 4)];
    let segments: Vec<i32> = PROMPTS
        .iter()
        .flat_map(|prompt| (0..LENGTH).map(move |place| i32::from(place < prompt + STEPS)))
        .collect();
    vec![
        tensor(1, &[batch, length, embed]),
        tensor(2, &[embed, heads, head_dim]),
        tensor(3, &[embed, kv_heads, head_dim]),
        tensor(4, &[heads, value_dim, embed]),
        tensor(5, &[head_dim]),
        tensor(6, &[heads]),
        tensor(7, &[embed, heads, head_dim]),
        (vec![batch, length], integers(&[2, LENGTH], &segments)),
        tensor(8, &[embed, kv_heads, value_dim]),
    ]
}

/// A layer whose values are its keys, unless it has a value projection of another width, and a layer that shares its
/// keys and values. The result is the sum of both outputs.
struct Pair<'t> {
    first: Attention<Tensor<'t>>,
    second: Attention<Tensor<'t>>,
    rotary: Rotary,
    options: AttentionOptions,
}

impl<'t> Pair<'t> {
    fn new(t: &[Tensor<'t>], options: AttentionOptions) -> Self {
        let (query, key, out) = (Linear::dense(t[1]), Linear::dense(t[2]), Linear::dense(t[3]));
        let first = Attention {
            query,
            value: (t[8].axis(VALUE_DIM).size != key.axis(HEAD_DIM).size).then(|| Linear::dense(t[8])),
            key: Some(key),
            out,
            query_norm: None,
            key_norm: Some(RmsNorm { scale: t[4] }),
            sinks: Some(t[5]),
        };
        let query = Linear::dense(t[6]);
        let second = Attention { query, key: None, key_norm: None, ..first.clone() };
        Self { first, second, rotary: Rotary::new(&RotaryOptions { head_dim: 4, ..PLAIN }), options }
    }

    /// The output, and the keys and values to write to the first layer's cache.
    fn forward(
        &self,
        x: Tensor<'t>,
        positions: Tensor<'t>,
        segments: Segments<'t>,
        cache: Option<CachedKeysValues<'t>>,
    ) -> (Tensor<'t>, Option<KeysValues<Tensor<'t>>>) {
        let angles = Some(self.rotary.angles(positions));
        let inputs = AttentionInputs {
            angles,
            query_factors: None,
            segments,
            cache,
            shared: None,
            biases: None,
            weight_dropout: Dropout::Off,
            with_scores: false,
        };
        let first = self.first.forward(x, &inputs, &self.options);
        let inputs = AttentionInputs { cache: None, shared: Some(first.keys_values), ..inputs };
        let second = self.second.forward(x, &inputs, &self.options);
        (first.output + second.output, first.written)
    }
}

/// Slices of `size` tokens, which start at a different position in each row.
fn rows<'t>(tensor: Tensor<'t>, starts: [usize; 2], size: usize) -> Tensor<'t> {
    let row = |index: usize| {
        tensor.slice(BATCH, index, index + 1).slice(POSITION, starts[index], starts[index] + size)
    };
    row(0).concatenate(&[row(1)], BATCH)
}

#[track_caller]
fn check(options: AttentionOptions) {
    for value_width in [4, 6] {
        check_for(Target::CPU, options, value_width);
        check_for(
            Target::Cpu(CpuKernels { f32: true, bf16: true, ..CpuKernels::NONE }),
            options,
            value_width,
        );
    }
}

#[track_caller]
fn check_for(target: Target, options: AttentionOptions, value_width: usize) {
    let results = run_for(target, "cached", &arguments(value_width), |region, t| {
        let (x, segmentation) = (t[0], t[7]);
        let pair = Pair::new(&t, options);
        let positions = region.iota(DType::I32, axis(POSITION, LENGTH)).broadcast(&segmentation.axes());
        let (whole, _) =
            pair.forward(x, positions, Segments::within(segmentation, SequenceOrder::AsRead), None);

        // The cache has one more slot than tokens.
        let slots = axis(KV_POSITION, LENGTH + 1);
        let axes = [axis(BATCH, 2), slots, axis(KV_HEADS, 2)];
        let empty = |width| region.full(DType::F32, &[&axes[..], &[width]].concat(), 0.0);
        let width = t[8].axis(VALUE_DIM);
        let mut cached = KeysValues { key: empty(axis(HEAD_DIM, 4)), value: empty(width) };
        let mut occupied = region.full(DType::I32, &axes[..2], 0.0);
        let places = region.iota(DType::I32, axis(POSITION, PROMPTS[0]));
        let row = |prompt: usize| places.less(prompt as f64).cast(DType::I32).unsqueeze(BATCH);
        let prompts = row(PROMPTS[0]).concatenate(&[row(PROMPTS[1])], BATCH);
        let one = region.full(DType::I32, &[axis(BATCH, 2), axis(POSITION, 1)], 1.0);
        let steps = (0..STEPS).map(|step| (PROMPTS.map(|prompt| prompt + step), PROMPTS[0] + step, one));
        let mut outputs = Vec::new();
        for (starts, slot, query) in std::iter::once(([0, 0], 0, prompts)).chain(steps) {
            let (start, size) = (region.integer(DType::I32, slot as i64), query.axis(POSITION).size);
            occupied = occupied.dynamic_update(KV_POSITION, start, query.rename(POSITION, KV_POSITION));
            let order = SequenceOrder::AsRead;
            let segments = Segments::of_cache(query, occupied, start, order);
            let (x, positions) = (rows(x, starts, size), rows(positions, starts, size));
            let cache = CachedKeysValues { cached, start, pages: None };
            let (output, written) = pair.forward(x, positions, segments, Some(cache));
            let KeysValues { key, value } = written.unwrap();
            cached = cache.write(key, value);
            outputs.push(output);
        }
        let steps = outputs[1].concatenate(&outputs[2..], POSITION);
        vec![rows(whole, PROMPTS, STEPS), steps]
    });
    assert_close("steps with a cache", &results[1], &results[0], 1e-6);
}

#[test]
fn steps_with_a_cache_equal_whole_sequences() {
    let masked = |window: Option<usize>, chunk: Option<usize>| AttentionOptions {
        mask: MaskSpec { window, chunk, ..MaskSpec::CAUSAL },
        ..OPTIONS
    };
    check(AttentionOptions { soft_cap: Some(0.8), normalize_values: true, ..OPTIONS });
    // Windows and chunks shorter than the prompts, longer, and longer than the whole sequence.
    for size in [3, 8, 30] {
        check(masked(Some(size), None));
        check(masked(None, Some(size)));
    }
    check(masked(Some(3), Some(7)));
}
