//! Products of rows with the matrices of their groups, where consecutive rows form the groups.

use mt_shape::{
    Axis, DType, axis,
    kernels::{self, attributes},
};
use mt_trace::{Region, Tensor};

use crate::axes::{EXPERT, ROW};

/// The largest number of rows that are multiplied at once by operations without a kernel.
const MOST_ROWS: usize = 256;

/// Groups of consecutive rows. Those of the first group come first.
#[derive(Clone, Copy, Debug)]
pub struct RowGroups<'t> {
    /// The number of rows of each group: `i32[expert]`.
    pub sizes: Tensor<'t>,
    /// The share of the rows that usually belong to groups. The size of tiles and the counted FLOPs of a program
    /// depend on it, but no results.
    pub usual_share: f64,
}

/// Multiplies each row by the matrix of its group and sums over the axis `over`. Rows after the last group become 0.
/// Products are of the rows' type, and the gradient of the matrices has the matrices' own type.
///
/// # Shapes
/// `[row, over], [expert, over, output] -> [row, output]`
#[track_caller]
pub fn grouped_dot<'t>(
    rows: Tensor<'t>,
    matrices: Tensor<'t>,
    groups: RowGroups<'t>,
    over: &'static str,
) -> Tensor<'t> {
    let RowGroups { sizes, usual_share } = groups;
    let given = matrices.axes();
    let is_output = |axis: &&Axis| ![EXPERT, over].contains(&axis.name);
    let output = given.iter().find(is_output).expect("the matrices have an output axis").name;
    let [product] = rows.region().custom_vjp(
        "grouped_dot",
        [rows.order(&[ROW, over]), matrices.order(&[EXPERT, over, output]), sizes],
        [true, true, false],
        |_, [rows, matrices, sizes]| [dot(rows, matrices, RowGroups { sizes, usual_share }, over)],
        |_, [rows, matrices, sizes]| {
            ([dot(rows, matrices, RowGroups { sizes, usual_share }, over)], vec![rows, matrices, sizes])
        },
        |_, residuals, [cotangent]| {
            let &[rows, matrices, sizes] = residuals.as_slice() else { unreachable!("as returned above") };
            let groups = RowGroups { sizes, usual_share };
            let of_rows = dot(cotangent, matrices, groups, output);
            let of_matrices = outer(rows, cotangent, groups, matrices.dtype());
            vec![of_rows, of_matrices]
        },
    );
    product
}

/// # Shapes
/// `[row, over], [expert, …] -> [row, output]`
fn dot<'t>(rows: Tensor<'t>, matrices: Tensor<'t>, groups: RowGroups<'t>, over: &'static str) -> Tensor<'t> {
    // CPU kernels convert the matrices themselves; the operation of TPUs takes operands of one type.
    let is_cpu = rows.region().target().is_cpu();
    let matrices = if is_cpu { matrices } else { matrices.cast(rows.dtype()) };
    let product = dot_of_one_type(rows, matrices, groups, over);
    // The rows that a TPU's kernels leave behind the last group are not documented.
    if is_cpu || groups.usual_share >= 1.0 { product } else { without_rest(product, groups.sizes) }
}

/// Rows, of which those behind the last group are 0.
fn without_rest<'t>(rows: Tensor<'t>, sizes: Tensor<'t>) -> Tensor<'t> {
    let region = rows.region();
    let places = region.iota(DType::I32, rows.axis(ROW));
    let is_of_group = places.less(sizes.sum(&[EXPERT])).broadcast(&rows.axes());
    is_of_group.select(rows, region.full(rows.dtype(), &rows.axes(), 0.0))
}

/// # Shapes
/// `[row, over], [expert, …] -> [row, output]`
fn dot_of_one_type<'t>(
    rows: Tensor<'t>,
    matrices: Tensor<'t>,
    groups: RowGroups<'t>,
    over: &'static str,
) -> Tensor<'t> {
    let operands = [rows, matrices, groups.sizes];
    let usual_share = groups.usual_share;
    let is_transposed = matrices.axes()[2].name == over;
    let attributes = vec![(attributes::TRANSPOSED, i64::from(is_transposed))];
    rows.region().kernel(&kernels::GROUPED_DOT, attributes, &operands, |region, operands| {
        let [rows, matrices, sizes] = operands[..] else { unreachable!("the kernel has three operands") };
        let output = matrices.axes()[if is_transposed { 1 } else { 2 }];
        let zeros = region.full(rows.dtype(), &[rows.axis(ROW), output], 0.0);
        let tiles = Tiles::new(rows.axis(ROW), sizes, usual_share);
        vec![tiles.fold(region, zeros, &[rows, matrices.cast(rows.dtype())], |tile, products, operands| {
            let [rows, matrices] = *operands else { unreachable!("as given above") };
            let product = tile.rows(rows).contract(tile.matrix(matrices), &[over]);
            tile.write(products, product)
        })]
    })[0]
}

/// The sum over the rows of each group of the products of two vectors per row.
///
/// # Shapes
/// `[row, a], [row, b] -> [expert, a, b]`
fn outer<'t>(left: Tensor<'t>, right: Tensor<'t>, groups: RowGroups<'t>, dtype: DType) -> Tensor<'t> {
    let operands = [left, right, groups.sizes];
    let usual_share = groups.usual_share;
    let sums = left.region().kernel(&kernels::GROUPED_OUTER, Vec::new(), &operands, |region, operands| {
        let [left, right, sizes] = operands[..] else { unreachable!("the kernel has three operands") };
        let axes = [sizes.axis(EXPERT), left.axes()[1], right.axes()[1]];
        let zeros = region.full(DType::F32, &axes, 0.0);
        let tiles = Tiles::new(left.axis(ROW), sizes, usual_share);
        vec![tiles.fold(region, zeros, &[left, right], |tile, sums, operands| {
            let [left, right] = *operands else { unreachable!("as given above") };
            let own = tile.own_rows(left).contract_into(tile.rows(right), &[ROW], DType::F32);
            let sum = sums.dynamic_slice(EXPERT, tile.expert, 1).squeeze(EXPERT) + own;
            sums.dynamic_update(EXPERT, tile.expert, sum.unsqueeze(EXPERT))
        })]
    })[0];
    sums.cast(dtype)
}

/// The division of groups into tiles of at most a fixed number of rows.
struct Tiles<'t> {
    /// The number of rows of a tile.
    size: usize,
    rows: Axis,
    /// The number of tiles if groups are of equal size and hold their usual share of the rows.
    usual: f64,
    /// For each group, the end of its rows and of its tiles: `i32[expert]`.
    ends: Tensor<'t>,
    tile_ends: Tensor<'t>,
    sizes: Tensor<'t>,
    tiles: Tensor<'t>,
}

/// Rows of one group.
struct Tile<'b> {
    size: usize,
    /// The group, an `i32` scalar.
    expert: Tensor<'b>,
    /// The first row of the slice that holds the tile: an `i32` scalar.
    first: Tensor<'b>,
    /// Whether rows of this slice belong to the tile: `bool[row]`.
    is_own: Tensor<'b>,
}

impl<'t> Tiles<'t> {
    fn new(rows: Axis, sizes: Tensor<'t>, usual_share: f64) -> Self {
        let experts = sizes.axis(EXPERT).size;
        let even = (rows.size as f64 * usual_share / experts as f64).ceil().max(1.0) as usize;
        let even = even.next_power_of_two();
        let size = even.min(MOST_ROWS).min(rows.size);
        let tiles = (sizes + (size - 1) as f64) / size as f64;
        Self {
            size,
            rows,
            usual: experts as f64 * (rows.size as f64 * usual_share / experts as f64 / size as f64).ceil(),
            ends: sizes.cumulative_sum(EXPERT),
            tile_ends: tiles.cumulative_sum(EXPERT),
            sizes,
            tiles,
        }
    }

    /// Changes a value by one tile after the other.
    fn fold(
        &self,
        region: Region<'t>,
        value: Tensor<'t>,
        operands: &[Tensor<'t>],
        step: impl for<'b> FnOnce(&Tile<'b>, Tensor<'b>, &[Tensor<'b>]) -> Tensor<'b>,
    ) -> Tensor<'t> {
        let last = self.tiles.axis(EXPERT).size - 1;
        let count = self.tile_ends.at(EXPERT, last);
        let zero = region.integer(DType::I32, 0);
        let lists = [self.ends, self.tile_ends, self.sizes, self.tiles];
        let (size, rows) = (self.size, self.rows);
        let carry = [&[zero, value][..], &[count], &lists, operands].concat();
        let results = region.while_loop_list(
            Some(self.usual),
            &carry,
            |_, carry| carry[0].less(carry[2]),
            |_, mut carry| {
                let number = carry[0];
                let tile = Tile::numbered(number, [carry[3], carry[4], carry[5], carry[6]], rows, size);
                carry[1] = step(&tile, carry[1], &carry[7..]);
                carry[0] = number + 1.0;
                carry
            },
        );
        results[1]
    }
}

impl<'b> Tile<'b> {
    fn numbered(
        number: Tensor<'b>,
        [ends, tile_ends, sizes, tiles]: [Tensor<'b>; 4],
        rows: Axis,
        size: usize,
    ) -> Self {
        let expert = tile_ends.less_equal(number).cast(DType::I32).sum(&[EXPERT]);
        let of_expert = |list: Tensor<'b>| list.dynamic_slice(EXPERT, expert, 1).squeeze(EXPERT);
        let end = of_expert(ends);
        let before = number - of_expert(tile_ends) + of_expert(tiles);
        let start = end - of_expert(sizes) + before * size as f64;
        // The last slices overlap earlier ones instead of exceeding the array.
        let first = start.minimum((rows.size - size) as f64);
        let places = number.region().iota(DType::I32, axis(ROW, size)) + first;
        let is_own = places.greater_equal(start).logical_and(places.less(end));
        // Later rows of the group are those of the next tile, which computes the same.
        Self { size, expert, first, is_own }
    }

    /// The slice of rows that holds the tile.
    fn rows(&self, rows: Tensor<'b>) -> Tensor<'b> {
        rows.dynamic_slice(ROW, self.first, self.size)
    }

    /// As [`Self::rows`], where rows of other tiles are 0.
    fn own_rows(&self, rows: Tensor<'b>) -> Tensor<'b> {
        let slice = self.rows(rows);
        let zeros = slice.region().full(slice.dtype(), &slice.axes(), 0.0);
        self.is_own.broadcast(&slice.axes()).select(slice, zeros)
    }

    fn matrix(&self, matrices: Tensor<'b>) -> Tensor<'b> {
        matrices.dynamic_slice(EXPERT, self.expert, 1).squeeze(EXPERT)
    }

    /// Replaces the tile's rows.
    fn write(&self, all: Tensor<'b>, rows: Tensor<'b>) -> Tensor<'b> {
        let others = self.rows(all);
        let rows = self.is_own.broadcast(&rows.axes()).select(rows, others);
        all.dynamic_update(ROW, self.first, rows)
    }
}
