//! Equality of mathematical answers: numbers, fractions, LaTeX, units, intervals, sets and expressions.

mod expression;
mod parser;
mod text;
mod value;

use value::Value;

/// Longer answers are compared as texts.
const MOST: usize = 2_000;

/// Whether an answer means the same as the expected one.
///
/// ```
/// # use mt_rl::math::equal;
/// assert!(equal(r"\frac{1}{2}", "0.5"));
/// assert!(equal(r"x \in [0, \infty)", "[0,oo)"));
/// assert!(equal(r"\{1, 2\}", r"\left\{2, 1\right\}"));
/// assert!(equal("3 cm", "3"));
/// assert!(!equal("1000000", "1000001"));
/// ```
pub fn equal(expected: &str, given: &str) -> bool {
    let [expected, given] = [expected, given].map(text::essence);
    if expected.is_empty() || given.is_empty() {
        return expected == given;
    }
    if text::compact(&expected) == text::compact(&given) {
        return true;
    }
    let parsed = [&expected, &given].map(|text| (text.len() <= MOST).then(|| parser::parse(text)).flatten());
    match &parsed {
        [Some(expected), Some(given)] => Value::equal(expected, given),
        _ => false,
    }
}

/// The answer within a text: the content of the last `\boxed{…}`, if there is one.
pub fn boxed(text: &str) -> Option<&str> {
    text::boxed(text)
}

/// The number that a text means, if it is one.
pub fn number(text: &str) -> Option<f64> {
    let text = text::essence(text);
    let parsed = (text.len() <= MOST).then(|| parser::parse(&text)).flatten()?;
    parsed.number()
}

/// The last number in a text, such as `1,234.5` or `-3/4`.
pub fn last_number(text: &str) -> Option<&str> {
    text::last_number(text)
}
