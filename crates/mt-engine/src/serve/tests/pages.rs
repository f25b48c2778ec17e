//! Random operations on the pages of a pool.

use std::collections::HashMap;

use mt_testing::Random;

use crate::serve::pages::{NULL_PAGE, PageId, PagePool, Prefix, PrefixHasher};

const NUM_OPERATIONS: usize = 1_200_000;
const NUM_PAGES: usize = 65;

/// A page of a sequence, and what it holds.
struct Held {
    page: PageId,
    prefix: Prefix,
}

#[test]
fn no_page_leaks_and_none_is_shared_wrongly() {
    let mut random = Random::new(3);
    let mut below = |count: usize| random.below(count);
    let mut pool = PagePool::new(NUM_PAGES);
    let hasher = PrefixHasher::default();
    let mut sequences: Vec<Vec<Held>> = (0..24).map(|_| Vec::new()).collect();
    // The content of each page.
    let mut contents: HashMap<PageId, Prefix> = HashMap::new();
    for operation in 0..NUM_OPERATIONS {
        let index = below(sequences.len());
        match below(16) {
            // The sequence ends.
            0 => sequences[index].drain(..).rev().for_each(|held| pool.release(held.page)),
            // Its first page is released, as in layers that see a limited number of tokens.
            1 if !sequences[index].is_empty() => pool.release(sequences[index].remove(0).page),
            // It has a next page, of one of few contents, so that other sequences have the same.
            _ => {
                let before = sequences[index].last().map_or(Prefix::EMPTY, |held| held.prefix);
                let prefix = hasher.extend(before, &[below(3) as u32]);
                if let Some(page) = pool.find(prefix) {
                    assert_eq!(contents.get(&page), Some(&prefix), "a found page holds the prefix");
                    pool.share(page);
                    sequences[index].push(Held { page, prefix });
                } else if let Some(page) = pool.allocate() {
                    assert_ne!(page, NULL_PAGE);
                    let holders = sequences.iter().flatten().filter(|held| held.page == page).count();
                    assert_eq!(holders, 0, "page {page} is allocated twice");
                    contents.insert(page, prefix);
                    if below(4) > 0 {
                        pool.register(page, prefix);
                    }
                    sequences[index].push(Held { page, prefix });
                } else {
                    assert_eq!(pool.available(), 0);
                    sequences[index].drain(..).for_each(|held| pool.release(held.page));
                }
            }
        }
        if operation % 512 == 0 {
            pool.check();
            let mut held: HashMap<PageId, u32> = HashMap::new();
            sequences.iter().flatten().for_each(|own| *held.entry(own.page).or_default() += 1);
            assert_eq!(pool.available() + held.len(), pool.total());
            for (page, count) in held {
                assert_eq!(pool.references(page), count);
            }
        }
    }
    sequences.into_iter().flatten().for_each(|held| pool.release(held.page));
    pool.check();
    assert_eq!(pool.available(), NUM_PAGES - 1);
}

#[test]
fn the_least_recently_used_prefix_is_forgotten_first() {
    let hasher = PrefixHasher::default();
    let prefixes: Vec<Prefix> = (0..4).map(|token| hasher.extend(Prefix::EMPTY, &[token])).collect();
    let mut pool = PagePool::new(4);
    let pages: Vec<PageId> = (0..3).map(|_| pool.allocate().unwrap()).collect();
    assert_eq!(pool.allocate(), None);
    pages.iter().zip(&prefixes).for_each(|(page, prefix)| pool.register(*page, *prefix));
    for index in [1, 0, 2] {
        pool.release(pages[index]);
    }
    // A use makes a prefix recent.
    pool.share(pages[1]);
    pool.release(pages[1]);
    let evicted: Vec<PageId> = (0..3).map(|_| pool.allocate().unwrap()).collect();
    assert_eq!(evicted, [pages[0], pages[2], pages[1]]);
    assert!(prefixes.iter().all(|prefix| pool.find(*prefix).is_none()));
}
