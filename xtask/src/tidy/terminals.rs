//! Only `mt-cli` and `xtask` print: libraries return errors and report events.

use super::{Finding, fields::code, sources::contains_word};
use crate::repository::Repository;

/// Packages that may print.
const PROGRAMS: &[&str] = &["crates/mt-cli/", "xtask/"];

/// Folders and files of code that does not belong to a library.
const OUTSIDE: &[&str] = &["/examples/", "/tests/", "/benches/", "/build.rs"];

/// Uses of a terminal.
const USES: &[&str] = &[
    "print!",
    "println!",
    "eprint!",
    "eprintln!",
    "is_terminal",
    "io::stdout",
    "io::stderr",
    "stdout()",
    "stderr()",
    "IsTerminal",
];

pub(super) fn check(repository: &Repository) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in repository.files.iter().filter(|file| is_library(&file.path)) {
        for (index, line) in code(&file.text).enumerate() {
            if let Some(used) = USES.iter().find(|used| contains_word(line, used)) {
                let message = format!("`{used}` in a library: report an event, or return the text");
                findings.push(Finding::new(&file.path, index + 1, message));
            }
        }
    }
    findings
}

fn is_library(path: &str) -> bool {
    path.ends_with(".rs")
        && !PROGRAMS.iter().any(|program| path.starts_with(program))
        && !OUTSIDE.iter().any(|folder| path.contains(folder))
}

#[cfg(test)]
mod tests {
    use super::*;

    const CODE: &str = "fn a() {\n    eprintln!(\"note\");\n}\n";

    fn check_files(files: &[(&str, &str)], expected: &[&str]) {
        let findings: Vec<_> = check(&Repository::of(files)).iter().map(ToString::to_string).collect();
        assert_eq!(findings, expected);
    }

    #[test]
    fn libraries_do_not_print() {
        let path = "crates/mt-a/src/lib.rs";
        let finding =
            "crates/mt-a/src/lib.rs:2: `eprintln!` in a library: report an event, or return the text";
        check_files(&[(path, CODE)], &[finding]);
        check_files(&[(path, "// println!\n#[cfg(test)]\nmod tests { fn a() { println!(); } }\n")], &[]);
        for path in [
            "crates/mt-cli/src/a.rs",
            "xtask/src/a.rs",
            "crates/mt-a/examples/a.rs",
            "crates/mt-a/src/tests/a.rs",
            "crates/mt-a/build.rs",
            "a.md",
        ] {
            check_files(&[(path, CODE)], &[]);
        }
    }
}
