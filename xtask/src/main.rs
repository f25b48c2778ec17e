//! Repository automation: `cargo xtask tidy`.
fn main() {}
