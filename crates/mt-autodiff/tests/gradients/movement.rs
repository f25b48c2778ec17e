//! Operations that move elements.

use mt_ir::Op;
use mt_shape::{Axis, DType, axis};
use mt_trace::Tensor;

use crate::harness::{Case, any, case, check, check_narrow, integers};

const A: Axis = axis("a", 3);
const B: Axis = axis("b", 5);
const C: Axis = axis("c", 2);
const D: Axis = axis("d", 4);
const ONE: Axis = axis("one", 1);
const NONE: Axis = axis("none", 0);

fn slice<'t>(x: Tensor<'t>, start: &[usize], limit: &[usize], stride: &[usize], axes: &[Axis]) -> Tensor<'t> {
    let op = Op::Slice { start: start.to_vec(), limit: limit.to_vec(), stride: stride.to_vec() };
    x.apply_one(op, &[], axes)
}

fn pad<'t>(
    x: Tensor<'t>,
    value: Tensor<'t>,
    low: &[i64],
    high: &[i64],
    interior: &[usize],
    axes: &[Axis],
) -> Tensor<'t> {
    let op = Op::Pad { low: low.to_vec(), high: high.to_vec(), interior: interior.to_vec() };
    x.apply_one(op, &[value], axes)
}

fn broadcast<'t>(x: Tensor<'t>, mapping: &[usize], axes: &[Axis]) -> Tensor<'t> {
    let dims = axes.iter().map(|axis| axis.size).collect();
    x.apply_one(Op::Broadcast { dims, mapping: mapping.to_vec() }, &[], axes)
}

fn cases() -> Vec<Case> {
    let x = || vec![any(&[A, B])];
    vec![
        case("broadcast", x(), |_, x| vec![x[0].broadcast(&[C, A, D, B]), x[0].broadcast(&[C, B, D, A])]),
        case("broadcast_scalar", vec![any(&[])], |_, x| vec![x[0].broadcast(&[A, B])]),
        case("broadcast_none", x(), |_, x| vec![x[0].broadcast(&[A, NONE, B])]),
        case("stretch", vec![any(&[ONE, A])], |_, x| {
            vec![
                broadcast(x[0], &[0, 1], &[D, A]),
                broadcast(x[0], &[2, 0], &[A, B, D]),
                broadcast(x[0], &[2, 1], &[C, A, ONE]),
            ]
        }),
        case("transpose", vec![any(&[A, B, C])], |_, x| {
            vec![x[0].order(&["b", "c", "a"]), x[0].order(&["c", "a", "b"]), x[0].order(&["a", "c", "b"])]
        })
        .like(|x| {
            let element = |a: usize, b: usize, c: usize| x[0][(a * 5 + b) * 2 + c];
            let bca = (0..30).map(|i| element(i % 3, i / 6, i / 3 % 2)).collect();
            let cab = (0..30).map(|i| element(i / 5 % 3, i % 5, i / 15)).collect();
            let acb = (0..30).map(|i| element(i / 10, i % 5, i / 5 % 2)).collect();
            vec![bca, cab, acb]
        }),
        case("split_and_merge", vec![any(&[axis("ac", 6), B])], |_, x| {
            let split = x[0].split("ac", &[A, C]);
            vec![split, split.merge(&["c", "b"], "cb"), x[0].unsqueeze("one").squeeze("one")]
        }),
        case("slice", x(), |_, x| vec![x[0].slice("b", 1, 4), x[0].at("a", 2), x[0].slice("b", 2, 2)]).like(
            |x| {
                let rows: Vec<&[f64]> = x[0].chunks(5).collect();
                vec![rows.iter().flat_map(|row| row[1..4].to_vec()).collect(), rows[2].to_vec(), vec![]]
            },
        ),
        case("stride", x(), |_, x| {
            vec![
                slice(x[0], &[0, 0], &[3, 5], &[2, 2], &[C, A]),
                slice(x[0], &[1, 1], &[3, 5], &[1, 3], &[C, C.renamed("e")]),
                slice(x[0], &[0, 0], &[3, 4], &[3, 3], &[ONE, C]),
            ]
        })
        .like(|x| {
            let x = &x[0];
            vec![
                vec![x[0], x[2], x[4], x[10], x[12], x[14]],
                vec![x[6], x[9], x[11], x[14]],
                vec![x[0], x[3]],
            ]
        }),
        case("pad", x(), |_, x| vec![x[0].pad("b", 1, 2, 3.0).pad("a", 0, 1, -1.0)]),
        case("pad_shapes", vec![any(&[A]), any(&[])], |_, x| {
            vec![
                pad(x[0], x[1], &[1], &[2], &[0], &[axis("x", 6)]),
                pad(x[0], x[1], &[-1], &[0], &[0], &[C]),
                pad(x[0], x[1], &[0], &[-2], &[0], &[ONE]),
                pad(x[0], x[1], &[0], &[0], &[2], &[axis("x", 7)]),
                pad(x[0], x[1], &[-2], &[-1], &[1], &[C]),
                pad(x[0], x[1], &[2], &[-3], &[1], &[D]),
                pad(x[0], x[1], &[-2], &[1], &[1], &[D]),
            ]
        })
        .like(|x| {
            let (a, p) = (&x[0], x[1][0]);
            vec![
                vec![p, a[0], a[1], a[2], p, p],
                vec![a[1], a[2]],
                vec![a[0]],
                vec![a[0], p, p, a[1], p, p, a[2]],
                vec![a[1], p],
                vec![p, p, a[0], p],
                vec![a[1], p, a[2], p],
            ]
        }),
        case("pad_none", vec![any(&[NONE]), any(&[])], |_, x| vec![pad(x[0], x[1], &[1], &[2], &[3], &[A])])
            .like(|x| vec![vec![x[1][0]; 3]]),
        case("concatenate", vec![any(&[A, C]), any(&[B, A]), any(&[A, NONE])], |_, x| {
            let second = x[1].rename("b", "c");
            vec![x[0].concatenate(&[second, x[0], x[2].rename("none", "c")], "c")]
        }),
        case("reverse", x(), |_, x| vec![x[0].reverse("b"), x[0].reverse("a").reverse("b")]).like(|x| {
            let along =
                x[0].chunks(5).flat_map(|row| row.iter().rev().copied().collect::<Vec<_>>()).collect();
            vec![along, x[0].iter().rev().copied().collect()]
        }),
        case("shift", x(), |_, x| vec![x[0].slice("b", 1, x[0].axis("b").size).pad("b", 0, 1, 0.0)]),
        case("dynamic_slice", vec![any(&[A, B]), integers(&[], &[2]), integers(&[], &[4])], |_, x| {
            // The second start is clamped so that the slice fits.
            vec![
                x[0].dynamic_slice("b", x[1], 3),
                x[0].dynamic_slice("b", x[2], 3),
                x[0].dynamic_slice("a", x[1], 1),
            ]
        })
        .like(|x| {
            let last: Vec<f64> = x[0].chunks(5).flat_map(|row| row[2..].to_vec()).collect();
            vec![last.clone(), last, x[0][10..].to_vec()]
        }),
        case(
            "dynamic_update",
            vec![any(&[A, B]), any(&[C, A]), integers(&[], &[1]), integers(&[], &[9])],
            |_, x| {
                let update = x[1].rename("c", "b");
                vec![x[0].dynamic_update("b", x[2], update), x[0].square().dynamic_update("b", x[3], update)]
            },
        )
        .like(|x| {
            let write = |row: usize, column: usize, start: usize, other: f64| match column.checked_sub(start)
            {
                Some(offset) if offset < 2 => x[1][offset * 3 + row],
                _ => other,
            };
            let at = |index: usize, start: usize, other: f64| write(index / 5, index % 5, start, other);
            let first = x[0].iter().enumerate().map(|(index, value)| at(index, 1, *value));
            let second = x[0].iter().enumerate().map(|(index, value)| at(index, 3, value * value));
            vec![first.collect(), second.collect()]
        }),
    ]
}

/// An update along two axes, of which it lacks one.
fn update_at() -> Case {
    case(
        "dynamic_update_at",
        vec![any(&[A, B]), any(&[C]), integers(&[], &[1]), integers(&[], &[9])],
        |_, x| vec![x[0].dynamic_update_at([("b", x[3]), ("a", x[2])], x[1].rename("c", "b"))],
    )
    .like(|x| {
        let write = |(index, value): (usize, &f64)| match index {
            8 | 9 => x[1][index - 8],
            _ => *value,
        };
        vec![x[0].iter().enumerate().map(write).collect()]
    })
}

#[test]
fn movement() {
    let cases: Vec<Case> = cases().into_iter().chain([update_at()]).collect();
    check("movement", &cases);
    check_narrow("movement", &cases, DType::F32, 1e-5);
    check_narrow("movement", &cases, DType::BF16, 3e-2);
}
