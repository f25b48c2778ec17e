//! Biases of attention logits that depend on the distance of key and query (Raffel et al., 2020: T5).

use mt_shape::{Axis, DType, HostArray, LogicalAxis, axis, logical};
use mt_trace::Tensor;

use super::Segments;
use crate::{
    SequenceOrder,
    axes::{BUCKET, KV_POSITION, POSITION, QUERY_HEADS},
};

/// The buckets of distances. Small distances have a bucket each, larger ones share buckets that grow exponentially.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RelativeBuckets {
    pub count: usize,
    /// The distance from which all pairs are in the last bucket.
    pub max_distance: usize,
    /// Whether later keys have buckets of their own, half of all. Otherwise they are in the bucket of distance 0.
    pub bidirectional: bool,
}

/// The boundaries of buckets.
const BOUNDARY: &str = "boundary";
/// The distances between keys and queries, of which negative ones follow the others.
const DISTANCE: &str = "distance";
/// The pairs of queries and distances, in one row.
const PAIR: &str = "pair";

/// Logical axes of the biases of whole sequences.
pub const BIASES: [Option<LogicalAxis>; 3] = [
    Some(logical::ACTIVATION_HEADS),
    Some(logical::ACTIVATION_LENGTH_ATTN),
    Some(logical::ACTIVATION_KV_LENGTH),
];

impl RelativeBuckets {
    /// The number of buckets for distances in one direction.
    fn of_direction(self) -> usize {
        if self.bidirectional { self.count / 2 } else { self.count }
    }

    /// The bucket of a distance in one direction. Computed in `f32`, as published models were, because rounding decides
    /// the bucket of distances at a boundary.
    fn of_distance(self, distance: usize) -> usize {
        let count = self.of_direction();
        let exact = count / 2;
        if distance < exact {
            return distance;
        }
        let range = (self.max_distance as f64 / exact as f64).ln() as f32;
        let share = (distance as f32 / exact as f32).ln() / range;
        (exact + (share * (count - exact) as f32) as usize).min(count - 1)
    }

    /// The smallest distance of each bucket but the first, in one direction.
    fn boundaries(self) -> Vec<i32> {
        let smallest =
            |bucket: usize| (0..=self.max_distance).find(|distance| self.of_distance(*distance) >= bucket);
        // Rounding never leaves the last bucket out, because the largest distance is in it.
        (1..self.of_direction()).map(|bucket| smallest(bucket).unwrap_or(self.max_distance) as i32).collect()
    }

    /// The bucket of each difference between the place of a key and that of a query.
    ///
    /// # Shapes
    /// `i32[…] -> i32[…]`
    #[track_caller]
    pub fn of_differences<'t>(self, differences: Tensor<'t>) -> Tensor<'t> {
        let region = differences.region();
        let boundaries = self.boundaries();
        let of_boundaries = axis(BOUNDARY, boundaries.len());
        let values = HostArray::from_slice(DType::I32, &[boundaries.len()], &boundaries);
        let boundaries = region.table(values.expect("there is a number for each boundary"), &[of_boundaries]);
        let before = differences * -1.0;
        let distances = if self.bidirectional { before.maximum(differences) } else { before.maximum(0.0) };
        let pairs = [&*distances.axes(), &[of_boundaries]].concat();
        let reached = distances.broadcast(&pairs).greater_equal(boundaries.broadcast(&pairs));
        let buckets = reached.cast(DType::I32).sum(&[BOUNDARY]);
        if !self.bidirectional {
            return buckets;
        }
        let is_later = differences.greater(0.0).cast(DType::I32);
        buckets + is_later * self.of_direction() as f64
    }

    /// The biases of all pairs, from the numbers that heads have learned for each bucket.
    ///
    /// # Shapes
    /// `[bucket, q_heads] -> f32[q_heads, position, kv_position]`, or `f32[batch, q_heads, position, kv_position]` in a
    /// cache
    #[track_caller]
    pub fn biases<'t>(self, table: Tensor<'t>, segments: Segments<'t>) -> Tensor<'t> {
        let (queries, keys) = (segments.query.axis(POSITION), segments.key.axis(KV_POSITION));
        if segments.first_query.is_none() && segments.order == SequenceOrder::AsRead {
            return self.of_sequences(table, queries, keys);
        }
        let (query_places, key_places) = segments.places(true);
        let pairs = [&*query_places.axes(), &[keys]].concat();
        let differences = key_places.broadcast(&pairs) - query_places.broadcast(&pairs);
        self.looked_up(table, differences)
    }

    /// The biases of queries and keys that both begin at place 0. Each row of the matrix is the one above it, shifted by
    /// one place, so that the table is read once for each distance and not for each pair.
    #[track_caller]
    fn of_sequences<'t>(self, table: Tensor<'t>, queries: Axis, keys: Axis) -> Tensor<'t> {
        let distances = axis(DISTANCE, queries.size + keys.size);
        let places = table.region().iota(DType::I32, distances);
        let differences = places.less(keys.size as f64).select(places, places - distances.size as f64);
        let of_distances = self.looked_up(table, differences);
        let heads = of_distances.axis(QUERY_HEADS);
        let row = distances.size - 1;
        let rows = of_distances.order(&[QUERY_HEADS, DISTANCE]).broadcast(&[heads, queries, distances]);
        rows.merge(&[POSITION, DISTANCE], PAIR)
            .slice(PAIR, 0, queries.size * row)
            .split(PAIR, &[queries, axis(DISTANCE, row)])
            .slice(DISTANCE, 0, keys.size)
            .rename(DISTANCE, KV_POSITION)
            .constrain(&BIASES)
    }

    /// Lookups as products with one-hot vectors, whose gradient is also a product.
    #[track_caller]
    fn looked_up<'t>(self, table: Tensor<'t>, differences: Tensor<'t>) -> Tensor<'t> {
        let buckets = self.of_differences(differences);
        let pairs = [&*buckets.axes(), &[table.axis(BUCKET)]].concat();
        let numbers = table.region().iota(DType::I32, table.axis(BUCKET)).broadcast(&pairs);
        let is_of = numbers.equals(buckets.broadcast(&pairs)).cast(DType::F32);
        is_of.contract(table.cast(DType::F32), &[BUCKET])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The smallest distance of each bucket as transformers 5.23 computes it (`T5Attention._relative_position_bucket`).
    #[test]
    fn distances_have_the_published_buckets() {
        let check = |count, max_distance, bidirectional, expected: &[i32]| {
            let buckets = RelativeBuckets { count, max_distance, bidirectional };
            assert_eq!(buckets.boundaries(), expected, "{buckets:?}");
        };
        check(32, 128, true, &[1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91]);
        let earlier = [
            1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59,
            67, 77, 87, 99, 113,
        ];
        check(32, 128, false, &earlier);
        check(6, 20, true, &[1, 5]);
        check(6, 20, false, &[1, 2, 3, 6, 11]);
    }
}
