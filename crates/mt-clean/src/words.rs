//! Words, sentences and lines of a text, and its simplified form for comparisons.
//!
//! Words are divided by the rules of spaCy's tokenizer for English, which datatrove counts with: at spaces, then at
//! punctuation at the ends and between letters, and at contractions. Ideographs are words of their own.

use unicode_normalization::UnicodeNormalization;
use unicode_normalization::char::is_combining_mark;

/// Characters that end sentences: Unicode's `Sentence_Terminal`, and two more of datatrove's list.
const TERMINALS: &[(u32, u32)] = &[
    (0x21, 0x21),
    (0x2e, 0x2e),
    (0x3f, 0x3f),
    (0x589, 0x589),
    (0x61d, 0x61f),
    (0x6d4, 0x6d4),
    (0x700, 0x702),
    (0x7f9, 0x7f9),
    (0x837, 0x837),
    (0x839, 0x839),
    (0x83d, 0x83e),
    (0x964, 0x965),
    (0x104a, 0x104b),
    (0x1362, 0x1362),
    (0x1367, 0x1368),
    (0x166e, 0x166e),
    (0x1735, 0x1736),
    (0x17d4, 0x17d6),
    (0x17d9, 0x17da),
    (0x1803, 0x1803),
    (0x1809, 0x1809),
    (0x1944, 0x1945),
    (0x1aa8, 0x1aab),
    (0x1b5a, 0x1b5b),
    (0x1b5e, 0x1b5f),
    (0x1b7d, 0x1b7e),
    (0x1c3b, 0x1c3c),
    (0x1c7e, 0x1c7f),
    (0x203c, 0x203d),
    (0x2047, 0x2049),
    (0x2e2e, 0x2e2e),
    (0x2e3c, 0x2e3c),
    (0x2e53, 0x2e54),
    (0x3002, 0x3002),
    (0xa4ff, 0xa4ff),
    (0xa60e, 0xa60f),
    (0xa6f3, 0xa6f3),
    (0xa6f7, 0xa6f7),
    (0xa876, 0xa877),
    (0xa8ce, 0xa8cf),
    (0xa92f, 0xa92f),
    (0xa9c8, 0xa9c9),
    (0xaa5d, 0xaa5f),
    (0xaaf0, 0xaaf1),
    (0xabeb, 0xabeb),
    (0xfe52, 0xfe52),
    (0xfe56, 0xfe57),
    (0xff01, 0xff01),
    (0xff0e, 0xff0e),
    (0xff1f, 0xff1f),
    (0xff61, 0xff61),
    (0x10a56, 0x10a57),
    (0x10f55, 0x10f59),
    (0x10f86, 0x10f89),
    (0x11047, 0x11048),
    (0x110be, 0x110c1),
    (0x11141, 0x11143),
    (0x111c5, 0x111c6),
    (0x111cd, 0x111cd),
    (0x111de, 0x111df),
    (0x11238, 0x11239),
    (0x1123b, 0x1123c),
    (0x112a9, 0x112a9),
    (0x1144b, 0x1144c),
    (0x115c2, 0x115c3),
    (0x115c9, 0x115d7),
    (0x11641, 0x11642),
    (0x1173c, 0x1173e),
    (0x11944, 0x11944),
    (0x11946, 0x11946),
    (0x11a42, 0x11a43),
    (0x11a9b, 0x11a9c),
    (0x11c41, 0x11c42),
    (0x11ef7, 0x11ef8),
    (0x11f43, 0x11f44),
    (0x16a6e, 0x16a6f),
    (0x16af5, 0x16af5),
    (0x16b37, 0x16b38),
    (0x16b44, 0x16b44),
    (0x16e98, 0x16e98),
    (0x1bc9f, 0x1bc9f),
    (0x1da88, 0x1da88),
];

/// Characters that [`simplified`] replaces by spaces.
const PUNCTUATION: &[(u32, u32)] = &[
    (0x0, 0x8),
    (0xb, 0x1f),
    (0x21, 0x2f),
    (0x3a, 0x40),
    (0x5b, 0x60),
    (0x7b, 0x9f),
    (0xab, 0xab),
    (0xb4, 0xb4),
    (0xbb, 0xbb),
    (0x2013, 0x2014),
    (0x2019, 0x2019),
    (0x201c, 0x201e),
    (0x2026, 0x2026),
    (0x2236, 0x2236),
    (0x2501, 0x2501),
    (0x25ba, 0x25ba),
    (0x3001, 0x3002),
    (0x3008, 0x300d),
    (0x3010, 0x3011),
    (0xff01, 0xff01),
    (0xff05, 0xff05),
    (0xff08, 0xff09),
    (0xff0c, 0xff0c),
    (0xff0e, 0xff0e),
    (0xff11, 0xff11),
    (0xff1a, 0xff1b),
    (0xff1f, 0xff1f),
    (0xff5e, 0xff5e),
];

/// Punctuation and quotation marks that are words of their own at the ends of a word.
const PEELED: &str = "…,:;!?¿؟¡()[]{}<>_#*&。？！，、；：～·।،۔؛٪'\"”“`‘´’‚„»«「」『』（）〔〕【】《》〈〉";
const CURRENCIES: &str = "$£€¥฿₽﷼₴₠₡₢₣₤₥₦₧₨₩₪₫₭₮₯₰₱₲₳₵₶₷₸₹₺₻₼₾₿";
/// Words that end with a period.
const ABBREVIATIONS: &str = " adm. ak. ala. apr. ariz. ark. aug. bros. calif. co. colo. conn. corp. d.c. dec. del. dr. e.g. \
    feb. fla. ga. gen. gov. i.e. ia. id. ill. inc. ind. jan. jr. jul. jun. kan. kans. ky. la. ltd. mar. mass. md. messrs. \
    mich. minn. miss. mo. mont. mr. mrs. ms. mt. n.c. n.d. n.h. n.j. n.m. n.y. neb. nebr. nev. nov. oct. okla. ore. pa. \
    ph.d. prof. rep. rev. s.c. sen. sep. sept. st. tenn. va. wash. wis. a.m. p.m. v.s. vs. ";
/// Abbreviations that also stand in lower case.
const LOWER_ABBREVIATIONS: &str = " co. e.g. i.e. a.m. p.m. v.s. vs. ";
/// Units that are words of their own behind a number.
const UNITS: &str = " km km² km³ m m² m³ dm dm² dm³ cm cm² cm³ mm mm² mm³ ha µm nm yd in ft kg g mg µg t lb oz m/s km/h kmh mph hPa \
    Pa mbar mb MB kb KB gb GB tb TB T G M K ";
/// Words that stay whole although they hold marks.
const WHOLE: &str = " c++ and/or w/o o'clock o’clock ma'am ma’am ";
/// Verbs before `n't`.
const VERBS: &str = " ai are ca could dare did does do had has have is may might must need ought sha should was were wo would ";
/// Words before `'ll`, `'d`, `'re`, `'ve` and `'m`.
const SUBJECTS: &str = " i you he she it we they who what when where why how there that this these those could might must \
    should would ";

fn is_in(character: char, ranges: &[(u32, u32)]) -> bool {
    let code = character as u32;
    let after = ranges.partition_point(|(first, _)| *first <= code);
    after > 0 && code <= ranges[after - 1].1
}

/// Whether a character ends sentences.
pub(crate) fn ends_sentence(character: char) -> bool {
    is_in(character, TERMINALS)
}

/// Whether a character belongs to no word.
pub(crate) fn is_mark(character: char) -> bool {
    is_in(character, PUNCTUATION) || ends_sentence(character)
}

fn holds(list: &str, word: &str) -> bool {
    // The lists are short, and a match is framed by spaces.
    list.match_indices(word).any(|(start, _)| {
        list.as_bytes().get(start.wrapping_sub(1)) == Some(&b' ')
            && list.as_bytes().get(start + word.len()) == Some(&b' ')
    })
}

/// The words and marks of a text.
pub(crate) fn words(text: &str) -> Vec<&str> {
    let mut words = Vec::with_capacity(text.len() / 5);
    for chunk in text.split_whitespace() {
        if chunk.bytes().all(|byte| byte.is_ascii_alphabetic()) {
            contraction(chunk, &mut words);
        } else {
            divide(chunk, &mut words);
        }
    }
    words
}

/// Divides a text without spaces.
fn divide<'a>(chunk: &'a str, words: &mut Vec<&'a str>) {
    let (mut rest, mut tails) = (chunk, Vec::new());
    loop {
        if rest.is_empty() || is_whole(rest) {
            break;
        }
        if let Some(length) = prefix(rest) {
            words.push(&rest[..length]);
            rest = &rest[length..];
            continue;
        }
        let Some(start) = suffix(rest) else { break };
        tails.push(&rest[start..]);
        rest = &rest[..start];
    }
    if !rest.is_empty() {
        if is_whole(rest) || is_address(rest) {
            words.push(rest);
        } else {
            between(rest, words);
        }
    }
    words.extend(tails.into_iter().rev());
}

/// Whether a text is an abbreviation or another exception.
fn is_whole(text: &str) -> bool {
    if text.len() > 8 || !text.is_ascii() && !text.contains('’') {
        return false;
    }
    let lower = text.to_lowercase();
    if holds(WHOLE, &lower) {
        return true;
    }
    if !text.ends_with('.') {
        return false;
    }
    let first = text.chars().next().unwrap_or(' ');
    text.len() == 2 && first.is_ascii_lowercase()
        || holds(ABBREVIATIONS, &lower) && (first.is_ascii_uppercase() || holds(LOWER_ABBREVIATIONS, text))
}

/// Whether a text is the address of a page or of mail.
fn is_address(text: &str) -> bool {
    if text.contains("://") {
        return true;
    }
    if !text.is_ascii() {
        return false;
    }
    let host = text.rsplit('@').next().unwrap_or(text);
    let host = host.split(['/', '?', '#', ':']).next().unwrap_or(host);
    let mut labels = host.split('.');
    let last = labels.next_back().unwrap_or("");
    let is_label = |label: &str| {
        !label.is_empty() && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte))
    };
    let mut named = labels.peekable();
    named.peek().is_some()
        && named.all(is_label)
        && last.len() >= 2
        && last.bytes().all(|byte| byte.is_ascii_lowercase())
}

/// The length of a mark at the beginning.
fn prefix(text: &str) -> Option<usize> {
    let mut characters = text.chars();
    let first = characters.next()?;
    if first == '.' {
        let dots = text.bytes().take_while(|byte| *byte == b'.').count();
        return (dots > 1).then_some(dots);
    }
    let is_plus = first == '+' && !characters.next().is_some_and(|next| next.is_ascii_digit());
    let is_mark = PEELED.contains(first) || CURRENCIES.contains(first) || "§%=—–".contains(first) || is_plus;
    (is_mark || is_icon(first)).then_some(first.len_utf8())
}

/// Pictographs and other symbols.
fn is_icon(character: char) -> bool {
    matches!(character as u32, 0xa6 | 0xa9 | 0xae | 0xb0 | 0x482 | 0x58d | 0x58e | 0x60e | 0x60f
        | 0x2100..=0x214f | 0x2190..=0x23ff | 0x2400..=0x27bf | 0x2900..=0x2bff | 0x1f000..=0x1fbff)
}

/// The start of a mark at the end.
fn suffix(text: &str) -> Option<usize> {
    let mut characters = text.chars().rev();
    let last = characters.next()?;
    let before = characters.next();
    let start = text.len() - last.len_utf8();
    if last == '.' {
        let dots = text.bytes().rev().take_while(|byte| *byte == b'.').count();
        if dots > 1 {
            return Some(text.len() - dots);
        }
        let before = before?;
        let two_capitals = before.is_uppercase() && characters.next().is_some_and(char::is_uppercase);
        let ends = before.is_ascii_digit()
            || before.is_lowercase()
            || is_ideograph(before)
            || PEELED.contains(before)
            || "%²-+".contains(before);
        return (ends || two_capitals).then_some(start);
    }
    if "sS".contains(last) && before.is_some_and(|mark| "'’".contains(mark)) {
        return Some(start - before.map_or(0, char::len_utf8));
    }
    if PEELED.contains(last) || "—–".contains(last) || is_icon(last) {
        return Some(start);
    }
    if let Some(digit) = text.rfind(|character: char| character.is_ascii_digit())
        && holds(UNITS, &text[digit + 1..])
    {
        return Some(digit + 1);
    }
    let after_digit = before.is_some_and(|before| before.is_ascii_digit());
    let is_after_digit = last == '+' || last == '%' || CURRENCIES.contains(last);
    (after_digit && is_after_digit).then_some(start)
}

/// Scripts that write no spaces between words.
fn is_ideograph(character: char) -> bool {
    matches!(character as u32, 0x3040..=0x30ff | 0x3400..=0x4dbf | 0x4e00..=0x9fff | 0xf900..=0xfaff | 0x20000..=0x3134f)
}

/// Divides a text at marks between letters, and its pieces at contractions.
fn between<'a>(text: &'a str, words: &mut Vec<&'a str>) {
    if contraction(text, words) {
        return;
    }
    let characters: Vec<(usize, char)> = text.char_indices().collect();
    let (mut start, mut place) = (0, 0);
    while place < characters.len() {
        let (at, character) = characters[place];
        let before = (place > 0).then(|| characters[place - 1].1);
        let (mut length, mut divides) = (1, false);
        if is_ideograph(character) {
            divides = true;
        } else if character == '…' || character == '.' {
            length = characters[place..]
                .iter()
                .take_while(|(_, next)| *next == character && character == '.')
                .count();
            length = length.max(1);
            let next = characters.get(place + length).map(|(_, next)| *next);
            divides = character == '…'
                || length > 1
                || before.is_some_and(char::is_lowercase) && next.is_some_and(char::is_uppercase);
        } else if let Some(before) = before {
            // Two or three hyphens are a dash.
            if character == '-' {
                length = characters[place..].iter().take(3).take_while(|(_, next)| *next == '-').count();
            }
            let next = characters.get(place + length).map(|(_, next)| *next);
            divides = next.is_some_and(|next| match character {
                ',' => before.is_alphabetic() && next.is_alphabetic(),
                '-' | '–' | '—' | '~' if before.is_alphabetic() && next.is_alphabetic() => true,
                '+' | '-' | '*' | '^' => {
                    before.is_ascii_digit() && (next.is_ascii_digit() || next == '-') && length == 1
                }
                ':' | '<' | '>' | '=' | '/' => {
                    (before.is_alphabetic() || before.is_ascii_digit()) && next.is_alphabetic()
                }
                _ => false,
            });
        }
        if divides {
            let end = characters.get(place + length).map_or(text.len(), |(next, _)| *next);
            if start < at {
                words.push(&text[start..at]);
            }
            words.push(&text[at..end]);
            start = end;
        }
        place += length;
    }
    if start < text.len() {
        words.push(&text[start..]);
    }
}

/// Adds the pieces of a contraction, or the whole of an ASCII word; `false` if the text may hold marks.
fn contraction<'a>(text: &'a str, words: &mut Vec<&'a str>) -> bool {
    let is_word = text.bytes().all(|byte| byte.is_ascii_alphabetic());
    if text.len() <= 14
        && let Some(at) = contracted(text)
    {
        words.extend([&text[..at], &text[at..]]);
        return true;
    }
    if is_word {
        words.push(text);
    }
    is_word
}

/// Where a contraction divides.
fn contracted(text: &str) -> Option<usize> {
    let bytes = text.as_bytes();
    // Most words are none: they end in letters that no contraction ends in.
    if !matches!(bytes.last()? | 0x20, b't' | b'm' | b'l' | b'd' | b'e' | b's' | b'a') {
        return None;
    }
    let lower = text.to_lowercase();
    if lower.len() != text.len() {
        return None;
    }
    match lower.as_str() {
        "cannot" | "gonna" | "gotta" => return Some(3),
        "im" | "ive" | "id" => return Some(1),
        "hes" | "wed" => return Some(2),
        "shes" | "youd" => return Some(3),
        "thats" | "whats" => return Some(4),
        "theres" | "wheres" => return Some(5),
        _ => {}
    }
    for ending in ["n't", "n’t", "nt"] {
        if let Some(stem) = lower.strip_suffix(ending)
            && holds(VERBS, stem)
        {
            return Some(stem.len());
        }
    }
    for ending in ["'ll", "'re", "'ve", "'d", "'m", "’ll", "’re", "’ve", "’d", "’m"] {
        if let Some(stem) = lower.strip_suffix(ending)
            && holds(SUBJECTS, stem)
        {
            return Some(stem.len());
        }
    }
    for ending in ["re", "ve"] {
        if let Some(stem) = lower.strip_suffix(ending)
            && matches!(stem, "you" | "they")
        {
            return Some(stem.len());
        }
    }
    None
}

/// The number of sentences of a line.
pub(crate) fn sentences(line: &str) -> usize {
    let (mut count, mut is_ended) = (1, false);
    for word in words(line) {
        let mut characters = word.chars();
        let first = characters.next().unwrap_or(' ');
        let is_end = characters.next().is_none() && ends_sentence(first);
        if is_end {
            is_ended = true;
        } else if is_ended && !word.chars().all(is_punctuation) {
            count += 1;
            is_ended = false;
        }
    }
    count
}

/// Whether a character is of Unicode's category of punctuation, as far as texts use them.
fn is_punctuation(character: char) -> bool {
    match character {
        '$' | '+' | '<' | '=' | '>' | '^' | '`' | '|' | '~' => false,
        _ if character.is_ascii() => character.is_ascii_punctuation(),
        _ => {
            ends_sentence(character)
                || matches!(character as u32, 0xa1 | 0xa7 | 0xab | 0xb6 | 0xb7 | 0xbb | 0xbf | 0x2010..=0x2027
                    | 0x2030..=0x205e | 0x3001..=0x3003 | 0x3008..=0x3011 | 0x3014..=0x301f | 0xff01..=0xff0f)
        }
    }
}

/// The lines of a text, as Python's `splitlines` divides them.
pub(crate) fn lines(text: &str) -> Vec<&str> {
    let ends = |character: char| {
        matches!(
            character,
            '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}'
        )
    };
    let (mut lines, mut rest) = (Vec::new(), text);
    while let Some(at) = rest.find(ends) {
        lines.push(&rest[..at]);
        let length = match &rest[at..] {
            tail if tail.starts_with("\r\n") => 2,
            tail => tail.chars().next().map_or(1, char::len_utf8),
        };
        rest = &rest[at + length..];
    }
    if !rest.is_empty() {
        lines.push(rest);
    }
    lines
}

/// The text in lower case, with `0` for every number, without punctuation and accents, and with single spaces.
pub(crate) fn simplified(text: &str) -> String {
    let lower = text.to_lowercase();
    let mut simple = String::with_capacity(lower.len());
    let mut characters = lower.chars().peekable();
    let push = |simple: &mut String, character: char| {
        if character.is_whitespace() {
            if !simple.is_empty() && !simple.ends_with(' ') {
                simple.push(' ');
            }
        } else {
            simple.push(character);
        }
    };
    let mut has_marks = false;
    while let Some(character) = characters.next() {
        if is_digit(character) {
            let mut after_point = false;
            loop {
                while characters.next_if(|next| is_digit(*next)).is_some() {}
                let mut ahead = characters.clone();
                let is_point = ahead.next().is_some_and(|next| ".,،٫⎖⎗⎘".contains(next));
                if after_point || !is_point || !ahead.next().is_some_and(is_digit) {
                    break;
                }
                characters.next();
                after_point = true;
            }
            simple.push('0');
        } else if is_in(character, PUNCTUATION) {
            push(&mut simple, ' ');
        } else {
            has_marks |= !character.is_ascii();
            push(&mut simple, character);
        }
    }
    if has_marks {
        simple = simple.nfd().filter(|character| !is_combining_mark(*character)).collect();
    }
    simple.truncate(simple.trim_end().len());
    simple
}

fn is_digit(character: char) -> bool {
    character.is_ascii_digit()
        || !character.is_ascii()
            && character.is_numeric()
            && character.to_digit(10).is_none()
            && matches!(character as u32, 0x660..=0x669 | 0x6f0..=0x6f9 | 0x966..=0x96f | 0x9e6..=0x9ef | 0xff10..=0xff19)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_divided_at_punctuation() {
        let check = |text: &str, expected: &[&str]| assert_eq!(words(text), expected, "{text}");
        check("The mill, by the river.", &["The", "mill", ",", "by", "the", "river", "."]);
        check(
            "I don't know; you'll see (soon)...",
            &["I", "do", "n't", "know", ";", "you", "'ll", "see", "(", "soon", ")", "..."],
        );
        check("Mr. Hill's well-known e.g. A.B", &["Mr.", "Hill", "'s", "well", "-", "known", "e.g.", "A.B"]);
        check(
            "see http://a.example/x?y=1, or a@b.org.",
            &["see", "http://a.example/x?y=1", ",", "or", "a@b.org", "."],
        );
        check("3.5% of $20 and 10-20", &["3.5", "%", "of", "$", "20", "and", "10", "-", "20"]);
        check("end.Then either/or", &["end", ".", "Then", "either", "/", "or"]);
        check("5km, 12mb 7x", &["5", "km", ",", "12", "mb", "7x"]);
        check("東京へ", &["東", "京", "へ"]);
    }

    #[test]
    fn sentences_end_at_terminals() {
        for (line, expected) in [
            ("One.", 1),
            ("One. Two! Three?", 3),
            ("He said \"Go.\" Then left.", 2),
            ("1.5 of Mr. Hill", 1),
            ("", 1),
        ] {
            assert_eq!(sentences(line), expected, "{line}");
        }
    }

    #[test]
    fn texts_are_simplified() {
        let check = |text: &str, expected: &str| assert_eq!(simplified(text), expected);
        check("  The  CAFÉ, at 10.30 —\n or 1|2|3! ", "the cafe at 0 or 0 0 0");
        check("v1.2.3", "v0 0");
    }

    #[test]
    fn lines_end_as_in_python() {
        assert_eq!(lines("a\r\nb\u{2028}c\n"), ["a", "b", "c"]);
        assert_eq!(lines("\n\nx"), ["", "", "x"]);
    }
}
