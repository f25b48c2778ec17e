//! The pages of a pool: which are free, which sequences share, and which are kept for prompts with the same beginning.

use std::{
    collections::HashMap,
    hash::{BuildHasher, RandomState},
};

/// The number of a page in its pool.
pub(crate) type PageId = u32;

/// The page that no sequence has. Padding is written to it, and tables name it where there is nothing to read.
pub(crate) const NULL_PAGE: PageId = 0;

/// The hash of all tokens up to the end of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Prefix(u128);

impl Prefix {
    /// The prefix without tokens.
    pub const EMPTY: Self = Self(0);

    /// The prefix without tokens for an adapter; 0 for none.
    pub fn of_adapter(adapter: u32) -> Self {
        Self(adapter.into())
    }
}

/// Hashes prefixes. Its keys are random, so that no request can be made to collide with another one.
#[derive(Clone, Default)]
pub(crate) struct PrefixHasher {
    low: RandomState,
    high: RandomState,
}

impl PrefixHasher {
    /// The prefix that continues `before` with the tokens of a page.
    pub fn extend(&self, before: Prefix, tokens: &[u32]) -> Prefix {
        let [low, high] = [&self.low, &self.high].map(|state| u128::from(state.hash_one((before, tokens))));
        Prefix(high << 64 | low)
    }
}

/// The pages of a pool.
pub(crate) struct PagePool {
    /// The number of sequences that have each page.
    references: Vec<u32>,
    /// The prefix that ends with each page, if the page can be shared.
    prefixes: Vec<Option<Prefix>>,
    /// The pages by prefix.
    pages: HashMap<Prefix, PageId>,
    /// Pages that hold nothing.
    free: Vec<PageId>,
    /// A ring of the pages that no sequence has and that hold a prefix, from the least to the most recently used. It
    /// begins and ends at the null page.
    next: Vec<PageId>,
    previous: Vec<PageId>,
    num_idle: usize,
    /// The pages that lost a prefix, until they are taken; `None` if nobody takes them.
    evicted: Option<Vec<(PageId, Prefix)>>,
}

impl PagePool {
    /// A pool of `num_pages` pages, of which the null page is one.
    pub fn new(num_pages: usize) -> Self {
        Self {
            references: vec![0; num_pages],
            prefixes: vec![None; num_pages],
            pages: HashMap::new(),
            free: (1..num_pages as PageId).rev().collect(),
            next: vec![NULL_PAGE; num_pages],
            previous: vec![NULL_PAGE; num_pages],
            num_idle: 0,
            evicted: None,
        }
    }

    /// The pages that have lost a prefix since the last call, which are noted from now on.
    pub fn take_evicted(&mut self) -> Vec<(PageId, Prefix)> {
        self.evicted.replace(Vec::new()).unwrap_or_default()
    }

    /// The number of pages that sequences can have.
    pub fn total(&self) -> usize {
        self.references.len() - 1
    }

    /// The number of pages that can be allocated, which includes those that only hold a prefix.
    pub fn available(&self) -> usize {
        self.free.len() + self.num_idle
    }

    /// Gives a page to a sequence. If none is free, the least recently used prefix is forgotten.
    pub fn allocate(&mut self) -> Option<PageId> {
        let page = match self.free.pop() {
            Some(page) => page,
            None => {
                let oldest = self.next[NULL_PAGE as usize];
                if oldest == NULL_PAGE {
                    return None;
                }
                self.unlink(oldest);
                let prefix = self.prefixes[oldest as usize].take().expect("idle pages hold a prefix");
                self.pages.remove(&prefix);
                self.evicted.iter_mut().for_each(|evicted| evicted.push((oldest, prefix)));
                oldest
            }
        };
        self.references[page as usize] = 1;
        Some(page)
    }

    /// The page that ends with a prefix.
    pub fn find(&self, prefix: Prefix) -> Option<PageId> {
        self.pages.get(&prefix).copied()
    }

    /// Gives a page to one more sequence.
    pub fn share(&mut self, page: PageId) {
        if self.references[page as usize] == 0 {
            self.unlink(page);
        }
        self.references[page as usize] += 1;
    }

    /// Takes a page from a sequence.
    pub fn release(&mut self, page: PageId) {
        let references = &mut self.references[page as usize];
        *references -= 1;
        if *references > 0 {
            return;
        }
        if self.prefixes[page as usize].is_none() {
            self.free.push(page);
            return;
        }
        let last = self.previous[NULL_PAGE as usize];
        self.next[last as usize] = page;
        self.previous[page as usize] = last;
        self.next[page as usize] = NULL_PAGE;
        self.previous[NULL_PAGE as usize] = page;
        self.num_idle += 1;
    }

    /// Lets other sequences find a full page by its prefix, unless another page has the same one.
    pub fn register(&mut self, page: PageId, prefix: Prefix) {
        if self.prefixes[page as usize].is_none() && !self.pages.contains_key(&prefix) {
            self.prefixes[page as usize] = Some(prefix);
            self.pages.insert(prefix, page);
        }
    }

    /// Whether several sequences have the page.
    #[cfg(test)]
    pub fn references(&self, page: PageId) -> u32 {
        self.references[page as usize]
    }

    fn unlink(&mut self, page: PageId) {
        let (before, after) = (self.previous[page as usize], self.next[page as usize]);
        self.next[before as usize] = after;
        self.previous[after as usize] = before;
        self.num_idle -= 1;
    }

    /// Checks that each page is in exactly one of the states, and that the maps agree.
    #[cfg(test)]
    pub fn check(&self) {
        let mut states = vec![0; self.references.len()];
        for page in &self.free {
            assert!(self.prefixes[*page as usize].is_none() && self.references[*page as usize] == 0);
            states[*page as usize] += 1;
        }
        let mut page = self.next[NULL_PAGE as usize];
        let mut num_idle = 0;
        while page != NULL_PAGE {
            assert!(self.prefixes[page as usize].is_some() && self.references[page as usize] == 0);
            assert_eq!(self.previous[self.next[page as usize] as usize], page);
            states[page as usize] += 1;
            num_idle += 1;
            page = self.next[page as usize];
        }
        assert_eq!(num_idle, self.num_idle);
        for (page, state) in states.iter_mut().enumerate().skip(1) {
            *state += usize::from(self.references[page] > 0);
            assert_eq!(*state, 1, "page {page} is in one state");
            if let Some(prefix) = self.prefixes[page] {
                assert_eq!(self.pages[&prefix], page as PageId);
            }
        }
        assert_eq!(self.pages.len(), self.prefixes.iter().flatten().count());
        assert_eq!(states[0], 0, "nobody has the null page");
    }
}
