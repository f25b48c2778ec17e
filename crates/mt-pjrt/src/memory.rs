//! Advice to the system about memory.

use std::ffi::{c_int, c_void};

unsafe extern "C" {
    fn madvise(address: *mut c_void, length: usize, advice: c_int) -> c_int;
}

/// `MADV_HUGEPAGE` of Linux on all its architectures.
const LARGE_PAGES: c_int = 14;

/// The largest page size that systems use by default for ordinary memory.
const PAGE: usize = 1 << 21;

/// Advises huge pages for memory that is about to be filled, because mapping gigabytes in pages of 4 kB takes longer
/// than filling them. The system may ignore the advice.
pub fn prefer_large_pages(bytes: &mut [u8]) {
    advise_large_pages(bytes);
}

/// [`prefer_large_pages`] for memory that its allocator has not yet handed out.
pub(crate) fn advise_large_pages(bytes: *mut [u8]) {
    let start = bytes.cast::<u8>().addr();
    let first = start.next_multiple_of(PAGE);
    let end = (start + bytes.len()) / PAGE * PAGE;
    if first >= end {
        return;
    }
    let address = bytes.cast::<u8>().wrapping_add(first - start);
    // SAFETY: the range is within memory that belongs to the caller, and the advice changes no contents. The system may
    // ignore it.
    let _ = unsafe { madvise(address.cast(), end - first, LARGE_PAGES) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contents_stay() {
        for size in [0, 10, PAGE, 3 * PAGE + 17] {
            let mut bytes = vec![7_u8; size];
            prefer_large_pages(&mut bytes);
            assert!(bytes.iter().all(|byte| *byte == 7));
        }
    }
}
