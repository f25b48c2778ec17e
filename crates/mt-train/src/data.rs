//! From the configuration to datasets and tokenizers.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use mt_config::{DataGroup, DatasetType, HfTextUnit, PackingType, TokenizerGroup, tokenizer_directory};
use mt_data::{
    BYTE_LEVEL_SPECIAL_TOKENS, BatchSource, Dataset, DatasetOptions, EvaluationSet, HeldOut, Packing,
    Remainder, Source, Split, TextDocument, Tokenizer, TokenizerKind, TrainIterator, UnigramModel, Watch,
    bits_per_byte, repository_documents, save_documents, train_bpe,
};

use crate::{Observer, TrainError, events};

/// The data of a run.
pub struct RunData {
    pub train: Box<dyn BatchSource>,
    pub evaluation: Option<Box<dyn HeldOut>>,
    /// What to compare a quick start with, where the data is text.
    pub(crate) baseline: Option<Baseline>,
}

/// What a model that only counts tokens would achieve.
pub(crate) struct Baseline {
    dataset: Arc<Dataset>,
    options: DatasetOptions,
    evaluation: Option<EvaluationSet>,
    tokenizer: Option<Arc<Tokenizer>>,
}

impl Baseline {
    /// Bits a byte of the evaluation text under the frequencies of the training tokens.
    pub fn bits_per_byte(&self) -> Result<Option<f64>, TrainError> {
        let (Some(tokenizer), Some(evaluation)) = (&self.tokenizer, &self.evaluation) else {
            return Ok(None);
        };
        let mut model = UnigramModel::new(tokenizer.vocab_size());
        let once = DatasetOptions {
            num_epoch: Some(1),
            shuffle: false,
            remainder: Remainder::Pad,
            ..self.options.clone()
        };
        let mut training = TrainIterator::new(self.dataset.clone(), once, Some(tokenizer.clone()))?;
        while let Some(batch) = training.next()? {
            model.add(batch.counted_targets());
        }
        let (mut tokens, mut bytes) = (Vec::new(), 0);
        for batch in evaluation.batches()? {
            let batch = batch?;
            bytes += batch.target_bytes;
            tokens.extend(batch.counted_targets());
        }
        let num_tokens = tokens.len() as u64;
        Ok(Some(bits_per_byte(model.cross_entropy(tokens), num_tokens, bytes)))
    }
}

/// What the data of a run is made from.
pub struct DataRequest<'a> {
    pub data: &'a DataGroup,
    pub tokenizer: &'a TokenizerGroup,
    pub run_directory: &'a Path,
    /// The clone whose files are the data of `hf_path=repository`.
    pub repository: &'a Path,
    pub rows: usize,
    pub evaluation_rows: usize,
    pub evaluation_steps: Option<u64>,
    pub evaluates: bool,
    /// Where the tokenizer is that comes with the parameters this run begins with, unless another is named.
    pub inherited_tokenizer: Option<PathBuf>,
    /// The run has checkpoints, so that its tokenizer and its copy of the data are its own.
    pub resumes: bool,
    pub observer: &'a Observer,
    /// Receives the progress of long work, and stops it.
    pub watch: Watch<'a>,
}

impl DataRequest<'_> {
    /// Rows of text, packed, with a tokenizer that is made unless the run already has one.
    ///
    /// # Errors
    /// Files or a tokenizer that cannot be read, or that do not fit the model.
    pub fn text(&self) -> Result<RunData, TrainError> {
        if !self.resumes {
            // What an attempt left that never came to a checkpoint.
            for stale in [self.run_directory.join("data"), tokenizer_directory(self.run_directory)] {
                if stale.exists() {
                    std::fs::remove_dir_all(&stale).map_err(TrainError::io("remove", &stale))?;
                }
            }
        }
        let (train, evaluation) = self.sources()?;
        let dataset = Arc::new(Dataset::open_watched(&train, self.watch)?);
        let tokenizer = self.open_tokenizer(&dataset)?;
        let options = |source: Source, rows: usize| DatasetOptions {
            packing: match (self.data.packing, self.data.grain_packing_type) {
                (false, _) => Packing::Off,
                (true, PackingType::FirstFit) => Packing::FirstFit,
                (true, PackingType::ConcatThenSplit) => Packing::ConcatThenSplit,
            },
            drops_long_ends: Some(self.data.drops_long_ends()),
            max_segments: self.data.max_segments_per_seq,
            shuffle: self.data.enable_data_shuffling,
            seed: self.data.data_shuffle_seed,
            num_epoch: self.data.num_epoch,
            add_bos: self.tokenizer.add_bos,
            add_eos: self.tokenizer.add_eos,
            vocab_size: Some(self.data.vocab_size),
            remainder: Remainder::Drop,
            ..DatasetOptions::training(source, self.data.max_target_length, rows)
        };
        let train_options = options(train, self.rows);
        let train = TrainIterator::new(dataset.clone(), train_options.clone(), tokenizer.clone())?;
        let evaluation = evaluation
            .filter(|_| self.evaluates)
            .map(|source| {
                EvaluationSet::open(
                    options(source, self.evaluation_rows),
                    tokenizer.clone(),
                    self.evaluation_steps,
                )
            })
            .transpose()?;
        let baseline =
            Baseline { dataset, options: train_options, evaluation: evaluation.clone(), tokenizer };
        let evaluation = evaluation.map(|set| -> Box<dyn HeldOut> { Box::new(set) });
        Ok(RunData { train: Box::new(train), evaluation, baseline: Some(baseline) })
    }

    fn sources(&self) -> Result<(Source, Option<Source>), TrainError> {
        let data = self.data;
        if data.dataset_type == DatasetType::Synthetic {
            let source = Source::Synthetic { vocab_size: data.vocab_size };
            return Ok((source.clone(), Some(source)));
        }
        if data.is_repository() {
            let train = self.repository_split(Split::Train, "train.jsonl")?;
            return Ok((train, Some(self.repository_split(Split::Evaluation, "evaluation.jsonl")?)));
        }
        let source = |files: Vec<String>, columns: &[String]| {
            let column = columns.first().cloned().unwrap_or_default();
            match data.hf_path.as_deref() {
                Some("json") => Source::JsonLines { files, column },
                Some("parquet") => Source::Parquet { files, column },
                _ => Source::Text {
                    files,
                    document: match data.hf_text_unit {
                        HfTextUnit::File => TextDocument::File,
                        HfTextUnit::Line => TextDocument::Line,
                    },
                },
            }
        };
        let train = source(data.train_patterns(), &data.train_data_columns);
        let evaluation = data.eval_patterns();
        let evaluation = (!evaluation.is_empty()).then(|| source(evaluation, &data.eval_data_columns));
        Ok((train, evaluation))
    }

    /// The files of a repository change as one works in it; a run keeps those that it started with.
    fn repository_split(&self, split: Split, name: &str) -> Result<Source, TrainError> {
        let directory = self.run_directory.join("data");
        let file = directory.join(name);
        if !file.is_file() {
            std::fs::create_dir_all(&directory).map_err(TrainError::io("create", &directory))?;
            save_documents(&file, &repository_documents(self.repository, split)?)?;
        }
        Ok(Source::JsonLines { files: vec![file.to_string_lossy().into_owned()], column: "text".to_owned() })
    }

    fn open_tokenizer(&self, train: &Dataset) -> Result<Option<Arc<Tokenizer>>, TrainError> {
        if self.data.dataset_type == DatasetType::Synthetic {
            return Ok(None);
        }
        let directory = tokenizer_directory(self.run_directory);
        let tokenizer = if Tokenizer::is_saved_in(&directory) {
            Tokenizer::load(&directory)?
        } else {
            let made = self.make_tokenizer(train)?;
            made.check_vocab_size(self.data.vocab_size)?;
            made.save(&directory)?;
            made
        };
        tokenizer.check_vocab_size(self.data.vocab_size)?;
        Ok(Some(Arc::new(tokenizer)))
    }

    fn make_tokenizer(&self, train: &Dataset) -> Result<Tokenizer, TrainError> {
        let size = self.tokenizer.tokenizer_vocab_size;
        let kind = TokenizerKind::named(self.tokenizer.tokenizer_type.name());
        let load = |path: &Path| match kind {
            None => Tokenizer::load(path),
            Some(kind) => Tokenizer::load_as(path, kind),
        };
        if let Some(directory) = &self.inherited_tokenizer {
            let text = format!("the tokenizer is that of the loaded parameters, `{}`", directory.display());
            events::note(self.observer, text);
            return Ok(load(directory)?);
        }
        Ok(match &self.tokenizer.tokenizer_path {
            None if size > 0 => train_bpe(train.documents(), size, &BYTE_LEVEL_SPECIAL_TOKENS, self.watch)?,
            None => Tokenizer::bytes(),
            Some(path) => load(path)?,
        })
    }
}
