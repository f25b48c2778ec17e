//! Lists of integers in columns of parquet files.

use std::path::Path;

use parquet::basic::Type as PhysicalType;
use parquet::column::reader::{ColumnReader, ColumnReaderImpl};
use parquet::data_type::DataType;
use parquet::file::reader::RowGroupReader;
use parquet::schema::types::SchemaDescriptor;

use super::parquet::{READ_ROWS, reason};
use super::row::{POSITION, SEGMENTATION};
use crate::error::{DataError, Result};
use crate::files;

/// The lists of a column of one row group; of a column that does not exist, all lists are empty.
#[derive(Debug, Default)]
pub(super) struct Lists {
    values: Vec<i32>,
    ends: Vec<usize>,
}

impl Lists {
    pub(super) fn list(&self, row: usize) -> &[i32] {
        let Some(end) = self.ends.get(row) else { return &[] };
        let start = row.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.values[start..*end]
    }
}

/// The leaf columns of token ids, and of their segments and positions if the file has such columns.
pub(super) fn token_leaves(
    path: &Path,
    schema: &SchemaDescriptor,
    column: &str,
) -> Result<[Option<usize>; 3]> {
    let leaf_of = |name: &str| -> Result<Option<usize>> {
        let root = |leaf: &str| leaf == name;
        let columns = schema.columns();
        let Some(number) =
            columns.iter().position(|leaf| leaf.path().parts().first().is_some_and(|part| root(part)))
        else {
            return Ok(None);
        };
        let leaf = &columns[number];
        let is_list = leaf.max_rep_level() == 1;
        match leaf.physical_type() {
            PhysicalType::INT32 | PhysicalType::INT64 if is_list => Ok(Some(number)),
            other => Err(DataError::ColumnType {
                path: path.into(),
                place: String::new(),
                column: name.into(),
                found: match (is_list, leaf.max_rep_level()) {
                    (true, _) => format!("lists of values of type {other}"),
                    (false, 0) => format!("single values of type {other}"),
                    (false, _) => "lists of lists".into(),
                },
                expected: "lists of token ids",
            }),
        }
    };
    let tokens = leaf_of(column)?;
    if tokens.is_none() {
        let names: Vec<&str> = schema.root_schema().get_fields().iter().map(|field| field.name()).collect();
        let available = if names.is_empty() { "no column".into() } else { files::quoted(&names) };
        let (path, column) = (path.into(), column.into());
        return Err(DataError::MissingColumn { path, place: String::new(), column, available });
    }
    Ok([tokens, leaf_of(&format!("{column}{SEGMENTATION}"))?, leaf_of(&format!("{column}{POSITION}"))?])
}

/// The `count` lists of a leaf column of a row group.
///
/// # Errors
/// The column cannot be decoded, or holds a null or a number of more than 32 bits.
pub(super) fn decode(group: &dyn RowGroupReader, leaf: usize, count: usize) -> Result<Lists, String> {
    match group.get_column_reader(leaf).map_err(|error| reason(&error))? {
        ColumnReader::Int32ColumnReader(reader) => decode_as(reader, group, leaf, count, Some),
        ColumnReader::Int64ColumnReader(reader) => {
            decode_as(reader, group, leaf, count, |value| i32::try_from(value).ok())
        }
        _ => Err("the file changed since it was opened".into()),
    }
}

fn decode_as<T: DataType>(
    mut reader: ColumnReaderImpl<T>,
    group: &dyn RowGroupReader,
    leaf: usize,
    count: usize,
    narrow: impl Fn(T::T) -> Option<i32>,
) -> Result<Lists, String>
where
    T::T: Copy + std::fmt::Display,
{
    let description = group.metadata().schema_descr().column(leaf);
    let max_level = description.max_def_level();
    let has_nulls = description.self_type().is_optional();
    let name = description.path().parts().first().cloned().unwrap_or_default();
    let mut lists = Lists::default();
    let (mut values, mut definitions, mut repetitions) = (Vec::new(), Vec::new(), Vec::new());
    while lists.ends.len() < count {
        values.clear();
        definitions.clear();
        repetitions.clear();
        let rows = READ_ROWS.min(count - lists.ends.len());
        let levels = (Some(&mut definitions), Some(&mut repetitions));
        let (read, _, _) =
            reader.read_records(rows, levels.0, levels.1, &mut values).map_err(|error| reason(&error))?;
        if read == 0 {
            return Err(format!("column `{name}` has {} rows instead of {count}", lists.ends.len()));
        }
        let mut values = values.iter();
        for (definition, repetition) in definitions.iter().zip(&repetitions) {
            if *repetition == 0 {
                lists.ends.push(lists.values.len());
            }
            let row = lists.ends.len() - 1;
            if *definition == max_level {
                let value = *values.next().ok_or("it has fewer values than rows")?;
                let narrowed = narrow(value).ok_or_else(|| {
                    format!("column `{name}`, row {}: {value} has more than 32 bits", row + 1)
                })?;
                lists.values.push(narrowed);
                lists.ends[row] += 1;
            } else if has_nulls && *definition == max_level - 1 {
                return Err(format!("column `{name}`, row {}: the list holds a null", row + 1));
            }
        }
    }
    match lists.ends.len() == count {
        true => Ok(lists),
        false => Err(format!("column `{name}` has {} rows instead of {count}", lists.ends.len())),
    }
}
