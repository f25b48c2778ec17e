//! Messages on standard error. If it is closed, a message is lost and the command goes on, unlike with `eprintln!`.

/// Writes a line to standard error.
macro_rules! say {
    ($($argument:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr(), $($argument)*);
    }};
}

/// Writes to standard error without ending the line.
macro_rules! say_inline {
    ($($argument:tt)*) => {{
        use std::io::Write as _;
        let _ = write!(std::io::stderr(), $($argument)*);
    }};
}
