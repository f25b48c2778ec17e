//! The data sources that a configuration names.

use std::path::{Path, PathBuf};

use mt_config::{DataFormat, DataGroup, DatasetType, HfTextUnit, RecordKind};
use mt_data::{
    Component, DataError, ExampleColumns, ExampleFormat, MixtureEntry, OlmoSource, RecordFormat, Source,
    Split, TensorflowDataset, TextDocument,
};

/// Whether documents are records, which have columns.
pub(crate) fn is_of_records(source: &Source) -> bool {
    match source {
        Source::Records { .. } => true,
        Source::TensorflowDataset(dataset) => matches!(dataset.content, ExampleColumns::Record(_)),
        Source::Mixture(components) => components.iter().all(|component| is_of_records(&component.source)),
        _ => false,
    }
}

/// The source for a split of the local data that the configuration names, and `None` for synthetic data. The files of a
/// repository are read below `repository`.
///
/// # Errors
/// A mixture cannot be read.
pub fn local_source(data: &DataGroup, split: Split, repository: &Path) -> Result<Option<Source>, DataError> {
    let is_train = split == Split::Train;
    let content = Content::of(data, is_train);
    match data.dataset_type {
        DatasetType::Synthetic => Ok(None),
        DatasetType::Hf => {
            let files = if is_train { data.train_patterns() } else { data.eval_patterns() };
            Ok(data.format().map(|format| of_files(data, format, &content, files, split, repository)))
        }
        DatasetType::Grain => grain(data, split, &content, repository).map(Some),
        DatasetType::Tfds | DatasetType::C4Mlperf => {
            let (name, of_dataset) = match is_train {
                true => (&data.dataset_name, &data.train_split),
                false => (&data.eval_dataset_name, &data.eval_split),
            };
            Ok(Some(Source::TensorflowDataset(TensorflowDataset {
                directory: data.dataset_path.clone().unwrap_or_else(usual_directory),
                name: name.clone(),
                split: of_dataset.clone(),
                content: match content {
                    Content::Text(column) => ExampleColumns::Text(column),
                    Content::Tokens(column) => ExampleColumns::Tokens(column),
                    Content::Records(columns) => ExampleColumns::Record(columns),
                },
            })))
        }
        DatasetType::OlmoGrain => Ok(Some(Source::Olmo(OlmoSource {
            index: data.olmo_index_path.clone().unwrap_or_default(),
            remap: data.olmo_path_remap_from.clone().zip(data.olmo_path_remap_to.clone()),
            length: data.max_target_length,
            filters_repetitions: data.olmo_apply_ngram_filter,
        }))),
    }
}

/// The directory of `tfds` if no key names one.
fn usual_directory() -> PathBuf {
    let given = std::env::var_os("TFDS_DATA_DIR").filter(|given| !given.is_empty()).map(PathBuf::from);
    given.unwrap_or_else(|| std::env::home_dir().unwrap_or_default().join("tensorflow_datasets"))
}

/// The columns of a record that are read.
enum Content {
    Text(String),
    Tokens(String),
    Records(Vec<String>),
}

impl Content {
    fn of(data: &DataGroup, is_train: bool) -> Self {
        let (columns, tokenizes) = match is_train {
            true => (data.train_columns(), data.tokenize_train_data),
            false => (data.eval_columns(), data.tokenize_eval_data),
        };
        if let Some(records) = data.records() {
            let margin = data.margin_column.clone().filter(|_| records == RecordKind::RankedAnswers);
            return Self::Records(columns.into_iter().chain(margin).collect());
        }
        let column = columns.into_iter().next().unwrap_or_default();
        if tokenizes { Self::Text(column) } else { Self::Tokens(column) }
    }
}

fn of_files(
    data: &DataGroup,
    format: DataFormat,
    content: &Content,
    files: Vec<String>,
    split: Split,
    repository: &Path,
) -> Source {
    let of_records = match format {
        DataFormat::Parquet => RecordFormat::Parquet,
        DataFormat::ArrayRecord => RecordFormat::Examples(ExampleFormat::ArrayRecord),
        DataFormat::TfRecord => RecordFormat::Examples(ExampleFormat::TfRecord),
        DataFormat::Json | DataFormat::Text | DataFormat::Repository | DataFormat::Instructions => {
            RecordFormat::JsonLines
        }
    };
    let column = match content {
        Content::Records(columns) => {
            return Source::Records { files, format: of_records, columns: columns.clone() };
        }
        Content::Tokens(column) => {
            return Source::Tokens { files, format: of_records, column: column.clone() };
        }
        Content::Text(column) => column.clone(),
    };
    match format {
        DataFormat::Text => Source::Text {
            files,
            document: match data.hf_text_unit {
                HfTextUnit::File => TextDocument::File,
                HfTextUnit::Line => TextDocument::Line,
            },
        },
        // Plain text of instructions is refused with the configuration.
        DataFormat::Json | DataFormat::Instructions => Source::JsonLines { files, column },
        DataFormat::Parquet => Source::Parquet { files, column },
        DataFormat::ArrayRecord => Source::Examples { files, format: ExampleFormat::ArrayRecord, column },
        DataFormat::TfRecord => Source::Examples { files, format: ExampleFormat::TfRecord, column },
        DataFormat::Repository => Source::Repository { root: repository.to_owned(), split },
    }
}

/// The files or the mixture of `dataset_type=grain`.
fn grain(data: &DataGroup, split: Split, content: &Content, repository: &Path) -> Result<Source, DataError> {
    let format = data.format().unwrap_or(DataFormat::ArrayRecord);
    let source = |patterns: Vec<String>| {
        // A directory stands for its files.
        let files = patterns.into_iter().map(|pattern| match Path::new(&pattern).is_dir() {
            true => format!("{}/*", pattern.trim_end_matches('/')),
            false => pattern,
        });
        of_files(data, format, content, files.collect(), split, repository)
    };
    let (given, patterns) = match split {
        Split::Train => (&data.grain_train_files, data.train_patterns()),
        Split::Evaluation => (&data.grain_eval_files, data.eval_patterns()),
    };
    let entries = match (&data.grain_train_mixture_config_path, split) {
        (Some(path), Split::Train) => Some(MixtureEntry::load(path)?),
        _ => MixtureEntry::parse(given.as_deref().unwrap_or_default())?,
    };
    let Some(entries) = entries else { return Ok(source(patterns)) };
    let component = |entry: MixtureEntry| Component {
        source: source(vec![entry.path]),
        name: entry.name,
        weight: entry.weight,
        epochs: entry.epochs,
        max_examples: entry.max_examples,
    };
    Ok(Source::Mixture(entries.into_iter().map(component).collect()))
}

#[cfg(test)]
mod tests {
    use mt_config::{Config, Request};

    use super::*;

    #[test]
    fn each_format_has_its_source() {
        let source = |arguments: &[&str], split| {
            let files = ["hf_train_files=a,b", "hf_eval_files=c", "eval_data_columns=[body]"];
            let arguments = files.iter().chain(arguments).map(|argument| (*argument).to_owned()).collect();
            let config = Config::resolve(&Request { arguments, ..Request::default() }).unwrap();
            local_source(&DataGroup::from_config(&config).unwrap(), split, Path::new("clone")).unwrap()
        };
        let files = || vec!["a".to_owned(), "b".to_owned()];
        let document = TextDocument::Line;
        let cases = [
            (
                &["dataset_type=hf", "hf_path=text", "hf_text_unit=line"][..],
                Some(Source::Text { files: files(), document }),
            ),
            (
                &["dataset_type=hf", "hf_path=json"],
                Some(Source::JsonLines { files: files(), column: "text".to_owned() }),
            ),
            (
                &["dataset_type=hf", "hf_path=parquet", "train_data_columns=[body]"],
                Some(Source::Parquet { files: files(), column: "body".to_owned() }),
            ),
            (
                &["dataset_type=hf", "hf_path=repository"],
                Some(Source::Repository { root: "clone".into(), split: Split::Train }),
            ),
            (&["dataset_type=synthetic", "hf_path=text"], None),
        ];
        for (arguments, expected) in cases {
            assert_eq!(source(arguments, Split::Train), expected, "{arguments:?}");
        }
        assert_eq!(
            source(&["dataset_type=hf", "hf_path=json"], Split::Evaluation),
            Some(Source::JsonLines { files: vec!["c".to_owned()], column: "body".to_owned() })
        );
    }
}
