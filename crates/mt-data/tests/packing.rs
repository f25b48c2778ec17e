//! Packed rows beside plain definitions of the packers. Best-fit packing has its own in `src/packing.rs`.

mod common;

use std::sync::Arc;

use common::{documents, drain, tokens_of};
use mt_data::{
    DatasetOptions, Packing, Source, Tokenizer, TrainIterator,
    arrays::{INPUTS, INPUTS_POSITION, INPUTS_SEGMENTATION, TARGETS, TARGETS_SEGMENTATION},
};
use proptest::prelude::*;

/// Rows that first-fit packing fills at the same time.
const OPEN_ROWS: usize = 64;

/// The tokens of each piece of a row: one more than it has positions.
type Row = Vec<Vec<i32>>;

fn positions(row: &Row) -> usize {
    row.iter().map(|piece| piece.len() - 1).sum()
}

/// Each piece of a document goes into the first row that has room, until none has.
fn first_fit(documents: &[Vec<i32>], length: usize, max_segments: usize) -> Vec<Row> {
    let (mut done, mut open): (Vec<Row>, Vec<Row>) = (Vec::new(), Vec::new());
    for document in documents {
        let mut first = 0;
        while first + 1 < document.len() {
            let last = (first + length).min(document.len() - 1);
            let piece = document[first..=last].to_vec();
            let fits = |row: &Row| positions(row) + piece.len() - 1 <= length && row.len() < max_segments;
            match open.iter().position(fits) {
                Some(row) => open[row].push(piece),
                None => {
                    if open.len() == OPEN_ROWS {
                        done.append(&mut open);
                    }
                    open.push(vec![piece]);
                }
            }
            first = last;
        }
    }
    done.append(&mut open);
    done
}

/// Documents follow each other, and rows are cut where they are full.
fn concatenated(documents: &[Vec<i32>], length: usize, max_segments: usize) -> Vec<Row> {
    let mut rows: Vec<Row> = vec![Vec::new()];
    for document in documents {
        let mut first = 0;
        while first + 1 < document.len() {
            let row = rows.last_mut().unwrap();
            let room = length - positions(row);
            if room == 0 || row.len() == max_segments {
                rows.push(Vec::new());
                continue;
            }
            let last = (first + room).min(document.len() - 1);
            row.push(document[first..=last].to_vec());
            first = last;
        }
    }
    rows.retain(|row| !row.is_empty());
    rows
}

/// The arrays of a row: inputs, targets, positions and segments, which inputs and targets share.
fn arrays(row: &Row, length: usize) -> [Vec<i32>; 4] {
    let mut arrays = [const { Vec::new() }; 4];
    for (segment, piece) in row.iter().enumerate() {
        for (position, pair) in piece.windows(2).enumerate() {
            let values = [pair[0], pair[1], position as i32, segment as i32 + 1];
            arrays.iter_mut().zip(values).for_each(|(array, value)| array.push(value));
        }
    }
    arrays.map(|mut array| {
        array.resize(length, 0);
        array
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn rows_are_those_of_the_definition(
        documents in proptest::collection::vec(documents(), 1..12), length in 1usize..40, is_first_fit in any::<bool>(),
        limit in proptest::option::of(1usize..4),
    ) {
        let documents = documents.concat();
        let options = DatasetOptions {
            packing: if is_first_fit { Packing::FirstFit } else { Packing::ConcatThenSplit },
            max_segments: limit,
            ..DatasetOptions::evaluation(Source::Memory { name: "memory".into(), documents: documents.clone() }, length, 1)
        };
        let (tokens, limit) = (tokens_of(&documents, true, true), limit.unwrap_or(usize::MAX));
        let expected = match is_first_fit {
            true => first_fit(&tokens, length, limit),
            false => concatenated(&tokens, length, limit),
        };
        let tokenizer = Some(Arc::new(Tokenizer::bytes()));
        let found = drain(&mut TrainIterator::open(options, tokenizer).unwrap(), 100_000);
        prop_assert_eq!(found.len(), expected.len());
        for (batch, row) in found.iter().zip(&expected) {
            let [inputs, targets, positions, segments] = arrays(row, length);
            prop_assert_eq!(batch.integers(INPUTS), inputs);
            prop_assert_eq!(batch.integers(TARGETS), targets);
            prop_assert_eq!(batch.integers(INPUTS_POSITION), positions);
            prop_assert_eq!(batch.integers(INPUTS_SEGMENTATION), &segments[..]);
            prop_assert_eq!(batch.integers(TARGETS_SEGMENTATION), segments);
        }
    }
}
