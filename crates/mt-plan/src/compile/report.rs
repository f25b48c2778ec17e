//! The report on compiled programs, as text and as JSON.

use std::{collections::BTreeMap, fmt, path::PathBuf};

use mt_runtime::{Collective, MemoryUse, format_bytes};
use mt_train::ArgumentBytes;
use serde::Serialize;

use super::Cycles;

/// The result of a compilation.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The requested hardware, or this machine's.
    pub hardware: String,
    pub device_kind: String,
    pub chip: Option<&'static str>,
    pub num_devices: usize,
    pub num_slices: usize,
    /// The memory of each device in bytes that programs can use.
    pub device_memory: Option<u64>,
    /// The mesh axes of more than one device, with their sizes.
    pub mesh: Vec<(String, usize)>,
    /// The number of sequences per step over all devices, and their length.
    pub sequences: usize,
    pub length: usize,
    pub programs: Vec<ProgramReport>,
    /// The peak memory of this process.
    pub host_memory: Option<u64>,
}

/// The result for one program.
#[derive(Clone, Debug, Serialize)]
pub struct ProgramReport {
    pub name: String,
    /// The time for tracing, differentiating and printing.
    pub trace_seconds: f64,
    pub compile_seconds: f64,
    pub text_bytes: usize,
    /// The size of the arguments on each device, predicted from the placement.
    pub predicted_arguments: Option<ArgumentBytes>,
    #[serde(flatten)]
    pub fit: Fit,
    pub flops: Flops,
    pub tokens: usize,
    /// Bytes read from and written to each device's memory.
    pub memory_traffic: Option<f64>,
    /// FLOPs of matrix products per byte of memory traffic.
    pub intensity: Option<f64>,
    pub exchanges: Vec<Exchanged>,
    pub times: Option<Times>,
    /// The time by the compiler's final schedule, if requested.
    pub cycles: Option<Cycles>,
    /// Remarks of the layers, such as why they call no kernel.
    pub notes: Vec<String>,
    /// The written files.
    pub written: Vec<PathBuf>,
}

/// Whether a program fits into the memory of a device.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "verdict", rename_all = "snake_case")]
pub enum Fit {
    Unknown,
    Fits {
        memory: Memory,
        /// The fraction of the available memory.
        share: Option<f64>,
    },
    TooLarge(Lack),
}

/// Bytes on each device.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Memory {
    /// The device memory that the program needs.
    pub needed: u64,
    pub arguments: u64,
    pub outputs: u64,
    /// The bytes of outputs that reuse arguments.
    pub aliased: u64,
    pub temporaries: u64,
    pub code: u64,
    /// Host memory.
    pub host: u64,
}

impl From<MemoryUse> for Memory {
    fn from(memory: MemoryUse) -> Self {
        let host = memory.host_arguments + memory.host_outputs + memory.host_temporaries;
        Self {
            needed: memory.on_device(),
            arguments: memory.arguments,
            outputs: memory.outputs,
            aliased: memory.aliased,
            temporaries: memory.temporaries,
            code: memory.code,
            host: host.saturating_sub(memory.host_aliased),
        }
    }
}

/// The memory problem of a program that does not fit.
#[derive(Clone, Debug, Serialize)]
pub struct Lack {
    pub needed: Option<u64>,
    pub available: Option<u64>,
    /// The memory of a program that was nevertheless compiled.
    #[serde(rename = "memory")]
    pub compiled: Option<Memory>,
    /// The compiler's message.
    pub message: Option<String>,
    /// The largest arrays of the program before optimization.
    pub largest: Vec<Array>,
    pub remedies: Vec<String>,
}

/// An array of a program.
#[derive(Clone, Debug, Serialize)]
pub struct Array {
    pub name: String,
    #[serde(rename = "type")]
    pub ty: String,
    /// On each device; for temporaries, under the assumption of an even split.
    pub bytes: u64,
    pub is_temporary: bool,
}

/// FLOPs of one run of a program on all devices.
#[derive(Clone, Debug, Serialize)]
pub struct Flops {
    /// Matrix products, including recomputation.
    pub products: f64,
    pub products_by_type: BTreeMap<String, f64>,
    /// Element-wise operations.
    pub others: f64,
    /// Whether loops of unknown length were counted as one iteration.
    pub is_at_least: bool,
    /// By the model's formula.
    pub model: f64,
    /// 6 per active parameter and token.
    pub six_n_d: Option<f64>,
}

/// Collectives of one kind, with groups of one size.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Exchanged {
    pub kind: String,
    /// The number of participating devices.
    pub group: usize,
    /// The number of slices that contain these devices.
    pub slices: usize,
    /// The number of executions in one run of the program.
    pub times: u64,
    /// The size in bytes of the data that is gathered, reduced or exchanged, on each device in one run.
    pub bytes: u64,
}

/// Lower bounds from the chip's data sheet, in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Times {
    pub products: f64,
    pub memory: f64,
    pub links: f64,
    pub slices: f64,
    /// The step, if computation and communication overlap fully.
    pub overlapped: f64,
    /// The step, if communication does not overlap with computation.
    pub serial: f64,
    /// The resource with the longest time.
    pub bound: &'static str,
    /// The model's FLOPs as a fraction of the peak (MFU), for both times.
    pub utilization: f64,
    pub serial_utilization: f64,
    pub tokens_per_second_per_device: f64,
    pub tflops_per_second_per_device: f64,
}

/// Sums collectives of the same kind, group size and number of slices.
pub(super) fn exchanged(collectives: &[Collective], slices_of: &dyn Fn(&[usize]) -> usize) -> Vec<Exchanged> {
    let mut sums: BTreeMap<(&str, usize, usize), (u64, u64)> = BTreeMap::new();
    for collective in collectives {
        let key = (collective.kind.as_str(), collective.places.len(), slices_of(&collective.places));
        let (times, bytes) = sums.entry(key).or_default();
        *times += collective.times;
        *bytes += collective.times * collective.bytes;
    }
    let mut all: Vec<Exchanged> = sums
        .into_iter()
        .map(|((kind, group, slices), (times, bytes))| Exchanged {
            kind: kind.to_owned(),
            group,
            slices,
            times,
            bytes,
        })
        .collect();
    all.sort_by_key(|exchanged| std::cmp::Reverse(exchanged.bytes));
    all
}

impl Report {
    /// Whether every program fits into the memory of a device, as far as that is known.
    pub fn fits(&self) -> bool {
        self.programs.iter().all(|program| !matches!(program.fit, Fit::TooLarge(_)))
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let line = |f: &mut fmt::Formatter<'_>, name: &str, value: &str| writeln!(f, "{name:<16}{value}");
        let slices = match self.num_slices {
            1 => String::new(),
            slices => format!(" in {slices} slices"),
        };
        let memory = match self.device_memory {
            Some(bytes) => format!(", {} of memory each", format_bytes(bytes)),
            None => String::new(),
        };
        line(
            f,
            "hardware",
            &format!("{}: {} × {}{slices}{memory}", self.hardware, self.num_devices, self.device_kind),
        )?;
        let mesh: Vec<String> = self.mesh.iter().map(|(axis, size)| format!("{axis}={size}")).collect();
        let mesh = if mesh.is_empty() { "one device".to_owned() } else { mesh.join(" ") };
        line(f, "mesh", &mesh)?;
        line(f, "batch", &format!("{} sequences of {} tokens", self.sequences, self.length))?;
        for program in &self.programs {
            writeln!(f)?;
            program.fmt(f)?;
        }
        if let Some(bytes) = self.host_memory {
            writeln!(f)?;
            line(f, "compiler's peak", &format!("{} of this machine's memory", format_bytes(bytes)))?;
        }
        Ok(())
    }
}

impl ProgramReport {
    fn write_cycles_notes_and_files(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(cycles) = &self.cycles {
            write!(f, "{cycles}")?;
        }
        self.notes.iter().try_for_each(|note| writeln!(f, "{:<16}{note}", "note"))?;
        self.written.iter().try_for_each(|path| writeln!(f, "{:<16}{}", "written", path.display()))
    }
}

impl fmt::Display for ProgramReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = format_bytes;
        let mut line = |name: &str, value: String| writeln!(f, "{name:<16}{value}");
        line("program", self.name.clone())?;
        line(
            "time",
            format!(
                "{:.2} s to trace and print, {:.1} s to compile",
                self.trace_seconds, self.compile_seconds
            ),
        )?;
        let compiled = match &self.fit {
            Fit::Unknown => None,
            Fit::Fits { memory, share } => {
                let share = share.map(|share| format!(", {:.0}% of the device's memory", 100.0 * share));
                line("memory", format!("fits: {}{}", bytes(memory.needed), share.unwrap_or_default()))?;
                Some(memory)
            }
            Fit::TooLarge(lack) => {
                let known = |bytes: Option<u64>| bytes.map_or("more".to_owned(), format_bytes);
                line(
                    "memory",
                    format!(
                        "DOES NOT FIT: needs {}, has {}",
                        known(lack.needed),
                        lack.available.map_or("less".to_owned(), format_bytes)
                    ),
                )?;
                lack.compiled.as_ref()
            }
        };
        if let Some(memory) = compiled {
            line("  arguments", format!("{} ({})", bytes(memory.arguments), memory.arguments))?;
        }
        if let Some(predicted) = &self.predicted_arguments {
            line(
                "  by placement",
                format!(
                    "{} ({}): parameters {}, optimizer {}, batch {}",
                    bytes(predicted.total()),
                    predicted.total(),
                    bytes(predicted.parameters),
                    bytes(predicted.optimizer),
                    bytes(predicted.batch)
                ),
            )?;
        }
        if let Some(memory) = compiled {
            line("  temporaries", format!("{} ({})", bytes(memory.temporaries), memory.temporaries))?;
            let fresh = memory.outputs.saturating_sub(memory.aliased);
            line(
                "  new results",
                format!("{}, in addition to {} that reuse arguments", bytes(fresh), bytes(memory.aliased)),
            )?;
            line("  code", bytes(memory.code))?;
            if memory.host > 0 {
                line("  on the host", format!("{} ({})", bytes(memory.host), memory.host))?;
            }
        }
        let flops = &self.flops;
        let products: Vec<String> = flops
            .products_by_type
            .iter()
            .map(|(dtype, flops)| format!("{} in {dtype}", operations(*flops)))
            .collect();
        let least = if flops.is_at_least { "at least " } else { "" };
        line(
            "products",
            format!("{least}{} per step, all devices ({})", operations(flops.products), products.join(", ")),
        )?;
        let six = flops.six_n_d.map(|six| format!("; 6·N·D is {}", operations(six))).unwrap_or_default();
        line("  model's", format!("{} by its formula{six}", operations(flops.model)))?;
        line("  others", format!("{} element-wise", operations(flops.others)))?;
        if let Some(traffic) = self.memory_traffic {
            let intensity = self.intensity.map(|intensity| format!("; {intensity:.0} FLOPs per byte"));
            line(
                "memory traffic",
                format!("{} per step on each device{}", bytes(traffic as u64), intensity.unwrap_or_default()),
            )?;
        }
        for (index, exchanged) in self.exchanges.iter().enumerate() {
            let slices = match exchanged.slices {
                1 => String::new(),
                slices => format!(" in {slices} slices"),
            };
            line(
                if index == 0 { "collectives" } else { "" },
                format!(
                    "{:<20} {:>10} per step on each device, {} times, among {} devices{slices}",
                    exchanged.kind,
                    bytes(exchanged.bytes),
                    exchanged.times,
                    exchanged.group
                ),
            )?;
        }
        if let Some(times) = &self.times {
            let percent = |share: f64| format!("{:.1}%", 100.0 * share);
            line(
                "roofline",
                format!(
                    "{} products, {} memory, {} links{}",
                    seconds(times.products),
                    seconds(times.memory),
                    seconds(times.links),
                    if times.slices > 0.0 {
                        format!(", {} between slices", seconds(times.slices))
                    } else {
                        String::new()
                    }
                ),
            )?;
            line(
                "step at best",
                format!(
                    "{} with full overlap, {} if communication does not overlap; bound by {}",
                    seconds(times.overlapped),
                    seconds(times.serial),
                    times.bound
                ),
            )?;
            line(
                "MFU at best",
                format!("{} to {}", percent(times.serial_utilization), percent(times.utilization)),
            )?;
            line(
                "speed at best",
                format!(
                    "{:.0} tokens/s and {:.0} TFLOP/s per device",
                    times.tokens_per_second_per_device, times.tflops_per_second_per_device
                ),
            )?;
        }
        self.write_cycles_notes_and_files(f)?;
        let mut line = |name: &str, value: String| writeln!(f, "{name:<16}{value}");
        if let Fit::TooLarge(lack) = &self.fit {
            line("largest arrays", "of the program before optimization".to_owned())?;
            for array in &lack.largest {
                let kind = if array.is_temporary { ", temporary, if split evenly" } else { "" };
                line(
                    "",
                    format!("{:>10} per device{kind}: `{}` {}", bytes(array.bytes), array.name, array.ty),
                )?;
            }
            for (index, remedy) in lack.remedies.iter().enumerate() {
                line(if index == 0 { "remedies" } else { "" }, remedy.clone())?;
            }
            if let Some(message) = &lack.message {
                line("compiler", message.replace('\n', "\n                "))?;
            }
        }
        Ok(())
    }
}

/// A number of FLOPs, such as `1.23 PFLOP`.
fn operations(flops: f64) -> String {
    const UNITS: [&str; 7] = ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"];
    let mut value = flops;
    let mut unit = 0;
    while value >= 1000.0 && unit + 1 < UNITS.len() {
        value /= 1000.0;
        unit += 1;
    }
    format!("{value:.2} {}", UNITS[unit])
}

fn seconds(seconds: f64) -> String {
    match seconds {
        short if short < 1e-3 => format!("{:.0} µs", short * 1e6),
        short if short < 1.0 => format!("{:.1} ms", short * 1e3),
        long => format!("{long:.2} s"),
    }
}
