//! Throughput of tokenizing and packing: `cargo bench -p mt-data`.
//!
//! Documents consist of words from a fixed list, and are between a sentence and a few pages long. Training a tokenizer
//! and tokenizing are measured in bytes of text, batches in tokens.

#![forbid(unsafe_code)]

use std::sync::Arc;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use mt_data::{
    BYTE_LEVEL_SPECIAL_TOKENS, Dataset, DatasetOptions, Packing, Source, Tokenizer, TrainIterator, Watch,
    train_bpe,
};

const NUM_DOCUMENTS: u64 = 512;
const LENGTH: usize = 2048;
const ROWS: usize = 16;

/// A pseudo-random number.
fn mixed(number: u64) -> u64 {
    let number = (number ^ (number >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    number ^ (number >> 31)
}

/// The word of this rank: two to four syllables.
fn word(rank: u64) -> String {
    let syllables = [
        "ba", "do", "ke", "lin", "mor", "na", "pe", "qui", "ra", "ston", "ti", "ver", "wa", "xen", "yo", "zu",
    ];
    (0..2 + rank % 3).map(|place| syllables[(mixed(rank * 8 + place) % 16) as usize]).collect()
}

fn documents() -> Vec<String> {
    let document = |number: u64| {
        let num_words = 10 + mixed(number) % 2000;
        let words: Vec<String> = (0..num_words)
            .map(|place| {
                // Small ranks are frequent, as in any language.
                let draw = mixed((number << 20) | place);
                word(((draw % 4000) * ((draw >> 32) & 0xFFFF)) >> 16)
            })
            .collect();
        words.join(" ")
    };
    (0..NUM_DOCUMENTS).map(document).collect()
}

fn pipeline(criterion: &mut Criterion) {
    let documents = documents();
    let bytes: usize = documents.iter().map(String::len).sum();
    let train =
        || train_bpe(documents.iter().cloned().map(Ok), 4096, &BYTE_LEVEL_SPECIAL_TOKENS, Watch::silent());
    let trained = Arc::new(train().expect("the documents hold text"));
    let tokenizers = [("bytes", Arc::new(Tokenizer::bytes())), ("trained", trained)];

    let mut group = criterion.benchmark_group("tokenizer");
    group.sample_size(10).throughput(Throughput::Bytes(bytes as u64));
    group.bench_function("train 4096 tokens", |bencher| bencher.iter(train));
    for (name, tokenizer) in &tokenizers {
        group.bench_function(format!("encode with {name}, one thread"), |bencher| {
            bencher.iter(|| {
                let encode = |text: &String| tokenizer.encode_document(text, true, true);
                documents.iter().map(encode).collect::<Result<Vec<_>, _>>().expect("any text is encoded")
            });
        });
    }
    group.finish();

    let source = Source::Memory { name: "words".into(), documents: documents.clone() };
    let dataset = Arc::new(Dataset::open(&source).expect("documents in memory open"));
    let mut group = criterion.benchmark_group("batches");
    group.throughput(Throughput::Elements((ROWS * LENGTH) as u64));
    let packings = [
        ("first fit", Packing::FirstFit),
        ("concatenated", Packing::ConcatThenSplit),
        ("not packed", Packing::Off),
    ];
    for (tokenizer_name, tokenizer) in &tokenizers {
        for (packing_name, packing) in packings {
            let options =
                DatasetOptions { packing, ..DatasetOptions::training(source.clone(), LENGTH, ROWS) };
            let mut iterator = TrainIterator::new(dataset.clone(), options, Some(tokenizer.clone()))
                .expect("the options agree with each other");
            group.bench_function(format!("{packing_name}, {tokenizer_name}"), |bencher| {
                bencher.iter(|| iterator.next().expect("documents in memory are read"));
            });
        }
    }
    group.finish();
}

criterion_group!(benches, pipeline);
criterion_main!(benches);
