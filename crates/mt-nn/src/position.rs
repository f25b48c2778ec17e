//! Position embeddings that are added to token embeddings.

use mt_derive::Tree;
use mt_shape::{Axis, DType, HostArray, logical};
use mt_trace::Tensor;

use crate::{Weight, axes::TABLE_POSITION};

/// A table with one learned vector for each position.
#[derive(Clone, Debug, Tree)]
pub struct PositionTable<L> {
    /// `[table_position, embed]`
    pub table: Weight<L>,
}

impl<'t> PositionTable<Tensor<'t>> {
    /// Looks up the vectors of positions.
    ///
    /// # Shapes
    /// `i32[batch, position] -> [batch, position, embed]`
    #[track_caller]
    pub fn lookup(&self, positions: Tensor<'t>, dtype: DType) -> Tensor<'t> {
        self.table.lookup(TABLE_POSITION, logical::POSITION, positions).cast(dtype)
    }

    /// As [`Self::lookup`], but as a product with one-hot vectors.
    ///
    /// # Shapes
    /// `i32[batch, position] -> [batch, position, embed]`
    #[track_caller]
    pub fn lookup_by_product(&self, positions: Tensor<'t>, dtype: DType) -> Tensor<'t> {
        self.table.lookup_by_product(TABLE_POSITION, positions, dtype)
    }
}

/// Sinusoidal position embeddings (Vaswani et al., 2017): the sines of each position at `width / 2` frequencies, then
/// the cosines. Periods grow from 2π to `2π · max_timescale`, both included.
///
/// # Shapes
/// `i32[batch, position] -> f32[batch, position, width]`
#[track_caller]
pub fn sinusoidal_positions<'t>(positions: Tensor<'t>, width: Axis, max_timescale: f64) -> Tensor<'t> {
    let half = width.with_size(width.size / 2);
    let last = half.size.max(2) - 1;
    let frequencies: Vec<f32> =
        (0..half.size).map(|index| max_timescale.powf(-(index as f64) / last as f64) as f32).collect();
    let table =
        HostArray::from_slice(DType::F32, &[half.size], &frequencies).expect("one number for each frequency");
    let angles = positions.cast(DType::F32).contract(positions.region().table(table, &[half]), &[]);
    angles.sin().concatenate(&[angles.cos()], width.name)
}
