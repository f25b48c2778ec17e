//! Prefetching of memory that will be packed soon.
//!
//! Packing an operand mostly waits for memory, while computing a tile reads only the caches. So the loops that compute
//! a tile also prefetch the elements that will be packed next.

/// Bytes of a line of the caches.
const LINE: usize = 64;

/// The cache lines of equally spaced rows, from the next line to fetch on. After the last line, the value stays at it.
#[derive(Clone, Copy)]
pub(super) struct Ahead {
    next: *const u8,
    /// The lines that are left of this row.
    lines: usize,
    /// The rows that are left after this one.
    rows: usize,
    lines_of_a_row: usize,
    /// The distance from a row's last line to the next row's first one, in bytes.
    jump: usize,
}

impl Ahead {
    pub fn nothing() -> Self {
        // The address is valid, because prefetching an invalid one is slow.
        static PLACE: u8 = 0;
        Self { next: &raw const PLACE, lines: 1, rows: 0, lines_of_a_row: 1, jump: 0 }
    }

    /// Rows of `bytes` bytes each, which begin `stride` bytes apart.
    pub fn rows(start: *const u8, bytes: usize, rows: usize, stride: usize) -> Self {
        if bytes == 0 || rows == 0 {
            return Self::nothing();
        }
        // A row may begin anywhere within a line.
        let lines = (start.addr() % LINE + bytes).div_ceil(LINE);
        let jump = stride.wrapping_sub((lines - 1) * LINE);
        Self { next: start, lines, rows: rows - 1, lines_of_a_row: lines, jump }
    }

    /// An address in the next line, which may lie outside of readable memory.
    #[inline(always)]
    pub fn take(&mut self) -> *const u8 {
        let line = self.next;
        if self.lines > 1 {
            self.lines -= 1;
            self.next = line.wrapping_add(LINE);
        } else if self.rows > 0 {
            self.rows -= 1;
            self.lines = self.lines_of_a_row;
            self.next = line.wrapping_add(self.jump);
        }
        line
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The lines that are fetched for rows that begin `start` bytes after a line does, counted from that line.
    fn lines(start: usize, bytes: usize, rows: usize, stride: usize) -> Vec<usize> {
        let memory = std::ptr::without_provenance::<u8>(1 << 20);
        let mut ahead = Ahead::rows(memory.wrapping_add(start), bytes, rows, stride);
        let mut lines: Vec<usize> = (0..1000).map(|_| (ahead.take().addr() - memory.addr()) / LINE).collect();
        lines.dedup();
        lines
    }

    #[test]
    fn rows_are_fetched_line_by_line() {
        assert_eq!(lines(0, 128, 3, 640), [0, 1, 10, 11, 20, 21]);
        assert_eq!(lines(0, 1, 2, 4096), [0, 64]);
    }

    #[test]
    fn rows_that_begin_within_lines_are_fetched_whole() {
        assert_eq!(lines(60, 128, 2, 640), [0, 1, 2, 10, 11, 12]);
    }

    #[test]
    fn nothing_is_left_to_fetch_of_no_rows() {
        let mut nothing = Ahead::rows(std::ptr::null(), 64, 0, 64);
        assert_eq!(nothing.take(), nothing.take());
        assert!(!nothing.take().is_null());
    }
}
