//! Only the program and the tools print: libraries return errors and report events.

use std::collections::BTreeSet;

use super::{Finding, allowances, fields::code, sources::contains_word};
use crate::repository::Repository;

/// Files that still print. The list may only shrink: a listed file without findings is a finding.
const ALLOWED: &str = include_str!("allowances/terminals.txt");
const ALLOWED_PATH: &str = "xtask/src/tidy/allowances/terminals.txt";

/// Packages that know terminals.
const PROGRAMS: &[&str] = &["crates/mt-cli/", "xtask/"];

/// Folders and files of code that is no part of a library.
const OUTSIDE: &[&str] = &["/examples/", "/tests/", "/benches/", "/build.rs"];

/// Uses of a terminal.
const USES: &[&str] =
    &["print!", "println!", "eprint!", "eprintln!", "is_terminal", "io::stdout", "io::stderr", "IsTerminal"];

pub(super) fn check(repository: &Repository) -> Vec<Finding> {
    check_except(repository, ALLOWED)
}

/// Checks all libraries but the listed files, and that each listed file still belongs in the list.
fn check_except(repository: &Repository, allowed: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut unlisted: BTreeSet<&str> = allowances::entries(allowed).map(|(_, path)| path).collect();
    for file in repository.files.iter().filter(|file| is_library(&file.path)) {
        let mut found = Vec::new();
        for (index, line) in code(&file.text).enumerate() {
            if let Some(used) = USES.iter().find(|used| contains_word(line, used)) {
                let message = format!("`{used}` in a library: report an event, or return the text");
                found.push(Finding::new(&file.path, index + 1, message));
            }
        }
        if found.is_empty() || !unlisted.remove(file.path.as_str()) {
            findings.append(&mut found);
        }
    }
    for (line, path) in allowances::entries(allowed).filter(|(_, path)| unlisted.contains(path)) {
        findings.push(allowances::superfluous(ALLOWED_PATH, line, path));
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

    fn check_files(files: &[(&str, &str)], allowed: &str, expected: &[&str]) {
        let findings: Vec<_> =
            check_except(&Repository::of(files), allowed).iter().map(ToString::to_string).collect();
        assert_eq!(findings, expected);
    }

    #[test]
    fn libraries_do_not_print() {
        let path = "crates/mt-a/src/lib.rs";
        let finding =
            "crates/mt-a/src/lib.rs:2: `eprintln!` in a library: report an event, or return the text";
        check_files(&[(path, CODE)], "", &[finding]);
        check_files(&[(path, "// println!\n#[cfg(test)]\nmod tests { fn a() { println!(); } }\n")], "", &[]);
        for path in [
            "crates/mt-cli/src/a.rs",
            "xtask/src/a.rs",
            "crates/mt-a/examples/a.rs",
            "crates/mt-a/src/tests/a.rs",
            "crates/mt-a/build.rs",
            "a.md",
        ] {
            check_files(&[(path, CODE)], "", &[]);
        }
    }

    #[test]
    fn the_list_only_shrinks() {
        check_files(&[("crates/mt-a/src/a.rs", CODE)], "crates/mt-a/src/a.rs\n", &[]);
        let superfluous =
            format!("{ALLOWED_PATH}:1: `crates/mt-a/src/a.rs` needs no entry any more: remove this line");
        check_files(&[("crates/mt-a/src/a.rs", "fn a() {}\n")], "crates/mt-a/src/a.rs\n", &[&superfluous]);
    }
}
