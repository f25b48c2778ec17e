//! The iterator that packs documents into batches.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use crate::batch::{Batch, TextRows};
use crate::error::{DataError, Result};
use crate::options::{DatasetOptions, Examples, Packing, Remainder, Targets};
use crate::packing::{Piece, Row, best_fit, num_pairs, window_rows};
use crate::random::{key, mix};
use crate::reader::DocumentReader;
use crate::source::Dataset;
use crate::state::{IteratorState, STATE_VERSION};
use crate::tokenizer::{EncodedDocument, Tokenizer};
use crate::watch::Watch;

/// Rows that first-fit packing fills at the same time. The meaning of a saved state depends on this number, so it is
/// fixed and independent of the batch size.
const OPEN_ROWS: usize = 64;

/// Batches of a dataset. Their order is a function of the options.
///
/// Every host packs the rows of all hosts and keeps its own. The first token of a row depends on the lengths of all
/// earlier documents, so the state is a single position, the same for every number of hosts. Without packing and with
/// long documents cut, each row is one document, and a host reads only its own documents.
#[derive(Debug)]
pub struct TrainIterator {
    dataset: Arc<Dataset>,
    options: DatasetOptions,
    reader: DocumentReader,
    fingerprint: BTreeMap<String, String>,
    pad: i32,
    /// The next document, and the number of its positions that have been used.
    cursor: Cursor,
    /// The rows that were filled together and wait for their batch, the cursor at which the first of them starts, and
    /// the number of rows already taken.
    open: VecDeque<Row>,
    open_start: Cursor,
    open_used: u64,
    rows: u64,
    /// The number of successive documents without a token to predict.
    barren: u64,
    /// The state after the last batch that was returned.
    state: IteratorState,
    ended: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Cursor {
    example: u64,
    token: usize,
}

impl TrainIterator {
    /// Opens the source of the options and starts at its beginning. A synthetic source needs no tokenizer.
    ///
    /// # Errors
    /// As [`Dataset::open`]; contradictory options.
    pub fn open(options: DatasetOptions, tokenizer: Option<Arc<Tokenizer>>) -> Result<Self> {
        options.check()?;
        let dataset = Arc::new(Dataset::open_with(&options.source, Watch::silent(), options.damage.skips())?);
        Self::new(dataset, options, tokenizer)
    }

    /// Starts at the beginning of an open dataset.
    ///
    /// # Errors
    /// Contradictory options.
    pub fn new(
        dataset: Arc<Dataset>,
        options: DatasetOptions,
        tokenizer: Option<Arc<Tokenizer>>,
    ) -> Result<Self> {
        options.check()?;
        if tokenizer.is_none() && dataset.needs_tokenizer() {
            return Err(DataError::Options(format!("the documents of {} need a tokenizer", dataset.name())));
        }
        let fingerprint = fingerprint(&dataset, &options, tokenizer.as_deref());
        // Padding is masked, so any token of the model's vocabulary serves.
        let known = |pad: &i32| options.vocab_size.is_none_or(|size| (*pad as usize) < size);
        let pad = tokenizer.as_ref().map(|tokenizer| tokenizer.pad_id() as i32).filter(known).unwrap_or(0);
        let reader = DocumentReader::new(dataset.clone(), tokenizer, &options)?;
        let state = IteratorState {
            version: STATE_VERSION,
            epoch: 0,
            document: 0,
            token: 0,
            skip_rows: 0,
            rows: 0,
            fingerprint: fingerprint.clone(),
        };
        Ok(Self {
            dataset,
            options,
            reader,
            fingerprint,
            pad,
            cursor: Cursor::default(),
            open: VecDeque::new(),
            open_start: Cursor::default(),
            open_used: 0,
            rows: 0,
            barren: 0,
            state,
            ended: false,
        })
    }

    /// The dataset of this iterator.
    pub fn dataset(&self) -> &Arc<Dataset> {
        &self.dataset
    }

    /// Sets the number of rows, on all hosts together, of the following batches. The data position does not depend on
    /// it.
    ///
    /// # Errors
    /// The hosts cannot share the rows equally.
    pub fn set_batch_rows(&mut self, rows: usize) -> Result<()> {
        self.options.batch_rows = rows;
        self.options.check()
    }

    /// The next batch, or `None` after the last epoch.
    ///
    /// # Errors
    /// A document cannot be read or tokenized; the dataset has no token to predict or, in training, does not fill one
    /// batch. After an error the iterator must be restored or dropped.
    #[allow(
        clippy::should_implement_trait,
        reason = "an iterator's item would have the result the wrong way round"
    )]
    pub fn next(&mut self) -> Result<Option<Batch>> {
        if self.ended {
            return Ok(None);
        }
        let mine = self.local_rows();
        let (examples, length) = (self.options.examples, self.options.length);
        let mut batch = TextRows::padding(mine.len(), examples.sequences(), length, self.pad);
        if examples.have_labels() {
            batch = batch.with_labels();
        }
        let first = self.rows;
        for index in 0..self.options.batch_rows {
            let Some(row) = self.next_row(first)? else { break };
            self.rows += 1;
            if mine.contains(&index) {
                row.write(&mut batch, index - mine.start);
            }
        }
        let produced = (self.rows - first) as usize;
        if produced < self.options.batch_rows {
            self.ended = true;
            self.explain_shortage(first)?;
            if produced == 0 || self.options.remainder == Remainder::Drop {
                return Ok(None);
            }
        }
        self.state = self.current_state();
        Ok(Some(batch.into_batch()))
    }

    /// The number of examples that have been read so far, some of which wait in rows under construction.
    pub fn examples_read(&self) -> u64 {
        self.cursor.example
    }

    /// The state after the last batch that [`TrainIterator::next`] returned. An iterator that is restored from it
    /// continues with the next batch.
    pub fn state(&self) -> IteratorState {
        self.state.clone()
    }

    /// Moves to a saved state.
    ///
    /// # Errors
    /// The state belongs to another dataset, tokenizer, seed or packing, which the error names, or is damaged.
    pub fn restore(&mut self, state: &IteratorState) -> Result<()> {
        state.check(&self.fingerprint)?;
        let size = self.dataset.epoch_size();
        let example = (state.document < size)
            .then_some(())
            .and_then(|()| state.epoch.checked_mul(size)?.checked_add(state.document))
            .ok_or_else(|| {
                let reason =
                    format!("it points at document {} of {size} in epoch {}", state.document, state.epoch);
                DataError::StateDamaged { reason }
            })?;
        self.cursor = Cursor { example, token: state.token as usize };
        self.open.clear();
        self.open_used = 0;
        self.rows = state.rows;
        self.barren = 0;
        self.ended = false;
        if state.skip_rows > 0 {
            self.fill_open_rows()?;
            if state.skip_rows >= self.open.len() as u64 {
                let reason = format!("it skips {} of {} rows", state.skip_rows, self.open.len());
                return Err(DataError::StateDamaged { reason });
            }
            self.open.drain(..state.skip_rows as usize);
            self.open_used = state.skip_rows;
        }
        self.state = state.clone();
        Ok(())
    }

    /// This host's rows of the global batch.
    fn local_rows(&self) -> Range<usize> {
        let count = self.options.batch_rows / self.options.num_hosts;
        self.options.host_index * count..(self.options.host_index + 1) * count
    }

    fn current_state(&self) -> IteratorState {
        let (cursor, skip_rows) =
            if self.open.is_empty() { (self.cursor, 0) } else { (self.open_start, self.open_used) };
        let size = self.dataset.epoch_size();
        IteratorState {
            version: STATE_VERSION,
            epoch: cursor.example / size,
            document: cursor.example % size,
            token: cursor.token as u64,
            skip_rows,
            rows: self.rows,
            fingerprint: self.fingerprint.clone(),
        }
    }

    /// Reports data that ends before the first full batch, because that is a mistake of the user. `first` is the number
    /// of rows before the incomplete batch; it is positive if earlier, smaller batches were full.
    fn explain_shortage(&self, first: u64) -> Result<()> {
        let dataset = self.dataset.name().to_string();
        if self.rows == 0 {
            return Err(DataError::NoTokens { dataset, documents: self.dataset.num_documents() });
        }
        if self.options.remainder == Remainder::Drop && first == 0 {
            let (batch_rows, length) = (self.options.batch_rows, self.options.length);
            return Err(DataError::TooSmall { dataset, rows: self.rows, batch_rows, length });
        }
        Ok(())
    }

    /// The next row of the global batch that begins with row `batch_start`.
    fn next_row(&mut self, batch_start: u64) -> Result<Option<Row>> {
        if let Some(vocab_size) = self.dataset.synthetic_vocab_size() {
            return Ok(Some(self.synthetic_row(vocab_size)));
        }
        match self.options.packing {
            Packing::Off if self.options.drops_long_ends() => self.single_row(batch_start),
            Packing::Off => self.piece_row(),
            Packing::ConcatThenSplit => self.cut_row(),
            Packing::FirstFit | Packing::BestFit => {
                if self.open.is_empty() {
                    self.fill_open_rows()?;
                }
                self.open_used += 1;
                Ok(self.open.pop_front())
            }
        }
    }

    /// Random tokens. The answers of preference data, in every other row a desirable one, are the second half. The last
    /// token of a row has its only reward.
    fn synthetic_row(&self, vocab_size: usize) -> Row {
        let row_key = key(&[self.options.seed, self.rows]);
        let length = self.options.length;
        let examples = self.options.examples;
        let is_preference = examples != Examples::Documents;
        let has_rewards = matches!(examples, Examples::RankedAnswers | Examples::JudgedSteps);
        let answer = if is_preference { length.div_ceil(2) } else { 0 };
        let piece = |sequence: u64| {
            let token = |column: usize| {
                let own = if column >= answer && sequence > 0 { mix(row_key ^ sequence) } else { row_key };
                (mix(own ^ mix(column as u64)) % vocab_size as u64) as i32
            };
            let num_marked = if is_preference { length } else { 0 };
            Piece {
                tokens: (0..=length).map(token).collect(),
                has_loss: (1..=num_marked)
                    .map(|column| if has_rewards { column == length } else { column >= answer })
                    .collect(),
                classes: match examples {
                    Examples::JudgedSteps => vec![(self.rows % 2) as i32; length],
                    _ => Vec::new(),
                },
                ..Piece::default()
            }
        };
        let second = (examples.sequences() == 2).then(|| piece(1));
        let label = if examples == Examples::JudgedAnswers { (self.rows % 2) as f32 } else { 0.0 };
        Row { filled: length, bytes: 0, segments: vec![piece(0)], second, label }
    }

    /// A row of one truncated document. Documents of other hosts are counted but not read.
    fn single_row(&mut self, batch_start: u64) -> Result<Option<Row>> {
        let example = self.cursor.example;
        if self.reader.is_past_end(example) {
            return Ok(None);
        }
        let (mine, batch_rows) = (self.local_rows(), self.options.batch_rows as u64);
        // Each row is one example, so both are counted from the start of this batch.
        let batch_example = example - (self.rows - batch_start);
        let wanted = |example: u64| mine.contains(&(((example - batch_example) % batch_rows) as usize));
        let mut row = Row::default();
        let mut is_barren = false;
        if wanted(example)
            && let Some(document) = self.reader.document(example, wanted)?
        {
            let count = num_pairs(document).min(self.options.length);
            is_barren = count == 0;
            if count > 0 {
                row.push(document, 0, count);
                self.barren = 0;
            }
        }
        self.advance(is_barren)?;
        Ok(Some(row))
    }

    /// The next piece of a document that does not share its row.
    fn piece_row(&mut self) -> Result<Option<Row>> {
        let mut row = Row::default();
        let piece = self.next_piece(self.options.length, |document, start, count| {
            row.push(document, start, count);
        })?;
        let Some((count, rest)) = piece else { return Ok(None) };
        self.consume(count, rest)?;
        Ok(Some(row))
    }

    /// The next `length` positions of the stream of documents.
    fn cut_row(&mut self) -> Result<Option<Row>> {
        let mut row = Row::default();
        let max_segments = self.options.max_segments.unwrap_or(usize::MAX);
        while row.filled < self.options.length && row.segments.len() < max_segments {
            let Some((count, rest)) =
                self.next_piece(self.options.length - row.filled, |document, start, count| {
                    row.push(document, start, count);
                })?
            else {
                break;
            };
            self.consume(count, rest)?;
        }
        Ok((row.filled > 0).then_some(row))
    }

    fn fill_open_rows(&mut self) -> Result<()> {
        self.open_start = self.cursor;
        self.open_used = 0;
        match self.options.packing {
            Packing::BestFit => self.fill_best(),
            _ => self.fill_first(),
        }
    }

    /// Collects documents for a window of rows, and places the longest first.
    fn fill_best(&mut self) -> Result<()> {
        let length = self.options.length;
        let capacity = window_rows(length) * length;
        let (mut pieces, mut filled) = (Vec::new(), 0);
        while filled < capacity
            && let Some((count, rest)) = self.next_piece(length, |document, start, count| {
                let mut row = Row::default();
                row.push(document, start, count);
                pieces.push(row);
            })?
        {
            filled += count;
            self.consume(count, rest)?;
        }
        let start = self.open_start;
        let order =
            self.options.shuffle.then(|| key(&[self.options.seed, start.example, start.token as u64]));
        self.open = best_fit(pieces, length, self.options.max_segments, order).into();
        Ok(())
    }

    /// Fills rows with documents until a document fits in no row.
    fn fill_first(&mut self) -> Result<()> {
        let (length, max_segments) = (self.options.length, self.options.max_segments.unwrap_or(usize::MAX));
        let mut rows: Vec<Row> = Vec::new();
        loop {
            let mut placed = true;
            let Some((count, rest)) = self.next_piece(length, |document, start, count| {
                let fits = |row: &Row| row.filled + count <= length && row.segments.len() < max_segments;
                if let Some(row) = rows.iter_mut().find(|row| fits(row)) {
                    row.push(document, start, count);
                } else if rows.len() < OPEN_ROWS {
                    let mut row = Row::default();
                    row.push(document, start, count);
                    rows.push(row);
                } else {
                    placed = false;
                }
            })?
            else {
                break;
            };
            if !placed {
                break;
            }
            self.consume(count, rest)?;
        }
        self.open = rows.into();
        Ok(())
    }

    /// Passes at most `room` positions of the document at the cursor to `place`, and skips documents that have no
    /// position. Returns the number of passed positions and of those that are left in the document.
    fn next_piece(
        &mut self,
        room: usize,
        place: impl FnOnce(&EncodedDocument, usize, usize),
    ) -> Result<Option<(usize, usize)>> {
        loop {
            let Some(document) = self.reader.document(self.cursor.example, |_| true)? else {
                return Ok(None);
            };
            let most = if self.options.drops_long_ends() { self.options.length } else { usize::MAX };
            let (pairs, token) = (num_pairs(document).min(most), self.cursor.token);
            if token > 0 && token >= pairs {
                let reason = format!("it points at token {token} of a document of {}", document.tokens.len());
                return Err(DataError::StateDamaged { reason });
            }
            if pairs > 0 {
                let count = room.min(pairs - token);
                place(document, token, count);
                return Ok(Some((count, pairs - token - count)));
            }
            self.advance(true)?;
        }
    }

    /// Moves past `count` positions of the document at the cursor, after which `rest` are left.
    fn consume(&mut self, count: usize, rest: usize) -> Result<()> {
        self.barren = 0;
        if rest == 0 {
            return self.advance(false);
        }
        self.cursor.token += count;
        Ok(())
    }

    /// Moves to the next document. Fails if a whole epoch has no token to predict, because the search would not end.
    fn advance(&mut self, is_barren: bool) -> Result<()> {
        self.cursor = Cursor { example: self.cursor.example + 1, token: 0 };
        self.barren += u64::from(is_barren);
        let documents = self.dataset.longest_epoch();
        // The end of one epoch and the start of the next may be barren in succession. So only two successive barren
        // epochs, or a barren first epoch, prove that no document has a token.
        if self.barren / 2 >= documents || (self.barren == documents && self.cursor.example == documents) {
            // If rows are documents, a host reads only its own documents, and these may be empty in every epoch.
            if self.options.packing == Packing::Off
                && self.options.num_hosts > 1
                && self.an_epoch_has_tokens()?
            {
                self.barren = 0;
                return Ok(());
            }
            return Err(DataError::NoTokens { dataset: self.dataset.name().into(), documents });
        }
        Ok(())
    }

    /// Whether any document of any host has a token to predict, within one epoch's number of documents from the cursor
    /// on.
    fn an_epoch_has_tokens(&mut self) -> Result<bool> {
        let first = self.cursor.example;
        for example in first..first + self.dataset.longest_epoch() {
            match self.reader.document(example, |_| true)? {
                Some(document) if num_pairs(document) > 0 => return Ok(true),
                Some(_) => {}
                // The last epoch ends, and the remaining rows are padding.
                None => return Ok(true),
            }
        }
        Ok(false)
    }
}

/// The settings on which a state depends. The numbers of hosts, threads, epochs and rows in a batch, and the remainder,
/// are not included: they change how far the data is read, not its order.
fn fingerprint(
    dataset: &Dataset,
    options: &DatasetOptions,
    tokenizer: Option<&Tokenizer>,
) -> BTreeMap<String, String> {
    let packing = match (options.packing, options.drops_long_ends()) {
        (Packing::Off, true) => "off",
        (Packing::Off, false) => "off with long documents in several rows",
        (Packing::ConcatThenSplit, false) => "concat_then_split",
        (Packing::ConcatThenSplit, true) => "concat_then_split of cut documents",
        (Packing::BestFit, false) => "best_fit",
        (Packing::BestFit, true) => "best_fit of cut documents",
        (Packing::FirstFit, false) => "first_fit",
        (Packing::FirstFit, true) => "first_fit of cut documents",
    };
    let segments = options.max_segments.map_or("any number".into(), |segments| segments.to_string());
    let is_synthetic = dataset.synthetic_vocab_size().is_some();
    let order = match options.shuffle {
        _ if is_synthetic => format!("seed {}", options.seed),
        true => format!("shuffled with seed {}", options.seed),
        false => "as in the files".into(),
    };
    let mut properties = vec![
        ("the dataset", dataset.fingerprint().to_string()),
        ("the order of the documents", order),
        ("the length of a row", options.length.to_string()),
    ];
    if let Some(mixture) = dataset.mixture_description() {
        properties.push(("the mixture", mixture));
    }
    if !is_synthetic && !dataset.needs_tokenizer() {
        properties.push(("the packing", format!("{packing}, {segments} of segments in a row")));
    } else if let Some(tokenizer) = tokenizer.filter(|_| !is_synthetic) {
        properties.push(("the tokenizer", tokenizer.fingerprint().into()));
        properties
            .push(("the use of BOS and EOS", format!("BOS {}, EOS {}", options.add_bos, options.add_eos)));
        if !options.trains_eos {
            properties.push(("the loss of EOS", "none".into()));
        }
        if let Some(conversations) = &options.conversations {
            properties.push(("the form of conversations", conversations.fingerprint()));
        }
        if options.targets == Targets::All {
            properties.push(("the targets", "all tokens of a document".into()));
        }
        properties.push(("the packing", format!("{packing}, {segments} of segments in a row")));
    }
    properties.into_iter().map(|(name, value)| (name.to_string(), value)).collect()
}
