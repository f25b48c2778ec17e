//! Answers as texts: what of them is mathematics, without delimiters and layout.

/// Commands that only affect the layout, each with its replacement. Longer ones come before their beginnings.
const LAYOUT: &[(&str, &str)] = &[
    (r"\displaystyle", ""),
    (r"\left", ""),
    (r"\right", ""),
    (r"\dfrac", r"\frac"),
    (r"\tfrac", r"\frac"),
    (r"\cfrac", r"\frac"),
    (r"\lbrace", r"\{"),
    (r"\rbrace", r"\}"),
    (r"\lbrack", "["),
    (r"\rbrack", "]"),
    (r"\cdot", "*"),
    (r"\times", "*"),
    (r"\div", "/"),
    (r"\leq", "<="),
    (r"\geq", ">="),
    (r"\neq", "!="),
    (r"\le ", "<="),
    (r"\ge ", ">="),
    (r"\ldots", "..."),
    (r"^{\circ}", ""),
    (r"^\circ", ""),
    (r"\circ", ""),
    (r"\degree", ""),
    ("°", ""),
    (r"\%", "%"),
    (r"\$", ""),
    (r"\!", ""),
    (r"\,", ""),
    (r"\;", " "),
    (r"\:", " "),
    (r"\ ", " "),
    (r"\quad", " "),
    (r"\(", ""),
    (r"\)", ""),
    (r"\[", ""),
    (r"\]", ""),
    ("$", ""),
    ("~", " "),
    ("−", "-"),
    ("–", "-"),
    ("×", "*"),
    ("·", "*"),
    ("÷", "/"),
    ("≤", "<="),
    ("≥", ">="),
    ("∪", r"\cup "),
    ("∞", r"\infty "),
    ("π", r"\pi "),
    ("√", r"\sqrt "),
];

/// Commands whose argument is text.
const WORDS: &[&str] =
    &[r"\text", r"\mathrm", r"\textbf", r"\mathbf", r"\textit", r"\mbox", r"\operatorname"];

/// Units that may follow a number without a command.
const UNITS: &[&str] = &[
    "cm", "mm", "km", "m", "kg", "g", "mg", "s", "h", "min", "minutes", "minute", "hours", "hour", "seconds",
    "second", "days", "day", "weeks", "years", "year", "degrees", "degree", "dollars", "dollar", "cents",
    "cent", "meters", "meter", "feet", "foot", "ft", "inches", "inch", "miles", "mile", "mph", "liters",
    "liter", "units", "unit", "people", "percent", "points", "point", "ways", "square", "cubic", "l", "ml",
];

/// The mathematics of an answer.
pub fn essence(text: &str) -> String {
    let inner = boxed(text).unwrap_or(text);
    let mut text = inner.trim().to_owned();
    for (from, to) in LAYOUT {
        text = text.replace(from, to);
    }
    let text = without_words(&text);
    let text = text.trim().trim_end_matches(['.', ',', ';']).trim();
    let text = without_units(text);
    without_name(&text).trim().to_owned()
}

/// A text for comparison as it is: without white space and without case of single letters that name choices.
pub fn compact(text: &str) -> String {
    let compact: String = text.chars().filter(|letter| !letter.is_whitespace()).collect();
    let choice = compact.trim_start_matches('(').trim_end_matches(')');
    if choice.chars().count() == 1 && choice.chars().all(|letter| letter.is_ascii_uppercase()) {
        return choice.to_owned();
    }
    compact
}

/// The content of the last `\boxed{…}` or `\fbox{…}`.
pub fn boxed(text: &str) -> Option<&str> {
    let start =
        [r"\boxed{", r"\fbox{"].iter().filter_map(|mark| Some(text.rfind(mark)? + mark.len())).max()?;
    let mut depth = 1;
    for (index, letter) in text[start..].char_indices() {
        match letter {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some(&text[start..start + index]);
        }
    }
    None
}

/// Replaces `\text{…}` by its content where that is the whole answer, and leaves it out elsewhere: it holds units or words.
fn without_words(text: &str) -> String {
    let mut rest = text;
    let mut kept = String::new();
    let mut words = String::new();
    while let Some((place, command)) = WORDS
        .iter()
        .filter_map(|command| rest.find(&format!("{command}{{")).map(|place| (place, *command)))
        .min()
    {
        kept.push_str(&rest[..place]);
        let content = &rest[place + command.len() + 1..];
        let end = content.find('}').unwrap_or(content.len());
        let word = &content[..end];
        match word.trim() {
            "or" | "and" => kept.push(','),
            _ => words.push_str(word),
        }
        rest = content.get(end + 1..).unwrap_or_default();
        // A unit's power belongs to the unit.
        for power in ["^2", "^3", "^{2}", "^{3}"] {
            rest = rest.strip_prefix(power).unwrap_or(rest);
        }
    }
    kept.push_str(rest);
    if kept.trim().is_empty() { words } else { kept }
}

/// Leaves out a unit after a number.
fn without_units(text: &str) -> String {
    let mut words: Vec<&str> = text.split_whitespace().collect();
    let is_unit = |word: &str| {
        let bare = word
            .trim_end_matches("^2")
            .trim_end_matches("^3")
            .trim_end_matches("^{2}")
            .trim_end_matches("^{3}");
        UNITS.contains(&bare.to_ascii_lowercase().as_str())
    };
    while words.len() > 1 && is_unit(words[words.len() - 1]) {
        words.pop();
    }
    words.join(" ")
}

/// Leaves out what an answer is the value of, as in `x = 5` or `x \in [0, 1]`.
fn without_name(text: &str) -> String {
    for sign in [r"\in ", r"\in[", "="] {
        let Some((name, value)) = text.split_once(sign) else { continue };
        let name = name.trim();
        let is_name = name.chars().count() <= 4
            && name.chars().next().is_some_and(char::is_alphabetic)
            && name.chars().all(|letter| letter.is_alphanumeric() || "_(){}".contains(letter));
        if is_name && !value.contains('=') {
            let opening = if sign.ends_with('[') { "[" } else { "" };
            return format!("{opening}{value}");
        }
    }
    text.to_owned()
}

/// The last number in a text, with its sign and thousands separators, or a fraction of two numbers.
pub fn last_number(text: &str) -> Option<&str> {
    let bytes = text.as_bytes();
    let is_digit = |index: usize| bytes.get(index).is_some_and(u8::is_ascii_digit);
    let end = bytes.iter().rposition(u8::is_ascii_digit)? + 1;
    let mut start = end;
    while start > 0 {
        let before = bytes[start - 1];
        let joins =
            matches!(before, b',' | b'.' | b'/') && start > 1 && is_digit(start - 2) && is_digit(start);
        if !(before.is_ascii_digit() || joins) {
            break;
        }
        start -= 1;
    }
    // A minus after a digit or a letter subtracts.
    let is_sign = start > 0
        && bytes[start - 1] == b'-'
        && (start == 1 || !bytes[start - 2].is_ascii_alphanumeric() && bytes[start - 2] != b')');
    let is_point =
        start > 0 && bytes[start - 1] == b'.' && (start == 1 || !bytes[start - 2].is_ascii_alphanumeric());
    if is_sign || is_point {
        start -= 1;
    }
    Some(&text[start..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_found_in_texts() {
        assert_eq!(boxed(r"so \boxed{1} or \boxed{\frac{1}{2}}."), Some(r"\frac{1}{2}"));
        assert_eq!((boxed(r"\boxed{1"), boxed("1")), (None, None));
        for (text, expected) in [
            ("The sum is 1,234.5 dollars.", Some("1,234.5")),
            ("it is -3/4", Some("-3/4")),
            ("5-3", Some("3")),
            ("10 - 3 = 7.", Some("7")),
            ("none", None),
            ("x = -12", Some("-12")),
            ("ends in .5", Some(".5")),
        ] {
            assert_eq!(last_number(text), expected, "{text}");
        }
    }
}
