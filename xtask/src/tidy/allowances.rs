//! Lists of files that a check does not yet cover. They live in text files beside this module and may only shrink.

use super::Finding;

/// The entries of a list with their line numbers, without empty lines and lines that begin with `#`.
pub(super) fn entries(list: &str) -> impl Iterator<Item = (usize, &str)> {
    let lines = list.lines().enumerate().map(|(index, line)| (index + 1, line.trim()));
    lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'))
}

/// The finding for an entry that is no longer needed.
pub(super) fn superfluous(list: &str, line: usize, entry: &str) -> Finding {
    Finding::new(list, line, format!("`{entry}` needs no entry any more: remove this line"))
}
