//! Division of a long text into pieces that give the same words as the whole.
//!
//! Several threads count the words of a document of many megabytes. A piece ends where the byte-level pattern ends a word in any
//! context.

/// The minimum length of a piece, except the last.
const MIN_BYTES: usize = 64 << 10;
/// The maximum length of a piece. Text without a word's end in this range is cut inside a word.
const MAX_BYTES: usize = 256 << 10;

/// The pieces of a text, in order. A document shorter than 64 KiB is one piece.
pub(super) fn pieces(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let (piece, tail) = rest.split_at(length_of_first(rest));
        rest = tail;
        Some(piece)
    })
}

fn length_of_first(text: &str) -> usize {
    if text.len() <= MIN_BYTES {
        return text.len();
    }
    let limit = text.floor_char_boundary(MAX_BYTES);
    let start = text.floor_char_boundary(MIN_BYTES);
    let mut before = None;
    for (index, character) in text[start..limit].char_indices() {
        if before.is_some_and(|before| ends_word(before, character)) {
            return start + index;
        }
        before = Some(character);
    }
    limit
}

/// Whether the byte-level pattern always ends a word between two characters, that is, no alternative of
/// `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+` matches both. Characters that the
/// pattern and Rust might classify differently do not qualify.
fn ends_word(before: char, after: char) -> bool {
    let is_letter =
        |c: char| c.is_ascii_alphabetic() || matches!(c, '\u{4e00}'..='\u{9fff}' | '\u{ac00}'..='\u{d7a3}');
    match after {
        ' ' | '\n' => before.is_ascii_graphic() || is_letter(before),
        _ => is_letter(before) && !after.is_whitespace() && !after.is_alphanumeric(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: &str, expected: &[usize]) {
        let pieces: Vec<&str> = pieces(text).collect();
        assert_eq!(pieces.concat(), text);
        assert_eq!(pieces.iter().map(|piece| piece.len()).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn pieces_end_with_words() {
        check("", &[]);
        check("short text", &[10]);
        let words = "word ".repeat(MIN_BYTES / 4);
        check(&words, &[MIN_BYTES + 3, words.len() - MIN_BYTES - 3]);
        let ideographs = format!("{}。{}", "漢".repeat(MIN_BYTES / 3 + 5), "字".repeat(MIN_BYTES / 3));
        let first = 3 * (MIN_BYTES / 3 + 5);
        check(&ideographs, &[first, ideographs.len() - first]);
        check(&"a".repeat(MAX_BYTES + 7), &[MAX_BYTES, 7]);
        check(&"漢".repeat(MAX_BYTES / 3 + 1), &[MAX_BYTES / 3 * 3, 3]);
    }
}
