//! Differences between computed and expected numbers.

use mt_shape::HostArray;

/// Numbers that can be compared, with their dimensions.
pub trait Values {
    /// The dimensions.
    fn dims(&self) -> Vec<usize>;
    /// The elements in row-major order.
    fn numbers(&self) -> Vec<f64>;
}

impl Values for HostArray {
    fn dims(&self) -> Vec<usize> {
        self.dims().to_vec()
    }

    fn numbers(&self) -> Vec<f64> {
        self.to_f64()
    }
}

impl Values for [f64] {
    fn dims(&self) -> Vec<usize> {
        vec![self.len()]
    }

    fn numbers(&self) -> Vec<f64> {
        self.to_vec()
    }
}

impl Values for Vec<f64> {
    fn dims(&self) -> Vec<usize> {
        self[..].dims()
    }

    fn numbers(&self) -> Vec<f64> {
        self.clone()
    }
}

/// The Euclidean norm.
pub fn norm(values: &[f64]) -> f64 {
    values.iter().map(|value| value * value).sum::<f64>().sqrt()
}

/// The largest finite absolute value; 0 if no value is finite.
pub fn largest(values: &[f64]) -> f64 {
    values.iter().filter(|value| value.is_finite()).fold(0.0, |largest, value| largest.max(value.abs()))
}

/// The standard deviation.
pub fn deviation(values: &[f64]) -> f64 {
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / values.len() as f64;
    variance.sqrt().max(1e-30)
}

/// The norm of the difference, divided by the norm of the expected values.
#[track_caller]
pub fn relative_error(actual: &(impl Values + ?Sized), expected: &(impl Values + ?Sized)) -> f64 {
    assert_eq!(actual.dims(), expected.dims());
    let expected = expected.numbers();
    let difference: Vec<f64> = actual.numbers().iter().zip(&expected).map(|(a, b)| a - b).collect();
    norm(&difference) / norm(&expected).max(1e-30)
}

/// The largest absolute difference of two elements; NaN if one is NaN.
#[track_caller]
pub fn largest_difference(actual: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(actual.len(), expected.len());
    // `f64::max` would leave out NaN.
    let larger = |largest: f64, one: f64| if one.is_nan() || one > largest { one } else { largest };
    actual.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, larger)
}

/// The largest absolute difference, divided by the standard deviation of the expected values.
#[track_caller]
pub fn largest_error(actual: &[f64], expected: &[f64]) -> f64 {
    largest_difference(actual, expected) / deviation(expected)
}

/// Asserts that the relative error is at most `tolerance`.
#[track_caller]
pub fn assert_close(
    what: &str,
    actual: &(impl Values + ?Sized),
    expected: &(impl Values + ?Sized),
    tolerance: f64,
) {
    assert_eq!(actual.dims(), expected.dims(), "{what}");
    let error = relative_error(actual, expected);
    assert!(error <= tolerance, "{what}: relative error {error:e} is above {tolerance:e}");
}

/// Asserts that each element differs by at most `bound`. Infinities and NaN equal themselves.
#[track_caller]
pub fn assert_within(
    what: &str,
    actual: &(impl Values + ?Sized),
    expected: &(impl Values + ?Sized),
    bound: f64,
) {
    assert_eq!(actual.dims(), expected.dims(), "{what}");
    let (actual, expected) = (actual.numbers(), expected.numbers());
    for (index, (a, b)) in actual.iter().zip(&expected).enumerate() {
        let is_same = (a - b).abs() <= bound || a == b || a.is_nan() && b.is_nan();
        assert!(
            is_same,
            "{what}: element {index} is {a}, not {b} within {bound:e}\n got {actual:?}\nwant {expected:?}"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_relative_to_the_expected_values() {
        assert_eq!(relative_error(&[3.0, 5.0][..], &[3.0, 4.0][..]), 0.2);
        assert_eq!(largest_difference(&[1.0, -2.0], &[1.5, -2.25]), 0.5);
        assert!(largest_difference(&[1.0, f64::NAN, 2.0], &[1.0, 1.0, 1.0]).is_nan());
        assert_eq!(largest(&[1.0, -3.0, f64::INFINITY, f64::NAN]), 3.0);
        assert_within("special", &[f64::NAN, f64::INFINITY][..], &[f64::NAN, f64::INFINITY][..], 0.0);
        let is_nan_caught =
            std::panic::catch_unwind(|| assert_close("NaN", &[f64::NAN][..], &[1.0][..], 1.0));
        assert!(is_nan_caught.is_err());
    }
}
