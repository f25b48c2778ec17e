//! Plain text and JSON lines.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rayon::prelude::*;

use super::json::{JsonProblem, integers_under, record_with, text_under};
use super::row::{POSITION, SEGMENTATION, TokenRow};
use super::{Document, Identity};
use crate::damage::DamagedFiles;
use crate::error::{DataError, Result};
use crate::files;
use crate::storage::{Content, FileCompression, Spool, compression_of, read_all, undecodable};
use crate::watch::{Task, Watch};

/// The size of the blocks in which lines are checked.
const BLOCK_BYTES: usize = 4 << 20;
/// Files that stay open between reads. If a dataset has more, each read opens its file.
pub(super) const MAX_OPEN_FILES: usize = 256;

/// Text files with one document each.
#[derive(Debug)]
pub(super) struct FileDocuments {
    paths: Vec<PathBuf>,
}

impl FileDocuments {
    pub(super) fn open(paths: Vec<PathBuf>, identity: &mut Identity, watch: Watch<'_>) -> Result<Self> {
        let indexed = Indexed::new(&paths, watch);
        let checked = paths.par_iter().map(|path| {
            let text = read_text(path)?;
            indexed.advance(text.len())?;
            Ok((text.len() as u64, crc32c::crc32c(text.as_bytes()), text.trim().is_empty()))
        });
        let checked = checked.collect::<Vec<_>>().into_iter().collect::<Result<Vec<_>>>()?;
        for (path, (length, checksum, _)) in paths.iter().zip(&checked) {
            identity.add(&files::name(path), *length, *checksum);
        }
        // Blank files keep their index. The dataset is empty only if all files are blank.
        let all_blank = checked.iter().all(|(_, _, blank)| *blank);
        Ok(Self { paths: if all_blank { Vec::new() } else { paths } })
    }

    pub(super) fn len(&self) -> u64 {
        self.paths.len() as u64
    }

    pub(super) fn read(&self, index: u64) -> Result<String> {
        read_text(&self.paths[index as usize])
    }

    pub(super) fn place(&self, index: u64) -> String {
        format!("`{}`", self.paths[index as usize].display())
    }
}

fn read_text(path: &Path) -> Result<String> {
    String::from_utf8(read_all(path)?).map(without_mark).map_err(|error| {
        let valid = error.utf8_error().valid_up_to();
        let line = 1 + error.as_bytes()[..valid].iter().filter(|byte| **byte == b'\n').count() as u64;
        DataError::NotUtf8 { path: path.into(), offset: valid as u64, line }
    })
}

/// Some editors start a file with a byte order mark, which belongs neither to the text nor to valid JSON.
fn without_mark(mut text: String) -> String {
    if text.starts_with('\u{feff}') {
        text.drain(..'\u{feff}'.len_utf8());
    }
    text
}

/// The text of a line that is its document.
#[derive(Debug)]
pub(super) enum LineContent {
    /// The whole line, which is plain text.
    Line,
    /// The text under a column of the line's JSON object.
    Text(String),
    /// The line's JSON object, which has these columns.
    Record(Vec<String>),
    /// The token ids under the first of these columns of the line's JSON object, with the segments and positions under
    /// the others, if there are any.
    Tokens([String; 3]),
}

impl LineContent {
    /// Token ids under a column.
    pub(super) fn tokens(column: &str) -> Self {
        Self::Tokens([column.to_owned(), format!("{column}{SEGMENTATION}"), format!("{column}{POSITION}")])
    }

    /// The document of a line, or the column that is wrong and the reason.
    fn of(&self, line: &str) -> Result<Document, (String, JsonProblem)> {
        match self {
            Self::Line => Ok(Document::Text(line.to_owned())),
            Self::Text(column) => match text_under(line, column) {
                Ok(text) => Ok(Document::Text(text)),
                Err(problem) => Err((column.clone(), problem)),
            },
            Self::Record(columns) => record_with(line, columns).map(Document::Text),
            Self::Tokens(columns) => {
                let row = integers_under(line, columns).and_then(|[tokens, segments, positions]| {
                    let row = TokenRow { tokens, segments, positions };
                    row.into_document().map_err(JsonProblem::Row)
                });
                row.map(Document::tokens).map_err(|problem| (columns[0].clone(), problem))
            }
        }
    }

    /// The text that distinguishes datasets of the same files.
    fn identity(&self) -> String {
        match self {
            Self::Line => String::new(),
            Self::Text(column) => column.clone(),
            Self::Record(columns) => columns.join(","),
            Self::Tokens([column, ..]) => format!("tokens {column}"),
        }
    }
}

/// Files with one document per line.
#[derive(Debug)]
pub(super) struct LineDocuments {
    files: Vec<LineFile>,
    /// The index of each file's first document, followed by the number of documents.
    firsts: Vec<u64>,
    content: LineContent,
}

#[derive(Debug)]
struct LineFile {
    content: Content,
    checksum: u32,
    /// The offset of each line that is not blank.
    starts: Vec<u64>,
}

impl LineDocuments {
    /// Whether documents are token ids.
    pub(super) fn holds_tokens(&self) -> bool {
        matches!(self.content, LineContent::Tokens(_))
    }

    pub(super) fn open(
        paths: Vec<PathBuf>,
        content: LineContent,
        identity: &mut Identity,
        (watch, damaged): (Watch<'_>, &DamagedFiles),
    ) -> Result<Self> {
        let indexed = Indexed::new(&paths, watch);
        let (spool, keep_open) = (Arc::<Spool>::default(), paths.len() <= MAX_OPEN_FILES);
        let open = |path| Content::open(path, &spool, keep_open, damaged);
        let skips = damaged.skips();
        let files = paths.into_par_iter().map(|path| index_lines(open(path)?, &content, &indexed, skips));
        let files = files.collect::<Vec<_>>().into_iter().collect::<Result<Vec<_>>>()?;
        let mut firsts = vec![0];
        for file in &files {
            identity.add(&files::name(&file.content.path), file.content.length, file.checksum);
            firsts.push(firsts[firsts.len() - 1] + file.starts.len() as u64);
        }
        identity.add(&content.identity(), 0, 0);
        Ok(Self { files, firsts, content })
    }

    pub(super) fn len(&self) -> u64 {
        self.firsts[self.firsts.len() - 1]
    }

    pub(super) fn read(&self, index: u64) -> Result<Document> {
        let (file, number) = self.locate(index);
        let line = file.read_line(number)?;
        let content = self.content.of(&line.text);
        content.map_err(|problem| json_error(&file.content.path, file.line_number(line.start), problem))
    }

    /// The file and the line of a document, for messages.
    pub(super) fn place(&self, index: u64) -> String {
        let (file, number) = self.locate(index);
        format!("`{}`, line {}", file.content.path.display(), file.line_number(file.starts[number]))
    }

    /// The file of a document, and the document's number in it.
    fn locate(&self, index: u64) -> (&LineFile, usize) {
        let which = self.firsts.partition_point(|first| *first <= index) - 1;
        (&self.files[which], (index - self.firsts[which]) as usize)
    }
}

struct Line {
    start: u64,
    text: String,
}

/// The number of bytes that have been indexed.
struct Indexed<'a> {
    done: AtomicU64,
    /// None if a file is compressed.
    total: Option<u64>,
    watch: Watch<'a>,
}

impl<'a> Indexed<'a> {
    fn new(paths: &[PathBuf], watch: Watch<'a>) -> Self {
        // Opening the file reports the missing size.
        let is_plain =
            |path: &PathBuf| !matches!(compression_of(path), Ok(found) if found != FileCompression::None);
        let sizes = paths.iter().filter_map(|path| fs::metadata(path).ok()).map(|file| file.len());
        let total = paths.iter().all(is_plain).then(|| sizes.sum());
        Self { done: AtomicU64::new(0), total, watch }
    }

    fn advance(&self, bytes: usize) -> Result<()> {
        let done = self.done.fetch_add(bytes as u64, Ordering::Relaxed) + bytes as u64;
        self.watch.advance(Task::IndexFiles, done, self.total)
    }
}

/// Finds a file's lines, and checks that all are text or JSON objects with the required columns. The error names the
/// first invalid line of the file.
fn index_lines(file: Content, content: &LineContent, indexed: &Indexed<'_>, skips: bool) -> Result<LineFile> {
    let path = &file.path;
    let unreadable = |error| undecodable(path, FileCompression::None, 0, error);
    let mut reader = BufReader::with_capacity(1 << 20, file.reader()?);
    let (mut starts, mut offset, mut checksum, mut number) = (Vec::new(), 0, 0, 0);
    let mut block = Vec::new();
    // The offsets of line ends in the block.
    let mut ends = Vec::new();
    loop {
        block.clear();
        ends.clear();
        while block.len() < BLOCK_BYTES && reader.read_until(b'\n', &mut block).map_err(unreadable)? > 0 {
            ends.push(block.len());
        }
        if block.is_empty() {
            break;
        }
        checksum = crc32c::crc32c_append(checksum, &block);
        let line_at = |index: usize| (index.checked_sub(1).map_or(0, |before| ends[before]), ends[index]);
        let check = |index: usize| -> Result<Option<u64>> {
            let (start, end) = line_at(index);
            let (at, line) = (offset + start as u64, number + index as u64 + 1);
            let text = std::str::from_utf8(&block[start..end]).map_err(|error| {
                let offset = at + error.valid_up_to() as u64;
                DataError::NotUtf8 { path: path.clone(), offset, line }
            })?;
            if text.trim().is_empty() {
                return Ok(None);
            }
            if !matches!(content, LineContent::Line) {
                let text = text.strip_prefix('\u{feff}').filter(|_| at == 0).unwrap_or(text);
                let content = content.of(text.trim_end_matches(['\r', '\n']));
                content.map_err(|problem| json_error(path, line, problem))?;
            }
            Ok(Some(at))
        };
        // The results are visited in order, so that the error names the first invalid line.
        for (index, start) in
            (0..ends.len()).into_par_iter().map(check).collect::<Vec<_>>().into_iter().enumerate()
        {
            match start {
                Ok(start) => starts.extend(start),
                // The line is a document whose reading fails.
                Err(error) if skips && error.is_of_document() => {
                    starts.push(offset + line_at(index).0 as u64)
                }
                Err(error) => return Err(error),
            }
        }
        offset += block.len() as u64;
        number += ends.len() as u64;
        indexed.advance(block.len())?;
    }
    drop(reader);
    Ok(LineFile { content: file, checksum, starts })
}

impl LineFile {
    fn read_line(&self, index: usize) -> Result<Line> {
        let start = self.starts[index];
        let end = self.starts.get(index + 1).copied().unwrap_or(self.content.length);
        let mut bytes = vec![0; (end - start) as usize];
        self.content.read_exact_at(&mut bytes, start)?;
        // The bytes may include blank lines after this line.
        if let Some(newline) = bytes.iter().position(|byte| *byte == b'\n') {
            bytes.truncate(newline);
        }
        if bytes.last() == Some(&b'\r') {
            bytes.pop();
        }
        let text = String::from_utf8(bytes).map_err(|error| DataError::NotUtf8 {
            path: self.content.path.clone(),
            offset: start + error.utf8_error().valid_up_to() as u64,
            line: self.line_number(start),
        })?;
        Ok(Line { start, text: if start == 0 { without_mark(text) } else { text } })
    }

    /// The number of the line that starts at `offset`. It is counted only for messages.
    fn line_number(&self, offset: u64) -> u64 {
        let Ok(file) = self.content.reader() else { return 0 };
        let mut reader = BufReader::new(std::io::Read::take(file, offset));
        let mut number = 1;
        loop {
            let chunk = match reader.fill_buf() {
                Ok(chunk) if !chunk.is_empty() => chunk,
                _ => return number,
            };
            number += chunk.iter().filter(|byte| **byte == b'\n').count() as u64;
            let length = chunk.len();
            reader.consume(length);
        }
    }
}

fn json_error(path: &Path, line: u64, (column, problem): (String, JsonProblem)) -> DataError {
    let (path, place) = (path.to_path_buf(), format!(", line {line}"));
    match problem {
        JsonProblem::Syntax(reason) => DataError::Json { path, line, reason },
        JsonProblem::Missing(available) => DataError::MissingColumn { path, place, column, available },
        JsonProblem::Row(reason) => DataError::Json { path, line, reason },
        JsonProblem::Type(found) => {
            let expected = if found.starts_with("no list") { "token ids" } else { "text" };
            DataError::ColumnType { path, place, column, found: found.into(), expected }
        }
    }
}
