//! Invariant attention compared with the other kernel, and with itself under other divisions of the work.

use half::bf16;

use mt_testing::Random;

use super::{
    Attend, Cache, Inputs, InvariantInputs, InvariantKeys, InvariantResults, Mask, Operand, Options, Outcome,
    Results, Shape, Strides, attend_invariantly,
};
use crate::{Alone, Element, Instructions, ScopedThreads, Team};

const CAUSAL: Mask = Mask { causal: true, window: None, chunk: None };

/// The arrays of one row: queries `[length, kv_heads, group, head_dim]`, keys and values.
struct Arrays<E> {
    shape: Shape,
    value_dim: usize,
    query: Vec<E>,
    key: Vec<E>,
    value: Vec<E>,
    sinks: Vec<f32>,
}

impl<E: Element> Arrays<E> {
    fn new(shape: Shape, value_dim: usize, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let mut numbers = |count: usize| -> Vec<E> {
            (0..count).map(|_| E::from_f32(random.between(-2.0, 2.0) as f32)).collect()
        };
        let Shape { length, kv_heads, group, head_dim, .. } = shape;
        let (query, key, value) = (
            numbers(length * kv_heads * group * head_dim),
            numbers(length * kv_heads * head_dim),
            numbers(length * kv_heads * value_dim),
        );
        let sinks = (0..kv_heads * group).map(|head| head as f32 * 0.3 - 0.5).collect();
        Self { shape, value_dim, query, key, value, sinks }
    }

    fn options(&self, mask: Mask, instructions: Instructions) -> Options {
        Options { shape: self.shape, mask, soft_cap: Some(3.0), instructions }
    }

    fn own(shape: Shape, value_dim: usize) -> [Shape; 2] {
        [shape, Shape { head_dim: value_dim, ..shape }]
    }

    /// The context of all positions, `[kv_heads, length, group, value_dim]`, the logarithms of sums and largest scores.
    fn whole(&self, team: &dyn Team, options: &Options, segments: &[i32]) -> (Vec<E>, Vec<f32>, Vec<f32>) {
        let [keys, values] = Self::own(self.shape, self.value_dim);
        let rows = keys.length * keys.kv_heads * keys.group;
        let mut context = vec![E::from_f32(0.0); rows * self.value_dim];
        let (mut log_sums, mut largest) = (vec![0.0; rows], vec![0.0; rows]);
        let numbers = Strides::heads_first(Shape { head_dim: 1, ..keys });
        let of_keys = |shape: Shape| Strides::positions_first(Shape { group: 1, ..shape });
        let inputs = InvariantInputs {
            query: Operand::queries(&self.query, Strides::positions_first(keys), keys),
            key: Operand::keys(&self.key, of_keys(keys), keys),
            value: Operand::keys(&self.value, of_keys(values), values),
            keys: InvariantKeys::Own { segments },
            sinks: &self.sinks,
            value_dim: self.value_dim,
        };
        let results = InvariantResults {
            context: Outcome::queries(&mut context, Strides::heads_first(values), values),
            log_sums: Some(Outcome::rows(&mut log_sums, numbers, keys)),
            largest_scores: Some(Outcome::rows(&mut largest, numbers, keys)),
        };
        attend_invariantly(team, options, &inputs, &results);
        (context, log_sums, largest)
    }

    /// The context of positions from `first` on, whose earlier keys lie in pages in another order.
    fn piece(
        &self,
        team: &dyn Team,
        options: &Options,
        first: usize,
        count: usize,
        page_size: usize,
    ) -> Vec<E> {
        let Shape { kv_heads, group, head_dim, .. } = self.shape;
        let num_pages = first.div_ceil(page_size).max(1) + 3;
        let table: Vec<i32> = (0..num_pages as i32 - 3).map(|page| num_pages as i32 - 1 - page).collect();
        let zero = E::from_f32(7.0);
        let mut pools = [self.shape.head_dim, self.value_dim]
            .map(|width| vec![zero; num_pages * page_size * kv_heads * width]);
        for position in 0..first {
            let slot = table[position / page_size] as usize * page_size + position % page_size;
            for (pool, (from, width)) in
                pools.iter_mut().zip([(&self.key, head_dim), (&self.value, self.value_dim)])
            {
                let width = kv_heads * width;
                pool[slot * width..][..width].copy_from_slice(&from[position * width..][..width]);
            }
        }
        let shape = Shape { length: count, ..self.shape };
        let [keys, values] = Self::own(shape, self.value_dim);
        let paged = |shape: Shape| Shape { batch: num_pages, length: page_size, group: 1, ..shape };
        let of_keys = |shape: Shape| Strides::positions_first(Shape { group: 1, ..shape });
        let before = [first as i32];
        let [key_pool, value_pool] = &pools;
        let from = |array: &'_ [E], width: usize| array[first * kv_heads * width..].to_vec();
        let (own_key, own_value) = (from(&self.key, head_dim), from(&self.value, self.value_dim));
        let inputs = InvariantInputs {
            query: Operand::queries(
                &self.query[first * kv_heads * group * head_dim..],
                Strides::positions_first(keys),
                keys,
            ),
            key: Operand::keys(&own_key, of_keys(keys), keys),
            value: Operand::keys(&own_value, of_keys(values), values),
            keys: InvariantKeys::Cached {
                key: Operand::keys(key_pool, of_keys(paged(keys)), paged(keys)),
                value: Operand::keys(value_pool, of_keys(paged(values)), paged(values)),
                cache: Cache::Pages { page_size, before: &before, table: &table },
            },
            sinks: &self.sinks,
            value_dim: self.value_dim,
        };
        let mut context = vec![zero; count * kv_heads * group * self.value_dim];
        let results = InvariantResults {
            context: Outcome::queries(&mut context, Strides::heads_first(values), values),
            log_sums: None,
            largest_scores: None,
        };
        attend_invariantly(team, &Options { shape, ..*options }, &inputs, &results);
        context
    }
}

fn bits<E: Element>(numbers: &[E]) -> Vec<u32> {
    numbers.iter().map(|number| number.to_f32().to_bits()).collect()
}

/// Checks that pieces of a text have the bits of the whole text.
fn check_pieces<E: Element>(shape: Shape, value_dim: usize, mask: Mask, seed: u64) {
    let arrays = Arrays::<E>::new(shape, value_dim, seed);
    let Shape { length, kv_heads, group, .. } = shape;
    let mut random = Random::new(seed + 1);
    for instructions in Instructions::available() {
        let options = arrays.options(mask, instructions);
        let (whole, ..) = arrays.whole(&Alone, &options, &vec![1; length]);
        for page_size in [4, 16, 96] {
            let first = random.below(length);
            let count = 1 + random.below(length - first);
            let piece = arrays.piece(&ScopedThreads(3), &options, first, count, page_size);
            for head in 0..kv_heads {
                let width = group * value_dim;
                let expected = &whole[(head * length + first) * width..][..count * width];
                let made = &piece[head * count * width..][..count * width];
                let place = format!("{instructions:?}, {mask:?}, head {head}, {first} and {count}");
                assert!(bits(made) == bits(expected), "{place}");
            }
        }
    }
}

#[test]
fn pieces_and_pages_change_no_bit() {
    let shape = |length, kv_heads, group, head_dim| Shape { batch: 1, length, kv_heads, group, head_dim };
    let masks = [
        CAUSAL,
        Mask { window: Some(1), ..CAUSAL },
        Mask { window: Some(70), ..CAUSAL },
        Mask { chunk: Some(48), ..CAUSAL },
    ];
    for (seed, mask) in (0..).zip(masks) {
        for (shape, value_dim) in
            [(shape(300, 2, 3, 16), 16), (shape(129, 1, 1, 24), 40), (shape(70, 3, 5, 7), 5)]
        {
            check_pieces::<f32>(shape, value_dim, mask, seed);
            check_pieces::<bf16>(shape, value_dim, mask, seed);
        }
    }
}

#[test]
fn neighbors_and_places_in_packed_rows_change_no_bit() {
    let shape = Shape { batch: 1, length: 100, kv_heads: 1, group: 2, head_dim: 16 };
    let arrays = Arrays::<f32>::new(shape, 16, 5);
    let options = arrays.options(CAUSAL, Instructions::best());
    let (whole, ..) = arrays.whole(&Alone, &options, &[1; 100]);
    // The text behind another one, in a longer row.
    let longer = Shape { length: 137, ..shape };
    let mut packed = Arrays::<f32>::new(longer, 16, 6);
    packed.query[37 * 32..].copy_from_slice(&arrays.query);
    packed.key[37 * 16..].copy_from_slice(&arrays.key);
    packed.value[37 * 16..].copy_from_slice(&arrays.value);
    let segments = [vec![1; 37], vec![2; 100]].concat();
    let (both, ..) = packed.whole(&ScopedThreads(2), &Options { shape: longer, ..options }, &segments);
    assert!(bits(&both[37 * 32..]) == bits(&whole));
}

/// Checks the results against those of the kernel that is not invariant.
fn check_values<E: Attend>(mask: Mask, segments: &[i32], tolerance: f32) {
    let shape = Shape { batch: 1, length: segments.len(), kv_heads: 2, group: 2, head_dim: 24 };
    let arrays = Arrays::<E>::new(shape, 24, 11);
    let options = arrays.options(mask, Instructions::best());
    let made = arrays.whole(&ScopedThreads(2), &options, segments);
    let rows = shape.length * shape.kv_heads * shape.group;
    let mut context = vec![E::from_f32(0.0); rows * shape.head_dim];
    let (mut log_sums, mut largest) = (vec![0.0; rows], vec![0.0; rows]);
    let numbers = Strides::heads_first(Shape { head_dim: 1, ..shape });
    let of_keys = Strides::positions_first(Shape { group: 1, ..shape });
    let inputs = Inputs {
        query: Operand::queries(&arrays.query, Strides::positions_first(shape), shape),
        key: Operand::keys(&arrays.key, of_keys, shape),
        value: Operand::keys(&arrays.value, of_keys, shape),
        segments,
        sinks: Some(&arrays.sinks),
    };
    let results = Results {
        context: Outcome::queries(&mut context, Strides::heads_first(shape), shape),
        log_sums: Outcome::rows(&mut log_sums, numbers, shape),
        largest_scores: Some(Outcome::rows(&mut largest, numbers, shape)),
    };
    E::forward(&Alone, &options, &inputs, &results);
    for (made, expected) in made.0.iter().zip(&context) {
        assert!((made.to_f32() - expected.to_f32()).abs() < tolerance, "{mask:?}");
    }
    for (made, expected) in [(&made.1, &log_sums), (&made.2, &largest)] {
        let are_close = made.iter().zip(expected).all(|(made, expected)| (made - expected).abs() < tolerance);
        assert!(are_close, "{mask:?}: {made:?}, not {expected:?}");
    }
}

#[test]
fn results_are_those_of_the_other_kernel() {
    let packed = [vec![1; 70], vec![2; 45], vec![0; 15]].concat();
    for mask in [
        CAUSAL,
        Mask::default(),
        Mask { window: Some(20), ..CAUSAL },
        Mask { window: Some(90), ..Mask::default() },
        Mask { chunk: Some(48), ..CAUSAL },
        Mask { chunk: Some(48), ..Mask::default() },
    ] {
        check_values::<f32>(mask, &[1; 130], 2e-5);
        check_values::<f32>(mask, &packed, 2e-5);
        check_values::<bf16>(mask, &packed, 3e-2);
    }
}
