//! `maxtext tokenizer`: train.

use mt_config::{Config, DataGroup, HfTextUnit, Request};
use mt_data::{BYTE_LEVEL_SPECIAL_TOKENS, Dataset, Source, Split, TOKENIZER_FILE, TextDocument, Watch};

use crate::{
    arguments::{TokenizerCommand, TokenizerTrain},
    commands::warn,
    failure::{Failure, print},
    progress::DataProgress,
};

/// Runs a subcommand of `maxtext tokenizer`.
pub fn run(command: TokenizerCommand) -> Result<(), Failure> {
    match command {
        TokenizerCommand::Train(arguments) => train(arguments),
    }
}

fn train(arguments: TokenizerTrain) -> Result<(), Failure> {
    let mut request = Request::from_process(arguments.settings.settings);
    // The text is always in files here, so that `dataset_type` need not be said.
    if !request.arguments.iter().any(|argument| argument.starts_with("dataset_type=")) {
        request.arguments.push("dataset_type=hf".to_owned());
    }
    let config = Config::resolve(&request)?;
    warn(&config);
    let data = DataGroup::from_config(&config)?;
    let progress = DataProgress::default();
    let report = |now| progress.show(now);
    // A signal ends the process, which has nothing to keep.
    let watch = Watch::new(&report, &|| false);
    let dataset = Dataset::open_watched(&source(&data)?, watch)?;
    let documents = dataset.documents();
    let tokenizer = mt_data::train_bpe(documents, arguments.vocab_size, &BYTE_LEVEL_SPECIAL_TOKENS, watch)?;
    progress.end();
    tokenizer.save(&arguments.output)?;
    print(&format!(
        "trained {} tokens on {} documents; `{}` is ready for `tokenizer_path={}`",
        tokenizer.vocab_size(),
        dataset.num_documents(),
        arguments.output.join(TOKENIZER_FILE).display(),
        arguments.output.display()
    ))
}

/// The training text that a configuration names.
fn source(data: &DataGroup) -> Result<Source, Failure> {
    let files = data.train_patterns();
    let column = || data.train_data_columns.first().cloned().unwrap_or_default();
    match data.hf_path.as_deref() {
        Some("text") => {
            let document = match data.hf_text_unit {
                HfTextUnit::File => TextDocument::File,
                HfTextUnit::Line => TextDocument::Line,
            };
            Ok(Source::Text { files, document })
        }
        Some("json") => Ok(Source::JsonLines { files, column: column() }),
        Some("parquet") => Ok(Source::Parquet { files, column: column() }),
        Some("repository") => {
            let root = files.first().map_or(".", String::as_str).into();
            Ok(Source::Repository { root, split: Split::Train })
        }
        _ => Err(Failure::user(
            "a tokenizer is trained on text, but `dataset_type=synthetic` has none\n\
             hint: name files, such as `hf_path=text hf_train_files='data/*.txt'`",
        )),
    }
}
