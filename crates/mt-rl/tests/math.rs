//! Equality of mathematical answers.

use mt_rl::math::equal;

#[track_caller]
fn check(cases: &[(&str, &str)], expected: bool) {
    for (one, other) in cases {
        assert_eq!(equal(one, other), expected, "{one:?} and {other:?}");
        assert_eq!(equal(other, one), expected, "{other:?} and {one:?}");
    }
}

#[test]
fn equal_answers() {
    check(
        &[
            ("4", "4.0"),
            ("4", "$4$"),
            ("4", r"\boxed{4}"),
            ("1,234", "1234"),
            ("1,234,567.5", "1234567.5"),
            ("0.5", r"\frac{1}{2}"),
            ("0.5", r"\dfrac12"),
            ("0.5", "1/2"),
            ("-0.75", r"-\frac{3}{4}"),
            ("2.5", r"2\frac{1}{2}"),
            ("50%", r"50\%"),
            ("50%", "0.5"),
            ("50%", "50"),
            ("10", "10 cm"),
            ("10", r"10\text{ cm}"),
            ("10", r"10\,\mathrm{m}^2"),
            ("90", r"90^\circ"),
            ("18.90", r"\$18.90"),
            ("5", "x = 5"),
            ("5", "x=5."),
            (r"\sqrt{8}", r"2\sqrt{2}"),
            (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}"),
            (r"\sqrt[3]{27}", "3"),
            ("2^{10}", "1024"),
            ("5!", "120"),
            (r"\pi/2", r"\frac{\pi}{2}"),
            (r"2\pi", "6.283185307179586"),
            ("x^2+2x+1", "(x+1)^2"),
            ("2x", r"x \cdot 2"),
            (r"\frac{x+1}{2}", "0.5x + 0.5"),
            (r"\sin^2 x + \cos^2 x", "1"),
            (r"\log_2 8", "3"),
            ("e^{2}", r"\exp(2)"),
            ("|{-3}|", "3"),
            ("(1, 2)", r"\left(1,2\right)"),
            ("(1, 2)", r"\left( \frac{2}{2}, 2.0 \right)"),
            ("[0,1)", r"[0, 1)"),
            (r"[0, \infty)", "[0,oo)"),
            (r"(-\infty, 2) \cup (3, \infty)", r"(3,\infty)\cup(-\infty,2)"),
            (r"x \in [0, 1]", "[0,1]"),
            (r"\{1, 2, 3\}", r"\{3,1,2\}"),
            ("1, 2", "2,1"),
            (r"1 \text{ or } 2", "2, 1"),
            ("x > 3", "3 < x"),
            (r"x \geq 3", "x>=3"),
            ("y = 2x + 1", "y = 1 + 2x"),
            ("A", "(A)"),
            (r"\text{Monday}", "monday"),
            ("100000000000000000000", "10^{20}"),
        ],
        true,
    );
}

#[test]
fn different_answers() {
    check(
        &[
            ("4", "5"),
            ("4", "-4"),
            ("1000000", "1000001"),
            ("0.333", r"\frac{1}{3}"),
            ("(1, 2)", "(2, 1)"),
            ("[0, 1)", "[0, 1]"),
            ("(0, 1)", "[0, 1]"),
            (r"\{1, 2\}", r"\{1, 2, 2\}"),
            ("x^2", "x^3"),
            ("x", "y"),
            ("x > 3", "x < 3"),
            ("x > 3", r"x \geq 3"),
            ("A", "B"),
            ("Monday", "Tuesday"),
            (r"\sqrt{2}", "1.41"),
            ("5", ""),
            ("12", "1, 2"),
            ("1/0", "2/0"),
            ("50%", "5"),
            (r"2\pi", "6.28"),
        ],
        false,
    );
}

#[test]
fn nothing_breaks_the_parser() {
    let deep = format!("{}1{}", "(".repeat(10_000), ")".repeat(10_000));
    let frac = r"\frac{".repeat(1_900);
    for odd in [
        "",
        "(",
        ")",
        "{}",
        r"\",
        r"\frac",
        r"\frac{1}",
        r"\boxed{",
        "1/",
        "^",
        "_",
        "!!",
        "((",
        "|",
        "||",
        "-",
        "--",
        "1e999",
        ",",
        ";",
        "=",
        "\u{1f600}",
        "1\u{301}",
        r"\text{",
        r"\sqrt[",
        "999!",
        "9^9^9^9",
        &deep,
        &frac,
        &"9".repeat(1_500),
        "1,2,3,4,",
        "[[[",
        r"\cup",
        "x=y=z",
        "%",
        "%%",
        "0/0",
        "1.2.3",
        "..",
        ".",
    ] {
        assert!(!equal(odd, "41") && !equal("41", odd), "{odd}");
        equal(odd, odd);
    }
}

/// Whether the checker agrees with Python's `math-verify` (`tests/goldens/math_verdicts.py`).
#[test]
fn verdicts_are_those_of_math_verify() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/goldens/math_verdicts.json");
    let pairs: Vec<(String, String, bool)> =
        serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    assert!(pairs.len() >= 2_000, "{}", pairs.len());
    let differs = |(expected, given, verdict): &&(String, String, bool)| equal(expected, given) != *verdict;
    let differing: Vec<_> = pairs.iter().filter(differs).collect();
    assert!(
        differing.is_empty(),
        "{} of {}: {:?}",
        differing.len(),
        pairs.len(),
        &differing[..differing.len().min(30)]
    );
}
