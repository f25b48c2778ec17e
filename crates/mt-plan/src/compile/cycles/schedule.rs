//! The final instruction schedule of one operation: bundles of instructions that issue together, one per cycle.

use std::collections::{HashMap, HashSet};

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
    /// The branches in the body of a kernel, which not every step takes, in order.
    branches: Vec<Branch>,
}

/// The bundles that a conditional branch skips.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Branch {
    cycles: f64,
    fed: f64,
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
        let mut regions = Regions::default();
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
            regions.end(line);
            if regions.is_in_branch()
                && let Some(branch) = schedule.branches.last_mut()
            {
                branch.cycles += cycles;
                branch.fed += fed;
            }
            if regions.begin(line) {
                schedule.branches.push(Branch::default());
            }
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
        let [issued, fed] = self.sums(iterations);
        issued.max(fed)
    }

    /// The bundles that issue, and the cycles that matrix units are fed.
    fn sums(&self, iterations: u64) -> [f64; 2] {
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
        [issued, fed]
    }

    /// The cycles of a kernel with this number of steps, whose branches run in `runs` of them. If the schedule has other
    /// branches than the kernel, each is taken at every step.
    pub fn kernel_cycles(&self, steps: u64, runs: &[u64]) -> f64 {
        if runs.len() != self.branches.len() {
            return self.cycles(steps);
        }
        let taken =
            self.branches.iter().zip(runs).map(|(branch, runs)| branch.cycles.max(branch.fed) * *runs as f64);
        // The matrix units may limit branches, and not the bundles around them.
        let issued: f64 = self.branches.iter().map(|branch| branch.cycles).sum();
        let around = self.sums(steps)[0] - issued * steps as f64;
        around.max(0.0) + taken.sum::<f64>()
    }
}

/// The regions that conditional branches skip, while a schedule is read.
#[derive(Debug, Default)]
struct Regions {
    /// The regions at which the skipped bundles end, the outermost first.
    open: Vec<u64>,
    /// Regions that have begun, to which only loops return.
    begun: HashSet<u64>,
}

impl Regions {
    /// Whether a bundle belongs to a branch of a kernel's body. The compiler puts the body itself into a branch.
    fn is_in_branch(&self) -> bool {
        self.open.len() > 1
    }

    /// Closes the branches that end before this bundle.
    fn end(&mut self, line: &str) {
        for region in numbers_after(line, "Start/End empty region ") {
            if let Some(place) = self.open.iter().position(|open| *open == region) {
                self.open.truncate(place);
            }
        }
    }

    /// Opens the branch that begins after this bundle; returns whether it is one of a kernel's body.
    fn begin(&mut self, line: &str) -> bool {
        self.begun.extend(numbers_after(line, "Start region "));
        let branch = line.find("sbr.rel (").map(|place| &line[place..]);
        let target = branch.and_then(|branch| numbers_after(branch, "target = $region").next());
        match target.filter(|region| !self.begun.contains(region)) {
            Some(region) => {
                self.open.push(region);
                self.open.len() == 2
            }
            None => false,
        }
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
