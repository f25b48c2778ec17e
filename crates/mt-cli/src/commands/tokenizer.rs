//! `maxtext tokenizer`: train.

use std::path::Path;

use mt_config::{Config, DataGroup, Request};
use mt_data::{BYTE_LEVEL_SPECIAL_TOKENS, Dataset, Source, Split, TOKENIZER_FILE, Watch};
use mt_train::local_source;

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
    // The text always comes from files, so `dataset_type` may be omitted.
    if !request.arguments.iter().any(|argument| argument.starts_with("dataset_type=")) {
        request.arguments.push("dataset_type=hf".to_owned());
    }
    let config = Config::resolve(&request)?;
    warn(&config);
    let data = DataGroup::from_config(&config)?;
    let progress = DataProgress::default();
    let report = |now| progress.show(now);
    // A signal ends the process; there is no partial result to save.
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
    // For a repository `hf_train_files` may name its root.
    let files = data.train_patterns();
    let root = files.first().map_or(".", String::as_str);
    local_source(data, Split::Train, Path::new(root))?.ok_or_else(|| {
        Failure::user(
            "a tokenizer is trained on text, but `dataset_type=synthetic` has none\n\
             hint: name files, such as `hf_path=text hf_train_files='data/*.txt'`",
        )
    })
}
