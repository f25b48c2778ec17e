//! The iterator that packs documents into batches.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use crate::batch::{Batch, TextRows};
use crate::error::{DataError, Result};
use crate::options::{DatasetOptions, Packing, Remainder, Targets};
use crate::packing_stream::PackingStream;
use crate::reader::thread_pool;
use crate::row_cache::RowCache;
use crate::source::Dataset;
use crate::state::{IteratorState, STATE_VERSION};
use crate::tokenizer::Tokenizer;
use crate::watch::Watch;

/// Batches of a dataset. Their order is a function of the options.
///
/// The examples are assigned to a fixed number of streams, each of which packs its own. A batch has an equal, contiguous share of
/// rows from each stream, and a host reads only the streams whose rows it feeds. The first token of a row depends on the
/// lengths of all earlier documents of its stream, so the state is one position for each stream, whatever the number of
/// hosts. With one stream, every host packs the rows of all hosts and keeps its own; without packing and with long documents
/// cut, each row is one document, and a host reads only its own documents. Hosts beyond the number of readers read none, and
/// get padding.
#[derive(Debug)]
pub struct TrainIterator {
    dataset: Arc<Dataset>,
    tokenizer: Option<Arc<Tokenizer>>,
    options: Arc<DatasetOptions>,
    fingerprint: BTreeMap<String, String>,
    pad: i32,
    /// The streams that fill rows of this host, by their numbers.
    streams: Vec<(usize, PackingStream)>,
    /// The state after the last batch that was returned.
    state: IteratorState,
    ended: bool,
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
        dataset.report_damage(&options.damage);
        let fingerprint = fingerprint(&dataset, &options, tokenizer.as_deref());
        // Padding is masked, so any token of the model's vocabulary serves.
        let known = |pad: &i32| options.vocab_size.is_none_or(|size| (*pad as usize) < size);
        let pad = tokenizer.as_ref().map(|tokenizer| tokenizer.pad_id() as i32).filter(known).unwrap_or(0);
        let options = Arc::new(options);
        let mut iterator = Self {
            dataset,
            tokenizer,
            fingerprint,
            pad,
            streams: Vec::new(),
            state: IteratorState::of(Vec::new(), options.streams, BTreeMap::new()),
            options,
            ended: false,
        };
        iterator.open_streams()?;
        iterator.state = iterator.current_state();
        Ok(iterator)
    }

    /// Opens the streams that fill rows of this host.
    fn open_streams(&mut self) -> Result<()> {
        let (mine, pool) = (self.local_rows(), thread_pool(&self.options)?);
        let cached = self.cached().map(|root| (root, self.row_properties()));
        for number in 0..self.options.streams {
            let rows = self.rows_of(number);
            if rows.start >= mine.end || mine.start >= rows.end {
                continue;
            }
            let (dataset, tokenizer) = (self.dataset.clone(), self.tokenizer.clone());
            let options = self.options.clone();
            let mut stream = PackingStream::new(dataset, tokenizer, options, number as u64, pool.clone());
            if let Some((root, properties)) = &cached {
                stream.use_cache(RowCache::new(root, properties, number as u64));
            }
            self.streams.push((number, stream));
        }
        Ok(())
    }

    /// The directory of cached rows. Random tokens need none, and a host that does not read the documents of others makes no
    /// whole rows of theirs.
    fn cached(&self) -> Option<PathBuf> {
        let options = &self.options;
        let is_partial = options.packing == Packing::Off && options.readers() > 1;
        let is_synthetic = self.dataset.synthetic_vocab_size().is_some();
        options.row_cache.clone().filter(|_| !is_partial && !is_synthetic)
    }

    /// All that determines the rows.
    fn row_properties(&self) -> BTreeMap<String, String> {
        let options = &self.options;
        let mut properties = self.fingerprint.clone();
        let more = [
            ("epochs", format!("{:?}", options.num_epoch)),
            ("vocabulary", format!("{:?}", options.vocab_size)),
            ("damaged documents", options.damage.skips().to_string()),
            ("examples", format!("{:?}", options.examples)),
            ("version", STATE_VERSION.to_string()),
        ];
        properties.extend(more.map(|(name, value)| (name.to_owned(), value)));
        properties
    }

    /// The rows that the streams of this host have given.
    fn rows(&self) -> u64 {
        self.streams.iter().map(|(_, stream)| stream.rows()).sum()
    }

    /// Whether an incomplete last batch is dropped. With several streams, a host does not know which of the others have ended.
    fn drops_remainder(&self) -> bool {
        self.options.remainder == Remainder::Drop && self.options.streams == 1 && !self.options.continues
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
        let options = DatasetOptions { batch_rows: rows, ..(*self.options).clone() };
        options.check()?;
        self.options = Arc::new(options);
        self.streams.iter_mut().for_each(|(_, stream)| stream.set_options(self.options.clone()));
        Ok(())
    }

    /// The next batch, or `None` after the last epoch, unless padding follows it. A host that does not read gets padding
    /// without end.
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
            return Ok(self.padding_behind_the_end());
        }
        let mine = self.local_rows();
        let first = self.rows();
        let mut batch = self.padding();
        let (mut produced, mut wanted) = (0, 0);
        for index in 0..self.streams.len() {
            let rows = self.rows_of(self.streams[index].0);
            wanted += rows.len();
            let stream = &mut self.streams[index].1;
            let start = stream.rows();
            for place in rows {
                let Some(row) = stream.next_row(start, &mine)? else { break };
                produced += 1;
                if mine.contains(&place) {
                    row.write(&mut batch, place - mine.start);
                }
            }
        }
        // A stream that has ended leaves padding, until all have.
        if produced < wanted && (self.options.streams == 1 || produced == 0) {
            self.ended = true;
            self.explain_shortage(first)?;
            if produced == 0 || self.drops_remainder() {
                return Ok(self.padding_behind_the_end());
            }
        }
        self.state = self.current_state();
        Ok(Some(batch.into_batch()))
    }

    /// Rows of padding, as many as this host has in a batch.
    fn padding(&self) -> TextRows {
        let (examples, length) = (self.options.examples, self.options.length);
        let rows = self.options.batch_rows / self.options.readers();
        let padding = TextRows::padding(rows, examples.sequences(), length, self.pad);
        if examples.have_labels() { padding.with_labels() } else { padding }
    }

    /// The batch that follows the last one, if any.
    fn padding_behind_the_end(&self) -> Option<Batch> {
        self.options.continues.then(|| self.padding().into_batch())
    }

    /// The number of examples that have been read so far, some of which wait in rows under construction.
    pub fn examples_read(&self) -> u64 {
        self.streams.iter().map(|(_, stream)| stream.examples_read()).max().unwrap_or(0)
    }

    /// The state after the last batch that [`TrainIterator::next`] returned. An iterator that is restored from it
    /// continues with the next batch.
    pub fn state(&self) -> IteratorState {
        self.state.clone()
    }

    /// Moves to a saved state, which holds the positions of all streams that this host feeds.
    ///
    /// # Errors
    /// The state belongs to another dataset, tokenizer, seed or packing, which the error names, or is damaged.
    pub fn restore(&mut self, state: &IteratorState) -> Result<()> {
        state.check(&self.fingerprint)?;
        for (number, stream) in &mut self.streams {
            stream.restore(&state.position(*number, self.options.streams)?)?;
        }
        self.ended = false;
        self.state = state.clone();
        Ok(())
    }

    /// This host's rows of the global batch; none if it does not read.
    fn local_rows(&self) -> Range<usize> {
        let rows = self.options.batch_rows;
        let count = rows / self.options.readers();
        let of_host = |host: usize| (host * count).min(rows);
        of_host(self.options.host_index)..of_host(self.options.host_index + 1)
    }

    /// The rows of a batch that a stream fills.
    fn rows_of(&self, stream: usize) -> Range<usize> {
        let count = self.options.batch_rows / self.options.streams;
        stream * count..(stream + 1) * count
    }

    fn current_state(&self) -> IteratorState {
        let positions = self.streams.iter().map(|(number, stream)| (*number, stream.position()));
        IteratorState::of(positions.collect(), self.options.streams, self.fingerprint.clone())
    }

    /// Reports data that ends before the first full batch, because that is a mistake of the user. `first` is the number
    /// of rows before the incomplete batch; it is positive if earlier, smaller batches were full.
    fn explain_shortage(&self, first: u64) -> Result<()> {
        let dataset = self.dataset.name().to_string();
        // The documents may all be in streams of other hosts.
        if self.streams.len() < self.options.streams {
            return Ok(());
        }
        let rows = self.rows();
        if rows == 0 {
            return Err(DataError::NoTokens { dataset, documents: self.dataset.num_documents() });
        }
        if self.drops_remainder() && first == 0 {
            let (batch_rows, length) = (self.options.batch_rows, self.options.length);
            return Err(DataError::TooSmall { dataset, rows, batch_rows, length });
        }
        Ok(())
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
    if options.streams > 1 {
        properties.push(("the number of packing streams", options.streams.to_string()));
    }
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
        if let Some(fim) = &options.fill_in_the_middle {
            properties.push(("the filling of gaps", format!("{fim:?} with seed {}", options.seed)));
        }
        if options.targets == Targets::All {
            properties.push(("the targets", "all tokens of a document".into()));
        }
        properties.push(("the packing", format!("{packing}, {segments} of segments in a row")));
    }
    properties.into_iter().map(|(name, value)| (name.to_string(), value)).collect()
}
