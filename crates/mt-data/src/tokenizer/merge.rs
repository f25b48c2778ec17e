//! Greedy merging of adjacent pieces of a text, shared by SentencePiece and tiktoken.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

/// A piece of the text that may still grow.
pub(super) struct Symbol {
    /// The range of the piece in the text.
    pub range: Range<usize>,
    /// Whether the piece is never merged.
    pub frozen: bool,
}

/// Two adjacent pieces that may be merged. The greatest candidate is merged first: by priority, then from the left.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Candidate<K> {
    priority: K,
    left: Reverse<usize>,
    right: usize,
    length: usize,
}

/// Merges adjacent pieces until no pair has a `priority`, which receives the ranges of both. The greatest priority goes
/// first, and among equal ones the leftmost pair. Returns the ranges of the remaining pieces.
pub(super) fn join<K: Ord>(
    mut symbols: Vec<Symbol>,
    mut priority: impl FnMut(&Range<usize>, &Range<usize>) -> Option<K>,
) -> Vec<Range<usize>> {
    const NONE: usize = usize::MAX;
    let count = symbols.len();
    let mut next: Vec<usize> = (1..=count).map(|index| if index < count { index } else { NONE }).collect();
    let mut previous: Vec<usize> = (0..count).map(|index| index.wrapping_sub(1)).collect();
    let mut queue = BinaryHeap::with_capacity(count);
    let mut propose = |symbols: &[Symbol], queue: &mut BinaryHeap<_>, left: usize, right: usize| {
        if left == NONE || right == NONE || symbols[left].frozen || symbols[right].frozen {
            return;
        }
        let (first, second) = (&symbols[left].range, &symbols[right].range);
        if let Some(priority) = priority(first, second) {
            let length = first.len() + second.len();
            queue.push(Candidate { priority, left: Reverse(left), right, length });
        }
    };
    for right in 1..count {
        propose(&symbols, &mut queue, right - 1, right);
    }
    while let Some(Candidate { left: Reverse(left), right, length, .. }) = queue.pop() {
        let (first, second) = (&symbols[left].range, &symbols[right].range);
        // One of the two pieces has been merged with another since.
        if first.is_empty() || second.is_empty() || first.len() + second.len() != length {
            continue;
        }
        symbols[left].range.end = second.end;
        symbols[right].range = 0..0;
        next[left] = next[right];
        if next[left] != NONE {
            previous[next[left]] = left;
        }
        propose(&symbols, &mut queue, previous[left], left);
        propose(&symbols, &mut queue, left, next[left]);
    }
    symbols.into_iter().map(|symbol| symbol.range).filter(|range| !range.is_empty()).collect()
}
