//! Suggestions for misspelled names.

/// At most this many names are suggested.
const MOST: usize = 3;

/// Longer names get no suggestions; comparing them would take long.
const LONGEST: usize = 64;

/// The names in `known` that resemble `name`, best match first.
pub(crate) fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Vec<String> {
    let wanted = name.to_lowercase();
    if wanted.len() > LONGEST {
        return Vec::new();
    }
    // Up to a third of the letters may differ; a larger tolerance would suggest unrelated names.
    let tolerance = (wanted.chars().count() / 3).max(1);
    let mut scored: Vec<(usize, &str)> = known
        .into_iter()
        .filter_map(|candidate| {
            let contained = wanted.len() >= 4 && (candidate.contains(&wanted) || wanted.contains(candidate));
            let related = contained || same_words(&wanted, candidate);
            // The edit distance is at least the difference in length.
            if !related && wanted.len().abs_diff(candidate.len()) > 4 * tolerance {
                return None;
            }
            let distance = edit_distance(&wanted, candidate);
            if distance <= tolerance {
                Some((distance, candidate))
            } else if related {
                Some((tolerance + 1 + distance, candidate))
            } else {
                None
            }
        })
        .collect();
    scored.sort_unstable();
    if scored.first().is_some_and(|(distance, _)| *distance == 0) {
        scored.truncate(1);
    }
    scored.into_iter().take(MOST).map(|(_, candidate)| candidate.to_owned()).collect()
}

/// Whether all words of `name`, at least two, occur in `candidate` in any order.
fn same_words(name: &str, candidate: &str) -> bool {
    let words: Vec<&str> = candidate.split(['_', '-']).collect();
    let wanted: Vec<&str> = name.split(['_', '-']).collect();
    wanted.len() >= 2 && wanted.iter().all(|word| words.contains(word))
}

/// The number of insertions, deletions, replacements and exchanges of neighboring letters that turn one text into the
/// other.
fn edit_distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut before_previous = vec![0; b.len() + 1];
    let mut previous: Vec<usize> = (0..=b.len()).collect();
    let mut row = vec![0; b.len() + 1];
    for i in 1..=a.len() {
        row[0] = i;
        for j in 1..=b.len() {
            let replaced = previous[j - 1] + usize::from(a[i - 1] != b[j - 1]);
            let mut best = replaced.min(previous[j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                best = best.min(before_previous[j - 2] + 1);
            }
            row[j] = best;
        }
        std::mem::swap(&mut before_previous, &mut previous);
        std::mem::swap(&mut previous, &mut row);
    }
    previous[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances() {
        for (a, b, expected) in
            [("", "abc", 3), ("kitten", "sitting", 3), ("setps", "steps", 1), ("a", "a", 0)]
        {
            assert_eq!(edit_distance(a, b), expected, "{a} {b}");
            assert_eq!(edit_distance(b, a), expected, "{b} {a}");
        }
    }

    #[test]
    fn misspelled_shortened_and_reordered_names_are_found() {
        let known = ["steps", "learning_rate", "warmup_steps_fraction", "base_emb_dim", "max_target_length"];
        for (name, expected) in [
            ("lerning_rate", "learning_rate"),
            ("setps", "steps"),
            ("emb_dim", "base_emb_dim"),
            ("warmup_fraction", "warmup_steps_fraction"),
            ("MAX_TARGET_LENGTH", "max_target_length"),
        ] {
            assert_eq!(nearest(name, known).first().map(String::as_str), Some(expected), "{name}");
        }
        assert!(nearest("zzz", known).is_empty());
    }
}
