//! The state of recurrent layers after whole pages, for prompts with the same beginning.
//!
//! Pages hold the state of each token, but recurrent layers have one state that each token replaces. So pages alone do not
//! let a prompt go on from a beginning that was read before: that takes a copy of the state, which lies in an entry of its
//! own.

use std::collections::HashMap;

use super::pages::Prefix;

/// Entries with copies of states. The least recently used one makes room for another.
pub(super) struct Snapshots {
    /// The number of the first entry.
    first: u32,
    /// The prefix after which each state is, and when it was last used.
    kept: Vec<(Option<Prefix>, u64)>,
    places: HashMap<Prefix, usize>,
    now: u64,
}

impl Snapshots {
    /// `count` entries from `first` on.
    pub fn new(first: u32, count: usize) -> Self {
        Self { first, kept: vec![(None, 0); count], places: HashMap::new(), now: 0 }
    }

    pub fn contains(&self, prefix: Prefix) -> bool {
        self.places.contains_key(&prefix)
    }

    /// The entry with the state after a prefix, which has been used now.
    pub fn find(&mut self, prefix: Prefix) -> Option<u32> {
        let place = *self.places.get(&prefix)?;
        self.now += 1;
        self.kept[place].1 = self.now;
        Some(self.first + place as u32)
    }

    /// An entry for the state after a prefix; `None` if it is kept already, or nothing can be kept.
    pub fn keep(&mut self, prefix: Prefix) -> Option<u32> {
        if self.find(prefix).is_some() {
            return None;
        }
        let (place, (oldest, used)) = self.kept.iter_mut().enumerate().min_by_key(|(_, (_, used))| *used)?;
        self.now += 1;
        if let Some(oldest) = oldest.replace(prefix) {
            self.places.remove(&oldest);
        }
        *used = self.now;
        self.places.insert(prefix, place);
        Some(self.first + place as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::pages::PrefixHasher;

    #[test]
    fn the_least_recently_used_state_makes_room() {
        let hasher = PrefixHasher::default();
        let [a, b, c] = [1, 2, 3].map(|token| hasher.extend(Prefix::EMPTY, &[token]));
        let mut snapshots = Snapshots::new(7, 2);
        assert_eq!((snapshots.keep(a), snapshots.keep(b), snapshots.keep(a)), (Some(7), Some(8), None));
        // Asking for `a` again has used it.
        assert_eq!((snapshots.keep(c), snapshots.contains(b), snapshots.find(a)), (Some(8), false, Some(7)));
        assert_eq!(Snapshots::new(3, 0).keep(a), None);
    }
}
