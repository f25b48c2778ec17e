//! `{% generation %}` blocks, which mark the assistant's text in templates.

use std::ops::Range;

/// Characters for private use that mark the beginning and the end of a block in rendered text.
const BEGIN: char = '\u{10fffc}';
const END: char = '\u{10fffd}';

/// The tags that replace those of a block.
struct Tags {
    begin: [&'static str; 2],
    end: [&'static str; 2],
}

/// A template with blocks that only group text.
pub(super) fn unmarked(source: &str) -> String {
    let tags = Tags { begin: ["with", ""], end: ["endwith", ""] };
    replaced(source, &tags).0
}

/// A template that writes [`BEGIN`] and [`END`] around the text of blocks; `None` if it has no block.
pub(super) fn marked(source: &str) -> Option<String> {
    // Blocks instead of expressions, so that white space around tags is removed as before: the first tag has the
    // original tag's left control, the last one its right control.
    let tags = Tags {
        begin: ["with", " %}{% if true %}\u{10fffc}{% endif"],
        end: ["if true", " %}\u{10fffd}{% endif %}{% endwith"],
    };
    let (text, has_blocks) = replaced(source, &tags);
    has_blocks.then_some(text)
}

/// Removes the marks from rendered text, and returns the ranges between them. `None` if blocks are nested.
pub(super) fn find(rendered: &str) -> Option<(String, Vec<Range<usize>>)> {
    let (mut text, mut ranges, mut open) = (String::with_capacity(rendered.len()), Vec::new(), None);
    for character in rendered.chars() {
        match (character, open) {
            (BEGIN, None) => open = Some(text.len()),
            (END, Some(start)) => {
                ranges.push(start..text.len());
                open = None;
            }
            (BEGIN | END, _) => return None,
            _ => text.push(character),
        }
    }
    open.is_none().then_some((text, ranges))
}

/// The template with other tags, and whether it has blocks.
fn replaced(source: &str, tags: &Tags) -> (String, bool) {
    let (mut output, mut rest, mut has_blocks) = (String::with_capacity(source.len()), source, false);
    while let Some(start) = rest.find("{%") {
        let inside = &rest[start + 2..];
        let Some(end) = inside.find("%}") else { break };
        let tag = &inside[..end];
        let word = tag.trim_start_matches(['-', '+']).trim_end_matches(['-', '+']).trim();
        output.push_str(&rest[..start + 2]);
        let replacement = match word {
            "generation" => Some(&tags.begin),
            "endgeneration" => Some(&tags.end),
            _ => None,
        };
        let Some([first, further]) = replacement else {
            // Another tag may contain `%}` in a string, so the search continues inside the tag.
            rest = inside;
            continue;
        };
        has_blocks = true;
        let (before, after) = tag.split_once(word).unwrap_or((tag, ""));
        output.push_str(before);
        output.push_str(first);
        output.push_str(further);
        output.push_str(after);
        rest = &inside[end..];
    }
    output.push_str(rest);
    (output, has_blocks)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_keep_their_control_of_white_space() {
        let source = "a {%- generation -%} b {%+ endgeneration %}\n";
        assert_eq!(unmarked(source), "a {%- with -%} b {%+ endwith %}\n");
        let marked = marked(source).unwrap();
        assert!(marked.starts_with("a {%- with %}{% if true %}"), "{marked}");
        assert!(marked.contains("{% endif -%} b {%+ if true %}"), "{marked}");
        assert!(marked.ends_with("{% endif %}{% endwith %}\n"), "{marked}");
    }

    #[test]
    fn ranges_are_found() {
        let rendered = format!("ä{BEGIN}bc{END}d{BEGIN}{END}");
        assert_eq!(find(&rendered), Some(("äbcd".to_owned(), vec![2..4, 5..5])));
        for nested in [format!("{BEGIN}{BEGIN}"), format!("{END}"), format!("{BEGIN}")] {
            assert_eq!(find(&nested), None);
        }
        assert_eq!(marked("{{ generation }}"), None);
    }
}
