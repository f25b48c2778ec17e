//! The final instruction schedule of one operation: bundles of instructions that issue together, one per cycle.

use std::collections::HashMap;

/// The number of matrix units of a core.
const MATRIX_UNITS: f64 = 4.0;

/// The schedule of one operation.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Schedule {
    /// Cycles outside of all loops.
    outside: f64,
    /// Cycles that the matrix units are fed outside of all loops.
    fed_outside: f64,
    loops: Vec<Loop>,
}

/// A loop of a schedule, without the loops inside.
#[derive(Clone, Debug, Default, PartialEq)]
struct Loop {
    depth: usize,
    cycles: f64,
    fed: f64,
    /// The bound of its counter, if it is a constant.
    bound: Option<u64>,
}

impl Schedule {
    /// Reads a dump of final bundles.
    pub fn parse(text: &str) -> Self {
        let mut schedule = Self::default();
        let mut within: Vec<usize> = Vec::new();
        let mut bounds: HashMap<String, u64> = HashMap::new();
        let mut previous = 0;
        for line in text.lines() {
            let Some((labels, markers)) = bundle(line) else { continue };
            let mut depth = markers.matches('>').count();
            let is_empty = depth == 0 && line.contains("{}");
            let ends_loop = line.contains("sbr.rel (!") && depth < previous && !within.is_empty();
            if is_empty || ends_loop {
                depth = previous;
            }
            previous = depth;
            if labels.contains("LB") {
                within.truncate(if depth == 0 { within.len().saturating_sub(1) } else { depth - 1 });
                within.push(schedule.loops.len());
                schedule.loops.push(Loop { depth, ..Loop::default() });
            }
            within.truncate(depth);
            let cycles = 1.0 + numbers_after(line, "vdelay ").sum::<u64>() as f64;
            let fed = rows_fed(line) / MATRIX_UNITS;
            match within.last() {
                Some(innermost) if depth > 0 => {
                    schedule.loops[*innermost].cycles += cycles;
                    schedule.loops[*innermost].fed += fed;
                }
                _ => {
                    if depth == 0 {
                        schedule.outside += cycles;
                    }
                    schedule.fed_outside += fed;
                }
            }
            bounds.extend(comparisons(line));
            if let (Some(predicate), Some(last)) = (branch_predicate(line), schedule.loops.last_mut())
                && last.bound.is_none()
            {
                last.bound = bounds.get(&predicate).copied();
            }
        }
        schedule
    }

    /// The cycles of one run with this number of windows.
    pub fn cycles(&self, iterations: u64) -> f64 {
        let (mut issued, mut fed) = (self.outside, self.fed_outside);
        for each in &self.loops {
            let bound = each.bound.unwrap_or(1).max(1);
            let times = match each.depth {
                1 if iterations > 1 || self.loops.len() == 1 => iterations,
                1 => bound,
                _ => iterations.max(1) * bound.min(64),
            };
            issued += each.cycles * times as f64;
            fed += each.fed * times as f64;
        }
        issued.max(fed)
    }
}

/// The labels of a bundle and the marks of loops before it: `  0x1f LB: >> {…`.
fn bundle(line: &str) -> Option<(&str, &str)> {
    let rest = line.trim_start();
    let address = match rest.strip_prefix("0x") {
        Some(digits) => 2 + digits.find(|letter: char| !letter.is_ascii_hexdigit())?,
        None => rest.find(|letter: char| !letter.is_ascii_digit()).filter(|end| *end > 0)?,
    };
    let rest = &rest[address..];
    if !rest.starts_with(char::is_whitespace) {
        return None;
    }
    let (labels, rest) = rest.split_once(':')?;
    if !labels.chars().all(|letter| letter.is_ascii_uppercase() || letter.is_whitespace()) {
        return None;
    }
    let open = rest.find('{')?;
    let markers = &rest[..open];
    (rest.starts_with(char::is_whitespace) && markers.chars().all(|mark| mark == '>' || mark.is_whitespace()))
        .then_some((labels, markers))
}

fn numbers_after<'a>(line: &'a str, word: &'a str) -> impl Iterator<Item = u64> {
    line.match_indices(word).filter_map(move |(place, _)| {
        let rest = &line[place + word.len()..];
        rest[..rest.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(rest.len())].parse().ok()
    })
}

/// The rows that a bundle feeds to matrix units: 16 for a product of `bf16`, else 8.
fn rows_fed(line: &str) -> f64 {
    let products = line.match_indices("vmatmul").map(|(place, _)| {
        let rest = &line[place..];
        let is_of_name = |letter: char| letter.is_ascii_alphanumeric() || letter == '.' || letter == '_';
        let name = &rest[..rest.find(|letter| !is_of_name(letter)).unwrap_or(rest.len())];
        if name.contains("lmr") || !name.contains("bf16") { 8.0 } else { 16.0 }
    });
    products.sum()
}

/// Predicates that compare a counter with a constant, and that constant:
/// `%p12_p3 = scmp.ge.s32.totalorder %s5_s6, 16`.
fn comparisons(line: &str) -> impl Iterator<Item = (String, u64)> {
    line.match_indices(" = scmp.").filter_map(|(place, found)| {
        let (before, after) = (&line[..place], &line[place + found.len()..]);
        let predicate = predicate(&before[before.rfind('%')? + 1..])?;
        let (kind, operands) = after.split_once(".s32.totalorder %s")?;
        if !["ge", "lt", "eq", "ne"].contains(&kind) {
            return None;
        }
        let is_of_name = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
        let bound = operands.trim_start_matches(is_of_name).strip_prefix(", ")?;
        let end = bound.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(bound.len());
        Some((predicate.to_owned(), bound[..end].parse().ok()?))
    })
}

/// The predicate of a branch out of a loop: `sbr.rel (!%p12_p3) target = $region`.
fn branch_predicate(line: &str) -> Option<String> {
    let start = "sbr.rel (!%";
    let rest = &line[line.find(start)? + start.len()..];
    let (name, rest) = rest.split_once(')')?;
    rest.starts_with(" target = $region").then_some(())?;
    predicate(name).map(str::to_owned)
}

/// `p12` of `p12_p3`.
fn predicate(name: &str) -> Option<&str> {
    let (first, second) = name.split_once('_')?;
    let is_one = |text: &str| text.strip_prefix('p').is_some_and(|digits| digits.parse::<u64>().is_ok());
    (is_one(first) && is_one(second)).then_some(first)
}
