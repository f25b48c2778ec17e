//! Hardware for which programs are compiled ahead of time, by MaxText's names.

use crate::{
    ConfigError,
    Hardware::{self, Gpu, Tpu},
    Problem, suggest,
};

/// A slice of hardware to compile for.
#[derive(Clone, Debug, PartialEq)]
pub struct CompileTopology {
    /// The requested name, such as `v5p-128`.
    pub name: String,
    pub chip: &'static Chip,
    /// Number of chips along each dimension of a slice; for GPUs, of one machine.
    pub bounds: Vec<usize>,
}

/// Peak figures of a device, from the data sheet of its chip. A chip is one device, or several devices that share its
/// resources.
#[derive(Debug, PartialEq)]
pub struct Chip {
    /// The compiler's name of the chip's generation, with which topology names begin.
    pub generation: &'static str,
    pub hardware: Hardware,
    /// A substring of the plugin's device kind.
    pub device_kind: &'static str,
    /// Peak of dense `bf16` products, in 10¹² FLOPs per second.
    pub peak_tflops: f64,
    /// Memory in bytes.
    pub memory: u64,
    /// Memory bandwidth in bytes per second.
    pub memory_bandwidth: f64,
    /// Bandwidth to all other chips of a slice together, one way, in bytes per second. The figure for v4 is derived
    /// from the all-reduce bandwidth that Google states for a pod: 1.1 PB/s over 4096 chips.
    pub link_bandwidth: f64,
    /// Bandwidth to chips of other slices, one way, in bytes per second: the device's share of its host's network. A
    /// slice of GPUs is a machine, and the figure is that of common machines. `None` if no network is common.
    pub slice_bandwidth: Option<f64>,
    /// The sizes in topology names.
    sizes: Sizes,
}

#[derive(Debug, PartialEq)]
enum Sizes {
    /// The number of chips in a square or in two adjacent squares, up to 16 by 16.
    Plane,
    /// Two per chip, in a block of at most `most_chips`. The two cores of a chip are one device or two.
    Block { most_chips: usize, devices_per_chip: usize },
    /// The number of GPUs of one machine, at most eight.
    Machine,
    /// No topology of this chip has a name.
    Unnamed,
}

const fn gib(number: u64) -> u64 {
    number << 30
}

const fn gigabytes(number: u64) -> u64 {
    number * 1_000_000_000
}

const fn block(most_chips: usize, devices_per_chip: usize) -> Sizes {
    Sizes::Block { most_chips, devices_per_chip }
}

const fn chip(
    (hardware, generation, device_kind): (Hardware, &'static str, &'static str),
    peak_tflops: f64,
    memory: u64,
    memory_bandwidth: f64,
    link_bandwidth: f64,
    slice_bandwidth: Option<f64>,
    sizes: Sizes,
) -> Chip {
    Chip {
        generation,
        hardware,
        device_kind,
        peak_tflops,
        memory,
        memory_bandwidth,
        link_bandwidth,
        slice_bandwidth,
        sizes,
    }
}

/// The known chips. A device belongs to the first chip whose kind is part of the device's name.
///
/// Sources of the bandwidth between slices, per chip: Google's pages give 50 Gb/s for v5p, 100 Gb/s for TPU7x, and per
/// host of eight 2 × 100 Gb/s for v5e and 4 × 200 Gb/s for v6e. No page exists for v4, so v5p's figure is assumed. `a3`
/// is Google's machine with 1 Tb/s for eight GPUs. The other machines of eight are NVIDIA's DGX, whose data sheets list
/// an adapter of 400 Gb/s per GPU, or 200 Gb/s for an A100.
pub static CHIPS: &[Chip] = &[
    chip((Tpu, "v4", "TPU v4"), 275.0, gib(32), 1.228e12, 2.7e11, Some(6.25e9), block(4096, 1)),
    chip((Tpu, "v5e", "TPU v5 lite"), 197.0, gib(16), 8.19e11, 2.0e11, Some(3.125e9), Sizes::Plane),
    chip((Tpu, "v5e", "TPU v5e"), 197.0, gib(16), 8.19e11, 2.0e11, Some(3.125e9), Sizes::Unnamed),
    chip((Tpu, "v5p", "TPU v5"), 459.0, gib(95), 2.765e12, 6.0e11, Some(6.25e9), block(8960, 1)),
    chip((Tpu, "v6e", "TPU v6"), 918.0, gib(32), 1.64e12, 4.0e11, Some(1.25e10), Sizes::Plane),
    chip((Tpu, "tpu7x", "TPU7x"), 1153.5, gib(96), 3.69e12, 3.0e11, Some(6.25e9), block(9216, 2)),
    chip((Gpu, "a3", "H100"), 989.0, gigabytes(80), 3.35e12, 4.5e11, Some(1.5625e10), Sizes::Machine),
    chip((Gpu, "h100", "H100"), 989.0, gigabytes(80), 3.35e12, 4.5e11, Some(5.0e10), Sizes::Machine),
    chip((Gpu, "h200", "H200"), 989.0, gigabytes(141), 4.8e12, 4.5e11, Some(5.0e10), Sizes::Machine),
    chip((Gpu, "b200", "B200"), 2250.0, gigabytes(180), 8.0e12, 9.0e11, Some(5.0e10), Sizes::Machine),
    chip((Gpu, "a100", "A100"), 312.0, gigabytes(80), 2.039e12, 3.0e11, Some(2.5e10), Sizes::Machine),
    chip((Gpu, "l40s", "L40S"), 362.0, gigabytes(48), 8.64e11, 3.2e10, None, Sizes::Unnamed),
    chip((Gpu, "l4", "L4"), 121.0, gigabytes(24), 3.0e11, 3.2e10, None, Sizes::Unnamed),
];

/// The side of a cube of 64 chips. Larger slices consist of whole cubes, which are wired to each other.
const SIDE: usize = 4;

/// The longest side of a block.
const LONGEST: usize = 256;

/// The hint for other numbers of GPUs.
const OF_A_MACHINE: &str = "GPUs are those of one machine, which are 1, 2, 4 or 8";

/// The longest side of a plane.
const PLANE_SIDE: usize = 16;

impl Chip {
    /// The chip of a device of this kind, if known.
    pub fn of_device(kind: &str) -> Option<&'static Self> {
        CHIPS.iter().find(|chip| kind.contains(chip.device_kind))
    }

    /// The number of devices of a chip.
    pub fn devices_per_chip(&self) -> usize {
        match self.sizes {
            Sizes::Block { devices_per_chip, .. } => devices_per_chip,
            Sizes::Plane | Sizes::Machine | Sizes::Unnamed => 1,
        }
    }

    /// The sides of the slice whose name ends in `size`, if it exists.
    fn bounds(&self, size: usize) -> Option<Vec<usize>> {
        match self.sizes {
            Sizes::Plane => plane(size),
            Sizes::Block { most_chips, .. } => {
                let chips = size / self.counted_per_chip();
                (chips <= most_chips && size.is_multiple_of(self.counted_per_chip()))
                    .then(|| block_sides(chips))
                    .flatten()
            }
            // Names count the GPUs of a machine.
            Sizes::Machine if matches!(size, 1 | 2 | 4 | 8) => Some(vec![size]),
            Sizes::Machine | Sizes::Unnamed => None,
        }
    }

    /// The number by which a name's size counts each chip: names of block slices count cores.
    fn counted_per_chip(&self) -> usize {
        if matches!(self.sizes, Sizes::Block { .. }) { 2 } else { 1 }
    }

    /// The sizes of all slices that names can denote, in ascending order.
    fn sizes(&self) -> impl Iterator<Item = usize> {
        let most = match self.sizes {
            Sizes::Plane => PLANE_SIDE * PLANE_SIDE,
            Sizes::Block { most_chips, .. } => self.counted_per_chip() * most_chips,
            Sizes::Machine => 8,
            Sizes::Unnamed => 0,
        };
        (1..=most).filter(|size| self.bounds(*size).is_some())
    }
}

/// The sides of a planar slice.
fn plane(chips: usize) -> Option<Vec<usize>> {
    let power = chips.is_power_of_two().then(|| chips.trailing_zeros())?;
    // Slices of two chips do not exist.
    let (short, long) = (power / 2, power.div_ceil(2));
    (chips != 2 && long <= 4).then(|| vec![1 << short, 1 << long])
}

/// The sides of a block slice: among the possible ones, those nearest to a cube.
fn block_sides(chips: usize) -> Option<Vec<usize>> {
    match chips {
        1 => return Some(vec![1, 1, 1]),
        4 => return Some(vec![2, 2, 1]),
        8 => return Some(vec![2, 2, 2]),
        16 => return Some(vec![2, 2, 4]),
        32 => return Some(vec![2, 4, 4]),
        _ => {}
    }
    let cubes = chips.is_multiple_of(SIDE.pow(3)).then_some(chips / SIDE.pow(3))?;
    let divisors = |number: usize| (1..=number).filter(move |side| number.is_multiple_of(*side));
    let sides = divisors(cubes)
        .flat_map(|first| divisors(cubes / first).map(move |second| [first, second, cubes / first / second]));
    let ordered = sides.filter(|[first, second, third]| first <= second && second <= third);
    let nearest = ordered.min_by_key(|sides| sides.iter().sum::<usize>())?;
    (nearest[2] * SIDE <= LONGEST).then(|| nearest.iter().map(|side| side * SIDE).collect())
}

impl CompileTopology {
    /// The hardware with this name: a generation and a size, such as `v5p-128` or `h100-8`, or a generation and sides,
    /// such as `v5p:4x4x8`.
    ///
    /// As in MaxText, sizes count both cores of each chip for v4, v5p and TPU7x, and chips otherwise; `a3` is one
    /// machine of eight. `v7x` means TPU7x, and `v5litepod` means v5e.
    ///
    /// # Errors
    /// No hardware has this name; the error lists the nearest names.
    pub fn named(name: &str) -> Result<Self, ConfigError> {
        Self::find(name).map_err(|problem| (*problem).into())
    }

    pub(crate) fn find(name: &str) -> Result<Self, Box<Problem>> {
        let unknown = |why: Option<String>| Box::new(Self::unknown(name, why));
        let found = |chip: &'static Chip, bounds| Self { name: name.to_owned(), chip, bounds };
        if let Some((generation, sides)) = name.split_once(':') {
            let of_generation = |chip: &&Chip| chip.generation == canonical(generation);
            let chip = named_chips().find(of_generation).ok_or_else(|| unknown(None))?;
            let sides: Vec<usize> = sides
                .split('x')
                .map(|side| side.parse().ok().filter(|side| *side > 0))
                .collect::<Option<_>>()
                .ok_or_else(|| unknown(None))?;
            chip.check_sides(&sides).map_err(|why| unknown(Some(why)))?;
            return Ok(found(chip, sides));
        }
        let (generation, size) = name.rsplit_once('-').unwrap_or((name, ""));
        let size = match (size, generation) {
            ("", "a3") => Some(8),
            _ => size.parse().ok(),
        };
        let of_generation = || named_chips().filter(|chip| chip.generation == canonical(generation));
        let mut sliced = of_generation().filter_map(|chip| Some((chip, chip.bounds(size?)?)));
        sliced.next().map(|(chip, bounds)| found(chip, bounds)).ok_or_else(|| {
            let is_machine = size.is_some() && of_generation().any(|chip| chip.sizes == Sizes::Machine);
            unknown(is_machine.then(|| OF_A_MACHINE.to_owned()))
        })
    }

    /// The error for an unknown `name`, with the reason `why` if it is known, and with the nearest names.
    fn unknown(name: &str, why: Option<String>) -> Problem {
        let generations = || named_chips().map(|chip| chip.generation);
        let spelled = name.to_lowercase().replace('_', "-");
        let generation = spelled.split(['-', ':']).next().unwrap_or_default();
        let chip_of = |generation: &str| named_chips().find(|chip| chip.generation == generation);
        let chips = match chip_of(canonical(generation)) {
            Some(chip) => vec![chip],
            None => suggest::nearest(generation, generations())
                .iter()
                .filter_map(|generation| chip_of(generation))
                .collect(),
        };
        let nearest: Vec<String> = match &chips[..] {
            [] => Vec::new(),
            [chip] => chip.nearest_names(&spelled, 2),
            several => several.iter().flat_map(|chip| chip.nearest_names(&spelled, 1)).collect(),
        };
        let nearest: Vec<String> = nearest.iter().map(|name| format!("`{name}`")).collect();
        let nearest = match &nearest[..] {
            [] => {
                let generations: Vec<&str> = generations().collect();
                format!("name one of {} with a size, such as `v5p-128` or `h100-8`", generations.join(", "))
            }
            [only] => format!("the nearest is {only}"),
            several => format!("the nearest are {}", several.join(" and ")),
        };
        let sides = chips.first().and_then(|chip| chip.example_of_sides());
        let hint = match (why, sides) {
            (Some(why), _) => format!("{why}; {nearest}"),
            (None, Some(sides)) => format!("{nearest}; sides work, too, such as `{sides}`"),
            (None, None) => nearest,
        };
        Problem::inconsistent(format!("there is no hardware named `{name}`"), hint)
    }

    /// The number of chips of a slice.
    pub fn chips_per_slice(&self) -> usize {
        self.bounds.iter().product()
    }

    /// The number of devices of a slice.
    pub fn devices_per_slice(&self) -> usize {
        self.chips_per_slice() * self.chip.devices_per_chip()
    }

    /// The compiler's name for the chip configuration, if the cores of a chip can be one device or several.
    pub fn chip_config(&self) -> Option<&'static str> {
        match self.chip.sizes {
            Sizes::Block { devices_per_chip: 1, .. } => Some("megacore"),
            Sizes::Block { .. } => Some("default"),
            Sizes::Plane | Sizes::Machine | Sizes::Unnamed => None,
        }
    }

    /// The number of chips along each dimension of the slice.
    pub fn sides(&self) -> &[usize] {
        &self.bounds
    }

    /// The compiler's name of the slice, such as `v5p:4x4x4`.
    pub fn compiler_name(&self) -> String {
        let sides: Vec<String> = self.bounds.iter().map(usize::to_string).collect();
        format!("{}:{}", self.chip.generation, sides.join("x"))
    }
}

/// The chips for which topology names exist.
fn named_chips() -> impl Iterator<Item = &'static Chip> {
    CHIPS.iter().filter(|chip| chip.sizes != Sizes::Unnamed)
}

/// The generation for a name, which may be an alias used by MaxText or Google's tools.
fn canonical(generation: &str) -> &str {
    match generation {
        "v7x" => "tpu7x",
        "v5litepod" => "v5e",
        generation => generation,
    }
}

impl Chip {
    fn num_sides(&self) -> usize {
        match self.sizes {
            Sizes::Plane => 2,
            Sizes::Block { .. } => 3,
            Sizes::Machine | Sizes::Unnamed => 1,
        }
    }

    /// Checks whether slices with these sides exist. The compiler aborts the process on sides that are too long, so
    /// only valid ones may reach it.
    ///
    /// # Errors
    /// No such slice exists; the text gives the reason.
    fn check_sides(&self, sides: &[usize]) -> Result<(), String> {
        let Self { generation, .. } = self;
        let num_sides = self.num_sides();
        if sides.len() != num_sides {
            let unit = if num_sides == 1 { "number" } else { "sides" };
            return Err(format!("`{generation}` has {num_sides} {unit} after the colon"));
        }
        match self.sizes {
            Sizes::Plane if sides.iter().any(|side| !side.is_power_of_two() || *side > PLANE_SIDE) => {
                Err(format!("sides of `{generation}` are 1, 2, 4, 8 or {PLANE_SIDE}"))
            }
            Sizes::Block { most_chips, .. } => self.check_block(sides, most_chips),
            Sizes::Machine if self.bounds(sides[0]).is_none() => Err(OF_A_MACHINE.to_owned()),
            Sizes::Plane | Sizes::Machine | Sizes::Unnamed => Ok(()),
        }
    }

    fn check_block(&self, sides: &[usize], most_chips: usize) -> Result<(), String> {
        let Self { generation, .. } = self;
        if sides.iter().any(|side| *side > LONGEST) {
            return Err(format!("sides of `{generation}` are at most {LONGEST}"));
        }
        let chips: usize = sides.iter().product();
        if chips > most_chips {
            return Err(format!("slices of `{generation}` have at most {most_chips} chips"));
        }
        let cube = SIDE.pow(3);
        if chips > cube && sides.iter().any(|side| !side.is_multiple_of(SIDE)) {
            return Err(format!("sides of slices of more than {cube} chips are multiples of {SIDE}"));
        }
        // A host has 2 by 2 chips, or fewer where a side of the slice is 1.
        if sides.iter().take(2).any(|side| *side > 1 && side % 2 == 1) {
            return Err("hosts have 2x2 chips, so that the first two sides are even or 1".to_owned());
        }
        Ok(())
    }

    /// The names of this chip's slices nearest to `name`, which names this chip or resembles it. Without a size in
    /// `name`, the largest slices.
    fn nearest_names(&self, name: &str, most: usize) -> Vec<String> {
        let size = match name.split_once(':') {
            Some((_, sides)) => {
                let sides: Option<Vec<usize>> = sides.split('x').map(|side| side.parse().ok()).collect();
                let chips = sides.map(|sides| sides.into_iter().fold(1, usize::saturating_mul));
                chips.map(|chips| chips.saturating_mul(self.counted_per_chip()))
            }
            None => name.rsplit_once('-').and_then(|(_, size)| size.parse().ok()),
        };
        let wanted = size.unwrap_or(usize::MAX);
        let mut sizes: Vec<usize> = self.sizes().collect();
        sizes.sort_by_key(|size| size.abs_diff(wanted));
        // A correct size in a misspelled name has one correction.
        let most = if sizes.first() == Some(&wanted) && !name.contains(':') { 1 } else { most };
        sizes.iter().take(most).map(|size| format!("{}-{size}", self.generation)).collect()
    }

    /// The name of the slice with this number of devices, if it exists.
    pub(crate) fn name_of_slice(&self, num_devices: usize) -> Option<String> {
        let is_whole = num_devices.is_multiple_of(self.devices_per_chip());
        let size = (num_devices / self.devices_per_chip()).checked_mul(self.counted_per_chip())?;
        (is_whole && self.bounds(size).is_some()).then(|| format!("{}-{size}", self.generation))
    }

    /// An example of sides, for chips whose slices have several.
    fn example_of_sides(&self) -> Option<String> {
        let sides = match self.sizes {
            Sizes::Plane => "4x8",
            Sizes::Block { .. } => "4x4x8",
            Sizes::Machine | Sizes::Unnamed => return None,
        };
        Some(format!("{}:{sides}", self.generation))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(name: &str, compiler_name: &str, chips: usize) {
        let topology = CompileTopology::named(name).unwrap();
        assert_eq!((topology.compiler_name().as_str(), topology.chips_per_slice()), (compiler_name, chips));
    }

    #[test]
    fn cores_are_devices_where_the_compiler_takes_them_for_such() {
        let devices = |name| CompileTopology::named(name).unwrap().devices_per_slice();
        assert_eq!(["v4-8", "v5p-8", "tpu7x-8", "v6e-8", "h100-8"].map(devices), [4, 4, 8, 8, 8]);
    }

    #[test]
    fn names_mean_what_they_do_in_maxtext() {
        check("v4-8", "v4:2x2x1", 4);
        check("v4-1536", "v4:8x8x12", 768);
        check("v5p-128", "v5p:4x4x4", 64);
        check("v5p-640", "v5p:4x4x20", 320);
        check("v5p-7680", "v5p:12x16x20", 3840);
        check("v5p-10368", "v5p:12x12x36", 5184);
        check("v5p-12288", "v5p:16x16x24", 6144);
        check("v5p-13824", "v5p:12x24x24", 6912);
        check("v5p-17920", "v5p:16x20x28", 8960);
        check("tpu7x-2", "tpu7x:1x1x1", 1);
        check("tpu7x-18432", "tpu7x:16x24x24", 9216);
        check("v5e-1", "v5e:1x1", 1);
        check("v5e-8", "v5e:2x4", 8);
        check("v6e-256", "v6e:16x16", 256);
        check("v5p:2x4x8", "v5p:2x4x8", 64);
        check("a3", "a3:8", 8);
        check("h100-1", "h100:1", 1);
    }

    #[test]
    fn generations_have_other_names() {
        check("v7x-8", "tpu7x:2x2x1", 4);
        check("v7x:2x2x1", "tpu7x:2x2x1", 4);
        check("v5litepod-8", "v5e:2x4", 8);
        check("v5litepod:2x4", "v5e:2x4", 8);
    }

    /// libtpu accepts these sides.
    #[test]
    fn sides_that_hosts_divide_are_taken() {
        for sides in ["1x1", "1x2", "2x1", "1x4", "4x1", "1x8", "2x2", "2x4", "4x2", "4x16", "16x2", "16x16"]
        {
            for generation in ["v5e", "v6e"] {
                let name = format!("{generation}:{sides}");
                assert_eq!(CompileTopology::named(&name).unwrap().compiler_name(), name);
            }
        }
        for sides in ["1x1x1", "1x1x2", "2x1x1", "1x2x3", "2x2x3", "4x4x1", "2x4x8", "4x4x4", "12x8x4"] {
            for generation in ["v4", "v5p", "tpu7x"] {
                let name = format!("{generation}:{sides}");
                assert_eq!(CompileTopology::named(&name).unwrap().compiler_name(), name);
            }
        }
        check("h100:4", "h100:4", 4);
    }

    #[track_caller]
    fn check_refused(name: &str, hint: &str) {
        let message = CompileTopology::named(name).unwrap_err().to_string();
        assert!(message.contains(&format!("there is no hardware named `{name}`")), "{message}");
        assert!(message.contains(hint), "{message}");
    }

    #[test]
    fn impossible_sides_are_refused_and_it_is_said_why() {
        for sides in ["32x32", "16x18", "9999999999x9999999999"] {
            check_refused(
                &format!("v5e:{sides}"),
                "hint: sides of `v5e` are 1, 2, 4, 8 or 16; the nearest are `v5e-256` and `v5e-128`",
            );
        }
        // libtpu accepts these sides at first, but has no routes between the chips.
        for name in ["v5e:10x2", "v5e:12x12", "v6e:6x16", "v5e:3x5", "v5e:1x3", "v6e:3x1"] {
            check_refused(name, "are 1, 2, 4, 8 or 16; the nearest");
        }
        check_refused("v5p:64x64x64", "slices of `v5p` have at most 8960 chips; the nearest are `v5p-17920`");
        check_refused("v4:16x16x32", "at most 4096 chips; the nearest are `v4-8192`");
        check_refused("tpu7x:64x64x64", "at most 9216 chips; the nearest are `tpu7x-18432`");
        check_refused("v5p:2x2x258", "sides of `v5p` are at most 256");
        for name in ["v5p:2x2x32", "v4:6x6x6", "tpu7x:2x2x256", "v5p:4x4x5"] {
            check_refused(name, "sides of slices of more than 64 chips are multiples of 4; the nearest");
        }
        for name in ["v5p:2x3x1", "v4:1x3x1", "tpu7x:3x3x3"] {
            check_refused(
                name,
                "hosts have 2x2 chips, so that the first two sides are even or 1; the nearest",
            );
        }
        check_refused("v5e:3x5", "the nearest are `v5e-16` and `v5e-8`");
        check_refused("v5p:4x4", "`v5p` has 3 sides after the colon; the nearest are `v5p-32`");
        check_refused("h100:4x2", "`h100` has 1 number after the colon; the nearest are `h100-8`");
        for name in ["h100:16", "h100:3", "a100:0x", "b200-16", "h200-"] {
            assert!(!CompileTopology::named(name).unwrap_err().to_string().contains("sides"), "{name}");
        }
        check_refused(
            "h100:16",
            "one machine, which are 1, 2, 4 or 8; the nearest are `h100-8` and `h100-4`",
        );
        check_refused("h100:3", "one machine");
    }

    #[test]
    fn unknown_names_list_the_nearest() {
        check_refused("v5p-130", "`v5p-128`");
        check_refused("v5p-100000", "`v5p-17920`");
        check_refused("v5x-128", "`v5e-128`");
        check_refused("V5E-8", "hint: the nearest is `v5e-8`; sides work, too, such as `v5e:4x8`");
        check_refused("h100_8", "hint: the nearest is `h100-8`");
        check_refused("V7X-8", "the nearest is `tpu7x-8`");
        check_refused(
            "h100-16",
            "one machine, which are 1, 2, 4 or 8; the nearest are `h100-8` and `h100-4`",
        );
        check_refused("v5e:axb", "such as `v5e:4x8`");
        for name in
            ["v5p", "v5p-8576", "v5e-2", "v5e-512", "v5p:4x4", "v5p:0x4x4", "l4-1", "", "-", ":", "v5e:"]
        {
            check_refused(name, "hint");
        }
    }

    #[test]
    fn slices_are_found_by_their_devices() {
        let name = |generation: &str, devices| {
            CHIPS.iter().find(|chip| chip.generation == generation)?.name_of_slice(devices)
        };
        assert_eq!(name("v5e", 8).as_deref(), Some("v5e-8"));
        assert_eq!(name("v5p", 8).as_deref(), Some("v5p-16"));
        assert_eq!(name("tpu7x", 8).as_deref(), Some("tpu7x-8"));
        assert_eq!(name("tpu7x", 3), None);
        assert_eq!(name("v5e", 6), None);
        assert_eq!(name("h100", 16), None);
    }

    #[test]
    fn devices_are_known_by_their_kinds() {
        let generation = |kind| Chip::of_device(kind).map(|chip| chip.generation);
        assert_eq!(generation("TPU v5 lite"), Some("v5e"));
        assert_eq!(generation("TPU v5p"), Some("v5p"));
        assert_eq!(generation("NVIDIA H100 80GB HBM3"), Some("a3"));
        assert_eq!(generation("NVIDIA L40S"), Some("l40s"));
        assert_eq!(generation("Intel"), None);
    }
}
