//! Passages of evaluation data in documents.

use crate::hashing::{Seen, mixed, rolled};
use crate::words::{simplified, words};

/// The n-grams of evaluation data. Shorter texts of theirs count as a whole, if they have at least [`LEAST`] words.
#[derive(Debug, Default)]
pub(crate) struct Contamination {
    n: usize,
    grams: Seen,
    /// The n-grams of texts with fewer words, by their number of words.
    short: Vec<(usize, Seen)>,
}

/// Shorter texts, such as answers of one word, are in any document.
const LEAST: usize = 6;

impl Contamination {
    pub(crate) fn new(n: usize) -> Self {
        Self { n, ..Self::default() }
    }

    /// Adds a text of evaluation data.
    pub(crate) fn add(&mut self, text: &str) {
        let hashes = hashes(text);
        if hashes.len() >= self.n {
            self.grams.extend(rolled(&hashes, self.n));
        } else if hashes.len() >= LEAST {
            let length = hashes.len();
            let place = self.short.iter().position(|(known, _)| *known == length).unwrap_or_else(|| {
                self.short.push((length, Seen::default()));
                self.short.len() - 1
            });
            self.short[place].1.extend(rolled(&hashes, length));
        }
    }

    /// The number of n-grams.
    pub(crate) fn len(&self) -> usize {
        self.grams.len() + self.short.iter().map(|(_, grams)| grams.len()).sum::<usize>()
    }

    /// The first passage of a document that is in evaluation data, simplified.
    pub(crate) fn find(&self, text: &str) -> Option<String> {
        let simple = simplified(text);
        let words = words(&simple);
        let hashes = mixed(&words);
        let sets =
            std::iter::once((self.n, &self.grams)).chain(self.short.iter().map(|(n, grams)| (*n, grams)));
        for (n, set) in sets.filter(|(_, set)| !set.is_empty()) {
            if let Some(place) = rolled(&hashes, n).iter().position(|gram| set.contains(gram)) {
                return Some(words[place..place + n].join(" "));
            }
        }
        None
    }
}

fn hashes(text: &str) -> Vec<u64> {
    let simple = simplified(text);
    mixed(&words(&simple))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passages_are_found_whatever_their_form() {
        let mut evaluation = Contamination::new(8);
        evaluation.add("Which river, of all the rivers of the north, turns the mill at Dunmore?");
        evaluation.add("Six short words make an answer.");
        evaluation.add("yes");
        assert_eq!(evaluation.len(), 14 - 8 + 1 + 1);
        let found = |text: &str| evaluation.find(text);
        assert_eq!(
            found("He asked: of ALL the rivers — of the North — turns one?").as_deref(),
            Some("of all the rivers of the north turns")
        );
        assert_eq!(
            found("It is said that six short words make an answer, yes.").as_deref(),
            Some("six short words make an answer")
        );
        assert_eq!(found("yes, of all the rivers"), None);
    }
}
