//! A written constitution: requests for critiques and revisions of answers, and for a choice between two (Bai et al., 2022).

use serde_json::{Map, Value};

/// A principle of a constitution.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Principle {
    /// The text of the principle, or its request for a critique.
    pub text: String,
    /// The request for a critique of an answer.
    pub critique: String,
    /// The request for a revision after the critique.
    pub revision: String,
    /// The question which of two answers is better.
    pub choice: String,
}

/// One of two answers in a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    First,
    Second,
}

impl Principle {
    /// The principles of a file, one on each line: a text, or an object with the requests `critique` and `revision`, and
    /// `choice` if it also compares answers.
    ///
    /// # Errors
    /// The line and the reason why it is no principle.
    pub fn read_all(text: &str) -> Result<Vec<Self>, String> {
        let lines = text.lines().zip(1..).filter(|(line, _)| !line.trim().is_empty());
        let principles: Result<Vec<Self>, String> = lines
            .map(|(line, number)| {
                Self::read(line.trim()).map_err(|reason| format!("line {number}: {reason}"))
            })
            .collect();
        match principles {
            Ok(principles) if principles.is_empty() => Err("it holds no principle".to_owned()),
            principles => principles,
        }
    }

    fn read(line: &str) -> Result<Self, String> {
        if !line.starts_with('{') {
            return Ok(Self {
                text: line.to_owned(),
                critique: format!("Name what in your last answer violates this principle: {line}"),
                revision: "Rewrite your answer so that it follows the principle. Write the new answer alone."
                    .to_owned(),
                choice: format!("Which answer follows this principle better? {line}"),
            });
        }
        let object: Map<String, Value> =
            serde_json::from_str(line).map_err(|error| format!("is no object of JSON: {error}"))?;
        let unknown = object.keys().find(|key| !["critique", "revision", "choice"].contains(&key.as_str()));
        if let Some(unknown) = unknown {
            return Err(format!("`{unknown}` is none of `critique`, `revision` and `choice`"));
        }
        let text = |key: &str| object.get(key).and_then(Value::as_str).map(str::to_owned);
        let pair = text("critique").zip(text("revision"));
        let (critique, revision) = pair.ok_or("has no texts `critique` and `revision`")?;
        let choice = text("choice").unwrap_or_else(|| format!("Which answer needs this less? {critique}"));
        Ok(Self { text: critique.clone(), critique, revision, choice })
    }

    /// The request to choose between two answers to a prompt.
    pub fn comparison(&self, prompt: &str, [first, second]: [&str; 2]) -> String {
        format!(
            "{}\n\nRequest:\n{prompt}\n\nAnswer A:\n{first}\n\nAnswer B:\n{second}\n\nReply with the letter A or B alone.",
            self.choice
        )
    }
}

/// The side that a reply to a comparison names; `None` if it names neither or both.
pub fn verdict(reply: &str) -> Option<Side> {
    let words = || reply.split(|letter: char| !letter.is_alphanumeric());
    let names = |letter: &str| words().any(|word| word == letter);
    match (names("A"), names("B"), reply.trim()) {
        (true, false, _) | (false, false, "a") => Some(Side::First),
        (false, true, _) | (false, false, "b") => Some(Side::Second),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn principles_are_texts_or_requests() {
        let file = "Be brief.\n\n{\"critique\": \"Is it rude?\", \"revision\": \"Be kind.\"}\n";
        let [brief, kind] = &Principle::read_all(file).unwrap()[..] else { panic!("two principles") };
        assert!(brief.critique.ends_with("violates this principle: Be brief."), "{brief:?}");
        assert_eq!((kind.critique.as_str(), kind.revision.as_str()), ("Is it rude?", "Be kind."));
        let request = brief.comparison("Hi", ["Hello", "Go away"]);
        assert!(
            request.contains("Be brief.\n\nRequest:\nHi\n\nAnswer A:\nHello\n\nAnswer B:\nGo away"),
            "{request}"
        );
        for (file, expected) in [
            ("\n", "no principle"),
            ("Be brief.\n{", "line 2: is no object of JSON"),
            ("{\"critique\": \"x\"}", "line 1: has no texts `critique` and `revision`"),
            ("{\"critique\": \"x\", \"revisions\": \"y\"}", "`revisions` is none of"),
        ] {
            let error = Principle::read_all(file).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn verdicts_name_one_side() {
        for (reply, expected) in [
            ("A", Some(Side::First)),
            (" b.", None),
            ("b", Some(Side::Second)),
            ("Answer B is a better one.", Some(Side::Second)),
            ("(A)", Some(Side::First)),
            ("A or B", None),
            ("a good question", None),
            ("", None),
        ] {
            assert_eq!(verdict(reply), expected, "{reply}");
        }
    }
}
