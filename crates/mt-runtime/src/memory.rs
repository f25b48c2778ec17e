//! Checks whether programs fit into memory.

use std::{
    cmp::Reverse,
    fmt::Write,
    fs,
    path::{Path, PathBuf},
};

use mt_ir::{ProgramTemporary, ProgramValue, TensorType};
use mt_pjrt::{MemoryUse, Platform};

use crate::{Executable, Runtime, RuntimeError};

/// The number of arrays that a message lists.
const NUM_NAMED: usize = 8;

/// The memory that a program needs when it runs alone, and the available memory, if known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryNeed {
    /// Bytes that the program needs on all devices that share the memory.
    pub needed: u64,
    /// Bytes that are free or hold arrays of this process.
    pub available: Option<u64>,
    /// The number of the program's devices that share the memory: all of a CPU client's, or one.
    pub num_devices: u64,
}

/// See [`Runtime::memory_need`].
pub(crate) fn need(runtime: &Runtime, executable: &Executable) -> Result<MemoryNeed, RuntimeError> {
    // The devices of a CPU client share the machine's memory; other devices have their own, all of one size.
    let (num_devices, available) = match runtime.platform() {
        Platform::Cpu => {
            let available = available_host_memory().map(|bytes| bytes + runtime.live_bytes());
            (executable.mesh().num_devices() as u64, available)
        }
        Platform::Gpu | Platform::Tpu => (1, smallest_device(runtime)),
    };
    Ok(MemoryNeed { needed: executable.memory()?.on_device() * num_devices, available, num_devices })
}

/// See [`Runtime::check_memory`].
pub(crate) fn check(runtime: &Runtime, executables: &[&Executable], hint: &str) -> Result<(), RuntimeError> {
    for executable in executables {
        let MemoryNeed { needed, available, .. } = need(runtime, executable)?;
        if let Some(available) = available
            && needed > available
        {
            let memory = executable.memory()?;
            return Err(RuntimeError::Memory(
                message(runtime.platform(), executable, &memory, needed, available) + "\nhint: " + hint,
            ));
        }
    }
    Ok(())
}

fn message(
    platform: Platform,
    executable: &Executable,
    memory: &MemoryUse,
    needed: u64,
    available: u64,
) -> String {
    let bytes = format_bytes;
    let name = executable.name();
    let mut text =
        format!("program `{name}` needs {} of memory, but {} are available", bytes(needed), bytes(available));
    let num_devices = executable.mesh().num_devices();
    if num_devices > 1 {
        text += match platform {
            Platform::Cpu => ", which all devices share",
            Platform::Gpu | Platform::Tpu => " on each device",
        };
    }
    let on_each = if num_devices > 1 { " on each device" } else { "" };
    // Writing to a string cannot fail.
    let _ = write!(
        text,
        "\narguments {}, results {} (of which {} reuse arguments), temporaries {}{on_each}",
        bytes(memory.arguments),
        bytes(memory.outputs),
        bytes(memory.aliased),
        bytes(memory.temporaries),
    );
    text += "\nlargest arrays:";
    let arrays =
        largest_arrays(executable.inputs(), executable.outputs(), executable.temporaries(), num_devices);
    for array in arrays {
        text += "\n  ";
        text += &array.line(num_devices);
    }
    text
}

/// An array of a program.
#[derive(Clone, Debug, PartialEq)]
pub struct LargeArray {
    pub name: String,
    /// The type of the whole array, all shards together.
    pub ty: TensorType,
    /// Bytes on each device; for a temporary, if the compiler splits it evenly.
    pub bytes: u64,
    /// Whether it is an intermediate value. The compiler may fuse such values away, or split them otherwise.
    pub is_temporary: bool,
}

/// The largest arguments, results and intermediate values of a program before compilation.
pub fn largest_arrays(
    inputs: &[ProgramValue],
    outputs: &[ProgramValue],
    temporaries: &[ProgramTemporary],
    num_devices: usize,
) -> Vec<LargeArray> {
    // A result with the name of an argument is that argument's next value.
    let is_new = |value: &&ProgramValue| inputs.iter().all(|input| input.name != value.name);
    let values = inputs.iter().chain(outputs.iter().filter(is_new)).map(|value| LargeArray {
        name: value.name.clone(),
        ty: value.ty.clone(),
        bytes: shard_bytes(value),
        is_temporary: false,
    });
    let temporaries = temporaries.iter().map(|ProgramTemporary { name, ty }| LargeArray {
        name: name.clone(),
        ty: ty.clone(),
        bytes: ty.byte_size() as u64 / num_devices as u64,
        is_temporary: true,
    });
    let mut all: Vec<LargeArray> = values.chain(temporaries).collect();
    all.sort_by_key(|array| Reverse(array.bytes));
    all.truncate(NUM_NAMED);
    all
}

impl LargeArray {
    /// One line about the array, in a message about a program for `num_devices` devices.
    fn line(&self, num_devices: usize) -> String {
        let (on_each, over_all) =
            if num_devices > 1 { (" on each device", " over all devices") } else { ("", "") };
        let Self { name, ty, bytes, is_temporary } = self;
        if *is_temporary {
            let size = format_bytes(ty.byte_size() as u64);
            return format!("`{name}` {ty}: {size}{over_all}, a temporary before operations are fused");
        }
        format!("`{name}` {ty}: {}{on_each}", format_bytes(*bytes))
    }
}

fn shard_bytes(value: &ProgramValue) -> u64 {
    let dims = value.sharding.shard_dims(&value.ty.dims);
    (dims.iter().product::<usize>() * value.ty.dtype.byte_size()) as u64
}

/// A human-readable number of bytes, such as `1.5 GiB`.
pub fn format_bytes(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

fn smallest_device(runtime: &Runtime) -> Option<u64> {
    let limits = runtime.devices().into_iter().map(|device| device.memory_stats()?.bytes_limit);
    limits.collect::<Option<Vec<u64>>>()?.into_iter().min()
}

/// Bytes of the machine's memory still available to this process: memory that is free or can be freed, within the
/// limits of its control groups. `None` if the system does not report it.
fn available_host_memory() -> Option<u64> {
    let machine = parse_meminfo(&fs::read_to_string("/proc/meminfo").ok()?)?;
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let limits = group_folders(&groups, Path::new("/sys/fs/cgroup"));
    Some(limits.iter().filter_map(|folder| group_available(folder)).fold(machine, u64::min))
}

fn parse_meminfo(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes * 1024)
}

/// The folders of a process's control groups and their ancestors, for both versions.
fn group_folders(groups: &str, root: &Path) -> Vec<PathBuf> {
    let mut folders = Vec::new();
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let base = match controllers {
            "" => root.to_owned(),
            _ if controllers.split(',').any(|name| name == "memory") => root.join("memory"),
            _ => continue,
        };
        // In a container the path may be the host's, which does not exist here; then the group is the base folder.
        for ancestor in Path::new(path.trim_start_matches('/')).ancestors() {
            folders.push(base.join(ancestor));
        }
    }
    folders
}

fn group_available(folder: &Path) -> Option<u64> {
    let number = |name: &str| fs::read_to_string(folder.join(name)).ok()?.trim().parse::<u64>().ok();
    let limit = number("memory.max").or_else(|| number("memory.limit_in_bytes"))?;
    let used = number("memory.current").or_else(|| number("memory.usage_in_bytes"))?;
    // Unused pages of the file cache count as used, but the system frees them on demand.
    let statistics = fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
    let find =
        |name: &str| statistics.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok());
    let reclaimable = find("total_inactive_file ").or_else(|| find("inactive_file ")).unwrap_or(0);
    Some(limit.saturating_sub(used.saturating_sub(reclaimable)))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use mt_ir::Memory;
    use mt_shape::{DType, Mesh, PartitionSpec, Sharding};

    use super::*;

    #[test]
    fn arrays_of_all_kinds_are_ranked_together() {
        let mesh = Arc::new(Mesh::new([("data".to_owned(), 4)]).unwrap());
        let value = |name: &str, size: usize, axes: &[&str]| {
            let spec = PartitionSpec(vec![axes.iter().map(|axis| (*axis).to_owned()).collect()]);
            let sharding = Sharding { mesh: mesh.clone(), spec };
            ProgramValue {
                name: name.into(),
                ty: TensorType::new(DType::F32, [size]),
                sharding,
                donated: false,
                memory: Memory::Device,
            }
        };
        let temporary = |name: &str, size: usize| ProgramTemporary {
            name: name.into(),
            ty: TensorType::new(DType::F32, [size]),
        };
        let inputs = [value("split", 1024, &["data"]), value("whole", 768, &[])];
        let outputs = [value("split", 1024, &["data"]), value("loss", 1, &[])];
        let temporaries = [temporary("layers/hidden", 2048), temporary("layers/small", 256)];
        let lines: Vec<String> =
            largest_arrays(&inputs, &outputs, &temporaries, 4).iter().map(|array| array.line(4)).collect();
        let expected = [
            "`whole` float32[768]: 3.0 KiB on each device",
            "`layers/hidden` float32[2048]: 8.0 KiB over all devices, a temporary before operations are fused",
            "`split` float32[1024]: 1.0 KiB on each device",
            "`layers/small` float32[256]: 1.0 KiB over all devices, a temporary before operations are fused",
            "`loss` float32[1]: 4 B on each device",
        ];
        assert_eq!(lines, expected);
        let arrays = largest_arrays(&[], &[], &temporaries, 1);
        assert_eq!(
            arrays[1].line(1),
            "`layers/small` float32[256]: 1.0 KiB, a temporary before operations are fused"
        );
    }

    #[test]
    fn bytes_are_legible() {
        let check = |bytes: u64, expected: &str| assert_eq!(format_bytes(bytes), expected);
        check(0, "0 B");
        check(1023, "1023 B");
        check(1536, "1.5 KiB");
        check(3 << 30, "3.0 GiB");
        check(u64::MAX, "16.0 EiB");
    }

    #[test]
    fn the_kernels_numbers_are_read() {
        assert_eq!(parse_meminfo("MemTotal:  8 kB\nMemAvailable:     5 kB\n"), Some(5120));
        assert_eq!(parse_meminfo("MemTotal:  8 kB\n"), None);
        let folders = group_folders("4:memory:/a\n3:cpu:/b\n0::/c/d\n", Path::new("/g"));
        assert_eq!(folders, ["/g/memory/a", "/g/memory/", "/g/c/d", "/g/c", "/g/"].map(PathBuf::from));
    }

    #[test]
    fn control_groups_limit() {
        let directory = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(directory.path().join(name), text).unwrap();
        assert_eq!(group_available(directory.path()), None);
        write("memory.max", "max\n");
        write("memory.current", "600\n");
        assert_eq!(group_available(directory.path()), None);
        write("memory.max", "1000\n");
        assert_eq!(group_available(directory.path()), Some(400));
        write("memory.stat", "active_file 50\ninactive_file 100\n");
        assert_eq!(group_available(directory.path()), Some(500));
    }

    #[test]
    fn the_machine_has_memory() {
        assert!(available_host_memory().is_some_and(|bytes| bytes > 1 << 20));
    }
}
