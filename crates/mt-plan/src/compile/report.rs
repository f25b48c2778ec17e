//! What is said of compiled programs, for people and as JSON.

use std::{collections::BTreeMap, fmt, path::PathBuf};

use mt_runtime::{Collective, MemoryUse, format_bytes};
use mt_train::ArgumentBytes;
use serde::Serialize;

/// What came of compiling.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// As it was asked for.
    pub hardware: String,
    pub device_kind: String,
    pub chip: Option<&'static str>,
    pub num_devices: usize,
    pub num_slices: usize,
    /// Bytes that programs can use on each device.
    pub device_memory: Option<u64>,
    /// The mesh axes that split anything, with their sizes.
    pub mesh: Vec<(String, usize)>,
    /// Of a step on all devices, and how long each is.
    pub sequences: usize,
    pub length: usize,
    pub programs: Vec<ProgramReport>,
    /// The most memory that this process has had.
    pub host_memory: Option<u64>,
}

/// What came of one program.
#[derive(Clone, Debug, Serialize)]
pub struct ProgramReport {
    pub name: String,
    /// Tracing, differentiating and printing.
    pub trace_seconds: f64,
    pub compile_seconds: f64,
    pub text_bytes: usize,
    /// What the placement predicts of the arguments on each device.
    pub predicted_arguments: Option<ArgumentBytes>,
    #[serde(flatten)]
    pub fit: Fit,
    pub flops: Flops,
    pub tokens: usize,
    /// Bytes from and to the main memory of each device.
    pub memory_traffic: Option<f64>,
    /// Operations of matrix products for each of these bytes.
    pub intensity: Option<f64>,
    pub exchanges: Vec<Exchanged>,
    pub times: Option<Times>,
    /// Files that were written.
    pub written: Vec<PathBuf>,
}

/// Whether a program fits into the memory of a device.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "verdict", rename_all = "snake_case")]
pub enum Fit {
    Unknown,
    Fits {
        memory: Memory,
        /// Of what there is.
        part: Option<f64>,
    },
    TooLarge(Lack),
}

/// Bytes on each device.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Memory {
    /// All of the device's memory that the program takes.
    pub needed: u64,
    pub arguments: u64,
    pub outputs: u64,
    /// The part of the outputs that reuses arguments.
    pub aliased: u64,
    pub temporaries: u64,
    pub code: u64,
    /// In the host's memory.
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

/// What is missing for a program to fit.
#[derive(Clone, Debug, Serialize)]
pub struct Lack {
    pub needed: Option<u64>,
    pub available: Option<u64>,
    /// Of a program that was compiled all the same.
    #[serde(rename = "memory")]
    pub compiled: Option<Memory>,
    /// The compiler's words.
    pub message: Option<String>,
    /// The largest arrays of the program as the compiler was given it.
    pub largest: Vec<Array>,
    pub remedies: Vec<String>,
}

/// An array of a program.
#[derive(Clone, Debug, Serialize)]
pub struct Array {
    pub name: String,
    #[serde(rename = "type")]
    pub ty: String,
    /// On each device; of temporaries, if they are split evenly.
    pub bytes: u64,
    pub is_temporary: bool,
}

/// Operations of one run of a program on all devices.
#[derive(Clone, Debug, Serialize)]
pub struct Flops {
    /// Of matrix products, what is computed again included.
    pub products: f64,
    pub products_by_type: BTreeMap<String, f64>,
    /// Of single elements.
    pub others: f64,
    /// Loops of unknown length were counted once.
    pub is_at_least: bool,
    /// By the model's formula.
    pub model: f64,
    /// 6 for each active parameter and token.
    pub six_n_d: Option<f64>,
}

/// Collectives of one kind, in groups of one size.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Exchanged {
    pub kind: String,
    /// The devices that exchange with each other.
    pub group: usize,
    /// The slices that these are in.
    pub slices: usize,
    /// How often in one run of the program.
    pub times: u64,
    /// On each device in one run, of what is gathered, reduced or exchanged.
    pub bytes: u64,
}

/// What the data sheet of the chip lets one expect, in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Times {
    pub products: f64,
    pub memory: f64,
    pub links: f64,
    pub slices: f64,
    /// The whole, if everything goes on at once.
    pub overlapped: f64,
    /// The whole, if exchanges and computation wait for each other.
    pub serial: f64,
    /// What takes longest.
    pub bound: &'static str,
    /// The model's operations as a part of the peak (MFU), for both.
    pub utilization: f64,
    pub serial_utilization: f64,
    pub tokens_per_second_per_device: f64,
    pub tflops_per_second_per_device: f64,
}

/// Adds up what is of one kind.
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
    /// Whether each program fits into the memory of a device, as far as that is known.
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
            Fit::Fits { memory, part } => {
                let part = part.map(|part| format!(", {:.0}% of what there is", 100.0 * part));
                line("memory", format!("fits: {}{}", bytes(memory.needed), part.unwrap_or_default()))?;
                Some(memory)
            }
            Fit::TooLarge(lack) => {
                let known = |bytes: Option<u64>| bytes.map_or("more".to_owned(), format_bytes);
                line(
                    "memory",
                    format!(
                        "DOES NOT FIT: {} are needed of {}",
                        known(lack.needed),
                        lack.available.map_or("what there is".to_owned(), format_bytes)
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
                format!("{} besides {} that reuse arguments", bytes(fresh), bytes(memory.aliased)),
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
            format!("{least}{} a step on all devices ({})", operations(flops.products), products.join(", ")),
        )?;
        let six = flops.six_n_d.map(|six| format!("; 6·N·D is {}", operations(six))).unwrap_or_default();
        line("  model's", format!("{} by its formula{six}", operations(flops.model)))?;
        line("  others", format!("{} on single elements", operations(flops.others)))?;
        if let Some(traffic) = self.memory_traffic {
            let intensity = self.intensity.map(|intensity| format!("; {intensity:.0} operations for each"));
            line(
                "memory traffic",
                format!("{} a step on each device{}", bytes(traffic as u64), intensity.unwrap_or_default()),
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
                    "{:<20} {:>10} a step on each device, {} times, among {} devices{slices}",
                    exchanged.kind,
                    bytes(exchanged.bytes),
                    exchanged.times,
                    exchanged.group
                ),
            )?;
        }
        if let Some(times) = &self.times {
            let percent = |part: f64| format!("{:.1}%", 100.0 * part);
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
                    "{} if all goes on at once, {} if exchanges are waited for; bound by {}",
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
                    "{:.0} tokens/s and {:.0} TFLOP/s a device",
                    times.tokens_per_second_per_device, times.tflops_per_second_per_device
                ),
            )?;
        }
        for path in &self.written {
            line("written", path.display().to_string())?;
        }
        if let Fit::TooLarge(lack) = &self.fit {
            line("largest arrays", "of the program as the compiler is given it".to_owned())?;
            for array in &lack.largest {
                let kind = if array.is_temporary { ", computed, if split evenly" } else { "" };
                line(
                    "",
                    format!("{:>10} a device{kind}: `{}` {}", bytes(array.bytes), array.name, array.ty),
                )?;
            }
            for (index, remedy) in lack.remedies.iter().enumerate() {
                line(if index == 0 { "would help" } else { "" }, remedy.clone())?;
            }
            if let Some(message) = &lack.message {
                line("compiler", message.replace('\n', "\n                "))?;
            }
        }
        Ok(())
    }
}

/// A number of operations, such as `1.23 PFLOP`.
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
