//! OCDBT, TensorStore's database of keys and values in a directory: a B+tree whose root a manifest names.
//!
//! ```text
//! manifest.ocdbt                the settings, and the location of the newest root
//! d/{32 hexadecimal digits}     nodes of the tree, which hold keys, small values and the locations of large values
//! ocdbt.process_0/d/{…}         large values, one after the other, without headers
//! ```
//!
//! `docs/decisions/0098-databases-of-arrays.md` describes what is written and what is read.

mod envelope;
mod format;
mod read;
mod write;

pub(crate) use read::{Database, Location};
pub(crate) use write::{DatabaseWriter, INLINE_BYTES, Placed, process_directory, random_name};

/// The file that makes a directory a database.
pub(crate) const MANIFEST_FILE: &str = "manifest.ocdbt";
/// The directory of data files, in that of the database and in that of each process.
pub(crate) const DATA_DIRECTORY: &str = "d";
