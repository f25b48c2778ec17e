//! The length of functions.

use std::collections::BTreeMap;

use super::{Finding, allowances};
use crate::repository::Repository;

/// A longer function does more than one thing.
const MAXIMUM_LINES: usize = 80;

/// Functions that are longer: path, name and length. An entry may only shrink or disappear.
const ALLOWED: &str = include_str!("allowances/functions.txt");
const ALLOWED_PATH: &str = "xtask/src/tidy/allowances/functions.txt";

/// A function of a file.
struct Function<'a> {
    name: &'a str,
    /// The line with its name, counted from one.
    line: usize,
    /// From that line to its closing brace.
    length: usize,
}

pub(super) fn check(repository: &Repository) -> Vec<Finding> {
    check_except(repository, ALLOWED)
}

/// Checks all functions except the listed ones, and that each listed function is still too long.
fn check_except(repository: &Repository, allowed: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut unlisted = BTreeMap::new();
    for (line, entry) in allowances::entries(allowed) {
        let mut fields = entry.split_whitespace();
        let (path, name) = (fields.next().unwrap_or_default(), fields.next().unwrap_or_default());
        match fields.next().and_then(|length| length.parse::<usize>().ok()) {
            Some(length) => {
                unlisted.insert((path, name), (line, entry, length, false));
            }
            None => {
                findings.push(Finding::new(ALLOWED_PATH, line, "an entry is a path, a name and a length"))
            }
        }
    }
    for file in repository.files.iter().filter(|file| file.path.ends_with(".rs")) {
        for function in functions(&file.text).filter(|function| function.length > MAXIMUM_LINES) {
            let limit = match unlisted.get_mut(&(file.path.as_str(), function.name)) {
                Some((_, _, length, is_used)) => {
                    *is_used = true;
                    *length
                }
                None => MAXIMUM_LINES,
            };
            if function.length > limit {
                let Function { name, line, length } = function;
                let message = format!("`{name}` has {length} lines, more than {limit}: split the function");
                findings.push(Finding::new(&file.path, line, message));
            }
        }
    }
    let unused = unlisted.values().filter(|(_, _, _, is_used)| !is_used);
    findings.extend(unused.map(|(line, entry, _, _)| allowances::superfluous(ALLOWED_PATH, *line, entry)));
    findings
}

/// The functions of a file that `rustfmt` formatted: each ends with a brace at the indentation of its first line.
fn functions(text: &str) -> impl Iterator<Item = Function<'_>> {
    let lines: Vec<&str> = text.lines().collect();
    (0..lines.len()).filter_map(move |index| {
        let name = function_name(lines[index])?;
        let indentation = lines[index].len() - lines[index].trim_start().len();
        let mut has_body = false;
        for (count, line) in lines[index..].iter().enumerate() {
            let is_outer = line.len() - line.trim_start().len() == indentation;
            if !has_body && line.ends_with(';') {
                return None;
            }
            if is_outer && line.ends_with('}') {
                return Some(Function { name, line: index + 1, length: count + 1 });
            }
            has_body |= line.ends_with('{');
        }
        None
    })
}

/// The name of the function that a line declares.
fn function_name(line: &str) -> Option<&str> {
    let mut rest = line.trim_start();
    if let Some(visibility) = rest.strip_prefix("pub(") {
        rest = visibility.split_once(") ")?.1;
    }
    for qualifier in ["pub ", "const ", "async ", "unsafe ", "extern \"C\" "] {
        rest = rest.strip_prefix(qualifier).unwrap_or(rest);
    }
    let rest = rest.strip_prefix("fn ")?;
    let end = rest.find(|character: char| !character.is_alphanumeric() && character != '_')?;
    // In a macro the name may be a variable.
    (end > 0).then(|| &rest[..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file that contains a function of this length.
    fn file(length: usize) -> String {
        let body = "        one();\n".repeat(length - 4);
        format!(
            "fn short() {{}}\n\ntrait T {{\n    fn declared(&self);\n}}\n\nimpl S {{\n    pub(super) const fn long(\n        \
             &self,\n    ) {{\n{body}    }}\n}}\n"
        )
    }

    fn check(length: usize, allowed: &str, expected: &[&str]) {
        let text = file(length);
        let repository = Repository::of(&[("a.rs", &text), ("a.md", &text)]);
        let findings: Vec<_> = check_except(&repository, allowed).iter().map(ToString::to_string).collect();
        assert_eq!(findings, expected);
    }

    #[test]
    fn long_functions_are_found() {
        check(80, "", &[]);
        check(81, "", &["a.rs:8: `long` has 81 lines, more than 80: split the function"]);
    }

    #[test]
    fn listed_functions_only_shrink() {
        check(90, "a.rs long 90\n", &[]);
        check(85, "a.rs long 90\n", &[]);
        check(91, "a.rs long 90\n", &["a.rs:8: `long` has 91 lines, more than 90: split the function"]);
        let superfluous =
            format!("{ALLOWED_PATH}:1: `a.rs long 90` needs no entry any more: remove this line");
        check(80, "a.rs long 90\n", &[&superfluous]);
        let malformed = format!("{ALLOWED_PATH}:1: an entry is a path, a name and a length");
        check(80, "a.rs long\n", &[&malformed]);
    }
}
