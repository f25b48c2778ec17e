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
/// returned at once. A thread returns what no execution has needed for a while. On two cores a twelfth of a training step went
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

    /// jemalloc's default, in milliseconds.
    const USUAL_DECAY: isize = 10_000;

    /// How often the thread looks for free memory.
    const INTERVAL: Duration = Duration::from_millis(50);

    /// Smaller amounts are kept.
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
            if use_of(arena).is_none() || keep_large_memory_of(arena).is_none() {
                return;
            }
            let watch = move || watch(arena);
            if thread::Builder::new().name("free memory".into()).spawn(watch).is_err() {
                set_decay(arena, USUAL_DECAY);
            }
        });
    }

    /// Returns free memory of an arena to the system, for the life of the process.
    fn watch(arena: c_uint) {
        let mut observations = Observations::default();
        loop {
            thread::sleep(INTERVAL);
            let Some(now) = use_of(arena) else { return set_decay(arena, USUAL_DECAY) };
            if observations.ask_for_return(now) {
                purge(arena);
            }
        }
    }

    /// The bytes of an arena that are allocated, and those that are free and retained.
    #[derive(Clone, Copy, Debug)]
    pub(super) struct Use {
        pub allocated: usize,
        pub free: usize,
    }

    /// The history of an arena as the thread has seen it.
    #[derive(Default)]
    pub(super) struct Observations {
        /// The most memory that was allocated at one time since free memory was last returned.
        most_allocated: usize,
        /// The latest observations in a row that found free memory, and those that found more than a program needs again.
        free: usize,
        excessive: usize,
    }

    impl Observations {
        /// A program needs its temporaries again that are free between two steps. Memory beyond the most that was allocated
        /// at one time is in excess.
        const MOST_EXCESSIVE: usize = 3;
        /// Ten seconds.
        const MOST_FREE: usize = 200;

        /// Adds an observation. Returns whether free memory is to be returned now.
        pub fn ask_for_return(&mut self, now: Use) -> bool {
            self.most_allocated = self.most_allocated.max(now.allocated);
            let counted = |is_so: bool, before: usize| if is_so { before + 1 } else { 0 };
            let is_free = now.free >= FEWEST_FREE;
            let is_excessive = is_free && now.allocated + now.free >= self.most_allocated + FEWEST_FREE;
            self.free = counted(is_free, self.free);
            self.excessive = counted(is_excessive, self.excessive);
            let returns = self.excessive == Self::MOST_EXCESSIVE || self.free == Self::MOST_FREE;
            if returns {
                *self = Self { most_allocated: now.allocated, ..Self::default() };
            }
            returns
        }
    }

    pub(super) fn use_of(arena: c_uint) -> Option<Use> {
        let control = |name| CString::new(format!("stats.arenas.{arena}.{name}")).ok();
        let (allocated, free) = (control("pactive")?, control("pdirty")?);
        // SAFETY: the controls have these types. Writing any epoch brings all statistics up to date.
        unsafe {
            exchange(c"epoch", Some(1_u64), 0_u64)?;
            let page = exchange::<usize, _>(c"arenas.page", None, 0_usize)?;
            let allocated = exchange::<usize, _>(&allocated, None, 0_usize)?;
            let free = exchange::<usize, _>(&free, None, 0_usize)?;
            Some(Use { allocated: allocated * page, free: free * page })
        }
    }

    fn set_decay(arena: c_uint, milliseconds: isize) {
        if let Ok(control) = CString::new(format!("arena.{arena}.dirty_decay_ms")) {
            // SAFETY: the control has this type.
            let _ = unsafe { exchange(&control, Some(milliseconds), 0_isize) };
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
        }
        set_decay(arena, NO_DECAY);
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
            let free = || use_of(arena).expect("statistics").free;
            drop(std::hint::black_box(vec![1_u8; 4 * FEWEST_FREE]));
            assert!(free() >= 4 * FEWEST_FREE, "{} bytes are kept", free());
            let deadline = std::time::Instant::now() + Duration::from_secs(60);
            while free() >= FEWEST_FREE {
                assert!(std::time::Instant::now() < deadline, "{} bytes stay free", free());
                thread::sleep(INTERVAL);
            }
        }

        #[test]
        fn temporaries_are_kept_from_step_to_step_and_excess_is_not() {
            let mut observations = Observations::default();
            let mut ask = |allocated: usize, free: usize| {
                observations
                    .ask_for_return(Use { allocated: allocated * FEWEST_FREE, free: free * FEWEST_FREE })
            };
            // Steps with temporaries of 30, and pauses between them.
            for _ in 0..50 {
                assert!(!ask(80, 0) && !ask(50, 30) && !ask(50, 30) && !ask(50, 30) && !ask(50, 30));
            }
            // A step took other memory, so that what the last one used is left.
            assert!(!ask(80, 30) && !ask(80, 30));
            assert!(ask(80, 30));
            assert!(!ask(80, 0));
            // The program pauses for ten seconds.
            assert_eq!((0..1000).position(|_| ask(50, 30)), Some(Observations::MOST_FREE - 1));
        }
    }
}
