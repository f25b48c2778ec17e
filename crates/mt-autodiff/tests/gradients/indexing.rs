//! Gathers, scatters, sorts and top-k.

use mt_ir::{GatherDims, Op, ScatterDims, ScatterKind};
use mt_shape::{Axis, DType, axis};
use mt_trace::Tensor;

use crate::harness::{Case, any, case, check, check_narrow, integers};

const A: Axis = axis("a", 3);
const B: Axis = axis("b", 5);
const C: Axis = axis("c", 2);
const K: Axis = axis("k", 4);

/// Adds or writes rows of updates to rows of `x`.
fn scatter_rows<'t>(x: Tensor<'t>, rows: Tensor<'t>, updates: Tensor<'t>, kind: ScatterKind) -> Tensor<'t> {
    let dims = ScatterDims {
        update_window_dims: vec![1],
        inserted_window_dims: vec![0],
        scatter_dims_to_operand_dims: vec![0],
        index_vector_dim: 1,
    };
    x.apply_one(Op::Scatter { dims, kind }, &[rows, updates], &x.axes())
}

fn cases() -> Vec<Case> {
    vec![
        case("take", vec![any(&[B, C]), integers(&[K], &[4, 0, 4, 2])], |_, x| vec![x[0].take("b", x[1])])
            .like(|x| vec![x[1].iter().flat_map(|row| x[0][*row as usize * 2..][..2].to_vec()).collect()]),
        case(
            "take_inner",
            vec![any(&[A, B, C]), integers(&[K, C.renamed("d")], &[4, 0, 4, 2, 1, 1, 0, 3])],
            |_, x| vec![x[0].take("b", x[1])],
        ),
        case("take_one", vec![any(&[B]), integers(&[], &[3])], |_, x| vec![x[0].take("b", x[1])])
            .like(|x| vec![vec![x[0][3]]]),
        case("windows", vec![any(&[A, B]), integers(&[K, C], &[0, 0, 1, 2, 0, 1, 1, 0])], |_, x| {
            // Windows of 2×3 elements whose corners the indices give.
            let dims = GatherDims {
                offset_dims: vec![1, 2],
                collapsed_slice_dims: vec![],
                start_index_map: vec![0, 1],
                index_vector_dim: 1,
                slice_sizes: vec![2, 3],
            };
            vec![x[0].apply_one(Op::Gather(dims), &[x[1]], &[K, C, A])]
        })
        .like(|x| {
            let corners = x[1].chunks(2).map(|corner| (corner[0] as usize, corner[1] as usize));
            let window =
                |(row, column): (usize, usize)| (0..6).map(move |i| (row + i / 3) * 5 + column + i % 3);
            vec![corners.flat_map(window).map(|index| x[0][index]).collect()]
        }),
        case("pairs", vec![any(&[A, B]), integers(&[C, K], &[0, 1, 2, 0, 3, 3, 1, 3])], |_, x| {
            // Single elements, and the index vectors along the leading dimension.
            let dims = GatherDims {
                offset_dims: vec![],
                collapsed_slice_dims: vec![0, 1],
                start_index_map: vec![0, 1],
                index_vector_dim: 0,
                slice_sizes: vec![1, 1],
            };
            vec![x[0].apply_one(Op::Gather(dims), &[x[1]], &[K])]
        })
        .like(|x| vec![(0..4).map(|i| x[0][x[1][i] as usize * 5 + x[1][4 + i] as usize]).collect()]),
        case("scatter_add", vec![any(&[B, C]), integers(&[K], &[4, 0, 4, 2]), any(&[K, C])], |_, x| {
            vec![scatter_rows(x[0], x[1], x[2], ScatterKind::Add)]
        })
        .like(|x| {
            let mut sums = x[0].clone();
            for (row, update) in x[1].iter().zip(x[2].chunks(2)) {
                sums[*row as usize * 2] += update[0];
                sums[*row as usize * 2 + 1] += update[1];
            }
            vec![sums]
        }),
        case("scatter_replace", vec![any(&[B, C]), integers(&[A], &[4, 0, 2]), any(&[A, C])], |_, x| {
            vec![scatter_rows(x[0], x[1], x[2], ScatterKind::Replace)]
        })
        .like(|x| {
            let mut values = x[0].clone();
            for (row, update) in x[1].iter().zip(x[2].chunks(2)) {
                values[*row as usize * 2..][..2].copy_from_slice(update);
            }
            vec![values]
        }),
        case(
            "scatter_windows",
            vec![any(&[A, B]), integers(&[K, C], &[0, 0, 1, 2, 0, 1, 1, 0]), any(&[K, C, A])],
            |_, x| {
                let dims = ScatterDims {
                    update_window_dims: vec![1, 2],
                    inserted_window_dims: vec![],
                    scatter_dims_to_operand_dims: vec![0, 1],
                    index_vector_dim: 1,
                };
                vec![x[0].apply_one(
                    Op::Scatter { dims, kind: ScatterKind::Add },
                    &[x[1], x[2]],
                    &x[0].axes(),
                )]
            },
        ),
        case("sort", vec![any(&[A, B])], |_, x| {
            vec![x[0].sort_with(&[], "b", false)[0], x[0].sort_with(&[], "a", true)[0]]
        })
        .like(|x| {
            let mut rows = x[0].clone();
            rows.chunks_mut(5).for_each(|row| row.sort_by(f64::total_cmp));
            let mut columns = x[0].clone();
            for column in 0..5 {
                let mut values: Vec<f64> = (0..3).map(|row| x[0][row * 5 + column]).collect();
                values.sort_by(|lhs, rhs| rhs.total_cmp(lhs));
                (0..3).for_each(|row| columns[row * 5 + column] = values[row]);
            }
            vec![rows, columns]
        }),
        case("sort_along", vec![any(&[A, B]), any(&[B, A]), integers(&[A, B], &[7; 15])], |region, x| {
            let positions = region.iota(DType::I32, B).broadcast(&[A, B]);
            let sorted = x[0].sort_with(&[x[1], positions, x[2]], "b", true);
            vec![sorted[0], sorted[1], sorted[2].cast(DType::F64), sorted[3]]
        }),
        case("sort_by_integers", vec![any(&[B]), integers(&[B], &[3, 1, 3, 0, 1])], |_, x| {
            // Equal keys keep their order.
            let sorted = x[1].sort_with(&[x[0], x[0].square()], "b", false);
            vec![sorted[1], sorted[2]]
        })
        .like(|x| {
            let sorted: Vec<f64> = [3, 1, 4, 0, 2].iter().map(|index: &usize| x[0][*index]).collect();
            vec![sorted.clone(), sorted.iter().map(|x| x * x).collect()]
        }),
        case("top_k", vec![any(&[A, B])], |_, x| {
            let (values, positions) = x[0].top_k(2, "k");
            vec![values, positions.cast(DType::F64)]
        })
        .like(|x| {
            let (mut values, mut positions) = (Vec::new(), Vec::new());
            for row in x[0].chunks(5) {
                let mut order: Vec<usize> = (0..5).collect();
                order.sort_by(|lhs, rhs| row[*rhs].total_cmp(&row[*lhs]));
                values.extend(order[..2].iter().map(|index| row[*index]));
                positions.extend(order[..2].iter().map(|index| *index as f64));
            }
            vec![values, positions]
        }),
        case("top_one", vec![any(&[B])], |_, x| vec![x[0].top_k(1, "k").0, x[0].top_k(5, "k").0]),
    ]
}

#[test]
fn indexing() {
    let cases = cases();
    check("indexing", &cases);
    check_narrow("indexing", &cases, DType::F32, 1e-5);
    check_narrow("indexing", &cases, DType::BF16, 3e-2);
}
