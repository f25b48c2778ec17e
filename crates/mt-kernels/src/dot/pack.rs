//! Copies of operands in the order in which tiles read them.
//!
//! A panel holds, for each step along the contraction, one word of each of its lines (rows of the left operand, columns
//! of the right one). A word is an `f32`, or two `bf16` that follow each other along the contraction.

use half::bf16;

/// What a word of a panel is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Format {
    F32,
    /// An `f32` that was rounded to `bf16`.
    RoundedF32,
    /// Two `bf16`, the first one in the lower half.
    Pairs,
}

impl Format {
    /// How many words a line has.
    pub fn steps(self, depth: usize) -> usize {
        match self {
            Self::F32 | Self::RoundedF32 => depth,
            Self::Pairs => depth.div_ceil(2),
        }
    }
}

/// An operand's elements, which outlive the call.
#[derive(Clone, Copy)]
pub(super) enum Source {
    F32(*const f32),
    Bf16(*const bf16),
}

/// What to copy, and where to.
pub(super) struct Panel<'a> {
    pub source: Source,
    /// Where each line begins.
    pub lines: &'a [usize],
    /// Where its elements lie, relative to the line's begin.
    pub depth: &'a [usize],
    pub format: Format,
    /// `[steps, width]`; what exceeds the lines, or the depth in the last step, is filled with zeros.
    pub out: *mut u32,
    pub width: usize,
}

/// Copies a panel element by element.
///
/// # Safety
/// All offsets lie in the source, and `out` has room for the panel.
#[inline(always)]
pub(super) unsafe fn portable(panel: &Panel) {
    // SAFETY: what the caller promises.
    unsafe { portable_steps(panel, 0) }
}

/// Copies the steps of a panel from `first` on, element by element.
///
/// # Safety
/// As for [`portable`].
#[inline(always)]
pub(super) unsafe fn portable_steps(panel: &Panel, first: usize) {
    let depth = panel.depth;
    for step in first..panel.format.steps(depth.len()) {
        for line in 0..panel.width {
            let word = match panel.lines.get(line) {
                None => 0,
                Some(&line) => {
                    // SAFETY: the offsets lie in the source.
                    let element = |offset: usize| unsafe { load(panel.source, line + offset) };
                    match panel.format {
                        Format::F32 => element(depth[step]).to_bits(),
                        Format::RoundedF32 => round(element(depth[step])).to_f32().to_bits(),
                        Format::Pairs => {
                            let low = round(element(depth[2 * step])).to_bits();
                            let high =
                                depth.get(2 * step + 1).map_or(0, |&offset| round(element(offset)).to_bits());
                            u32::from(low) | u32::from(high) << 16
                        }
                    }
                }
            };
            // SAFETY: the word lies in the panel.
            unsafe { *panel.out.add(step * panel.width + line) = word };
        }
    }
}

/// # Safety
/// The offset lies in the source.
#[inline(always)]
unsafe fn load(source: Source, offset: usize) -> f32 {
    match source {
        // SAFETY: what the caller promises.
        Source::F32(start) => unsafe { *start.add(offset) },
        // SAFETY: what the caller promises.
        Source::Bf16(start) => unsafe { *start.add(offset) }.to_f32(),
    }
}

#[inline(always)]
fn round(number: f32) -> bf16 {
    bf16::from_f32(number)
}
