//! The description of an absent GPU for XLA's compiler.

use mt_config::Chip;

/// The figures of NVIDIA's data sheets and programming guide that a chip's own record lacks.
struct Figures {
    name: &'static str,
    compute_capability: (u32, u32),
    cores: u32,
    clock_ghz: f64,
    l2_cache: u64,
    /// Shared memory in bytes: of a core, and of a block that requests more than 48 KiB.
    shared_memory: [u64; 2],
}

const A100: Figures = Figures {
    name: "NVIDIA A100-SXM4-80GB",
    compute_capability: (8, 0),
    cores: 108,
    clock_ghz: 1.41,
    l2_cache: 40 << 20,
    shared_memory: [167_936, 166_912],
};

const H100: Figures = Figures {
    name: "NVIDIA H100 80GB HBM3",
    compute_capability: (9, 0),
    cores: 132,
    clock_ghz: 1.98,
    l2_cache: 50 << 20,
    shared_memory: [233_472, 232_448],
};

const H200: Figures = Figures { name: "NVIDIA H200", ..H100 };

const B200: Figures = Figures {
    name: "NVIDIA B200",
    compute_capability: (10, 0),
    cores: 148,
    clock_ghz: 1.965,
    l2_cache: 126 << 20,
    shared_memory: [233_472, 232_448],
};

/// The text of a `GpuTargetConfigProto`.
pub(super) fn description(chip: &Chip) -> String {
    let figures = match chip.generation {
        "a100" => A100,
        "h200" => H200,
        "b200" => B200,
        _ => H100,
    };
    let Figures { name, compute_capability: (major, minor), cores, clock_ghz, l2_cache, shared_memory } =
        figures;
    let [per_core, per_block] = shared_memory;
    let (bandwidth, memory) = (chip.memory_bandwidth as u64, chip.memory);
    format!(
        "gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {per_core}
  threads_per_core_limit: 2048
  core_count: {cores}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth}
  l2_cache_size: {l2_cache}
  clock_rate_ghz: {clock_ghz}
  device_memory_size: {memory}
  shared_memory_per_block_optin: {per_block}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: \"CUDA\"
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: \"{name}\"
"
    )
}

#[cfg(test)]
mod tests {
    use mt_config::{CHIPS, Hardware};

    use super::*;

    #[test]
    fn every_gpu_with_a_name_is_described_as_itself() {
        for chip in CHIPS.iter().filter(|chip| chip.hardware == Hardware::Gpu) {
            let named = mt_config::CompileTopology::named(&format!("{}-8", chip.generation)).is_ok();
            assert!(!named || description(chip).contains(chip.device_kind), "{}", chip.generation);
        }
    }
}
