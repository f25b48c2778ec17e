//! The time of a program by the final schedule of the TPU compiler.
//!
//! libtpu schedules each operation statically, one bundle of instructions per cycle, and dumps these bundles beside the
//! text of the module. An operation takes the cycles of its bundles times the trips of its loops, or those of its access
//! to main memory if they are more. A collective for which the program waits takes the time of its bytes on the links.
//!
//! Left out are waits for asynchronous copies and collectives, the latency of an operation's first access to memory, and
//! the start of each operation, about 0.1 to 0.3 µs; so the operations that run are counted too.

mod clock;
mod memory;
mod module;
mod parts;
mod report;
mod schedule;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, HashMap},
    fs, io,
    path::{Path, PathBuf},
};

use mt_config::{Chip, Hardware};
use serde::Serialize;

pub use self::parts::Part;
use self::{
    clock::{Clock, Source, Timed},
    module::Module,
    schedule::Schedule,
};

/// The number of operations that a report lists.
const LISTED: usize = 10;

/// The cost of one run of a program on each device by the compiler's final schedule.
#[derive(Clone, Debug, Serialize)]
pub struct Cycles {
    pub cycles: f64,
    /// The cycles at the chip's clock.
    pub seconds: f64,
    /// Cycles per second.
    pub clock: f64,
    /// The cycles by the compiler's model of fusions, which prices every operand as if it came from main memory.
    pub estimated_cycles: f64,
    /// The operations that run, each with a start that `cycles` leaves out.
    pub op_runs: f64,
    /// In descending order of cycles.
    pub parts: Vec<PartCycles>,
    /// The operations that take the most cycles in all their runs.
    pub costliest: Vec<CostlyOperation>,
    pub left_out: LeftOut,
    /// The model's FLOPs as a fraction of the peak (MFU), if the program took these cycles.
    pub utilization: f64,
}

/// The cost of one category of operations.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct PartCycles {
    pub part: Part,
    pub cycles: f64,
    pub seconds: f64,
    pub estimated_cycles: f64,
    pub op_runs: f64,
}

/// The cost of one operation.
#[derive(Clone, Debug, Serialize)]
pub struct CostlyOperation {
    pub name: String,
    /// The operation's path of scopes in the model.
    pub scope: String,
    pub part: Part,
    #[serde(rename = "type")]
    pub ty: String,
    pub runs: f64,
    /// The sum over all runs.
    pub cycles: f64,
    pub estimated_cycles: f64,
}

/// Work that the cycles do not contain, or only as a guess.
#[derive(Clone, Debug, Serialize)]
pub struct LeftOut {
    /// Runs of asynchronous operations by kind, for which the program may wait.
    pub asynchronous: BTreeMap<String, f64>,
    /// Runs of operations whose schedule is not in the dump; the compiler's model of fusions times them.
    pub without_schedule: f64,
    /// Loops whose number of trips is a guess.
    pub guessed_loops: usize,
}

/// The rates of a core that runs programs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Core {
    /// Cycles per second.
    clock: f64,
    /// Bytes of main memory per cycle.
    memory_per_cycle: f64,
    /// Bytes on all links to other chips of the slice per cycle, one way.
    links_per_cycle: f64,
    /// The devices of the program.
    num_devices: u64,
}

/// The share of a link's peak that collectives reach.
const LINK_SHARE: f64 = 0.9;

impl Core {
    /// The core of a chip in a slice with these sides; `None` if the chip's clock is unknown.
    pub fn new(chip: &Chip, sides: &[usize], num_devices: usize) -> Option<Self> {
        if chip.hardware != Hardware::Tpu {
            return None;
        }
        // Cycles per second, and the links of each chip.
        let (clock, links) = match chip.generation {
            "v4" => (1.05e9, 6),
            "v5e" => (1.5e9, 4),
            "v5p" => (1.75e9, 6),
            "v6e" => (1.75e9, 4),
            "tpu7x" => (2.2e9, 6),
            _ => return None,
        };
        // Two chips along a side have one link, more have one in each direction.
        let used: usize = sides.iter().map(|side| (side - 1).min(2)).sum();
        let share = LINK_SHARE * used.max(1) as f64 / f64::from(links);
        Some(Self {
            clock,
            memory_per_cycle: chip.memory_bandwidth / clock,
            links_per_cycle: chip.link_bandwidth * share / clock,
            num_devices: num_devices as u64,
        })
    }
}

/// The dumps of one program.
#[derive(Clone, Copy, Debug)]
pub struct Dumps<'a> {
    /// The directory of the module's texts.
    pub modules: &'a Path,
    /// The directory of the schedules of operations.
    pub schedules: &'a Path,
}

/// The dumps of the compiler cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum CyclesError {
    #[error("`{path}` cannot be read or deleted")]
    Io { path: PathBuf, source: io::Error },
    #[error(
        "the compiler dumped no {what} to `{path}`\n\
         hint: `--cycles` reads the dumps of libtpu 0.0.51; `maxtext plugin install tpu` installs it"
    )]
    Missing { what: &'static str, path: PathBuf },
}

impl Dumps<'_> {
    /// Times the program of these dumps. `flops` are those of the model on each device, and `peak` those of a device
    /// per second.
    ///
    /// # Errors
    /// The dumps are missing or cannot be read.
    pub fn time(&self, core: Core, flops: f64, peak: f64) -> Result<Cycles, CyclesError> {
        let missing = |what, path: &Path| CyclesError::Missing { what, path: path.to_owned() };
        let text = self.module_text()?.ok_or_else(|| missing("module", self.modules))?;
        let module = Module::parse(&text).ok_or_else(|| missing("module", self.modules))?;
        let schedules = self.read_schedules()?;
        if schedules.is_empty() {
            return Err(missing("schedule", self.schedules));
        }
        let clock = Clock::new(&module, schedules, core);
        Ok(summary(&clock, &module, core, flops, peak))
    }

    /// Deletes the schedules. The directory remains, because the compiler may expect it.
    ///
    /// # Errors
    /// A file cannot be deleted.
    pub fn delete_schedules(&self) -> Result<(), CyclesError> {
        files(self.schedules)?
            .iter()
            .filter(|path| path.is_file())
            .try_for_each(|path| fs::remove_file(path).map_err(|source| read_error(path, source)))
    }

    /// The largest text of a module after the generation of code: smaller ones are those of host programs.
    fn module_text(&self) -> Result<Option<String>, CyclesError> {
        let mut largest: Option<(u64, PathBuf)> = None;
        for path in files(self.modules)? {
            if path.to_string_lossy().ends_with("after_codegen.txt") {
                let bytes = fs::metadata(&path).map_err(|source| read_error(&path, source))?.len();
                if largest.as_ref().is_none_or(|(most, _)| bytes > *most) {
                    largest = Some((bytes, path));
                }
            }
        }
        let read =
            |(_, path): (u64, PathBuf)| fs::read_to_string(&path).map_err(|source| read_error(&path, source));
        largest.map(read).transpose()
    }

    fn read_schedules(&self) -> Result<HashMap<String, Schedule>, CyclesError> {
        let mut schedules = HashMap::new();
        for path in files(self.schedules)? {
            let Some(name) = path.file_name().and_then(|name| operation_of(name.to_str()?)) else { continue };
            let bytes = fs::read(&path).map_err(|source| read_error(&path, source))?;
            schedules.insert(name, Schedule::parse(&String::from_utf8_lossy(&bytes)));
        }
        Ok(schedules)
    }
}

fn read_error(path: &Path, source: io::Error) -> CyclesError {
    CyclesError::Io { path: path.to_owned(), source }
}

/// The files of a directory, in order.
fn files(directory: &Path) -> Result<Vec<PathBuf>, CyclesError> {
    let listed = fs::read_dir(directory).and_then(|entries| {
        entries.map(|entry| entry.map(|entry| entry.path())).collect::<Result<Vec<_>, _>>()
    });
    match listed {
        Ok(mut paths) => {
            paths.sort();
            Ok(paths)
        }
        Err(source) if source.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(source) => Err(read_error(directory, source)),
    }
}

/// The operation of a file of bundles: `TIME-NAME-NUMBER-final_bundles.txt`.
fn operation_of(file: &str) -> Option<String> {
    let rest = file.strip_suffix("-final_bundles.txt").filter(|_| !file.contains("schedule-analysis"))?;
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let (time, rest) = rest.split_once('-')?;
    let (name, number) = rest.rsplit_once('-')?;
    (is_number(time) && is_number(number)).then(|| name.to_owned())
}

fn summary(clock: &Clock<'_>, module: &Module, core: Core, flops: f64, peak: f64) -> Cycles {
    let mut parts: BTreeMap<Part, PartCycles> = BTreeMap::new();
    let mut listed: Vec<(Part, &Timed<'_>)> = Vec::new();
    let mut without_schedule = 0.0;
    for timed in &clock.operations {
        let part = Part::of(module, timed);
        let sum = parts.entry(part).or_insert(PartCycles {
            part,
            cycles: 0.0,
            seconds: 0.0,
            estimated_cycles: 0.0,
            op_runs: 0.0,
        });
        sum.cycles += timed.cycles * timed.runs;
        sum.seconds += timed.cycles * timed.runs / core.clock;
        sum.estimated_cycles += timed.estimate * timed.runs;
        sum.op_runs += timed.runs;
        if timed.source == Source::Estimate {
            without_schedule += timed.runs;
        }
        listed.push((part, timed));
    }
    listed.sort_by(|(_, one), (_, other)| (other.cycles * other.runs).total_cmp(&(one.cycles * one.runs)));
    let costliest = listed.iter().take(LISTED).map(|(part, timed)| CostlyOperation {
        name: timed.instruction.name.clone(),
        scope: timed.instruction.scope().to_owned(),
        part: *part,
        ty: timed.instruction.shape.clone(),
        runs: timed.runs,
        cycles: timed.cycles * timed.runs,
        estimated_cycles: timed.estimate * timed.runs,
    });
    let mut parts: Vec<PartCycles> = parts.into_values().collect();
    parts.sort_by(|one, other| other.cycles.total_cmp(&one.cycles));
    let sum = |of: fn(&PartCycles) -> f64| parts.iter().map(of).sum::<f64>();
    let cycles = sum(|part| part.cycles);
    let seconds = cycles / core.clock;
    Cycles {
        cycles,
        seconds,
        clock: core.clock,
        estimated_cycles: sum(|part| part.estimated_cycles),
        op_runs: sum(|part| part.op_runs),
        costliest: costliest.collect(),
        left_out: LeftOut {
            asynchronous: clock.asynchronous.clone(),
            without_schedule,
            guessed_loops: clock.guessed_loops,
        },
        utilization: flops / (seconds * peak),
        parts,
    }
}
