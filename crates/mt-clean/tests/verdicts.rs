//! Verdicts on generated documents, beside those of datatrove in `goldens/`, which `bench/data/clean_goldens.py` writes.

use mt_clean::{RuleSet, Thresholds};
use serde_json::Value;

const GOLDENS: &str = include_str!("goldens/verdicts.jsonl");

#[test]
fn verdicts_and_remaining_lines_are_those_of_datatrove() {
    let thresholds = Thresholds::default();
    let (mut removed, mut total) = (0, 0);
    for (number, line) in GOLDENS.lines().enumerate() {
        let golden: Value = serde_json::from_str(line).unwrap();
        let text = golden["text"].as_str().unwrap();
        for (name, set) in RuleSet::NAMES {
            let expected = golden["verdicts"][name].as_str();
            let found = thresholds.apply(set, text);
            let rule = found.as_ref().err().map(|finding| finding.rule);
            assert_eq!(
                rule.is_some(),
                expected.is_some(),
                "document {number}, {name}: {rule:?} {expected:?}"
            );
            removed += u32::from(rule.is_some());
            total += 1;
            if let (RuleSet::C4, Ok(kept)) = (set, found) {
                let kept = kept.unwrap_or_else(|| text.to_owned());
                assert_eq!(Some(kept.as_str()), golden["verdicts"]["c4_text"].as_str(), "document {number}");
            }
        }
    }
    assert!(removed > total / 5 && removed < total * 4 / 5, "{removed} of {total}");
}
