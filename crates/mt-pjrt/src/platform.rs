//! Kinds of hardware.

use std::{fmt, fs, path::Path, str::FromStr};

/// A kind of hardware, which has its own plugin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Platform {
    Cpu,
    Gpu,
    Tpu,
}

/// PCI vendor of TPUs, shared with the network and storage devices of Google's virtual machines.
const GOOGLE: &str = "0x1ae0";
/// PCI devices of TPUs, from v2 to v7x.
const TPUS: [&str; 8] = ["0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006e", "0x006f", "0x0076"];

impl Platform {
    /// Every platform.
    pub const ALL: [Self; 3] = [Self::Cpu, Self::Gpu, Self::Tpu];

    /// The name in configurations and messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Gpu => "gpu",
            Self::Tpu => "tpu",
        }
    }

    /// Whether this machine has such hardware.
    pub fn is_present(self) -> bool {
        match self {
            Self::Cpu => true,
            Self::Gpu => {
                // The last is the GPU of the Windows subsystem for Linux.
                ["/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/dxg"]
                    .iter()
                    .any(|path| Path::new(path).exists())
            }
            Self::Tpu => has_tpu(Path::new("/sys/bus/pci/devices")),
        }
    }

    /// The fastest hardware that this machine has.
    pub fn best_present() -> Self {
        [Self::Tpu, Self::Gpu].into_iter().find(|platform| platform.is_present()).unwrap_or(Self::Cpu)
    }
}

impl fmt::Display for Platform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Platform {
    type Err = crate::Error;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let found = Self::ALL.into_iter().find(|platform| platform.name() == text);
        found.ok_or_else(|| crate::Error::UnknownPlatform(text.to_owned()))
    }
}

fn has_tpu(devices: &Path) -> bool {
    let Ok(entries) = fs::read_dir(devices) else { return false };
    let read = |path: &Path| fs::read_to_string(path).unwrap_or_default();
    entries.flatten().any(|entry| {
        let path = entry.path();
        read(&path.join("vendor")).trim() == GOOGLE && TPUS.contains(&read(&path.join("device")).trim())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_card_of_the_same_vendor_is_no_tpu() {
        let directory = tempfile::tempdir().unwrap();
        let add = |name: &str, device: &str| {
            let path = directory.path().join(name);
            fs::create_dir(&path).unwrap();
            fs::write(path.join("vendor"), "0x1ae0\n").unwrap();
            fs::write(path.join("device"), device).unwrap();
        };
        add("0", "0x0042\n");
        assert!(!has_tpu(directory.path()));
        add("1", "0x0063\n");
        assert!(has_tpu(directory.path()));
    }
}
