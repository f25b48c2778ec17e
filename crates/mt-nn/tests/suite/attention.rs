//! Blockwise and dense attention compared with each other, and the effects of options.

use mt_derive::Tree;
use mt_nn::{
    SequenceOrder,
    attention::{
        Additions, AttentionOptions, BlockSizes, Context, KeysValues, MaskSpec, PassBlocks, Segments,
        blockwise, dense,
    },
    axes::{BATCH, GROUP, HEAD_DIM, KV_HEADS, KV_POSITION, POSITION, VALUE_DIM},
};
use mt_shape::{DType, HostArray, axis};
use mt_trace::Tensor;

use crate::harness::{
    Argument, CAUSAL_ATTENTION, assert_close, gradients, integers, numbers, of_documents, relative_error,
    run, text,
};

const OPTIONS: AttentionOptions = CAUSAL_ATTENTION;

#[derive(Clone, Copy)]
struct Case {
    batch: usize,
    length: usize,
    kv_heads: usize,
    group: usize,
    head_dim: usize,
    value_dim: usize,
    block: usize,
}

const CASE: Case = Case { batch: 2, length: 37, kv_heads: 2, group: 3, head_dim: 6, value_dim: 6, block: 8 };

impl Case {
    /// Queries, keys, values, sinks and segments: documents of odd lengths, then padding.
    fn arguments(self) -> Vec<Argument> {
        let Self { batch, length, kv_heads, group, head_dim, value_dim, .. } = self;
        let [batch, keys] = [axis(BATCH, batch), axis(KV_POSITION, length)];
        let [kv_heads, group, head_dim] =
            [axis(KV_HEADS, kv_heads), axis(GROUP, group), axis(HEAD_DIM, head_dim)];
        let (queries, value_dim) = (axis(POSITION, length), axis(VALUE_DIM, value_dim));
        let tensor = |seed, axes: Vec<_>| {
            let dims: Vec<usize> = axes.iter().map(|axis: &mt_shape::Axis| axis.size).collect();
            (axes, numbers(seed, &dims))
        };
        let segments: Vec<i32> = (0..batch.size)
            .flat_map(|row| {
                let (first, padding) = (length / (row + 2), length - length / 7);
                (0..length).map(move |place| if place >= padding { 0 } else { 1 + i32::from(place >= first) })
            })
            .collect();
        vec![
            tensor(1, vec![batch, queries, kv_heads, group, head_dim]),
            tensor(2, vec![batch, keys, kv_heads, head_dim]),
            tensor(3, vec![batch, keys, kv_heads, value_dim]),
            tensor(5, vec![kv_heads, group]),
            (vec![batch, queries], integers(&[batch.size, length], &segments)),
        ]
    }

    /// The context in `f32` and the gradients of queries, keys, values and sinks.
    fn run(self, dtype: DType, options: &AttentionOptions, sinks: Sinks, is_dense: bool) -> Vec<HostArray> {
        let cotangent = numbers(4, &[self.batch * self.kv_heads * self.length * self.group * self.value_dim]);
        let block = self.block;
        let (context, gradients) = gradients("attention", &self.arguments(), &cotangent, |t| {
            context(t, dtype, options, sinks, if is_dense { 0 } else { block })
        });
        [vec![context], gradients].concat()
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Sinks {
    With,
    Without,
}

/// The context of attention; dense if `block` is 0.
fn context<'t>(
    t: &[Tensor<'t>],
    dtype: DType,
    options: &AttentionOptions,
    sinks: Sinks,
    block: usize,
) -> Tensor<'t> {
    let [query, key, value] = [t[0], t[1], t[2]].map(|tensor| tensor.cast(dtype));
    attend([query, key, value], t[4], (sinks == Sinks::With).then_some(t[3]), options, block, false).context
}

fn attend<'t>(
    [query, key, value]: [Tensor<'t>; 3],
    segments: Tensor<'t>,
    sinks: Option<Tensor<'t>>,
    options: &AttentionOptions,
    block: usize,
    with_scores: bool,
) -> Context<'t> {
    let keys_values = KeysValues { key, value };
    let segments = of_documents(segments, options.mask, SequenceOrder::AsRead);
    if block == 0 {
        let additions = Additions { sinks, ..Additions::default() };
        dense(query, keys_values, segments.mask(options.mask), additions, options, with_scores)
    } else {
        blockwise(query, keys_values, segments, sinks, options, Some(block), with_scores)
    }
}

const RESULTS: [&str; 5] =
    ["context", "query's gradient", "key's gradient", "value's gradient", "sinks' gradient"];

#[track_caller]
fn check(case: Case, dtype: DType, options: AttentionOptions, sinks: Sinks, tolerance: f64) {
    let dense = case.run(dtype, &options, sinks, true);
    let blockwise = case.run(dtype, &options, sinks, false);
    for ((result, dense), blockwise) in RESULTS.iter().zip(&dense).zip(&blockwise) {
        assert!(blockwise.to_f64().iter().all(|value| value.is_finite()), "{result}");
        if dense.to_f64().iter().all(|value| *value == 0.0) {
            // A query with one key has no gradient; on some processors rounding leaves a trace of its two terms.
            let largest = blockwise.to_f64().iter().fold(0.0, |largest: f64, value| largest.max(value.abs()));
            assert!(largest <= tolerance, "{result}: {largest:e}, not 0");
            continue;
        }
        assert_close(result, blockwise, dense, tolerance);
    }
    let sinks_gradient = blockwise[4].to_f64();
    assert_eq!(sinks_gradient.iter().all(|value| *value != 0.0), sinks == Sinks::With);
}

#[test]
fn given_sizes_of_blocks_change_no_value() {
    let sizes = |queries, keys| BlockSizes { queries: Some(queries), keys: Some(keys) };
    for given in [
        PassBlocks { forward: sizes(16, 8), backward: sizes(8, 16) },
        PassBlocks { forward: sizes(5, 100), backward: sizes(37, 4) },
        PassBlocks { forward: BlockSizes { keys: Some(3), ..BlockSizes::NONE }, ..PassBlocks::NONE },
    ] {
        let options = AttentionOptions { blocks: given, ..OPTIONS };
        check(CASE, DType::F32, options, Sinks::With, 1e-6);
        let local =
            AttentionOptions { local_blocks: given, soft_cap: Some(0.7), ..masked(true, Some(11), None) };
        check(CASE, DType::F32, local, Sinks::Without, 1e-6);
    }
}

#[test]
fn sizes_of_blocks_act_on_layers_of_their_kind() {
    let given = BlockSizes { queries: Some(9), keys: Some(5) };
    let blocks = PassBlocks { forward: given, backward: given };
    let program = |options: AttentionOptions| {
        text(&CASE.arguments(), |region, t| {
            let (_, [], gradients) = region.value_and_grad(&Operands(t[..4].to_vec()), |_, operands| {
                let operands = [operands.0.as_slice(), &[t[4]]].concat();
                (context(&operands, DType::F32, &options, Sinks::With, CASE.block).square().sum_all(), [])
            });
            gradients.0
        })
    };
    let window = masked(true, Some(11), None);
    for (usual, own, others) in [
        (
            OPTIONS,
            AttentionOptions { blocks, ..OPTIONS },
            AttentionOptions { local_blocks: blocks, ..OPTIONS },
        ),
        (window, AttentionOptions { local_blocks: blocks, ..window }, AttentionOptions { blocks, ..window }),
    ] {
        assert_ne!(program(usual), program(own));
        assert_eq!(program(usual), program(others));
    }
}

#[test]
fn blockwise_equals_dense() {
    let check = |case| check(case, DType::F32, OPTIONS, Sinks::Without, 1e-6);
    check(CASE);
    // Blocks that divide the length, a single block, and blocks larger and smaller than documents.
    check(Case { length: 48, block: 16, ..CASE });
    check(Case { length: 13, block: 13, ..CASE });
    check(Case { length: 29, block: 3, kv_heads: 1, group: 5, head_dim: 2, value_dim: 2, ..CASE });
    check(Case { length: 1, block: 1, batch: 1, ..CASE });
    check(Case { kv_heads: 3, group: 1, ..CASE });
}

#[test]
fn blockwise_equals_dense_with_other_widths_of_values() {
    for value_dim in [1, 4, 9] {
        let case = Case { value_dim, ..CASE };
        check(case, DType::F32, OPTIONS, Sinks::Without, 1e-6);
        let options = AttentionOptions { soft_cap: Some(0.7), ..masked(true, Some(11), None) };
        check(case, DType::F32, options, Sinks::With, 1e-6);
        check(Case { length: 48, block: 16, ..case }, DType::BF16, OPTIONS, Sinks::Without, 1.2e-2);
    }
}

/// The largest logit of each query, by plain loops: `[batch, kv_heads, position, group]`.
fn largest_scores(case: Case, options: &AttentionOptions) -> Vec<f64> {
    let Case { batch, length, kv_heads, group, head_dim, .. } = case;
    let arguments = case.arguments();
    let [query, key, segments] = [0, 1, 4].map(|index| arguments[index].1.to_f64());
    let MaskSpec { causal, window, chunk, .. } = options.mask;
    let sees = |query: usize, key: usize| {
        (!causal || key <= query)
            && window.is_none_or(|window| key + window > query)
            && chunk.is_none_or(|chunk| query / chunk == key / chunk)
    };
    let mut largest = Vec::new();
    for (row, head) in (0..batch).flat_map(|row| (0..kv_heads).map(move |head| (row, head))) {
        for (place, member) in (0..length).flat_map(|place| (0..group).map(move |member| (place, member))) {
            let same = |other: &usize| segments[row * length + place] == segments[row * length + other];
            let q = (((row * length + place) * kv_heads + head) * group + member) * head_dim;
            let scores = (0..length).filter(|other| sees(place, *other)).filter(same).map(|other| {
                let k = ((row * length + other) * kv_heads + head) * head_dim;
                (0..head_dim).map(|index| query[q + index] * key[k + index]).sum::<f64>()
            });
            largest.push(scores.fold(f64::NEG_INFINITY, f64::max));
        }
    }
    largest
}

/// Largest logits cover the keys that a query sees, are taken before sinks and caps, and have no gradients.
#[test]
fn largest_scores_of_both_kernels() {
    let capped = |options| AttentionOptions { soft_cap: Some(0.7), ..options };
    for (case, options, sinks) in [
        (CASE, OPTIONS, Sinks::Without),
        (CASE, OPTIONS, Sinks::With),
        (CASE, capped(masked(true, Some(11), None)), Sinks::With),
        (CASE, masked(true, Some(1), None), Sinks::Without),
        (Case { length: 48, block: 16, kv_heads: 3, group: 1, ..CASE }, capped(OPTIONS), Sinks::Without),
        (Case { length: 29, block: 3, ..CASE }, masked(false, None, Some(13)), Sinks::With),
    ] {
        let expected = largest_scores(case, &options);
        let arguments = case.arguments();
        for block in [0, case.block] {
            let made = run("largest", &arguments, |region, t| {
                let segments = t[4];
                let (_, made, gradients) = region.value_and_grad_list(&Operands(t[..4].to_vec()), |_, t| {
                    let t = t.0;
                    let sinks = (sinks == Sinks::With).then_some(t[3]);
                    let made = attend([t[0], t[1], t[2]], segments, sinks, &options, block, true);
                    let scores = made.largest_scores.unwrap();
                    let scores = scores.order(&[BATCH, KV_HEADS, POSITION, GROUP]);
                    (made.context.square().sum_all() + scores.sum_all(), vec![scores])
                });
                let (_, [], without) = region.value_and_grad(&Operands(t[..4].to_vec()), |_, t| {
                    let t = [t.0.as_slice(), &[segments]].concat();
                    (context(&t, DType::F32, &options, sinks, block).square().sum_all(), [])
                });
                [made, gradients.0, without.0].concat()
            });
            let scores = made[0].to_f64();
            for (score, expected) in scores.iter().zip(&expected) {
                assert!(
                    (score - expected).abs() <= 1e-5,
                    "{options:?}, block {block}: {score}, not {expected}"
                );
            }
            for (result, (gradient, without)) in RESULTS[1..].iter().zip(made[1..5].iter().zip(&made[5..])) {
                assert_eq!(gradient, without, "{result}");
            }
        }
    }
}

fn masked(causal: bool, window: Option<usize>, chunk: Option<usize>) -> AttentionOptions {
    AttentionOptions { mask: MaskSpec { causal, window, chunk, block: None }, ..OPTIONS }
}

#[test]
fn blockwise_equals_dense_with_windows_and_chunks() {
    let check = |case, options| check(case, DType::F32, options, Sinks::Without, 1e-6);
    // Windows shorter than a block of 8, as long, not a multiple of it, and longer than the sequence.
    for size in [1, 3, 8, 11, 100] {
        check(CASE, masked(true, Some(size), None));
    }
    // Chunks that end at borders of blocks, within blocks, and after the sequence.
    for size in [3, 16, 13, 100] {
        check(CASE, masked(true, None, Some(size)));
    }
    check(CASE, masked(true, Some(5), Some(13)));
    check(Case { length: 29, block: 3, kv_heads: 1, batch: 1, ..CASE }, masked(true, Some(7), None));
    check(Case { length: 48, block: 16, kv_heads: 3, group: 1, ..CASE }, masked(true, None, Some(24)));
    check(Case { length: 1, block: 1, batch: 1, ..CASE }, masked(true, Some(1), Some(1)));
}

#[test]
fn blockwise_equals_dense_with_blocks_of_documents() {
    let blocks = |size| AttentionOptions { mask: MaskSpec::blocks(size), ..OPTIONS };
    for size in [1, 3, 8, 11, 100] {
        check(CASE, DType::F32, blocks(size), Sinks::Without, 1e-6);
    }
    let capped = AttentionOptions { soft_cap: Some(0.7), ..blocks(5) };
    check(Case { length: 29, block: 3, kv_heads: 1, ..CASE }, DType::F32, capped, Sinks::With, 1e-6);
    check(Case { length: 1, block: 1, batch: 1, ..CASE }, DType::F32, capped, Sinks::With, 1e-6);
}

/// Masks with blocks compared with loops over the positions of documents.
#[test]
fn a_query_sees_its_block_and_the_earlier_ones_of_its_document() {
    let documents: [&[usize]; 3] = [&[37], &[1, 8, 20], &[5, 5, 13]];
    let place = |documents: &[usize], place: usize| {
        let (mut segment, mut rest) = (0, place);
        while segment < documents.len() && rest >= documents[segment] {
            rest -= documents[segment];
            segment += 1;
        }
        // Padding follows the last document.
        if segment < documents.len() { (segment as i32 + 1, rest) } else { (0, place) }
    };
    for (length, size) in [(37, 1), (37, 4), (37, 5), (37, 37), (37, 50), (29, 8), (1, 2)] {
        let of = |row: usize, index| place(documents[row], index);
        let all = || (0..3).flat_map(|row| (0..length).map(move |index| (row, index)));
        let each = |of_place: &dyn Fn((i32, usize)) -> i32| {
            let values: Vec<i32> = all().map(|(row, index)| of_place(of(row, index))).collect();
            let axes = vec![axis(BATCH, 3), axis(POSITION, length)];
            (axes, integers(&[3, length], &values))
        };
        let arguments = [
            each(&|(segment, _)| segment),
            each(&|(segment, position)| if segment == 0 { 0 } else { position as i32 }),
        ];
        let made = run("mask", &arguments, |_, t| {
            let segments = Segments::within(t[0], SequenceOrder::AsRead).with_positions(t[1]);
            vec![segments.mask(MaskSpec::blocks(size)).cast(DType::I32)]
        });
        let pairs = all().flat_map(|(row, query)| (0..length).map(move |key| (row, query, key)));
        let expected = pairs.map(|(row, query, key)| {
            let ((segment, own), (other, position)) = (of(row, query), of(row, key));
            f64::from(segment == other && position / size <= own / size)
        });
        assert!(made[0].to_f64().into_iter().eq(expected), "length {length}, blocks of {size}");
    }
}

#[test]
fn blockwise_equals_dense_in_both_directions() {
    let check = |options| check(CASE, DType::F32, options, Sinks::Without, 1e-6);
    check(masked(false, None, None));
    check(masked(false, Some(5), None));
    check(masked(false, None, Some(13)));
}

#[test]
fn blockwise_equals_dense_with_soft_caps_and_sinks() {
    let check = |case, options, sinks| check(case, DType::F32, options, sinks, 1e-6);
    let capped = |options| AttentionOptions { soft_cap: Some(0.7), ..options };
    check(CASE, capped(OPTIONS), Sinks::Without);
    check(CASE, OPTIONS, Sinks::With);
    check(CASE, capped(masked(true, Some(11), None)), Sinks::With);
    check(CASE, capped(masked(true, None, Some(13))), Sinks::With);
    check(Case { length: 48, block: 16, kv_heads: 3, group: 1, ..CASE }, capped(OPTIONS), Sinks::With);
    check(Case { length: 29, block: 3, kv_heads: 1, batch: 1, ..CASE }, capped(OPTIONS), Sinks::With);
    check(Case { length: 1, block: 1, batch: 1, ..CASE }, capped(OPTIONS), Sinks::With);
}

#[test]
fn blocks_outside_of_the_mask_are_not_visited() {
    // A NaN value shows in the sum, whatever its weight.
    let mut arguments = CASE.arguments();
    let (axes, values) = &mut arguments[2];
    let per_key = CASE.kv_heads * CASE.value_dim;
    let mut poisoned: Vec<f32> = values.to_f64().iter().map(|value| *value as f32).collect();
    for row in 0..CASE.batch {
        let start = row * CASE.length * per_key;
        poisoned[start..start + CASE.block * per_key].fill(f32::NAN);
    }
    let dims: Vec<usize> = axes.iter().map(|axis| axis.size).collect();
    *values = HostArray::from_slice(DType::F32, &dims, &poisoned).unwrap();
    let clean = |options: AttentionOptions| {
        let results = run("visited", &arguments, |_, t| {
            let context = context(&t, DType::F32, &options, Sinks::Without, CASE.block);
            vec![context.is_finite().all(&[BATCH, KV_HEADS, GROUP, VALUE_DIM]).cast(DType::I32)]
        });
        results[0].to_f64().iter().map(|value| *value == 1.0).collect::<Vec<bool>>()
    };
    // In blocks of 8, queries from place 16 see keys from place 8, unless the window reaches further back.
    let from = |start: usize| (0..CASE.length).map(|place| place >= start).collect::<Vec<bool>>();
    assert_eq!(clean(OPTIONS), from(CASE.length));
    assert_eq!(clean(masked(true, Some(9), None)), from(16));
    assert_eq!(clean(masked(true, Some(10), None)), from(24));
    assert_eq!(clean(masked(true, None, Some(8))), from(8));
    assert_eq!(clean(masked(true, None, Some(24))), from(24));
}

#[derive(Tree)]
struct Operands<L>(Vec<L>);

#[test]
fn blockwise_holds_nothing_of_the_size_of_the_scores() {
    let case = Case { length: 88, ..CASE };
    let options = AttentionOptions { soft_cap: Some(0.7), ..masked(true, Some(11), None) };
    let most_positions = |block: usize| {
        let text = text(&case.arguments(), |region, t| {
            let (_, [], gradients) = region.value_and_grad(&Operands(t[..4].to_vec()), |_, operands| {
                let operands = [operands.0.as_slice(), &[t[4]]].concat();
                (context(&operands, DType::F32, &options, Sinks::With, block).square().sum_all(), [])
            });
            gradients.0
        });
        let types = text.split("tensor<").skip(1).map(|rest| rest.split('>').next().unwrap());
        types.map(|ty| ty.split('x').filter(|dimension| *dimension == "88").count()).max()
    };
    assert_eq!(most_positions(0), Some(2));
    assert_eq!(most_positions(8), Some(1));
}

#[test]
fn blockwise_equals_dense_in_bf16() {
    for (options, sinks) in [
        (OPTIONS, Sinks::Without),
        (AttentionOptions { soft_cap: Some(2.0), ..masked(true, Some(11), None) }, Sinks::With),
    ] {
        check(CASE, DType::BF16, options, sinks, 1.2e-2);
        // Both are as close to the exact result as `bf16` allows.
        let exact = CASE.run(DType::F32, &options, sinks, true);
        for is_dense in [true, false] {
            let narrow = CASE.run(DType::BF16, &options, sinks, is_dense);
            for ((result, narrow), exact) in RESULTS.iter().zip(&narrow).zip(&exact) {
                assert_close(result, narrow, exact, 1.2e-2);
            }
        }
    }
}

#[test]
fn scores_in_f32_are_nearer() {
    // Large queries give logits whose last bits matter.
    let mut arguments = CASE.arguments();
    let dims = arguments[0].1.dims().to_vec();
    let large: Vec<f32> = arguments[0].1.to_f64().iter().map(|value| (*value * 6.0) as f32).collect();
    arguments[0].1 = HostArray::from_slice(DType::F32, &dims, &large).unwrap();
    let cotangent = numbers(4, &[CASE.batch * CASE.kv_heads * CASE.length * CASE.group * CASE.value_dim]);
    let run = |dtype: DType, options: AttentionOptions| {
        // Inputs are rounded once, so that runs differ only in the computation of logits.
        gradients("scores", &arguments, &cotangent, |t| {
            let [query, key, value] =
                [t[0], t[1], t[2]].map(|tensor| tensor.cast(DType::BF16).cast(DType::F32));
            context(&[query, key, value, t[3], t[4]], dtype, &options, Sinks::Without, 0)
        })
        .0
    };
    let exact = run(DType::F32, OPTIONS);
    let error = |options| relative_error(&run(DType::BF16, options), &exact);
    let narrow = AttentionOptions { float32_scores: false, ..OPTIONS };
    let (with_narrow_scores, with_wide_scores) = (error(narrow), error(OPTIONS));
    assert!(with_wide_scores * 2.0 < with_narrow_scores, "{with_wide_scores:e} {with_narrow_scores:e}");
    // With a product in `f32`, logits are in `f32`, whatever the option for logits.
    let with_wide_product = error(AttentionOptions { float32_product: true, ..narrow });
    assert!(with_wide_product * 2.0 < with_narrow_scores, "{with_wide_product:e} {with_narrow_scores:e}");
}

#[test]
fn options_choose_the_types_of_products_and_softmax() {
    let lines = |options: AttentionOptions, block: usize| {
        text(&CASE.arguments(), |_, t| vec![context(&t, DType::BF16, &options, Sinks::Without, block)])
            .lines()
            .filter(|line| line.contains("stablehlo.exponential") || line.contains("stablehlo.dot_general"))
            .map(str::to_owned)
            .collect::<Vec<String>>()
    };
    #[track_caller]
    fn check(lines: &[String], operation: &str, nth: usize, operand: &str) {
        let line = lines.iter().filter(|line| line.contains(operation)).nth(nth).unwrap();
        let types = line.rsplit(" : ").next().unwrap();
        assert!(types.split("->").next().unwrap().contains(&format!("x{operand}>")), "{line}");
    }
    let wide_product = AttentionOptions { float32_product: true, ..OPTIONS };
    let narrow_scores = AttentionOptions { float32_scores: false, ..OPTIONS };
    for block in [0, 8] {
        check(&lines(OPTIONS, block), "dot_general", 0, "bf16");
        check(&lines(OPTIONS, block), "exponential", 0, "f32");
        check(&lines(wide_product, block), "dot_general", 0, "f32");
        check(&lines(wide_product, block), "dot_general", 1, "bf16");
    }
    check(&lines(narrow_scores, 0), "exponential", 0, "bf16");
    // Running sums over blocks are always in `f32`.
    check(&lines(narrow_scores, 8), "exponential", 0, "f32");
}
