//! Drafts from the text itself: the tokens that followed the last ones at an earlier place (prompt lookup).

/// The tokens that followed the longest earlier occurrence of the end of `text`, `most` at most. Occurrences have `shortest`
/// to `longest` tokens. The first one of the same length counts, which the most tokens follow.
pub(super) fn drafts_from_text(text: &[u32], shortest: usize, longest: usize, most: usize) -> &[u32] {
    let Some(last) = text.len().checked_sub(1).filter(|_| most > 0) else { return &[] };
    let (mut best, mut end) = (shortest.max(1) - 1, 0);
    // Every occurrence ends before the text does, so that a token follows it.
    for place in 0..last {
        if text[place] != text[last] {
            continue;
        }
        let limit = longest.min(place + 1);
        let length = (1..limit).take_while(|back| text[place - back] == text[last - back]).count() + 1;
        if length > best {
            (best, end) = (length, place + 1);
            if best >= longest {
                break;
            }
        }
    }
    &text[end..][..if end == 0 { 0 } else { most.min(text.len() - end) }]
}

#[cfg(test)]
mod tests {
    use super::drafts_from_text;

    #[test]
    fn drafts_continue_the_longest_occurrence() {
        let check = |text: &[u32], [shortest, longest, most]: [usize; 3], expected: &[u32]| {
            assert_eq!(drafts_from_text(text, shortest, longest, most), expected, "{text:?}");
        };
        check(&[], [1, 3, 4], &[]);
        check(&[5], [1, 3, 4], &[]);
        check(&[5, 6, 7], [1, 3, 4], &[]);
        check(&[5, 6, 7, 5], [1, 3, 4], &[6, 7, 5]);
        check(&[5, 6, 7, 5], [1, 3, 2], &[6, 7]);
        check(&[5, 6, 7, 5], [2, 3, 2], &[]);
        check(&[5, 6, 7, 5], [1, 3, 0], &[]);
        // The longest occurrence, not the first one.
        check(&[6, 9, 5, 6, 7, 1, 5, 6], [1, 3, 2], &[7, 1]);
        check(&[6, 9, 5, 6, 7, 1, 5, 6], [1, 1, 2], &[9, 5]);
        // The first one of the same length.
        check(&[1, 2, 3, 1, 2, 4, 1, 2], [1, 2, 1], &[3]);
        // Occurrences may overlap the end of the text.
        check(&[8, 8, 8, 8], [1, 3, 5], &[8]);
        check(&[3, 8, 8, 8, 8], [1, 2, 5], &[8, 8]);
    }
}
