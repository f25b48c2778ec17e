//! Scratch memory that each thread keeps between tasks. The system would clear newly allocated pages for each task.

use std::cell::RefCell;

/// A cache line.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u32; WORDS]);

const WORDS: usize = 16;

thread_local! {
    static LINES: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
}

/// Runs `work` with slices of the given numbers of words. The slices hold the content that earlier tasks left.
pub(super) fn with_scratch<const N: usize, R>(
    sizes: [usize; N],
    work: impl FnOnce([&mut [u32]; N]) -> R,
) -> R {
    let whole_lines = |size: &usize| size.next_multiple_of(WORDS);
    let num_words: usize = sizes.iter().map(whole_lines).sum();
    LINES.with_borrow_mut(|lines| {
        if lines.len() * WORDS < num_words {
            // Clearing first saves a copy of the old content.
            lines.clear();
            lines.resize(num_words / WORDS, Line([0; WORDS]));
        }
        // SAFETY: a line is an array of words.
        let mut rest =
            unsafe { std::slice::from_raw_parts_mut(lines.as_mut_ptr().cast::<u32>(), lines.len() * WORDS) };
        work(sizes.map(|size| {
            let (words, after) = std::mem::take(&mut rest).split_at_mut(size.next_multiple_of(WORDS));
            rest = after;
            &mut words[..size]
        }))
    })
}

/// The same bits as `f32`.
pub(super) fn floats(words: &mut [u32]) -> &mut [f32] {
    // SAFETY: both types have the same size and alignment and hold any bits.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), words.len()) }
}

/// The same bits as words.
pub(super) fn words(floats: &mut [f32]) -> &mut [u32] {
    // SAFETY: both types have the same size and alignment and hold any bits.
    unsafe { std::slice::from_raw_parts_mut(floats.as_mut_ptr().cast(), floats.len()) }
}
