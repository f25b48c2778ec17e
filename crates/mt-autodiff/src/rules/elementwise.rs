//! Elementwise operations.

use mt_ir::{Binary, Comparison, Op, Reduction, Unary, ValueId};

use super::Context;

pub(super) fn unary(c: &mut Context<'_>, unary: Unary) -> Option<ValueId> {
    let (x, y, g) = (c.operands[0], c.results[0], c.cotangent());
    let b = &mut *c.builder;
    let factor = match unary {
        Unary::Negate => return Some(b.unary(Unary::Negate, g)),
        // Constant almost everywhere.
        Unary::Sign | Unary::Floor | Unary::Ceil | Unary::RoundNearestEven | Unary::Not | Unary::IsFinite => {
            return None;
        }
        Unary::Abs => b.unary(Unary::Sign, x),
        Unary::Exp => y,
        Unary::ExpM1 => {
            let one = b.splat_like(y, 1.0);
            b.add(y, one)
        }
        Unary::Log => return Some(b.binary(Binary::Divide, g, x)),
        Unary::Log1p => {
            let one = b.splat_like(x, 1.0);
            let denominator = b.add(x, one);
            return Some(b.binary(Binary::Divide, g, denominator));
        }
        Unary::Sqrt => {
            let half = b.splat_like(y, 0.5);
            b.binary(Binary::Divide, half, y)
        }
        Unary::Rsqrt => {
            let factor = b.splat_like(y, -0.5);
            let square = b.multiply(y, y);
            let cube = b.multiply(square, y);
            b.multiply(factor, cube)
        }
        Unary::Tanh => {
            let one = b.splat_like(y, 1.0);
            let square = b.multiply(y, y);
            b.binary(Binary::Subtract, one, square)
        }
        Unary::Logistic => {
            let one = b.splat_like(y, 1.0);
            let rest = b.binary(Binary::Subtract, one, y);
            b.multiply(y, rest)
        }
        Unary::Sin => b.unary(Unary::Cos, x),
        Unary::Cos => {
            let sine = b.unary(Unary::Sin, x);
            b.unary(Unary::Negate, sine)
        }
        Unary::Erf => {
            let scale = b.splat_like(x, std::f64::consts::FRAC_2_SQRT_PI);
            let square = b.multiply(x, x);
            let negative = b.unary(Unary::Negate, square);
            let gauss = b.unary(Unary::Exp, negative);
            b.multiply(scale, gauss)
        }
        Unary::ErfInv => {
            let scale = b.splat_like(y, 0.5 * std::f64::consts::PI.sqrt());
            let square = b.multiply(y, y);
            let growth = b.unary(Unary::Exp, square);
            b.multiply(scale, growth)
        }
    };
    Some(b.multiply(g, factor))
}

pub(super) fn binary(c: &mut Context<'_>, binary: Binary) -> Vec<Option<ValueId>> {
    let (lhs, rhs, y, g) = (c.operands[0], c.operands[1], c.results[0], c.cotangent());
    let needs = [c.needs[0], c.needs[1]];
    let b = &mut *c.builder;
    match binary {
        Binary::Add => vec![Some(g), Some(g)],
        Binary::Subtract => vec![Some(g), needs[1].then(|| b.unary(Unary::Negate, g))],
        Binary::Multiply => {
            vec![needs[0].then(|| b.multiply(g, rhs)), needs[1].then(|| b.multiply(lhs, g))]
        }
        Binary::Divide => {
            let scaled = b.binary(Binary::Divide, g, rhs);
            let rhs_gradient = needs[1].then(|| {
                let product = b.multiply(scaled, y);
                b.unary(Unary::Negate, product)
            });
            vec![Some(scaled), rhs_gradient]
        }
        Binary::Remainder => {
            let rhs_gradient = needs[1].then(|| {
                // x mod y is x - y * trunc(x / y).
                let quotient = b.binary(Binary::Divide, lhs, rhs);
                let sign = b.unary(Unary::Sign, quotient);
                let magnitude = b.unary(Unary::Abs, quotient);
                let floor = b.unary(Unary::Floor, magnitude);
                let truncated = b.multiply(sign, floor);
                let product = b.multiply(g, truncated);
                b.unary(Unary::Negate, product)
            });
            vec![Some(g), rhs_gradient]
        }
        Binary::Power => {
            let lhs_gradient = needs[0].then(|| {
                let one = b.splat_like(rhs, 1.0);
                let less = b.binary(Binary::Subtract, rhs, one);
                // Where the exponent is zero, the factor is zero; an infinite power would turn it into NaN, so the
                // exponent is replaced.
                let zero = b.splat_like(rhs, 0.0);
                let is_zero = b.emit(Op::Compare(Comparison::Equal), &[rhs, zero]);
                let less = b.emit(Op::Select, &[is_zero, one, less]);
                let power = b.binary(Binary::Power, lhs, less);
                let factor = b.multiply(rhs, power);
                b.multiply(g, factor)
            });
            let rhs_gradient = needs[1].then(|| {
                // A zero base is replaced before the logarithm, since zero to any positive power stays zero.
                let zero = b.splat_like(lhs, 0.0);
                let one = b.splat_like(lhs, 1.0);
                let is_zero = b.emit(Op::Compare(Comparison::Equal), &[lhs, zero]);
                let base = b.emit(Op::Select, &[is_zero, one, lhs]);
                let logarithm = b.unary(Unary::Log, base);
                let factor = b.multiply(y, logarithm);
                b.multiply(g, factor)
            });
            vec![lhs_gradient, rhs_gradient]
        }
        Binary::Maximum | Binary::Minimum => {
            // Equal operands share the cotangent.
            let half = b.splat_like(g, 0.5);
            let zero = b.splat_like(g, 0.0);
            let shared = b.multiply(g, half);
            let tie = b.emit(Op::Compare(Comparison::Equal), &[lhs, rhs]);
            let direction = if binary == Binary::Maximum { Comparison::Greater } else { Comparison::Less };
            let mut gradient = |own: ValueId, other: ValueId| {
                let wins = b.emit(Op::Compare(direction), &[own, other]);
                let alone = b.emit(Op::Select, &[wins, g, zero]);
                b.emit(Op::Select, &[tie, shared, alone])
            };
            vec![needs[0].then(|| gradient(lhs, rhs)), needs[1].then(|| gradient(rhs, lhs))]
        }
        Binary::And | Binary::Or | Binary::Xor | Binary::ShiftLeft | Binary::ShiftRightLogical => {
            vec![None, None]
        }
    }
}

pub(super) fn select(c: &mut Context<'_>) -> Vec<Option<ValueId>> {
    let (predicate, g) = (c.operands[0], c.cotangent());
    let zero = c.builder.splat_like(g, 0.0);
    vec![
        None,
        c.needs[1].then(|| c.builder.emit(Op::Select, &[predicate, g, zero])),
        c.needs[2].then(|| c.builder.emit(Op::Select, &[predicate, zero, g])),
    ]
}

pub(super) fn clamp(c: &mut Context<'_>) -> Vec<Option<ValueId>> {
    let (value, g) = (c.operands[1], c.cotangent());
    let ty = c.ty(value);
    let zero = c.builder.splat_like(g, 0.0);
    let full = |c: &mut Context<'_>, bound: ValueId| {
        if c.builder.ty(bound).dims == ty.dims {
            return bound;
        }
        c.builder.emit(Op::Broadcast { dims: ty.dims.clone(), mapping: Vec::new() }, &[bound])
    };
    let low = full(c, c.operands[0]);
    let high = full(c, c.operands[2]);
    let below = c.builder.emit(Op::Compare(Comparison::Less), &[value, low]);
    let above = c.builder.emit(Op::Compare(Comparison::Greater), &[value, high]);
    let mut bound = |operand: usize, outside: ValueId| {
        c.needs[operand].then(|| {
            let gradient = c.builder.emit(Op::Select, &[outside, g, zero]);
            if c.builder.ty(c.operands[operand]).dims == ty.dims {
                return gradient;
            }
            let dimensions = (0..ty.rank()).collect();
            c.builder.emit(Op::Reduce { kind: Reduction::Sum, dimensions }, &[gradient])
        })
    };
    let low_gradient = bound(0, below);
    let high_gradient = bound(2, above);
    let outside = c.builder.binary(Binary::Or, below, above);
    vec![low_gradient, Some(c.builder.emit(Op::Select, &[outside, zero, g])), high_gradient]
}
