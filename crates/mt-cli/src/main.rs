//! The `maxtext` command.
fn main() {}
