//! Copies of `i8` into panels for tiles of a matrix unit, sixteen words of sixteen lines at a time.

use std::arch::x86_64::*;

use super::super::pack::{Order, Panels, Source, copy_elements};
use super::load::first_lanes;
use super::tile_panels::{are_adjacent, store};
use crate::amx::TILE;

/// The elements of a line that a tile holds.
const DEPTH: usize = 4 * TILE;

/// Copies panels of four `i8` a word, in whole tiles.
///
/// # Safety
/// See [`super::Kernel::pack`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) unsafe fn pack(panels: &Panels) {
    let Source::I8(source) = panels.source else { unreachable!("other types have other panels") };
    for (tile, position) in (0..panels.offsets.len()).step_by(DEPTH).enumerate() {
        let offsets = &panels.offsets[position..(position + DEPTH).min(panels.offsets.len())];
        let step = tile * TILE;
        for panel in 0..panels.count() {
            let lines = &panels.lines[panel * panels.width..];
            let lines = &lines[..lines.len().min(panels.width)];
            for lane in (0..panels.width).step_by(TILE) {
                let lines = lines.get(lane..).unwrap_or_default();
                let lines = &lines[..lines.len().min(TILE)];
                // SAFETY: the lines' elements lie in the source, and the words in the panel.
                unsafe {
                    if lines.is_empty() || panels.runs[position] >= offsets.len() {
                        let words = along(source, lines, offsets);
                        store(panels, panel, step, lane, words, Order::ByLines);
                    } else if are_adjacent(lines) {
                        let words = across(source, lines, offsets);
                        store(panels, panel, step, lane, words, Order::BySteps);
                    } else {
                        copy_elements(panels, panel, step..step + TILE, lane..lane + TILE);
                    }
                }
            }
        }
    }
}

/// Sixteen words of each line. Each line's elements are adjacent.
///
/// # Safety
/// The elements lie in the source.
#[inline(always)]
unsafe fn along(source: *const i8, lines: &[usize], offsets: &[usize]) -> [__m512i; TILE] {
    let mask = u64::MAX >> (DEPTH - offsets.len());
    // SAFETY: what the caller promises.
    unsafe {
        let mut words = [_mm512_setzero_si512(); TILE];
        for (words, line) in words.iter_mut().zip(lines) {
            *words = _mm512_maskz_loadu_epi8(mask, source.add(line + offsets[0]));
        }
        words
    }
}

/// A word of each line for sixteen steps. The lines are adjacent.
///
/// # Safety
/// The elements lie in the source.
#[inline(always)]
unsafe fn across(source: *const i8, lines: &[usize], offsets: &[usize]) -> [__m512i; TILE] {
    let mask = first_lanes(lines.len());
    // SAFETY: what the caller promises.
    unsafe {
        let mut words = [_mm512_setzero_si512(); TILE];
        for (words, quad) in words.iter_mut().zip(offsets.chunks(4)) {
            let mut bytes = [_mm512_setzero_si512(); 4];
            for (bytes, offset) in bytes.iter_mut().zip(quad) {
                *bytes = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask, source.add(lines[0] + offset)));
            }
            let low = _mm512_or_si512(bytes[0], _mm512_slli_epi32::<8>(bytes[1]));
            let high = _mm512_or_si512(bytes[2], _mm512_slli_epi32::<8>(bytes[3]));
            *words = _mm512_or_si512(low, _mm512_slli_epi32::<16>(high));
        }
        words
    }
}
