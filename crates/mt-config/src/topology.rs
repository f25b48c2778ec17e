//! Hardware that programs are compiled for without being there, by MaxText's names.

use crate::{
    ConfigError,
    Hardware::{self, Gpu, Tpu},
    Problem, suggest,
};

/// Hardware to compile for.
#[derive(Clone, Debug, PartialEq)]
pub struct CompileTopology {
    /// As it was asked for, such as `v5p-128`.
    pub name: String,
    pub chip: &'static Chip,
    /// Chips along each dimension of a slice; for GPUs, those of one machine.
    pub bounds: Vec<usize>,
}

/// What a device can do at best, from the data sheet of the maker of its chip. A chip is one device, or several that
/// share what it has.
#[derive(Debug, PartialEq)]
pub struct Chip {
    /// What names of topologies begin with, and what the compiler calls its generation.
    pub generation: &'static str,
    pub hardware: Hardware,
    /// A part of what its plugin calls the kind of device.
    pub device_kind: &'static str,
    /// Dense `bf16` products, in 10¹² operations a second.
    pub peak_tflops: f64,
    /// Bytes of memory.
    pub memory: u64,
    /// Bytes a second from and to memory.
    pub memory_bandwidth: f64,
    /// Bytes a second to all other chips of a slice together, one way. For v4 it is Google's 1.1 PB/s of a pod that
    /// reduces, by its 4096 chips.
    pub link_bandwidth: f64,
    /// Bytes a second to chips of other slices, one way: this device's share of its host's network. For GPUs, whose
    /// slices are machines, that of usual machines. `None` where none is usual.
    pub slice_bandwidth: Option<f64>,
    /// How the sizes in names of topologies are counted, and which there are.
    sizes: Sizes,
}

#[derive(Debug, PartialEq)]
enum Sizes {
    /// Chips in a square or in two, up to 16 by 16.
    Plane,
    /// Two for each chip, which are in a block of at most as many. The two cores of a chip are one device, or two.
    Block { most_chips: usize, devices_per_chip: usize },
    /// No sizes: one machine of eight.
    Machine,
    /// No topology has a name.
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

/// The chips that are known. The first whose kind is part of a device's name is that device's.
///
/// Between slices, of each chip: v5p and TPU7x 50 and 100 Gb/s, v5e 2 × 100 Gb/s and v6e 4 × 200 Gb/s for a host of
/// eight, as Google's pages about them say. For v4 there is no such page, and what v5p has is assumed. `a3` is Google's
/// machine with 1 Tb/s for eight GPUs; the other machines of eight are NVIDIA's own (DGX), whose data sheets have an
/// adapter of 400 Gb/s for each GPU, or of 200 Gb/s for an A100.
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

/// Blocks of 64 chips are wired to each other, so that larger slices consist of whole ones.
const SIDE: usize = 4;

/// The longest side of a block.
const LONGEST: usize = 256;

impl Chip {
    /// The chip of a device of this kind, if it is known.
    pub fn of_device(kind: &str) -> Option<&'static Self> {
        CHIPS.iter().find(|chip| kind.contains(chip.device_kind))
    }

    /// The devices that a chip is.
    pub fn devices_per_chip(&self) -> usize {
        match self.sizes {
            Sizes::Block { devices_per_chip, .. } => devices_per_chip,
            Sizes::Plane | Sizes::Machine | Sizes::Unnamed => 1,
        }
    }

    /// The sides of the slice whose name ends in `size`, if there is one.
    fn bounds(&self, size: usize) -> Option<Vec<usize>> {
        match self.sizes {
            Sizes::Plane => plane(size),
            Sizes::Block { most_chips, .. } if size.is_multiple_of(2) && size / 2 <= most_chips => {
                block_sides(size / 2)
            }
            // Names count the chips of a machine, of which there are eight or fewer.
            Sizes::Machine if matches!(size, 1 | 2 | 4 | 8) => Some(vec![size]),
            Sizes::Block { .. } | Sizes::Machine | Sizes::Unnamed => None,
        }
    }

    /// The sizes that names end in, from the smallest.
    fn sizes(&self) -> impl Iterator<Item = usize> {
        let most = match self.sizes {
            Sizes::Plane => 256,
            Sizes::Block { most_chips, .. } => 2 * most_chips,
            Sizes::Machine => 8,
            Sizes::Unnamed => 0,
        };
        (1..=most).filter(|size| self.bounds(*size).is_some())
    }
}

/// The sides of a slice of chips in a plane.
fn plane(chips: usize) -> Option<Vec<usize>> {
    let power = chips.is_power_of_two().then(|| chips.trailing_zeros())?;
    // There is no slice of two.
    let (short, long) = (power / 2, power.div_ceil(2));
    (chips != 2 && long <= 4).then(|| vec![1 << short, 1 << long])
}

/// The sides of a slice of chips in a block: of those that the chips can form, the nearest to a cube.
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
    /// The hardware of this name: a generation and a size, such as `v5p-128` or `h100-8`, or its sides,
    /// such as `v5p:4x4x8`.
    ///
    /// As in MaxText, sizes count the two cores of each chip for v4, v5p and TPU7x, and chips for the others; `a3` is one
    /// machine of eight.
    ///
    /// # Errors
    /// There is none; the nearest names are listed.
    pub fn named(name: &str) -> Result<Self, ConfigError> {
        Self::find(name).map_err(|problem| (*problem).into())
    }

    pub(crate) fn find(name: &str) -> Result<Self, Box<Problem>> {
        let found = |chip: &'static Chip, bounds| Self { name: name.to_owned(), chip, bounds };
        if let Some((generation, sides)) = name.split_once(':') {
            let sides: Option<Vec<usize>> =
                sides.split('x').map(|side| side.parse().ok().filter(|side| *side > 0)).collect();
            let chip = named_chips().find(|chip| chip.generation == generation);
            if let (Some(chip), Some(sides)) = (chip, sides)
                && sides.len() == chip.num_sides()
            {
                return Ok(found(chip, sides));
            }
            return Err(Box::new(Self::unknown(name)));
        }
        let (generation, size) = name.rsplit_once('-').unwrap_or((name, ""));
        let size = match (size, generation) {
            ("", "a3") => Some(8),
            _ => size.parse().ok(),
        };
        let of_generation = named_chips().filter(|chip| chip.generation == generation);
        let mut sliced = of_generation.filter_map(|chip| Some((chip, chip.bounds(size?)?)));
        sliced.next().map(|(chip, bounds)| found(chip, bounds)).ok_or_else(|| Box::new(Self::unknown(name)))
    }

    fn unknown(name: &str) -> Problem {
        let generations: Vec<&str> = named_chips().map(|chip| chip.generation).collect();
        let generation = name.split(['-', ':']).next().unwrap_or_default();
        let size: Option<usize> = name.rsplit_once('-').and_then(|(_, size)| size.parse().ok());
        let nearest: Vec<String> = match named_chips().find(|chip| chip.generation == generation) {
            // Of a generation that is known, the sizes on both sides.
            Some(chip) => {
                let wanted = size.unwrap_or(usize::MAX);
                let mut sizes: Vec<usize> = chip.sizes().collect();
                sizes.sort_by_key(|size| size.abs_diff(wanted));
                sizes.iter().take(2).map(|size| format!("{}-{size}", chip.generation)).collect()
            }
            None => suggest::nearest(generation, generations.iter().copied()),
        };
        let nearest: Vec<String> = nearest.iter().map(|name| format!("`{name}`")).collect();
        let hint = if nearest.is_empty() {
            format!("name one of {} with a size, such as `v5p-128` or `h100-8`", generations.join(", "))
        } else {
            format!("the nearest are {}; sides work, too, such as `v5p:4x4x8`", nearest.join(" and "))
        };
        Problem::inconsistent(format!("there is no hardware named `{name}`"), hint)
    }

    /// The chips of a slice.
    pub fn chips_per_slice(&self) -> usize {
        self.bounds.iter().product()
    }

    /// The devices of a slice.
    pub fn devices_per_slice(&self) -> usize {
        self.chips_per_slice() * self.chip.devices_per_chip()
    }

    /// What the compiler calls the way of using its chips, where the cores of a chip can be one device or several.
    pub fn chip_config(&self) -> Option<&'static str> {
        match self.chip.sizes {
            Sizes::Block { devices_per_chip: 1, .. } => Some("megacore"),
            Sizes::Block { .. } => Some("default"),
            Sizes::Plane | Sizes::Machine | Sizes::Unnamed => None,
        }
    }

    /// What the compiler calls it, such as `v5p:4x4x4`.
    pub fn compiler_name(&self) -> String {
        let sides: Vec<String> = self.bounds.iter().map(usize::to_string).collect();
        format!("{}:{}", self.chip.generation, sides.join("x"))
    }
}

/// The chips that names of topologies begin with.
fn named_chips() -> impl Iterator<Item = &'static Chip> {
    CHIPS.iter().filter(|chip| chip.sizes != Sizes::Unnamed)
}

impl Chip {
    fn num_sides(&self) -> usize {
        match self.sizes {
            Sizes::Plane => 2,
            Sizes::Block { .. } => 3,
            Sizes::Machine | Sizes::Unnamed => 1,
        }
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
    fn unknown_names_list_the_nearest() {
        let message = |name: &str| CompileTopology::named(name).unwrap_err().to_string();
        assert!(message("v5p-130").contains("`v5p-128`"), "{}", message("v5p-130"));
        assert!(message("v5p-100000").contains("`v5p-17920`"));
        assert!(message("v5x-128").contains("v5"), "{}", message("v5x-128"));
        for name in ["v5p", "v5p-8576", "v5e-2", "v5e-512", "v5p:4x4", "v5p:0x4x4", "l4-1", "", "-"] {
            assert!(message(name).contains("hint"), "{name}: {}", message(name));
        }
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
