//! Attention compared with plain loops in `f64`.

use half::bf16;

use mt_testing::Random;

use super::*;
use crate::{Alone, ScopedThreads};

#[derive(Clone, Copy, Debug)]
struct Case {
    shape: Shape,
    mask: Mask,
    soft_cap: Option<f32>,
    has_sinks: bool,
    /// Lengths of each row's segments, followed by padding. If empty, a row is one segment.
    segments: &'static [usize],
    threads: usize,
}

const CAUSAL: Mask = Mask { causal: true, window: None, chunk: None };

const PLAIN: Case = Case {
    shape: Shape { batch: 1, length: 129, kv_heads: 2, group: 1, head_dim: 16 },
    mask: CAUSAL,
    soft_cap: None,
    has_sinks: false,
    segments: &[],
    threads: 1,
};

fn cases() -> Vec<Case> {
    let shape = |batch, length, kv_heads, group, head_dim| Shape { batch, length, kv_heads, group, head_dim };
    let mut cases = vec![PLAIN];
    for shape in [
        shape(1, 1, 1, 1, 1),
        shape(2, 7, 1, 3, 5),
        shape(1, 129, 1, 2, 64),
        shape(2, 200, 2, 4, 80),
        shape(1, 65, 3, 1, 17),
        shape(1, 150, 1, 7, 33),
        shape(3, 64, 1, 1, 128),
        shape(1, 100, 1, 1, 256),
    ] {
        cases.push(Case { shape, ..PLAIN });
    }
    for mask in [
        Mask::default(),
        Mask { window: Some(1), ..CAUSAL },
        Mask { window: Some(50), ..CAUSAL },
        Mask { window: Some(90), ..Mask::default() },
        Mask { chunk: Some(48), ..CAUSAL },
        Mask { chunk: Some(100), ..Mask::default() },
        Mask { chunk: Some(64), window: Some(70), ..CAUSAL },
    ] {
        cases.push(Case { mask, shape: shape(1, 300, 1, 2, 16), ..PLAIN });
        cases.push(Case { mask, shape: shape(2, 150, 1, 1, 8), segments: &[40, 65, 30], ..PLAIN });
    }
    for threads in [1, 3] {
        cases.push(Case { has_sinks: true, threads, shape: shape(2, 130, 2, 3, 16), ..PLAIN });
        cases.push(Case { soft_cap: Some(1.5), threads, segments: &[5, 90], ..PLAIN });
        cases.push(Case {
            shape: shape(1, 517, 1, 2, 24),
            mask: Mask { window: Some(130), ..CAUSAL },
            soft_cap: Some(2.0),
            has_sinks: true,
            segments: &[300, 1, 150],
            threads,
        });
    }
    cases
}

/// Operands and results in the layout `[batch, position, kv_heads, group, head_dim]`.
struct Exact {
    context: Vec<f64>,
    log_sums: Vec<f64>,
    largest_scores: Vec<f64>,
    query_gradient: Vec<f64>,
    key_gradient: Vec<f64>,
    value_gradient: Vec<f64>,
    sinks_gradient: Vec<f64>,
}

struct Values<E> {
    query: Vec<E>,
    key: Vec<E>,
    value: Vec<E>,
    cotangent: Vec<E>,
    sinks: Vec<f32>,
    segments: Vec<i32>,
}

impl<E: Element> Values<E> {
    fn new(case: &Case) -> Self {
        let Shape { batch, length, kv_heads, group, head_dim } = case.shape;
        let mut random = Random::new(1);
        let mut values = |count: usize, scale: f32| -> Vec<E> {
            (0..count).map(|_| E::from_f32(random.between(-1.0, 1.0) as f32 * scale)).collect()
        };
        let keys = batch * length * kv_heads * head_dim;
        let scale = 4.0 / (head_dim as f32).sqrt();
        let query = values(keys * group, scale);
        let (key, value, cotangent) = (values(keys, 1.0), values(keys, 1.0), values(keys * group, 1.0));
        let sinks = values(kv_heads * group, 2.0).into_iter().map(Element::to_f32).collect();
        let mut segments = Vec::new();
        for _ in 0..batch {
            let ends = case.segments.iter().enumerate();
            let mut row: Vec<i32> =
                ends.flat_map(|(index, length)| vec![index as i32 + 1; *length]).take(length).collect();
            let filler = if case.segments.is_empty() { 1 } else { 0 };
            row.resize(length, filler);
            segments.extend(row);
        }
        Self { query, key, value, cotangent, sinks, segments }
    }

    fn exact(&self, case: &Case) -> Exact {
        let Shape { batch, length, kv_heads, group, head_dim } = case.shape;
        let rows = batch * length * kv_heads * group;
        let mut exact = Exact {
            context: vec![0.0; rows * head_dim],
            log_sums: vec![0.0; rows],
            largest_scores: vec![0.0; rows],
            query_gradient: vec![0.0; rows * head_dim],
            key_gradient: vec![0.0; rows / group * head_dim],
            value_gradient: vec![0.0; rows / group * head_dim],
            sinks_gradient: vec![0.0; kv_heads * group],
        };
        let at = |data: &[E], index: usize| f64::from(data[index].to_f32());
        let dots = |left: &[E], left_row: usize, right: &[E], right_row: usize| -> f64 {
            (0..head_dim)
                .map(|d| at(left, left_row * head_dim + d) * at(right, right_row * head_dim + d))
                .sum()
        };
        for row in 0..rows {
            let (head, position) = (row % (kv_heads * group), row / (kv_heads * group) % length);
            let (kv_head, batch) = (head / group, row / (kv_heads * group * length));
            let segments = &self.segments[batch * length..][..length];
            let keys: Vec<usize> = (0..length)
                .filter(|key| segments[*key] == segments[position])
                .filter(|key| !case.mask.causal || *key <= position)
                .filter(|key| case.mask.window.is_none_or(|window| key + window > position))
                .filter(|key| case.mask.chunk.is_none_or(|chunk| key / chunk == position / chunk))
                .collect();
            let key_row = |key: usize| (batch * length + key) * kv_heads + kv_head;
            let raw: Vec<f64> =
                keys.iter().map(|key| dots(&self.query, row, &self.key, key_row(*key))).collect();
            let cap = case.soft_cap.map(f64::from);
            let scores: Vec<f64> =
                raw.iter().map(|score| cap.map_or(*score, |cap| cap * (score / cap).tanh())).collect();
            let sink = case.has_sinks.then(|| f64::from(self.sinks[head]));
            let sum: f64 = scores.iter().copied().chain(sink).map(f64::exp).sum();
            exact.log_sums[row] = sum.ln();
            exact.largest_scores[row] = raw.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|score| score.exp() / sum).collect();
            let from_values: Vec<f64> =
                keys.iter().map(|key| dots(&self.cotangent, row, &self.value, key_row(*key))).collect();
            let mean: f64 = weights.iter().zip(&from_values).map(|(weight, value)| weight * value).sum();
            if let Some(sink) = sink {
                exact.sinks_gradient[head] -= sink.exp() / sum * mean;
            }
            for (index, key) in keys.iter().enumerate() {
                let slope = cap.map_or(1.0, |cap| 1.0 - (scores[index] / cap).powi(2));
                let gradient = weights[index] * (from_values[index] - mean) * slope;
                for d in 0..head_dim {
                    let (own, other) = (row * head_dim + d, key_row(*key) * head_dim + d);
                    exact.context[own] += weights[index] * at(&self.value, other);
                    exact.query_gradient[own] += gradient * at(&self.key, other);
                    exact.key_gradient[other] += gradient * at(&self.query, own);
                    exact.value_gradient[other] += weights[index] * at(&self.cotangent, own);
                }
            }
        }
        exact
    }
}

fn assert_close(what: &str, found: impl Iterator<Item = f32>, wanted: &[f64], tolerance: f64) {
    // Operands are of size 1, and so are the numbers that cancel in small results.
    let size = wanted.iter().map(|value| value.abs()).fold(0.1, f64::max);
    let found: Vec<f32> = found.collect();
    assert_eq!(found.len(), wanted.len());
    for (index, (found, wanted)) in found.into_iter().zip(wanted).enumerate() {
        let distance = (f64::from(found) - wanted).abs();
        assert!(distance <= tolerance * size, "{what}[{index}]: {found}, not {wanted}");
    }
}

/// A copy with the given strides, and NaN between the rows.
fn spread<E: Element>(values: &[E], shape: Shape, strides: Strides) -> Vec<E> {
    let natural = Strides::positions_first(shape);
    let mut spread = vec![E::from_f32(f32::NAN); values.len() * 2 + 100];
    for_each_row(shape, |row| {
        let from = &values[row_start(natural, row)..][..shape.head_dim];
        spread[row_start(strides, row)..][..shape.head_dim].copy_from_slice(from);
    });
    spread
}

fn gathered<E: Element>(spread: &[E], shape: Shape, strides: Strides) -> impl Iterator<Item = f32> {
    let natural = Strides::positions_first(shape);
    let mut values = vec![0.0; shape.batch * shape.length * shape.kv_heads * shape.group * shape.head_dim];
    for_each_row(shape, |row| {
        let to = &mut values[row_start(natural, row)..][..shape.head_dim];
        let from = &spread[row_start(strides, row)..];
        to.iter_mut().zip(from).for_each(|(to, from)| *to = from.to_f32());
    });
    values.into_iter()
}

fn row_start(strides: Strides, [batch, position, kv_head, group]: [usize; 4]) -> usize {
    batch * strides.batch + position * strides.position + kv_head * strides.kv_head + group * strides.group
}

fn for_each_row(shape: Shape, mut row: impl FnMut([usize; 4])) {
    for batch in 0..shape.batch {
        for position in 0..shape.length {
            for kv_head in 0..shape.kv_heads {
                for group in 0..shape.group {
                    row([batch, position, kv_head, group]);
                }
            }
        }
    }
}

fn check<E: Attend>(case: &Case, instructions: Instructions, tolerance: f64) {
    let values = Values::<E>::new(case);
    let exact = values.exact(case);
    let shape = case.shape;
    let options = Options { shape, mask: case.mask, soft_cap: case.soft_cap, instructions };
    let (keys, rows) = (Shape { group: 1, ..shape }, Shape { head_dim: 1, ..shape });
    // Queries are stored heads first, with gaps between rows if memory suffices; keys are stored positions first.
    let mut apart = Strides::heads_first(shape);
    apart.group += 3;
    apart.position = apart.group * shape.group;
    apart.kv_head = apart.position * shape.length;
    apart.batch = apart.kv_head * shape.kv_heads;
    let apart =
        if apart.batch * shape.batch <= 2 * values.query.len() { apart } else { Strides::heads_first(shape) };
    let mut key_strides = Strides::positions_first(keys);
    key_strides.group = 0;
    let query = spread(&values.query, shape, apart);
    let inputs = Inputs {
        query: Operand::queries(&query, apart, shape),
        key: Operand::keys(&values.key, key_strides, shape),
        value: Operand::keys(&values.value, key_strides, shape),
        segments: &values.segments,
        sinks: case.has_sinks.then_some(&values.sinks),
    };
    let team: &dyn Team = if case.threads == 1 { &Alone } else { &ScopedThreads(case.threads) };
    let mut context = vec![E::from_f32(f32::NAN); query.len()];
    let row_strides = Strides::heads_first(rows);
    let mut log_sums = vec![f32::NAN; values.query.len() / shape.head_dim];
    let mut largest_scores = log_sums.clone();
    E::forward(
        team,
        &options,
        &inputs,
        &Results {
            context: Outcome::queries(&mut context, apart, shape),
            log_sums: Outcome::rows(&mut log_sums, row_strides, shape),
            largest_scores: Some(Outcome::rows(&mut largest_scores, row_strides, shape)),
        },
    );
    let what = |name: &str| format!("{case:?}, {instructions:?}: {name}");
    let close = |name: &str, found: &[E], shape, strides, wanted: &[f64]| {
        assert_close(&what(name), gathered(found, shape, strides), wanted, tolerance);
    };
    close("context", &context, shape, apart, &exact.context);
    assert_close(&what("log_sums"), gathered(&log_sums, rows, row_strides), &exact.log_sums, 1e-5);
    let largest = gathered(&largest_scores, rows, row_strides);
    assert_close(&what("largest_scores"), largest, &exact.largest_scores, 1e-5);

    let cotangent = spread(&values.cotangent, shape, apart);
    let mut query_gradient = vec![E::from_f32(f32::NAN); query.len()];
    let [mut key_gradient, mut value_gradient] =
        [0, 1].map(|_| vec![E::from_f32(f32::NAN); values.key.len()]);
    let mut sinks_gradient = vec![f32::NAN; values.sinks.len()];
    E::backward(
        team,
        &options,
        &inputs,
        &Residuals {
            context: Operand::queries(&context, apart, shape),
            log_sums: Operand::rows(&log_sums, row_strides, shape),
            cotangent: Operand::queries(&cotangent, apart, shape),
        },
        Gradients {
            query: Outcome::queries(&mut query_gradient, apart, shape),
            key: Outcome::keys(&mut key_gradient, key_strides, shape),
            value: Outcome::keys(&mut value_gradient, key_strides, shape),
            sinks: case.has_sinks.then_some(&mut sinks_gradient),
        },
    );
    close("query gradient", &query_gradient, shape, apart, &exact.query_gradient);
    close("key gradient", &key_gradient, keys, key_strides, &exact.key_gradient);
    close("value gradient", &value_gradient, keys, key_strides, &exact.value_gradient);
    if case.has_sinks {
        let found = sinks_gradient.into_iter();
        assert_close(&what("sinks gradient"), found, &exact.sinks_gradient, tolerance);
    }
}

#[test]
fn single_precision_agrees_with_loops() {
    for instructions in Instructions::available() {
        cases().iter().for_each(|case| check::<f32>(case, instructions, 1e-5));
    }
}

#[test]
fn half_precision_agrees_with_loops() {
    for instructions in Instructions::available() {
        cases().iter().for_each(|case| check::<bf16>(case, instructions, 1e-2));
    }
}

#[test]
fn gradients_are_those_of_finite_differences() {
    let case = Case {
        shape: Shape { batch: 1, length: 9, kv_heads: 1, group: 2, head_dim: 3 },
        soft_cap: Some(2.0),
        has_sinks: true,
        segments: &[4, 5],
        ..PLAIN
    };
    let values = Values::<f32>::new(&case);
    let loss = |values: &Values<f32>| -> f64 {
        let context = values.exact(&case).context;
        context.iter().zip(&values.cotangent).map(|(made, factor)| made * f64::from(*factor)).sum()
    };
    let exact = values.exact(&case);
    let gradients: [(fn(&mut Values<f32>) -> &mut Vec<f32>, _); 4] = [
        (|values| &mut values.query, exact.query_gradient),
        (|values| &mut values.key, exact.key_gradient),
        (|values| &mut values.value, exact.value_gradient),
        (|values| &mut values.sinks, exact.sinks_gradient),
    ];
    for (which, gradient) in gradients {
        for (index, gradient) in gradient.into_iter().enumerate() {
            let mut moved = Values::<f32>::new(&case);
            let value = which(&mut moved)[index];
            let [above, below] = [value + 1.0 / 1024.0, value - 1.0 / 1024.0];
            let mut loss_at = |value: f32| {
                which(&mut moved)[index] = value;
                loss(&moved)
            };
            let slope = (loss_at(above) - loss_at(below)) / f64::from(above - below);
            assert!((slope - gradient).abs() < 1e-5, "{slope}, not {gradient}");
        }
    }
}

#[test]
fn what_is_no_number_is_not_hidden() {
    for instructions in Instructions::available() {
        let mut values = Values::<f32>::new(&PLAIN);
        values.key[0] = f32::NAN;
        let shape = PLAIN.shape;
        let strides = Strides::positions_first(shape);
        let options = Options { shape, mask: CAUSAL, soft_cap: None, instructions };
        let inputs = Inputs {
            query: Operand::queries(&values.query, strides, shape),
            key: Operand::keys(&values.key, strides, shape),
            value: Operand::keys(&values.value, strides, shape),
            segments: &values.segments,
            sinks: None,
        };
        let mut context = vec![0.0; values.query.len()];
        let mut log_sums = vec![0.0; values.query.len() / shape.head_dim];
        let rows = Strides::positions_first(Shape { head_dim: 1, ..shape });
        let results = Results {
            context: Outcome::queries(&mut context, strides, shape),
            log_sums: Outcome::rows(&mut log_sums, rows, shape),
            largest_scores: None,
        };
        f32::forward(&Alone, &options, &inputs, &results);
        let is_of_first_head = |index: usize| (index / shape.head_dim).is_multiple_of(shape.kv_heads);
        for (index, value) in context.iter().enumerate() {
            assert_eq!(value.is_nan(), is_of_first_head(index), "{instructions:?}: {index}");
        }
    }
}

/// A step of decoding.
#[derive(Clone, Copy, Debug)]
struct CachedCase {
    shape: Shape,
    slots: usize,
    slot: usize,
    mask: Mask,
    soft_cap: Option<f32>,
    has_sinks: bool,
    /// Empty slots before the token's own: none in the first row, this many in the second, twice as many in the third.
    empty: usize,
}

const CACHED: CachedCase = CachedCase {
    shape: Shape { batch: 1, length: 1, kv_heads: 2, group: 1, head_dim: 16 },
    slots: 40,
    slot: 30,
    mask: CAUSAL,
    soft_cap: None,
    has_sinks: false,
    empty: 0,
};

fn cached_cases() -> Vec<CachedCase> {
    let shape = |batch, kv_heads, group, head_dim| Shape { batch, length: 1, kv_heads, group, head_dim };
    let mut cases = vec![CACHED, CachedCase { slot: 0, ..CACHED }, CachedCase { slot: 39, ..CACHED }];
    for shape in [shape(1, 1, 1, 1), shape(3, 2, 3, 5), shape(2, 1, 7, 80), shape(1, 8, 1, 64)] {
        for (slots, slot) in [(1, 0), (64, 31), (400, 333)] {
            cases.push(CachedCase { shape, slots, slot, ..CACHED });
        }
    }
    for (window, chunk) in
        [(Some(1), None), (Some(9), None), (None, Some(7)), (Some(20), Some(12)), (None, Some(500))]
    {
        let mask = Mask { window, chunk, ..CAUSAL };
        cases.push(CachedCase { mask, shape: shape(3, 2, 2, 24), empty: 11, ..CACHED });
        cases.push(CachedCase {
            mask,
            shape: shape(2, 1, 1, 8),
            slots: 300,
            slot: 290,
            empty: 100,
            ..CACHED
        });
    }
    cases.push(CachedCase { soft_cap: Some(1.5), slots: 200, slot: 150, ..CACHED });
    cases.push(CachedCase {
        has_sinks: true,
        shape: shape(2, 2, 3, 16),
        slots: 200,
        slot: 199,
        empty: 20,
        ..CACHED
    });
    cases
}

fn check_cached<E: Attend + Default>(tolerance: f64) {
    for case in cached_cases() {
        let Shape { batch, kv_heads, group, head_dim, .. } = case.shape;
        let of_cache = Shape { batch, length: case.slots, kv_heads, group, head_dim };
        let values = Values::<E>::new(&Case { shape: of_cache, ..PLAIN });
        let own = Values::<E>::new(&Case { shape: case.shape, ..PLAIN });
        let mut cached_segments = vec![0; batch * case.slots];
        for (row, segments) in cached_segments.chunks_exact_mut(case.slots).enumerate() {
            segments[..=case.slot].fill(1);
            let first = case.slot.saturating_sub(case.empty * row);
            segments[first..case.slot].fill(0);
        }
        let sinks = if case.has_sinks { own.sinks.clone() } else { vec![MASKED; kv_heads * group] };
        let expected = exact_cached(&case, &values, &own, &cached_segments, &sinks);
        let cache = Strides::positions_first(Shape { group: 1, ..of_cache });
        let keys = Strides::positions_first(Shape { group: 1, ..case.shape });
        let inputs = CachedInputs {
            query: Operand::queries(&own.query, Strides::positions_first(case.shape), case.shape),
            key: Operand::keys(&own.key, Strides { group: 0, ..keys }, case.shape),
            value: Operand::keys(&own.value, Strides { group: 0, ..keys }, case.shape),
            cached_key: Operand::keys(&values.key, Strides { group: 0, ..cache }, of_cache),
            cached_value: Operand::keys(&values.value, Strides { group: 0, ..cache }, of_cache),
            cache: Cache::Slots {
                slot: case.slot,
                segments: &vec![1; batch],
                cached_segments: &cached_segments,
            },
            sinks: &sinks,
        };
        check_context(&case, &inputs, &expected, tolerance);
        // The tokens before the row's own, without the empty slots, in pages.
        let before: Vec<i32> =
            (0..batch).map(|row| case.slot.saturating_sub(case.empty * row) as i32).collect();
        let width = kv_heads * head_dim;
        let [(keys, table), (cached_values, _)] =
            [&values.key, &values.value].map(|rows| in_pages(rows, batch, case.slots, width));
        let pages = Shape { batch: keys.len() / (PAGE_SIZE * width), length: PAGE_SIZE, ..of_cache };
        let strides = Strides { group: 0, ..Strides::positions_first(Shape { group: 1, ..pages }) };
        let inputs = CachedInputs {
            cached_key: Operand::keys(&keys, strides, pages),
            cached_value: Operand::keys(&cached_values, strides, pages),
            cache: Cache::Pages { page_size: PAGE_SIZE, before: &before, table: &table },
            ..inputs
        };
        check_context(&case, &inputs, &expected, tolerance);
    }
}

const PAGE_SIZE: usize = 4;

/// The slots of rows in pages whose order differs, and the table of these pages.
fn in_pages<E: Copy + Default>(rows: &[E], batch: usize, slots: usize, width: usize) -> (Vec<E>, Vec<i32>) {
    let of_row = slots.div_ceil(PAGE_SIZE);
    let num_pages = batch * of_row;
    let table: Vec<i32> = (0..num_pages).map(|page| (num_pages - page) as i32).collect();
    let mut pool = vec![E::default(); (num_pages + 1) * PAGE_SIZE * width];
    for (index, row) in rows.chunks_exact(width).enumerate() {
        let (batch, slot) = (index / slots, index % slots);
        let page = table[batch * of_row + slot / PAGE_SIZE] as usize;
        pool[(page * PAGE_SIZE + slot % PAGE_SIZE) * width..][..width].copy_from_slice(row);
    }
    (pool, table)
}

fn check_context<E: Attend + Default>(
    case: &CachedCase,
    inputs: &CachedInputs<'_, E>,
    expected: &[f64],
    tolerance: f64,
) {
    for instructions in Instructions::available() {
        let options = Options { shape: case.shape, mask: case.mask, soft_cap: case.soft_cap, instructions };
        for threads in [1, 3] {
            let team: &dyn Team = if threads == 1 { &Alone } else { &ScopedThreads(threads) };
            let mut context = vec![E::default(); expected.len()];
            let outcome = Outcome::queries(&mut context, Strides::heads_first(case.shape), case.shape);
            attend_to_cache(team, &options, inputs, &outcome);
            for (index, (given, wanted)) in context.iter().zip(expected).enumerate() {
                let given = f64::from(given.to_f32());
                assert!(
                    (given - wanted).abs() <= tolerance,
                    "{case:?}, {instructions:?}, {threads} threads, {index}: {given}, not {wanted}"
                );
            }
        }
    }
}

/// `[batch, kv_heads, group, head_dim]`
fn exact_cached<E: Element>(
    case: &CachedCase,
    cache: &Values<E>,
    own: &Values<E>,
    segments: &[i32],
    sinks: &[f32],
) -> Vec<f64> {
    let Shape { batch, kv_heads, group, head_dim, .. } = case.shape;
    let mut context = Vec::new();
    for (row, head) in (0..batch).flat_map(|row| (0..kv_heads * group).map(move |head| (row, head))) {
        let query = &own.query[(row * kv_heads * group + head) * head_dim..][..head_dim];
        let segments = &segments[row * case.slots..][..case.slots];
        let place = |slot: usize| segments[..slot].iter().filter(|segment| **segment != 0).count();
        let seen = (0..=case.slot).filter(|slot| {
            let (query, key) = (place(case.slot), place(*slot));
            segments[*slot] == 1
                && case.mask.window.is_none_or(|window| query - key < window)
                && case.mask.chunk.is_none_or(|chunk| query / chunk == key / chunk)
        });
        let of = |slot: usize| {
            let (from, index) = if slot == case.slot { (own, row) } else { (cache, row * case.slots + slot) };
            let start = (index * kv_heads + head / group) * head_dim;
            (&from.key[start..][..head_dim], &from.value[start..][..head_dim])
        };
        let score = |slot: usize| {
            let products = query.iter().zip(of(slot).0);
            let score: f64 = products.map(|(a, b)| f64::from(a.to_f32()) * f64::from(b.to_f32())).sum();
            case.soft_cap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh())
        };
        let weights: Vec<(usize, f64)> = seen.map(|slot| (slot, score(slot).exp())).collect();
        let sum = weights.iter().map(|(_, weight)| weight).sum::<f64>() + f64::from(sinks[head]).exp();
        context.extend((0..head_dim).map(|dim| {
            let weighted = weights.iter().map(|(slot, weight)| weight * f64::from(of(*slot).1[dim].to_f32()));
            weighted.sum::<f64>() / sum
        }));
    }
    context
}

#[test]
fn tokens_attend_to_caches() {
    check_cached::<f32>(2e-6);
    check_cached::<bf16>(8e-3);
}
