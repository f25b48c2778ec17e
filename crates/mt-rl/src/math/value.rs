//! Values of answers, and when two of them are equal.

use std::collections::BTreeSet;

use super::expression::Expression;

/// The meaning of an answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    Expression(Expression),
    /// Values between brackets: a point, a tuple or an interval.
    Bracketed {
        open: char,
        values: Vec<Value>,
        close: char,
    },
    /// Values in any order.
    Set(Vec<Value>),
    /// Intervals and sets in any order.
    Union(Vec<Value>),
    /// A relation, with `<` and `<=` rather than their opposites.
    Relation {
        left: Box<Value>,
        sign: Sign,
        right: Box<Value>,
    },
    /// Words.
    Words(String),
}

/// The sign of a relation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sign {
    Equal,
    Unequal,
    Less,
    AtMost,
}

/// The relative difference of numbers that are equal but for rounding.
const TOLERANCE: f64 = 1e-9;

/// Points at which expressions are compared.
const POINTS: usize = 7;

impl Value {
    /// The number, if the value is one.
    pub fn number(&self) -> Option<f64> {
        let Self::Expression(expression) = self else { return None };
        let mut variables = BTreeSet::new();
        expression.variables(&mut variables);
        let value = expression.value(&|_| f64::NAN);
        (variables.is_empty() && value.is_finite()).then_some(value)
    }

    /// Whether both mean the same.
    pub fn equal(one: &Self, other: &Self) -> bool {
        match (one, other) {
            (Self::Expression(one), Self::Expression(other)) => are_equal(one, other),
            (
                Self::Bracketed { open, values, close },
                Self::Bracketed { open: other_open, values: others, close: other_close },
            ) => (open, close) == (other_open, other_close) && in_order(values, others),
            (Self::Set(values), Self::Set(others)) | (Self::Union(values), Self::Union(others)) => {
                in_any_order(values, others)
            }
            // One value, with or without the braces of a set.
            (Self::Set(values), single) | (single, Self::Set(values)) => {
                values.len() == 1 && Self::equal(&values[0], single)
            }
            (
                Self::Relation { left, sign, right },
                Self::Relation { left: other_left, sign: other_sign, right: other_right },
            ) => {
                let is_same = Self::equal(left, other_left) && Self::equal(right, other_right);
                let is_symmetric = matches!(sign, Sign::Equal | Sign::Unequal);
                let is_turned =
                    is_symmetric && Self::equal(left, other_right) && Self::equal(right, other_left);
                sign == other_sign && (is_same || is_turned)
            }
            (Self::Words(one), Self::Words(other)) => one.eq_ignore_ascii_case(other),
            _ => false,
        }
    }
}

fn in_order(values: &[Value], others: &[Value]) -> bool {
    values.len() == others.len() && values.iter().zip(others).all(|(one, other)| Value::equal(one, other))
}

/// Whether each value has its counterpart. Equality is no ordering, so that pairs are searched.
fn in_any_order(values: &[Value], others: &[Value]) -> bool {
    let mut left: Vec<&Value> = others.iter().collect();
    values.len() == others.len()
        && values.iter().all(|value| {
            let found = left.iter().position(|other| Value::equal(value, other));
            found.map(|place| left.swap_remove(place)).is_some()
        })
}

/// Whether two expressions have the same value, everywhere if they have variables. A percentage also equals its number of
/// hundredths without the sign.
fn are_equal(one: &Expression, other: &Expression) -> bool {
    if same(one, other) {
        return true;
    }
    match (one.without_percent(), other.without_percent()) {
        (Some(bare), None) => same(bare, other),
        (None, Some(bare)) => same(one, bare),
        _ => false,
    }
}

fn same(one: &Expression, other: &Expression) -> bool {
    if let (Some(one), Some(other)) = (one.exact(), other.exact()) {
        return one == other;
    }
    let [mut names, mut others] = [BTreeSet::new(), BTreeSet::new()];
    one.variables(&mut names);
    other.variables(&mut others);
    if names.is_empty() && others.is_empty() {
        return are_close(one.value(&|_| f64::NAN), other.value(&|_| f64::NAN));
    }
    names.extend(others);
    let mut compared = 0;
    for point in 0..POINTS {
        let at = |name: &str| coordinate(name, point);
        let (left, right) = (one.value(&at), other.value(&at));
        if left.is_nan() && right.is_nan() {
            continue;
        }
        if !are_close(left, right) {
            return false;
        }
        compared += 1;
    }
    compared >= 2
}

/// A number for a variable at a point, between 0.3 and 3.3, without a simple relation to others.
fn coordinate(name: &str, point: usize) -> f64 {
    let seed = name.bytes().fold(point as u64 + 1, |seed, byte| {
        (seed ^ u64::from(byte)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
    });
    0.3 + 3.0 * (seed >> 11) as f64 / (1_u64 << 53) as f64
}

fn are_close(one: f64, other: f64) -> bool {
    if one.is_infinite() || other.is_infinite() {
        return one == other;
    }
    (one - other).abs() <= TOLERANCE * one.abs().max(other.abs()).max(1e-9)
}
