//! Panics of the parquet library as errors. The library asserts invariants that a damaged file violates.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Once;

thread_local! {
    static GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// Runs `decode`. A panic is returned as text, and neither its message nor a backtrace is printed.
pub(super) fn guarded<T>(decode: impl FnOnce() -> T) -> Result<T, String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let previous = take_hook();
        set_hook(Box::new(move |panic| {
            if !GUARDED.get() {
                previous(panic);
            }
        }));
    });
    let outer = GUARDED.replace(true);
    // `decode` only reads its captures, or the caller discards them after a failure.
    let result = catch_unwind(AssertUnwindSafe(decode));
    GUARDED.set(outer);
    result.map_err(|panic| {
        let text = panic.downcast_ref::<&str>().map(|text| text.to_string());
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
        format!("the file is damaged ({text})")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panics_become_text() {
        assert_eq!(guarded(|| 3), Ok(3));
        let number = std::hint::black_box(0);
        assert_eq!(guarded(|| assert!(number > 0, "no rows")), Err("the file is damaged (no rows)".into()));
        assert!(!GUARDED.get());
    }
}
