//! Copies of operands into panels for tiles of a matrix unit, sixteen words of sixteen lines at a time.

use std::arch::x86_64::*;

use super::super::pack::{Format, Order, Panels, Source, copy_elements};
use super::load::{Load, PairsOfBf16, PairsOfF32, PairsOfRemainders, first_lanes};
use super::panels::transpose;
use crate::amx::{BLOCK, TILE};

/// Copies panels of pairs of `bf16`, in whole tiles.
///
/// # Safety
/// See [`super::Kernel::pack`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) unsafe fn pack(panels: &Panels) {
    // SAFETY: what the caller promises; the processor has the instructions.
    unsafe {
        match (panels.source, panels.format) {
            (Source::F32(start), Format::TileSplit) => {
                copy(panels, PairsOfF32(start), 0);
                copy(panels, PairsOfRemainders(start), 1);
            }
            (Source::F32(start), _) => copy(panels, PairsOfF32(start), 0),
            (Source::Bf16(start), Format::TileSplit) => {
                copy(panels, PairsOfBf16(start), 0);
                clear(panels, 1);
            }
            (Source::Bf16(start), _) => copy(panels, PairsOfBf16(start), 0),
            (Source::I8(_), _) => unreachable!("integers have panels of their own"),
        }
    }
}

/// The cache lines by which prefetching along the contraction runs ahead.
const AHEAD: usize = 4;

/// Copies one half of all panels' words.
///
/// # Safety
/// See [`super::Kernel::pack`].
#[inline(always)]
unsafe fn copy<L: Load>(panels: &Panels, load: L, half: usize) {
    let depth = 2 * TILE;
    let halves = panels.format.halves();
    // One bit for each panel.
    let mut whole_panels = 0_u64;
    for (panel, lines) in panels.lines.chunks(panels.width).take(64).enumerate() {
        whole_panels |= u64::from(lines.len() == BLOCK && are_adjacent(lines)) << panel;
    }
    for (tile, position) in (0..panels.offsets.len()).step_by(depth).enumerate() {
        let offsets = &panels.offsets[position..(position + depth).min(panels.offsets.len())];
        let is_run = panels.runs[position] >= offsets.len();
        let step = (tile * halves + half) * TILE;
        for panel in 0..panels.count() {
            let lines = &panels.lines[panel * panels.width..];
            let lines = &lines[..lines.len().min(panels.width)];
            if !is_run && offsets.len() == depth && panel < 64 && whole_panels >> panel & 1 == 1 {
                // SAFETY: the lines' elements lie in the source, and the words in the panel.
                unsafe { copy_block(panels, load, panel, step, lines[0], offsets) };
                continue;
            }
            for lane in (0..panels.width).step_by(TILE) {
                let lines = lines.get(lane..).unwrap_or_default();
                let lines = &lines[..lines.len().min(TILE)];
                // SAFETY: the lines' elements lie in the source, and the words in the panel.
                unsafe {
                    if lines.is_empty() {
                        store(panels, panel, step, lane, [_mm512_setzero_si512(); TILE], Order::ByLines);
                    } else if is_run {
                        let words = along(load, lines, offsets);
                        store(panels, panel, step, lane, words, Order::ByLines);
                    } else if are_adjacent(lines) {
                        let words = across(load, lines, offsets);
                        store(panels, panel, step, lane, words, Order::BySteps);
                    } else {
                        copy_elements(panels, panel, step..step + TILE, lane..lane + TILE);
                    }
                }
            }
        }
    }
}

pub(super) fn are_adjacent(lines: &[usize]) -> bool {
    lines.len() > 1 && lines.windows(2).all(|pair| pair[1] == pair[0] + 1)
}

/// Copies sixteen words of each of 32 adjacent lines.
///
/// # Safety
/// The elements lie in the source, and the words in the panel.
#[inline(always)]
unsafe fn copy_block<L: Load>(
    panels: &Panels,
    load: L,
    panel: usize,
    step: usize,
    first: usize,
    offsets: &[usize],
) {
    let (pairs, _) = offsets.as_chunks::<2>();
    // SAFETY: what the caller promises.
    unsafe {
        let mut words = [[_mm512_setzero_si512(); TILE]; 2];
        for (index, pair) in pairs.iter().enumerate() {
            // Processors do not prefetch over such distances on their own.
            load.prefetch(first + pair[0] + BLOCK);
            load.prefetch(first + pair[1] + BLOCK);
            if L::CACHE_LINE < BLOCK {
                load.prefetch(first + pair[0] + BLOCK + L::CACHE_LINE);
                load.prefetch(first + pair[1] + BLOCK + L::CACHE_LINE);
            }
            let [low, high] = load.across_two(first + pair[0], first + pair[1]);
            if panels.order == Order::BySteps {
                let to = panels.tile(panel, step, 0).add(index * TILE);
                _mm512_storeu_si512(to.cast(), low);
                _mm512_storeu_si512(to.add(TILE * TILE).cast(), high);
            } else {
                words[0][index] = low;
                words[1][index] = high;
            }
        }
        if panels.order == Order::ByLines {
            let [low, high] = words;
            store(panels, panel, step, 0, low, Order::BySteps);
            store(panels, panel, step, TILE, high, Order::BySteps);
        }
    }
}

/// Sixteen words of each line. Each line's elements are adjacent.
///
/// # Safety
/// The elements lie in the source.
#[inline(always)]
unsafe fn along<L: Load>(load: L, lines: &[usize], offsets: &[usize]) -> [__m512i; TILE] {
    let start = offsets[0];
    // SAFETY: what the caller promises.
    unsafe {
        let mut words = [_mm512_setzero_si512(); TILE];
        if let (Some(lines), true) = (lines.first_chunk::<TILE>(), offsets.len() == 2 * TILE) {
            for (words, line) in words.iter_mut().zip(lines) {
                for later in (0..2 * TILE).step_by(L::CACHE_LINE) {
                    load.prefetch(line + start + later + AHEAD * L::CACHE_LINE);
                }
                *words = load.along(line + start, 2 * TILE);
            }
        } else {
            for (words, line) in words.iter_mut().zip(lines) {
                *words = load.along(line + start, offsets.len());
            }
        }
        words
    }
}

/// A word of each line for sixteen steps. The lines are adjacent.
///
/// # Safety
/// The elements lie in the source.
#[inline(always)]
unsafe fn across<L: Load>(load: L, lines: &[usize], offsets: &[usize]) -> [__m512i; TILE] {
    let first = lines[0];
    // SAFETY: what the caller promises.
    unsafe {
        let mut words = [_mm512_setzero_si512(); TILE];
        if let (TILE, Some(offsets)) = (lines.len(), offsets.first_chunk::<{ 2 * TILE }>()) {
            for (words, pair) in words.iter_mut().zip(offsets.as_chunks::<2>().0) {
                *words = load.across(first + pair[0], Some(first + pair[1]), __mmask16::MAX);
            }
        } else {
            for (words, pair) in words.iter_mut().zip(offsets.chunks(2)) {
                let second = pair.get(1).map(|second| first + second);
                *words = load.across(first + pair[0], second, first_lanes(lines.len()));
            }
        }
        words
    }
}

/// Stores a tile's words, which have the order `order`, in the order of the panels.
///
/// # Safety
/// The panel has the steps and lanes.
#[inline(always)]
pub(super) unsafe fn store(
    panels: &Panels,
    panel: usize,
    step: usize,
    lane: usize,
    words: [__m512i; TILE],
    order: Order,
) {
    // SAFETY: what the caller promises.
    unsafe {
        let words = if order == panels.order { words } else { transpose(&words) };
        let start = panels.tile(panel, step, lane);
        for (index, words) in words.into_iter().enumerate() {
            _mm512_storeu_si512(start.add(index * TILE).cast(), words);
        }
    }
}

/// Fills one half of all panels' words with zeros.
///
/// # Safety
/// See [`super::Kernel::pack`].
#[inline(always)]
unsafe fn clear(panels: &Panels, half: usize) {
    let halves = panels.format.halves();
    for panel in 0..panels.count() {
        for step in (half * TILE..panels.steps()).step_by(halves * TILE) {
            for lane in (0..panels.width).step_by(TILE) {
                // SAFETY: the panel has the steps and lanes.
                unsafe { store(panels, panel, step, lane, [_mm512_setzero_si512(); TILE], panels.order) };
            }
        }
    }
}
