//! Pages in host memory: those with a prefix that the device no longer has room for.
//!
//! A page goes to the host when its place on the device is given away, and comes back when a prompt begins with its prefix.
//! The least recently used pages are forgotten when the memory is full. This file decides; `steps/host.rs` moves the bytes.

use std::collections::{BTreeMap, HashMap};

use super::pages::{PageId, Prefix};

/// The pages in host memory.
pub(crate) struct HostPages {
    /// The bytes of a page of each pool.
    page_bytes: Vec<u64>,
    /// The most bytes of all pages.
    limit: u64,
    used: u64,
    entries: HashMap<Key, Entry>,
    /// The entries from the least to the most recently used.
    order: BTreeMap<u64, Key>,
    clock: u64,
    /// The number of this step, and its moves.
    step: u64,
    moves: HostMoves,
}

/// The pool of a page, and the prefix that ends with it.
type Key = (usize, Prefix);

struct Entry {
    /// The number of the page in host memory, which no other page ever has.
    number: u64,
    /// The time of its last use.
    time: u64,
    /// The last step that restores it, in which it must not be forgotten; 0 for none.
    restored_in: u64,
}

/// The moves of a step between device and host: pages are forgotten and saved before all other work, and restored after
/// copies.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct HostMoves {
    /// The numbers of pages in host memory.
    pub forgotten: Vec<u64>,
    pub saved: Vec<PageMove>,
    pub restored: Vec<PageMove>,
}

/// A page that moves between a pool and host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PageMove {
    pub pool: usize,
    pub page: PageId,
    /// The number of the page in host memory.
    pub number: u64,
}

impl HostPages {
    /// Memory of `limit` bytes, for pages of these bytes in each pool.
    pub fn new(limit: u64, page_bytes: Vec<u64>) -> Self {
        Self {
            page_bytes,
            limit,
            used: 0,
            entries: HashMap::new(),
            order: BTreeMap::new(),
            clock: 0,
            step: 1,
            moves: HostMoves::default(),
        }
    }

    /// The same memory without pages.
    pub fn emptied(self) -> Self {
        // Numbers go on, so that none is used twice.
        Self { clock: self.clock, ..Self::new(self.limit, self.page_bytes) }
    }

    /// The bytes of all pages.
    pub fn used(&self) -> u64 {
        self.used
    }

    pub fn has(&self, pool: usize, prefix: Prefix) -> bool {
        self.entries.contains_key(&(pool, prefix))
    }

    /// Brings a page back, which stays in host memory, too.
    pub fn restore(&mut self, pool: usize, prefix: Prefix, page: PageId) {
        let key = (pool, prefix);
        self.touch(key);
        let entry = self.entries.get_mut(&key).expect("the page is in host memory");
        entry.restored_in = self.step;
        self.moves.restored.push(PageMove { pool, page, number: entry.number });
    }

    /// Keeps a page that loses its place on the device, if there is memory for it.
    pub fn save(&mut self, pool: usize, prefix: Prefix, page: PageId) {
        let key = (pool, prefix);
        if self.entries.contains_key(&key) {
            return self.touch(key);
        }
        let bytes = self.page_bytes[pool];
        if bytes > self.limit {
            return;
        }
        while self.used + bytes > self.limit {
            if !self.forget_oldest() {
                return;
            }
        }
        self.clock += 1;
        let time = self.clock;
        self.order.insert(time, key);
        self.entries.insert(key, Entry { number: time, time, restored_in: 0 });
        self.used += bytes;
        self.moves.saved.push(PageMove { pool, page, number: time });
    }

    /// The moves of the step that was planned.
    pub fn take_moves(&mut self) -> HostMoves {
        self.step += 1;
        std::mem::take(&mut self.moves)
    }

    fn touch(&mut self, key: Key) {
        self.clock += 1;
        let entry = self.entries.get_mut(&key).expect("the page is in host memory");
        self.order.remove(&entry.time);
        entry.time = self.clock;
        self.order.insert(self.clock, key);
    }

    /// Forgets the least recently used page. `false` if this step restores it, and so all others.
    fn forget_oldest(&mut self) -> bool {
        let Some((time, key)) = self.order.first_key_value().map(|(time, key)| (*time, *key)) else {
            return false;
        };
        if self.entries[&key].restored_in == self.step {
            return false;
        }
        self.order.remove(&time);
        let entry = self.entries.remove(&key).expect("the order has the entries");
        self.used -= self.page_bytes[key.0];
        // A page that was saved in this very step need not move.
        match self.moves.saved.iter().position(|saved| saved.number == entry.number) {
            Some(place) => drop(self.moves.saved.remove(place)),
            None => self.moves.forgotten.push(entry.number),
        }
        true
    }

    /// Checks that the sums and the order agree with the entries.
    #[cfg(test)]
    pub fn check(&self) {
        assert!(self.used <= self.limit);
        assert_eq!(self.used, self.entries.keys().map(|(pool, _)| self.page_bytes[*pool]).sum::<u64>());
        assert_eq!(self.order.len(), self.entries.len());
        assert!(self.order.iter().all(|(time, key)| self.entries[key].time == *time));
    }
}
