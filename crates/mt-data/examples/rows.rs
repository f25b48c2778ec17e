//! Reads packed rows of a file as fast as possible, and prints tokens a second: `bench/data/run.py` compares them with
//! those of other programs.
//!
//! `cargo run --release -p mt-data --example rows -- FORMAT FILE COLUMN LENGTH [TOKENIZER]`, where FORMAT is `parquet`,
//! `arrayrecord`, `tfrecord` or `jsonl`. Without a tokenizer, the column holds token ids.

#![forbid(unsafe_code)]

use std::sync::Arc;
use std::time::Instant;

use mt_data::{
    Dataset, DatasetOptions, ExampleFormat, Packing, RecordFormat, Remainder, Source, Tokenizer,
    TrainIterator, arrays::INPUTS_SEGMENTATION,
};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [format, file, column, length, tokenizer @ ..] = arguments.as_slice() else {
        return Err("FORMAT FILE COLUMN LENGTH [TOKENIZER]".into());
    };
    let (files, column, length) = (vec![file.clone()], column.clone(), length.parse()?);
    let format = match format.as_str() {
        "parquet" => RecordFormat::Parquet,
        "arrayrecord" => RecordFormat::Examples(ExampleFormat::ArrayRecord),
        "tfrecord" => RecordFormat::Examples(ExampleFormat::TfRecord),
        _ => RecordFormat::JsonLines,
    };
    let tokenizer = tokenizer.first().map(Tokenizer::load).transpose()?.map(Arc::new);
    let source = match (format, &tokenizer) {
        (_, None) => Source::Tokens { files, format, column },
        (RecordFormat::Parquet, _) => Source::Parquet { files, column },
        (RecordFormat::JsonLines, _) => Source::JsonLines { files, column },
        (RecordFormat::Examples(format), _) => Source::Examples { files, format, column },
    };
    let begin = Instant::now();
    let dataset = Arc::new(Dataset::open(&source)?);
    let opened = begin.elapsed();
    for packing in [Packing::FirstFit, Packing::BestFit, Packing::ConcatThenSplit] {
        let options = DatasetOptions {
            packing,
            num_epoch: Some(1),
            remainder: Remainder::Pad,
            ..DatasetOptions::training(source.clone(), length, 16)
        };
        let begin = Instant::now();
        let mut iterator = TrainIterator::new(dataset.clone(), options, tokenizer.clone())?;
        let (mut positions, mut tokens) = (0, 0);
        while let Some(batch) = iterator.next()? {
            let segments = batch.integers(INPUTS_SEGMENTATION);
            positions += segments.len();
            tokens += segments.iter().filter(|segment| **segment != 0).count();
        }
        let seconds = begin.elapsed().as_secs_f64();
        let line = serde_json::json!({
            "packing": format!("{packing:?}"), "tokens": tokens, "seconds": seconds,
            "tokens_per_second": tokens as f64 / seconds, "open_seconds": opened.as_secs_f64(),
            "padding_share": 1.0 - tokens as f64 / positions as f64,
        });
        println!("{line}");
    }
    Ok(())
}
