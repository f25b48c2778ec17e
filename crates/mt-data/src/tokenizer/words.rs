//! Division of a text into words, as the pre-tokenizers of byte-level models divide it.
//!
//! The two patterns that most published models use are matched by hand. The classes of characters are those of the engine of
//! regular expressions, which classifies all of them once.

use std::sync::LazyLock;

use tokenizers::PreTokenizerWrapper;
use tokenizers::pattern::Pattern;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::tokenizer::SplitDelimiterBehavior;
use tokenizers::utils::SysRegex;

/// The split pattern of Llama 3.
pub(super) const LLAMA3_PATTERN: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
);

/// A division of the pieces that earlier divisions left.
#[derive(Debug)]
pub(super) enum Division {
    /// `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`.
    Gpt2,
    /// [`LLAMA3_PATTERN`], with the most digits of a word.
    Llama3 { digits: usize },
    /// Each numeric character is a word.
    Digits,
    /// The matches of a pattern, and the text between them.
    Pattern(SysRegex),
}

impl Division {
    /// The divisions of a pre-tokenizer that spells bytes as characters; `None` for other pre-tokenizers.
    pub(super) fn all(pre_tokenizer: &PreTokenizerWrapper) -> Option<Vec<Self>> {
        let steps = match pre_tokenizer {
            PreTokenizerWrapper::Sequence(sequence) => sequence.as_ref(),
            other => std::slice::from_ref(other),
        };
        let (PreTokenizerWrapper::ByteLevel(last), before) = steps.split_last()? else { return None };
        if last.add_prefix_space {
            return None;
        }
        let mut divisions = before.iter().map(Self::of).collect::<Option<Vec<_>>>()?;
        divisions.extend(last.use_regex.then_some(Self::Gpt2));
        Some(divisions)
    }

    fn of(pre_tokenizer: &PreTokenizerWrapper) -> Option<Self> {
        match pre_tokenizer {
            PreTokenizerWrapper::Digits(digits) if digits.individual_digits => Some(Self::Digits),
            PreTokenizerWrapper::Split(Split {
                pattern: SplitPattern::Regex(pattern),
                behavior,
                invert,
                ..
            }) if *behavior == SplitDelimiterBehavior::Isolated && !invert => Self::by(pattern),
            _ => None,
        }
    }

    /// The division by a pattern.
    fn by(pattern: &str) -> Option<Self> {
        if pattern == LLAMA3_PATTERN {
            Some(Self::Llama3 { digits: 3 })
        } else if pattern == LLAMA3_PATTERN.replace("{1,3}", "") {
            Some(Self::Llama3 { digits: 1 })
        } else {
            SysRegex::new(pattern).ok().map(Self::Pattern)
        }
    }

    /// Calls `visit` with the words of a text, in order. Together they are the text.
    fn words<'a>(&self, text: &'a str, mut visit: impl FnMut(&'a str)) {
        let scanner = Scanner { text, bytes: text.as_bytes(), classes: &CLASSES };
        let mut at = 0;
        let mut visit_by = |end_of: &dyn Fn(usize) -> usize| {
            while at < text.len() {
                let end = end_of(at);
                visit(&text[at..end]);
                at = end;
            }
        };
        match self {
            Self::Gpt2 => visit_by(&|at| scanner.end_of_gpt2(at)),
            Self::Llama3 { digits } => visit_by(&|at| scanner.end_of_llama3(at, *digits)),
            Self::Digits => visit_by(&|at| {
                let mut characters = text[at..].char_indices();
                let is_numeric = |(_, character): &(usize, char)| character.is_numeric();
                let first = characters.next().filter(is_numeric);
                let end = match first {
                    Some((_, digit)) => Some(digit.len_utf8()),
                    None => characters.find(is_numeric).map(|(index, _)| index),
                };
                end.map_or(text.len(), |end| at + end)
            }),
            Self::Pattern(pattern) => {
                // It fails for no text.
                for ((start, end), _) in pattern.find_matches(text).into_iter().flatten() {
                    if start < end {
                        visit(&text[start..end]);
                    }
                }
            }
        }
    }
}

/// Calls `visit` with the words into which divisions, one after the other, divide a text.
pub(super) fn divide<'a>(divisions: &[Division], text: &'a str, visit: &mut dyn FnMut(&'a str)) {
    match divisions {
        [] if text.is_empty() => {}
        [] => visit(text),
        [last] => last.words(text, visit),
        [first, others @ ..] => first.words(text, |piece| divide(others, piece, visit)),
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Class {
    Other,
    Letter,
    Number,
    Space,
}

/// The classes of the first characters; all later ones are [`Class::Other`].
static CLASSES: LazyLock<Vec<Class>> = LazyLock::new(|| {
    let mut classes = vec![Class::Other; 0x40000];
    let all: String = (0..classes.len() as u32).filter_map(char::from_u32).collect();
    for (pattern, class) in [(r"\p{L}+", Class::Letter), (r"\p{N}+", Class::Number), (r"\s+", Class::Space)] {
        let pattern = SysRegex::new(pattern).expect("the pattern is valid");
        for (start, end) in pattern.find_iter(&all) {
            all[start..end].chars().for_each(|character| classes[character as usize] = class);
        }
    }
    classes
});

/// Searches for the ends of words.
struct Scanner<'a> {
    text: &'a str,
    bytes: &'a [u8],
    classes: &'a [Class],
}

impl Scanner<'_> {
    /// The class of the character at an offset and its length; `None` at the end.
    fn class(&self, at: usize) -> Option<(Class, usize)> {
        let byte = *self.bytes.get(at)?;
        if byte < 0x80 {
            return Some((self.classes[usize::from(byte)], 1));
        }
        let character = self.text[at..].chars().next()?;
        let class = self.classes.get(character as usize).copied().unwrap_or(Class::Other);
        Some((class, character.len_utf8()))
    }

    /// The end of the characters of a class, of which there are at most `most`.
    fn run(&self, mut at: usize, class: Class, most: usize) -> usize {
        for _ in 0..most {
            match self.class(at) {
                Some((found, length)) if found == class => at += length,
                _ => break,
            }
        }
        at
    }

    fn end_of_gpt2(&self, at: usize) -> usize {
        if let Some(length) = contraction(&self.bytes[at..], false) {
            return at + length;
        }
        // A space begins the word behind it.
        let body = at + usize::from(self.bytes[at] == b' ');
        match self.class(body) {
            Some((class, _)) if class != Class::Space => self.run(body, class, usize::MAX),
            _ => self.end_of_space(at),
        }
    }

    fn end_of_llama3(&self, at: usize, digits: usize) -> usize {
        if let Some(length) = contraction(&self.bytes[at..], true) {
            return at + length;
        }
        let is_break = |byte: &u8| matches!(byte, b'\r' | b'\n');
        let (class, length) = self.class(at).unwrap_or((Class::Other, 0));
        match class {
            Class::Letter => return self.run(at, class, usize::MAX),
            Class::Number => return self.run(at, class, digits),
            Class::Other | Class::Space => {}
        }
        let behind = self.run(at + length, Class::Letter, usize::MAX);
        if behind > at + length && !is_break(&self.bytes[at]) {
            return behind;
        }
        let body = at + usize::from(self.bytes[at] == b' ');
        let marks = self.run(body, Class::Other, usize::MAX);
        if marks > body {
            return marks + self.bytes[marks..].iter().take_while(|byte| is_break(byte)).count();
        }
        let end = self.run(at, Class::Space, usize::MAX);
        match self.bytes[at..end].iter().rposition(is_break) {
            Some(last) => at + last + 1,
            None => self.end_of_space(at),
        }
    }

    /// The end of white space. Its last character is left to what follows, unless it is the only one.
    fn end_of_space(&self, at: usize) -> usize {
        let end = self.run(at, Class::Space, usize::MAX);
        match self.text[at..end].char_indices().next_back() {
            Some((last, _)) if last > 0 && end < self.text.len() => at + last,
            _ => end,
        }
    }
}

/// The length of an English contraction at the beginning of a text.
fn contraction(bytes: &[u8], any_case: bool) -> Option<usize> {
    let [b'\'', rest @ ..] = bytes else { return None };
    let first = rest.first()?;
    let first = if any_case { first.to_ascii_lowercase() } else { *first };
    let second = rest.get(1).map(|second| if any_case { second.to_ascii_lowercase() } else { *second });
    match (first, second) {
        (b's' | b't' | b'm' | b'd', _) => Some(2),
        (b'r' | b'v', Some(b'e')) | (b'l', Some(b'l')) => Some(3),
        // The long s is a lower case of `S`.
        _ if any_case && rest.starts_with("\u{17f}".as_bytes()) => Some(3),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GPT2_PATTERN: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

    fn words<'a>(division: &Division, text: &'a str) -> Vec<&'a str> {
        let mut words = Vec::new();
        divide(std::slice::from_ref(division), text, &mut |word| words.push(word));
        words
    }

    fn pattern(pattern: &str) -> Division {
        Division::Pattern(SysRegex::new(pattern).unwrap())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]

        #[test]
        fn known_patterns_are_matched_as_by_the_engine(
            text in r"([ ]{1,3}|'[a-zA-Zſ]{0,3}|[a-zA-Z]{1,4}|[0-9]{1,5}|[éßſKǅ漢字あ한\u{301}٣Ⅷ²👍\u{200d}\u{a0}\u{85}\u{2028}\u{3000}]|[.,;!#(){}$_-]{1,3}|[\t\r\n]{1,3}|\PC){0,12}",
        ) {
            let single = LLAMA3_PATTERN.replace("{1,3}", "");
            for (own, by_engine) in [
                (Division::Gpt2, GPT2_PATTERN),
                (Division::by(LLAMA3_PATTERN).unwrap(), LLAMA3_PATTERN),
                (Division::by(&single).unwrap(), &single),
                (Division::Digits, r"\p{N}"),
            ] {
                prop_assert!(!matches!(own, Division::Pattern(_)));
                let found = words(&own, &text);
                prop_assert_eq!(&found, &words(&pattern(by_engine), &text), "{}", by_engine);
                prop_assert_eq!(found.concat(), text.clone());
            }
        }
    }

    #[test]
    fn later_characters_have_no_class() {
        let later: String =
            (CLASSES.len() as u32..=u32::from(char::MAX)).filter_map(char::from_u32).collect();
        for class in [r"\p{L}", r"\p{N}", r"\s"] {
            assert_eq!(words(&pattern(class), &later).len(), 1, "{class}");
        }
        assert!(CLASSES[usize::from(b'a')] == Class::Letter && CLASSES[0x3000] == Class::Space);
    }

    #[test]
    fn each_character_between_others_is_divided_as_by_the_engine() {
        let own = [Division::Gpt2, Division::Llama3 { digits: 3 }];
        let engine = [pattern(GPT2_PATTERN), pattern(LLAMA3_PATTERN)];
        let all: Vec<char> = ('\0'..=char::MAX).step_by(7).chain('\0'..'\u{3200}').collect();
        for group in all.chunks(4096) {
            let text: String =
                group.iter().map(|character| format!("a {character}b\n'{character}1")).collect();
            for (own, engine) in own.iter().zip(&engine) {
                assert!(words(own, &text) == words(engine, &text), "{:?} and later", group[0]);
            }
        }
    }

    #[test]
    fn divisions_follow_each_other() {
        let json = r#"{"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": "[\r\n]"}, "behavior": "Isolated", "invert": false},
            {"type": "Digits", "individual_digits": true},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}]}"#;
        let divisions = Division::all(&serde_json::from_str(json).unwrap()).unwrap();
        let mut found = Vec::new();
        divide(&divisions, "in 1984\nthey're", &mut |word| found.push(word));
        assert_eq!(found, ["in", " ", "1", "9", "8", "4", "\n", "they", "'re"]);
        let other = json.replace("\"add_prefix_space\": false", "\"add_prefix_space\": true");
        assert!(Division::all(&serde_json::from_str(&other).unwrap()).is_none());
        let other = json.replace("Isolated", "Removed");
        assert!(Division::all(&serde_json::from_str(&other).unwrap()).is_none());
    }
}
