//! The allocator of this program and of the plugins it loads: jemalloc instead of the C library's, on systems where it
//! is known to work. With jemalloc, the compiler for TPUs takes two thirds of the time, and less memory.

/// Returns free memory, which the allocator otherwise retains, to the system. Compiling a program takes hundreds of
/// megabytes that no later work uses.
pub fn release_free_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu", target_arch = "x86_64"))]
    jemalloc::release_free_memory();
}

/// Prepares the allocator for executions on CPUs, each of which allocates XLA's temporaries again. From now on
/// allocations of megabytes use huge pages, and their memory is retained for the next execution; otherwise it is
/// returned at once. A thread returns what has been free for a while. On two cores a twelfth of a training step went
/// into mapping memory in pages of 4 kB, and a tenth into clearing pages that had been returned too early.
pub(crate) fn keep_large_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu", target_arch = "x86_64"))]
    jemalloc::keep_large_memory();
}

#[cfg(all(target_os = "linux", target_env = "gnu", target_arch = "x86_64"))]
mod jemalloc {
    use std::{
        ffi::{CStr, CString, c_uint, c_void},
        ptr,
        sync::{Once, OnceLock},
        thread,
        time::Duration,
    };

    use tikv_jemalloc_sys::{extent_hooks_t, free, mallctl, malloc};

    use crate::memory::advise_large_pages;

    /// jemalloc serves larger allocations from an arena of their own that returns free memory at once
    /// (`opt.oversize_threshold`).
    const LARGE: usize = 8 << 20;

    /// The decay of memory that only the thread below returns.
    const NO_DECAY: isize = -1;

    /// How often the thread looks for free memory, and how often in a row it finds some before it returns it. Between two
    /// executions memory is free for a few milliseconds.
    const INTERVAL: Duration = Duration::from_millis(50);
    const MOST_OBSERVED: usize = 3;

    /// Less free memory is kept.
    const FEWEST_FREE: usize = 16 << 20;

    /// jemalloc's number for all arenas (`MALLCTL_ARENAS_ALL`).
    const ALL_ARENAS: c_uint = 4096;

    pub fn release_free_memory() {
        purge(ALL_ARENAS);
    }

    fn purge(arena: c_uint) {
        let Ok(control) = CString::new(format!("arena.{arena}.purge")) else { return };
        // SAFETY: this control reads and writes no value.
        let _ = unsafe { mallctl(control.as_ptr(), ptr::null_mut(), ptr::null_mut(), ptr::null_mut(), 0) };
    }

    pub fn keep_large_memory() {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            // Failure makes programs slower and has no other effect.
            let Some(arena) = arena_of_large() else { return };
            // Without the thread, jemalloc itself must return free memory.
            let watch = move || release_what_stays_free(arena);
            if thread::Builder::new().name("free memory".into()).spawn(watch).is_ok() {
                let _ = keep_large_memory_of(arena);
            }
        });
    }

    /// Returns free memory of an arena to the system once it has been free for a while, for the life of the process.
    fn release_what_stays_free(arena: c_uint) {
        let mut observed = 0;
        loop {
            thread::sleep(INTERVAL);
            observed = if free_bytes(arena) < FEWEST_FREE { 0 } else { observed + 1 };
            if observed == MOST_OBSERVED {
                purge(arena);
                observed = 0;
            }
        }
    }

    /// The bytes that an arena retains.
    pub(super) fn free_bytes(arena: c_uint) -> usize {
        let Ok(pages) = CString::new(format!("stats.arenas.{arena}.pdirty")) else { return 0 };
        // SAFETY: the controls have these types. Writing any epoch brings all statistics up to date.
        unsafe {
            exchange(c"epoch", Some(1_u64), 0_u64);
            let pages = exchange::<usize, _>(&pages, None, 0_usize).unwrap_or(0);
            pages * exchange::<usize, _>(c"arenas.page", None, 0_usize).unwrap_or(0)
        }
    }

    /// The arena that serves large allocations.
    pub(super) fn arena_of_large() -> Option<c_uint> {
        // SAFETY: only the memory's address is looked up, before it is freed.
        unsafe {
            let memory = malloc(LARGE);
            let arena = exchange(c"arenas.lookup", Some(memory), c_uint::MAX);
            free(memory);
            arena
        }
    }

    fn keep_large_memory_of(arena: c_uint) -> Option<()> {
        static HOOKS: OnceLock<extent_hooks_t> = OnceLock::new();

        let control = |name| CString::new(format!("arena.{arena}.{name}")).ok();
        let hooks_control = control("extent_hooks")?;
        // SAFETY: the hooks of an arena are a pointer to a structure that is never freed; new hooks may be set at any
        // time.
        unsafe {
            let usual =
                exchange::<*mut extent_hooks_t, *mut extent_hooks_t>(&hooks_control, None, ptr::null_mut())?;
            if USUAL.set(usual.as_ref()?.alloc?).is_err() {
                return None;
            }
            let hooks = HOOKS.get_or_init(|| extent_hooks_t { alloc: Some(in_large_pages), ..*usual });
            exchange(&hooks_control, Some(ptr::from_ref(hooks)), ptr::null::<extent_hooks_t>())?;
            exchange(&control("dirty_decay_ms")?, Some(NO_DECAY), 0_isize)?;
        }
        Some(())
    }

    type Allocate = unsafe extern "C" fn(
        *mut extent_hooks_t,
        *mut c_void,
        usize,
        usize,
        *mut bool,
        *mut bool,
        c_uint,
    ) -> *mut c_void;

    static USUAL: OnceLock<Allocate> = OnceLock::new();

    /// Allocates with the previous hook and advises huge pages.
    unsafe extern "C" fn in_large_pages(
        hooks: *mut extent_hooks_t,
        address: *mut c_void,
        size: usize,
        alignment: usize,
        zero: *mut bool,
        commit: *mut bool,
        arena: c_uint,
    ) -> *mut c_void {
        let Some(usual) = USUAL.get() else { return ptr::null_mut() };
        // SAFETY: the arguments are those that jemalloc passes.
        let memory = unsafe { usual(hooks, address, size, alignment, zero, commit, arena) };
        if !memory.is_null() {
            advise_large_pages(ptr::slice_from_raw_parts_mut(memory.cast(), size));
        }
        memory
    }

    /// Reads a jemalloc control and writes `new` to it. `None` if jemalloc refuses it.
    ///
    /// # Safety
    /// The control reads and writes values of these types.
    unsafe fn exchange<N, T>(control: &CStr, new: Option<N>, mut old: T) -> Option<T> {
        let mut old_size = size_of::<T>();
        let mut new = new;
        let (pointer, size) = match &mut new {
            Some(new) => (ptr::from_mut(new).cast(), size_of::<N>()),
            None => (ptr::null_mut(), 0),
        };
        // SAFETY: `old` has room for the value read, and `new` has the size that is passed.
        let failure =
            unsafe { mallctl(control.as_ptr(), (&raw mut old).cast(), &raw mut old_size, pointer, size) };
        (failure == 0 && old_size == size_of::<T>()).then_some(old)
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn large_memory_has_an_arena_whose_memory_is_kept() {
            keep_large_memory();
            let arena = arena_of_large().expect("memory of jemalloc");
            let small = Box::new(1_u8);
            let decay = CString::new(format!("arena.{arena}.dirty_decay_ms")).expect("a name");
            // SAFETY: the controls have these types.
            let (arena_of_small, decay) = unsafe {
                (
                    exchange(c"arenas.lookup", Some(ptr::from_ref(&*small)), c_uint::MAX),
                    exchange::<isize, _>(&decay, None, 0_isize),
                )
            };
            assert!(arena_of_small.is_some_and(|one| one != arena));
            assert_eq!(decay, Some(NO_DECAY));
        }

        #[test]
        fn memory_that_stays_free_is_returned() {
            keep_large_memory();
            let arena = arena_of_large().expect("memory of jemalloc");
            drop(std::hint::black_box(vec![1_u8; 4 * FEWEST_FREE]));
            let deadline = std::time::Instant::now() + Duration::from_secs(20);
            while free_bytes(arena) >= FEWEST_FREE {
                assert!(std::time::Instant::now() < deadline, "{} bytes stay free", free_bytes(arena));
                thread::sleep(INTERVAL);
            }
        }
    }
}
