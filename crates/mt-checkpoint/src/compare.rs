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
    /// Arrays of the right shape but another element type.
    pub wrong_dtype: Vec<Difference>,
}

impl Comparison {
    pub(crate) fn new<'s>(
        checkpoint: PathBuf,
        stored: impl Iterator<Item = (&'s str, DType, &'s [usize])>,
        expected: &[ExpectedArray],
    ) -> Self {
        let mut unexpected = Vec::new();
        let mut found = HashMap::new();
        let by_name: HashMap<&str, &ExpectedArray> =
            expected.iter().map(|array| (array.name.as_str(), array)).collect();
        for (name, dtype, dims) in stored {
            if by_name.contains_key(name) {
                found.insert(name, (dtype, dims));
            } else {
                unexpected.push(name.to_owned());
            }
        }
        let mut comparison =
            Self { checkpoint, missing: vec![], unexpected, wrong_shape: vec![], wrong_dtype: vec![] };
        for array in expected {
            let Some(&(found_dtype, dims)) = found.get(array.name.as_str()) else {
                comparison.missing.push(array.clone());
                continue;
            };
            let difference =
                || Difference { expected: array.clone(), found_dtype, found_dims: dims.to_vec() };
            if dims != array.dims {
                comparison.wrong_shape.push(difference());
            } else if found_dtype != array.dtype {
                comparison.wrong_dtype.push(difference());
            }
        }
        comparison
    }

    /// Whether names and shapes agree; element types may be converted.
    pub fn fits(&self) -> bool {
        self.missing.is_empty() && self.unexpected.is_empty() && self.wrong_shape.is_empty()
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
        let renamed = !self.missing.is_empty() && !self.unexpected.is_empty();
        f.write_str(if !self.wrong_shape.is_empty() {
            "\nhint: use the model settings that the checkpoint was made with (widths, number of layers, vocabulary)"
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

    fn expected(name: &str, dtype: DType, dims: &[usize]) -> ExpectedArray {
        ExpectedArray { name: name.to_owned(), dtype, dims: dims.to_vec() }
    }

    #[test]
    fn every_difference_is_listed_once() {
        let stored: [(&str, DType, &[usize]); 4] = [
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
        let comparison = Comparison::new("run".into(), stored.into_iter(), &wanted);
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
            let stored: [(&str, DType, &[usize]); 1] = [("half", DType::BF16, &[4])];
            Comparison::new("run".into(), stored.into_iter(), &[expected("half", DType::F32, &[4])])
        };
        assert!(compare().check().is_ok());
        assert!(compare().check_exactly().is_err());
    }
}
