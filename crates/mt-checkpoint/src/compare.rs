//! Compares the contents of a checkpoint with a run's expectations.

use std::{collections::HashMap, fmt, path::PathBuf};

use mt_shape::DType;

use crate::error::{CheckpointError, Result};

/// An array that a run expects in a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpectedArray {
    pub name: String,
    pub dtype: DType,
    pub dims: Vec<usize>,
}

/// An array that differs from the expected one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    pub expected: ExpectedArray,
    pub found_dtype: DType,
    pub found_dims: Vec<usize>,
}

/// The differences between a checkpoint and the expected arrays. Its display form is a message for the user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Comparison {
    pub checkpoint: PathBuf,
    pub missing: Vec<ExpectedArray>,
    pub unexpected: Vec<String>,
    pub wrong_shape: Vec<Difference>,
    /// Arrays of the right shape but another element type, which is converted.
    pub wrong_dtype: Vec<Difference>,
    /// Arrays whose element type cannot stand for the expected one, with that type: weights of whole numbers, and weights
    /// in `float64`, in which no checkpoint holds them.
    pub unusable: Vec<(ExpectedArray, String)>,
}

/// A stored leaf that is not empty.
#[derive(Clone, Copy)]
pub(crate) enum StoredType<'s> {
    Array(DType, &'s [usize]),
    /// The name of a type that is not read.
    Other(&'s str),
}

/// Whether stored elements are converted to the expected type.
fn is_converted(stored: DType, expected: DType) -> bool {
    let is_weight = matches!(stored, DType::F32 | DType::BF16 | DType::F16 | DType::F8E4M3FN | DType::F8E5M2);
    let is_count = |dtype| matches!(dtype, DType::I32 | DType::I64);
    stored == expected || (expected.is_float() && is_weight) || (is_count(expected) && is_count(stored))
}

impl Comparison {
    pub(crate) fn new<'s>(
        checkpoint: PathBuf,
        stored: impl Iterator<Item = (&'s str, StoredType<'s>)>,
        expected: &[ExpectedArray],
    ) -> Self {
        let mut unexpected = Vec::new();
        let mut found = HashMap::new();
        let by_name: HashMap<&str, &ExpectedArray> =
            expected.iter().map(|array| (array.name.as_str(), array)).collect();
        for (name, stored) in stored {
            if by_name.contains_key(name) {
                found.insert(name, stored);
            } else if let StoredType::Array(..) = stored {
                unexpected.push(name.to_owned());
            }
        }
        let mut comparison = Self {
            checkpoint,
            missing: vec![],
            unexpected,
            wrong_shape: vec![],
            wrong_dtype: vec![],
            unusable: vec![],
        };
        for array in expected {
            let (found_dtype, dims) = match found.get(array.name.as_str()) {
                Some(StoredType::Array(dtype, dims)) => (*dtype, *dims),
                Some(StoredType::Other(kind)) => {
                    comparison.unusable.push((array.clone(), (*kind).to_owned()));
                    continue;
                }
                None => {
                    comparison.missing.push(array.clone());
                    continue;
                }
            };
            let difference =
                || Difference { expected: array.clone(), found_dtype, found_dims: dims.to_vec() };
            if dims != array.dims {
                comparison.wrong_shape.push(difference());
            } else if !is_converted(found_dtype, array.dtype) {
                comparison.unusable.push((array.clone(), found_dtype.to_string()));
            } else if found_dtype != array.dtype {
                comparison.wrong_dtype.push(difference());
            }
        }
        comparison
    }

    /// Whether names and shapes agree, and element types agree or are converted.
    pub fn fits(&self) -> bool {
        self.missing.is_empty()
            && self.unexpected.is_empty()
            && self.wrong_shape.is_empty()
            && self.unusable.is_empty()
    }

    /// # Errors
    /// Names or shapes differ. The error lists all differences.
    pub fn check(self) -> Result<()> {
        if self.fits() { Ok(()) } else { Err(CheckpointError::Mismatch(Box::new(self))) }
    }

    /// # Errors
    /// Names, shapes or element types differ. The error lists all differences.
    pub fn check_exactly(self) -> Result<()> {
        if self.fits() && self.wrong_dtype.is_empty() {
            return Ok(());
        }
        Err(CheckpointError::Mismatch(Box::new(self)))
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "checkpoint `{}` does not fit this run's model", self.checkpoint.display())?;
        let missing = |array: &ExpectedArray| format!("`{}`, {}{:?}", array.name, array.dtype, array.dims);
        let different = |array: &Difference| {
            let Difference { expected: ExpectedArray { name, dtype, dims }, found_dtype, found_dims } = array;
            format!("`{name}`: stored {found_dtype}{found_dims:?}, expected {dtype}{dims:?}")
        };
        section(f, "missing in the checkpoint", self.missing.iter().map(missing))?;
        section(f, "unexpected in the checkpoint", self.unexpected.iter().map(|name| format!("`{name}`")))?;
        section(f, "of another shape", self.wrong_shape.iter().map(different))?;
        section(f, "of another element type", self.wrong_dtype.iter().map(different))?;
        let unusable = |(array, found): &(ExpectedArray, String)| {
            format!("`{}`: stored {found}, expected {}", array.name, array.dtype)
        };
        section(f, "of an element type that cannot be used", self.unusable.iter().map(unusable))?;
        let renamed = !self.missing.is_empty() && !self.unexpected.is_empty();
        f.write_str(if !self.wrong_shape.is_empty() {
            "\nhint: use the model settings that the checkpoint was made with (widths, number of layers, vocabulary)"
        } else if self.missing.is_empty() && self.unexpected.is_empty() && !self.unusable.is_empty() {
            "\nhint: save weights in `float32`, `bfloat16` or `float16`, and counts in `int32`"
        } else if renamed {
            "\nhint: use the model settings that the checkpoint was made with (`decoder_block`, number of layers, `scan_layers`)"
        } else {
            "\nhint: use the model and optimizer settings that the checkpoint was made with"
        })
    }
}

/// Lists the first few lines of a kind of difference.
fn section(
    f: &mut fmt::Formatter<'_>,
    title: &str,
    lines: impl ExactSizeIterator<Item = String>,
) -> fmt::Result {
    const SHOWN: usize = 12;
    let total = lines.len();
    if total == 0 {
        return Ok(());
    }
    write!(f, "\n  {title} ({total}):")?;
    for line in lines.take(SHOWN) {
        write!(f, "\n    {line}")?;
    }
    if total > SHOWN {
        write!(f, "\n    and {} more", total - SHOWN)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compared(stored: &[(&'static str, DType, &'static [usize])], wanted: &[ExpectedArray]) -> Comparison {
        let stored = stored.iter().map(|(name, dtype, dims)| (*name, StoredType::Array(*dtype, dims)));
        Comparison::new("run".into(), stored, wanted)
    }

    fn expected(name: &str, dtype: DType, dims: &[usize]) -> ExpectedArray {
        ExpectedArray { name: name.to_owned(), dtype, dims: dims.to_vec() }
    }

    #[test]
    fn every_difference_is_listed_once() {
        let stored: [(&'static str, DType, &'static [usize]); 4] = [
            ("same", DType::F32, &[2]),
            ("wide", DType::F32, &[2, 3]),
            ("half", DType::BF16, &[4]),
            ("extra", DType::F32, &[]),
        ];
        let wanted = [
            expected("same", DType::F32, &[2]),
            expected("wide", DType::F32, &[2, 4]),
            expected("half", DType::F32, &[4]),
            expected("lost", DType::I32, &[1]),
        ];
        let comparison = compared(&stored, &wanted);
        assert!(!comparison.fits());
        assert_eq!(
            comparison.to_string(),
            "checkpoint `run` does not fit this run's model\n  \
             missing in the checkpoint (1):\n    `lost`, int32[1]\n  \
             unexpected in the checkpoint (1):\n    `extra`\n  \
             of another shape (1):\n    `wide`: stored float32[2, 3], expected float32[2, 4]\n  \
             of another element type (1):\n    `half`: stored bfloat16[4], expected float32[4]\n\
             hint: use the model settings that the checkpoint was made with (widths, number of layers, vocabulary)"
        );
        assert!(comparison.check().unwrap_err().is_user_error());
    }

    #[test]
    fn element_types_count_only_where_the_state_must_be_exact() {
        let compare = || {
            let stored: [(&'static str, DType, &'static [usize]); 1] = [("half", DType::BF16, &[4])];
            compared(&stored, &[expected("half", DType::F32, &[4])])
        };
        assert!(compare().check().is_ok());
        assert!(compare().check_exactly().is_err());
    }

    #[test]
    fn weights_of_other_kinds_of_numbers_are_refused_by_name() {
        for (stored, wanted, fits) in [
            (DType::F16, DType::F32, true),
            (DType::F8E5M2, DType::BF16, true),
            (DType::I64, DType::I32, true),
            (DType::F64, DType::F32, false),
            (DType::I32, DType::F32, false),
            (DType::I8, DType::BF16, false),
            (DType::Bool, DType::F32, false),
            (DType::F32, DType::I32, false),
            (DType::Bool, DType::Bool, true),
            (DType::U8, DType::I32, false),
        ] {
            let comparison = compared(&[("scale", stored, &[4])], &[expected("scale", wanted, &[4])]);
            assert_eq!(comparison.fits(), fits, "{stored} for {wanted}");
            if fits {
                continue;
            }
            let error = comparison.check().unwrap_err();
            let message = error.to_string();
            assert!(error.is_user_error(), "{message}");
            assert!(message.contains(&format!("`scale`: stored {stored}, expected {wanted}")), "{message}");
            assert!(message.contains("hint: save weights in `float32`"), "{message}");
        }
        let other = Comparison::new(
            "run".into(),
            [("scale", StoredType::Other("complex64"))].into_iter(),
            &[expected("scale", DType::F32, &[4])],
        );
        assert!(other.to_string().contains("`scale`: stored complex64, expected float32"), "{other}");
        assert!(other.missing.is_empty() && !other.fits());
    }
}
