//! Expressions, their exact values and their values at points.

use std::collections::BTreeSet;

/// An expression.
#[derive(Clone, Debug, PartialEq)]
pub enum Expression {
    /// A number, written with decimals or without.
    Number(Fraction),
    /// A number too long for a fraction.
    Approximate(f64),
    Variable(String),
    Pi,
    E,
    Infinity,
    Sum(Vec<Expression>),
    Product(Vec<Expression>),
    Negative(Box<Expression>),
    Quotient(Box<Expression>, Box<Expression>),
    Power(Box<Expression>, Box<Expression>),
    Function(Function, Box<Expression>),
    /// A number of hundredths.
    Percent(Box<Expression>),
}

/// A function of one argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Function {
    Sine,
    Cosine,
    Tangent,
    Logarithm,
    NaturalLogarithm,
    Exponential,
    SquareRoot,
    Absolute,
    Factorial,
    ArcSine,
    ArcCosine,
    ArcTangent,
}

/// A fraction in lowest terms, with a positive denominator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fraction {
    numerator: i128,
    denominator: i128,
}

impl Fraction {
    /// `None` if the denominator is 0 or a number overflows.
    pub fn new(numerator: i128, denominator: i128) -> Option<Self> {
        if denominator == 0 || numerator == i128::MIN || denominator == i128::MIN {
            return None;
        }
        let divisor = greatest_divisor(numerator.abs(), denominator.abs()).max(1) * denominator.signum();
        Some(Self { numerator: numerator / divisor, denominator: denominator / divisor })
    }

    fn plus(self, other: Self) -> Option<Self> {
        let left = self.numerator.checked_mul(other.denominator)?;
        let right = other.numerator.checked_mul(self.denominator)?;
        Self::new(left.checked_add(right)?, self.denominator.checked_mul(other.denominator)?)
    }

    fn times(self, other: Self) -> Option<Self> {
        let numerator = self.numerator.checked_mul(other.numerator)?;
        Self::new(numerator, self.denominator.checked_mul(other.denominator)?)
    }

    fn inverse(self) -> Option<Self> {
        Self::new(self.denominator, self.numerator)
    }

    /// A whole power, if it does not overflow.
    fn power(self, exponent: Self) -> Option<Self> {
        if exponent.denominator != 1 || exponent.numerator.abs() > 200 {
            return None;
        }
        let base = if exponent.numerator < 0 { self.inverse()? } else { self };
        let mut result = Self::new(1, 1)?;
        for _ in 0..exponent.numerator.abs() {
            result = result.times(base)?;
        }
        Some(result)
    }

    pub fn to_f64(self) -> f64 {
        self.numerator as f64 / self.denominator as f64
    }
}

fn greatest_divisor(mut one: i128, mut other: i128) -> i128 {
    while other != 0 {
        (one, other) = (other, one % other);
    }
    one
}

impl Expression {
    /// The value, if it is a fraction that arithmetic on numbers gives.
    pub fn exact(&self) -> Option<Fraction> {
        match self {
            Self::Number(number) => Some(*number),
            Self::Sum(terms) => {
                terms.iter().try_fold(Fraction::new(0, 1)?, |sum, term| sum.plus(term.exact()?))
            }
            Self::Product(factors) => factors
                .iter()
                .try_fold(Fraction::new(1, 1)?, |product, factor| product.times(factor.exact()?)),
            Self::Negative(inner) => inner.exact()?.times(Fraction::new(-1, 1)?),
            Self::Quotient(above, below) => above.exact()?.times(below.exact()?.inverse()?),
            Self::Power(base, exponent) => base.exact()?.power(exponent.exact()?),
            Self::Percent(inner) => inner.exact()?.times(Fraction::new(1, 100)?),
            Self::Function(Function::Absolute, inner) => {
                let value = inner.exact()?;
                Fraction::new(value.numerator.abs(), value.denominator)
            }
            Self::Function(Function::Factorial, inner) => {
                let value = inner.exact()?;
                let is_small = value.denominator == 1 && (0..=33).contains(&value.numerator);
                is_small.then(|| Fraction::new((1..=value.numerator).product(), 1)).flatten()
            }
            _ => None,
        }
    }

    /// The value where each variable has the value that `at` gives.
    pub fn value(&self, at: &dyn Fn(&str) -> f64) -> f64 {
        match self {
            Self::Number(number) => number.to_f64(),
            Self::Approximate(number) => *number,
            Self::Variable(name) => at(name),
            Self::Pi => std::f64::consts::PI,
            Self::E => std::f64::consts::E,
            Self::Infinity => f64::INFINITY,
            Self::Sum(terms) => terms.iter().map(|term| term.value(at)).sum(),
            Self::Product(factors) => factors.iter().map(|factor| factor.value(at)).product(),
            Self::Negative(inner) => -inner.value(at),
            // A quotient by zero is no number, not even an infinite one.
            Self::Quotient(above, below) => match below.value(at) {
                0.0 => f64::NAN,
                below => above.value(at) / below,
            },
            Self::Power(base, exponent) => power(base.value(at), exponent, at),
            Self::Percent(inner) => inner.value(at) / 100.0,
            Self::Function(function, inner) => function.value(inner.value(at)),
        }
    }

    /// Adds the names of variables.
    pub fn variables(&self, found: &mut BTreeSet<String>) {
        match self {
            Self::Variable(name) => {
                found.insert(name.clone());
            }
            Self::Sum(all) | Self::Product(all) => all.iter().for_each(|inner| inner.variables(found)),
            Self::Negative(inner) | Self::Function(_, inner) | Self::Percent(inner) => inner.variables(found),
            Self::Quotient(one, other) | Self::Power(one, other) => {
                one.variables(found);
                other.variables(found);
            }
            _ => {}
        }
    }

    /// The expression without its sign of percent, if it has one.
    pub fn without_percent(&self) -> Option<&Self> {
        match self {
            Self::Percent(inner) => Some(inner),
            _ => None,
        }
    }
}

/// A power. Odd roots of negative numbers are negative.
fn power(base: f64, exponent: &Expression, at: &dyn Fn(&str) -> f64) -> f64 {
    let exact = exponent.exact();
    if base < 0.0
        && let Some(fraction) = exact
        && fraction.denominator % 2 == 1
    {
        let size = (-base).powf(fraction.to_f64());
        return if fraction.numerator % 2 == 0 { size } else { -size };
    }
    base.powf(exponent.value(at))
}

impl Function {
    fn value(self, argument: f64) -> f64 {
        match self {
            Self::Sine => argument.sin(),
            Self::Cosine => argument.cos(),
            Self::Tangent => argument.tan(),
            Self::Logarithm => argument.log10(),
            Self::NaturalLogarithm => argument.ln(),
            Self::Exponential => argument.exp(),
            Self::SquareRoot => argument.sqrt(),
            Self::Absolute => argument.abs(),
            Self::Factorial => {
                let is_whole = argument >= 0.0 && argument.fract() == 0.0 && argument <= 170.0;
                if is_whole { (1..=argument as u64).map(|factor| factor as f64).product() } else { f64::NAN }
            }
            Self::ArcSine => argument.asin(),
            Self::ArcCosine => argument.acos(),
            Self::ArcTangent => argument.atan(),
        }
    }
}
