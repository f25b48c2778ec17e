//! Rows under construction, and the packing of documents that are known in advance.

use std::collections::BTreeMap;

use crate::batch::TextRows;
use crate::random::Permutation;
use crate::tokenizer::EncodedDocument;

/// Positions of a window of best-fit packing, and bounds of its rows. The meaning of a saved state depends on them.
const WINDOW_POSITIONS: usize = 1 << 21;
const WINDOW_ROWS: [usize; 2] = [64, 1024];

/// The rows that best-fit packing fills at the same time in each of several streams.
pub(crate) fn window_rows(length: usize, streams: usize) -> usize {
    (WINDOW_POSITIONS / length.max(1) / streams.max(1)).clamp(WINDOW_ROWS[0], WINDOW_ROWS[1])
}

/// Packs the documents of `pieces`, one in each, into rows: the longest first, each into the row that it fills best, or
/// into a new one if it fits in none. The earlier of equal ones is placed first, and the row that was opened first is filled.
/// The rows come in the order of a permutation for `order`, or without it of their earliest documents. Rows in the order
/// in which they were opened would present all long documents of a window before the short ones.
pub(crate) fn best_fit(
    mut pieces: Vec<Row>,
    length: usize,
    max_segments: Option<usize>,
    order: Option<u64>,
) -> Vec<Row> {
    let max_segments = max_segments.unwrap_or(usize::MAX);
    let mut by_length: Vec<usize> = (0..pieces.len()).collect();
    by_length.sort_by_key(|index| std::cmp::Reverse(pieces[*index].filled));
    // The documents of each row, and the rows with room, by their room, in the order in which they were opened.
    let mut rows: Vec<Vec<usize>> = Vec::new();
    let mut with_room: BTreeMap<usize, std::collections::BTreeSet<usize>> = BTreeMap::new();
    for index in by_length {
        let count = pieces[index].filled;
        let found = with_room.range(count..).next().and_then(|(room, rows)| Some((*room, *rows.first()?)));
        let (room, row) = match found {
            Some((room, row)) => {
                if let Some(of_room) = with_room.get_mut(&room) {
                    of_room.remove(&row);
                    if of_room.is_empty() {
                        with_room.remove(&room);
                    }
                }
                (room, row)
            }
            None => {
                rows.push(Vec::new());
                (length, rows.len() - 1)
            }
        };
        rows[row].push(index);
        if room > count && rows[row].len() < max_segments {
            with_room.entry(room - count).or_default().insert(row);
        }
    }
    // Documents of a row keep their order.
    rows.iter_mut().for_each(|row| row.sort_unstable());
    rows.sort_by_key(|row| row.first().copied());
    let mut take = |row: &Vec<usize>| {
        row.iter().map(|index| std::mem::take(&mut pieces[*index])).fold(Row::default(), Row::joined)
    };
    match order {
        None => rows.iter().map(take).collect(),
        Some(key) => {
            let permutation = Permutation::new(rows.len() as u64, key);
            (0..rows.len() as u64).map(|place| take(&rows[permutation.apply(place) as usize])).collect()
        }
    }
}

/// A row under construction.
#[derive(Debug, Default, Clone)]
pub(crate) struct Row {
    /// The positions that are not padding.
    pub filled: usize,
    pub bytes: u64,
    pub segments: Vec<Piece>,
    /// The second sequence of a row of preference data.
    pub second: Option<Piece>,
    pub label: f32,
}

/// A stretch of a document's tokens.
#[derive(Debug, Default, Clone)]
pub(crate) struct Piece {
    pub tokens: Vec<i32>,
    /// Whether the target of each pair of consecutive tokens has a loss; empty if all have one.
    pub has_loss: Vec<bool>,
    /// The classes that replace the targets; empty if tokens are targets.
    pub classes: Vec<i32>,
    /// For rows that hold several documents: how many of them end before each input; empty if the piece is of one.
    pub documents: Vec<i32>,
    /// The position of each input, if they were given.
    pub positions: Vec<i32>,
}

impl Piece {
    /// The pairs `start..start + count` of a document's tokens.
    fn of(document: &EncodedDocument, start: usize, count: usize) -> Self {
        let of_inputs = |list: &[i32]| list.get(start..start + count).unwrap_or_default().to_vec();
        let mut documents = of_inputs(&document.segments);
        let mut ended = 0;
        let mut before = documents.first().copied();
        for segment in &mut documents {
            ended += i32::from(before.replace(*segment) != Some(*segment));
            *segment = ended;
        }
        Self {
            documents: if ended == 0 { Vec::new() } else { documents },
            positions: of_inputs(&document.positions),
            tokens: document.tokens[start..=start + count].to_vec(),
            has_loss: document.trained.get(start + 1..=start + count).unwrap_or_default().to_vec(),
            classes: document.classes.get(start + 1..=start + count).unwrap_or_default().to_vec(),
        }
    }

    fn write(&self, batch: &mut TextRows, place: (usize, usize), start: usize, segment: usize) {
        let has_loss = |pair: usize| self.has_loss.get(pair).copied().unwrap_or(true);
        batch.write_segment(place, start, segment, &self.tokens, has_loss);
        batch.write_targets(place, start, &self.classes);
        if !self.documents.is_empty() || !self.positions.is_empty() {
            batch.write_documents(place, start, &self.documents, &self.positions);
        }
    }
}

impl Row {
    /// Appends the pairs `start..start + count` of a document as a new segment.
    pub fn push(&mut self, document: &EncodedDocument, start: usize, count: usize) {
        let targets = start + 1..=start + count;
        self.segments.push(Piece::of(document, start, count));
        self.second = document.second.as_ref().map(|second| Piece::of(second, 0, num_pairs(second)));
        self.label = document.label;
        let counted = targets.filter(|target| document.is_trained(*target));
        self.bytes +=
            counted.map(|target| u64::from(document.bytes.get(target).copied().unwrap_or(0))).sum::<u64>();
        self.filled += count;
    }

    pub fn write(&self, batch: &mut TextRows, row: usize) {
        let mut start = 0;
        let mut segment = 1;
        for piece in &self.segments {
            piece.write(batch, (row, 0), start, segment);
            segment += 1 + piece.documents.last().map_or(0, |ended| *ended as usize);
            start += piece.tokens.len() - 1;
        }
        if let Some(second) = &self.second {
            second.write(batch, (row, 1), 0, 1);
        }
        batch.set_label(row, self.label);
        batch.target_bytes += self.bytes;
    }
}

/// The number of tokens of a document that have a successor in it.
pub(crate) fn num_pairs(document: &EncodedDocument) -> usize {
    document.tokens.len().saturating_sub(1)
}

impl Row {
    /// The documents of both rows, which have one sequence each.
    fn joined(mut self, other: Self) -> Self {
        self.filled += other.filled;
        self.bytes += other.bytes;
        self.segments.extend(other.segments);
        self
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::random::mix;

    fn piece(number: usize, count: usize) -> Row {
        let mut row = Row::default();
        let tokens = vec![number as i32; count + 1];
        row.push(&EncodedDocument { tokens, ..EncodedDocument::default() }, 0, count);
        row
    }

    /// The definition, without an index of rows.
    fn reference(counts: &[usize], length: usize, max_segments: usize) -> Vec<Vec<i32>> {
        let mut order: Vec<usize> = (0..counts.len()).collect();
        order.sort_by_key(|index| (std::cmp::Reverse(counts[*index]), *index));
        let mut rows: Vec<Vec<usize>> = Vec::new();
        for index in order {
            let room = |row: &Vec<usize>| length - row.iter().map(|index| counts[*index]).sum::<usize>();
            let fits = |row: &Vec<usize>| room(row) >= counts[index] && row.len() < max_segments;
            match (0..rows.len()).filter(|row| fits(&rows[*row])).min_by_key(|row| room(&rows[*row])) {
                Some(row) => rows[row].push(index),
                None => rows.push(vec![index]),
            }
        }
        let sorted = |mut row: Vec<usize>| {
            row.sort_unstable();
            row.into_iter().map(|index| index as i32).collect()
        };
        let mut rows: Vec<Vec<i32>> = rows.into_iter().map(sorted).collect();
        rows.sort();
        rows
    }

    fn documents(rows: &[Row]) -> Vec<Vec<i32>> {
        rows.iter().map(|row| row.segments.iter().map(|piece| piece.tokens[0]).collect()).collect()
    }

    proptest! {
        #[test]
        fn best_fit_is_its_definition(
            counts in proptest::collection::vec(1usize..40, 0..80), max_segments in proptest::option::of(1usize..5), order in any::<u64>()
        ) {
            let pieces = || counts.iter().enumerate().map(|(number, count)| piece(number, *count)).collect();
            let rows = best_fit(pieces(), 40, max_segments, None);
            prop_assert!(rows.iter().all(|row| row.filled <= 40));
            let found = documents(&rows);
            prop_assert_eq!(&found, &reference(&counts, 40, max_segments.unwrap_or(usize::MAX)));
            let mut permuted = documents(&best_fit(pieces(), 40, max_segments, Some(order)));
            permuted.sort();
            prop_assert_eq!(permuted, found);
        }
    }

    /// 100,000 documents of lognormal lengths: median 400, sigma 1.2, at most 2048 positions.
    #[test]
    fn best_fit_wastes_less_than_a_hundredth() {
        let mut draws = 0;
        let mut uniform = || {
            draws += 1;
            ((mix(draws) >> 11) as f64 + 0.5) / (1_u64 << 53) as f64
        };
        let mut length_of = || {
            let normal = (-2.0 * uniform().ln()).sqrt() * (std::f64::consts::TAU * uniform()).cos();
            (400.0 * (1.2 * normal).exp()).round().clamp(1.0, 2048.0) as usize
        };
        let lengths: Vec<usize> = (0..100_000).map(|_| length_of()).collect();
        let (mut window, mut rows, capacity) = (Vec::new(), 0, window_rows(2048, 1) * 2048);
        let mut pack =
            |window: &mut Vec<Row>| rows += best_fit(std::mem::take(window), 2048, None, None).len();
        for length in &lengths {
            if window.iter().map(|row: &Row| row.filled).sum::<usize>() >= capacity {
                pack(&mut window);
            }
            window.push(Row { filled: *length, ..Row::default() });
        }
        pack(&mut window);
        let waste = 1.0 - lengths.iter().sum::<usize>() as f64 / (rows * 2048) as f64;
        println!("best-fit packing wastes {:.3}% of {rows} rows", 100.0 * waste);
        assert!(waste < 0.01, "{waste}");
    }
}
