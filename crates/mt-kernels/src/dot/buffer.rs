//! Memory for packed panels, reused from call to call.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::ptr::NonNull;
use std::sync::Mutex;

/// The most memory that is kept for later calls.
const KEPT_BYTES: usize = 64 << 20;

/// The size of a page: panels of different threads share no page.
const ALIGNMENT: usize = 4096;

/// Memory of unspecified content.
pub(super) struct Buffer {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: only the buffer refers to its memory.
unsafe impl Send for Buffer {}

static KEPT: Mutex<Vec<Buffer>> = Mutex::new(Vec::new());

impl Buffer {
    /// Memory for `count` words of four bytes.
    pub fn take(count: usize) -> Pooled {
        let bytes = (count * 4).next_power_of_two().max(ALIGNMENT);
        let mut kept = KEPT.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        // A larger buffer would fit too, but a call that needs its size would then allocate.
        let fitting = kept.iter().position(|buffer| buffer.bytes == bytes);
        Pooled(Some(match fitting {
            Some(index) => kept.swap_remove(index),
            None => {
                drop(kept);
                Self::new(bytes)
            }
        }))
    }

    fn new(bytes: usize) -> Self {
        let layout = Self::layout(bytes);
        // SAFETY: the size is not zero.
        let start = unsafe { alloc(layout) };
        Self { start: NonNull::new(start).unwrap_or_else(|| handle_alloc_error(layout)), bytes }
    }

    fn layout(bytes: usize) -> Layout {
        Layout::from_size_align(bytes, ALIGNMENT).expect("a power of two of bytes, far fewer than addresses")
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated by `new` with this layout.
        unsafe { dealloc(self.start.as_ptr(), Self::layout(self.bytes)) };
    }
}

/// A buffer that returns to the pool when it is dropped.
pub(super) struct Pooled(Option<Buffer>);

impl Pooled {
    pub fn words(&self) -> *mut u32 {
        self.0.as_ref().map_or(std::ptr::null_mut(), |buffer| buffer.start.as_ptr().cast())
    }
}

impl Drop for Pooled {
    fn drop(&mut self) {
        let Some(buffer) = self.0.take() else { return };
        let mut kept = KEPT.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let total: usize = kept.iter().map(|buffer| buffer.bytes).sum();
        if total + buffer.bytes <= KEPT_BYTES {
            kept.push(buffer);
        } else {
            drop(kept);
            drop(buffer);
        }
    }
}
