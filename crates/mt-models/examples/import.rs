//! Measures the import of published weights.
//!
//! ```text
//! import make DIRECTORY   creates a Llama with a billion random bfloat16 parameters
//! import load DIRECTORY   loads it as decoding does; prints seconds and the peak memory of this process
//! import again DIRECTORY  loads it six times, reusing freed memory; prints the median time
//! import floor DIRECTORY  only reads its files into fresh memory; no import can be faster
//! ```

use std::{
    env,
    fs::{self, File},
    io,
    os::unix::fs::FileExt,
    path::Path,
    sync::{Mutex, PoisonError},
    thread,
    time::Instant,
};

use anyhow::{Context, Result, bail};
use mt_checkpoint::{TensorSpec, WeightsOptions, WeightsWriter};
use mt_config::{Config, ModelGroup, Request, value_text};
use mt_models::{
    Model, Storage, build_decoder,
    hugging_face::{Weights, settings_of},
};
use mt_runtime::{Runtime, RuntimeOptions, prefer_large_pages};
use mt_shape::{DType, HostArray, Placement};

const CONFIG: &str = r#"{
  "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu",
  "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
  "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
  "vocab_size": 32000, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
  "max_position_embeddings": 8192, "tie_word_embeddings": true, "dtype": "bfloat16"
}"#;

fn main() -> Result<()> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    match &arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["make", directory] => make(Path::new(directory)),
        ["load", directory] => load(Path::new(directory), 1),
        ["again", directory] => load(Path::new(directory), 6),
        ["floor", directory] => floor(Path::new(directory)),
        _ => bail!("usage: import make|load|again|floor DIRECTORY"),
    }
}

fn model(directory: &Path) -> Result<impl Model> {
    let mut arguments: Vec<String> = settings_of(directory)?
        .into_pairs()
        .into_iter()
        .map(|(key, value)| format!("{key}={}", value_text(&value)))
        .collect();
    arguments.push("weight_dtype=bfloat16".to_owned());
    let config = Config::resolve(&Request { arguments, ..Request::default() })?;
    Ok(build_decoder(&ModelGroup::from_config(&config)?)?)
}

fn make(directory: &Path) -> Result<()> {
    fs::create_dir_all(directory)?;
    fs::write(directory.join("config.json"), CONFIG)?;
    let tensors = model(directory)?.file_tensors()?;
    let specs: Vec<TensorSpec> = tensors
        .iter()
        .map(|tensor| TensorSpec { name: tensor.name.clone(), dtype: DType::BF16, dims: tensor.dims.clone() })
        .collect();
    let mut writer = WeightsWriter::create(directory, specs, WeightsOptions::default())?;
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for tensor in &tensors {
        let mut array = HostArray::zeros(DType::BF16, &tensor.dims);
        for pair in array.bytes_mut().as_chunks_mut::<2>().0 {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let number = half::bf16::from_f32((state >> 40) as f32 / (1 << 24) as f32 * 0.04 - 0.02);
            *pair = number.to_le_bytes();
        }
        writer.write(&tensor.name, &array)?;
    }
    writer.finish()?;
    Ok(())
}

fn load(directory: &Path, times: usize) -> Result<()> {
    mt_runtime::prepare_environment();
    let runtime = Runtime::new(&RuntimeOptions::default(), &mut |begins| println!("{begins}"))?;
    let model = model(directory)?;
    let before = peak()?;
    let (mut taken, mut bytes) = (Vec::new(), 0);
    for _ in 0..times {
        let start = Instant::now();
        let weights = Weights::open(&model, directory)?;
        let arrays = weights.load_to_read(&runtime, &Placement::single(), &model, None)?;
        taken.push(start.elapsed().as_secs_f64());
        bytes = arrays.iter().map(|array| array.bytes_on_device(0)).sum::<usize>();
    }
    taken.sort_by(f64::total_cmp);
    let seconds = taken[times / 2];
    println!("{seconds:.3} s, weights {bytes} bytes, peak memory {} bytes", peak()? - before);
    Ok(())
}

fn floor(directory: &Path) -> Result<()> {
    const AT_ONCE: usize = 8 << 20;
    let (start, mut read) = (Instant::now(), Vec::new());
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        if path.extension().is_none_or(|extension| extension != "safetensors") {
            continue;
        }
        let file = File::open(path)?;
        let mut bytes = vec![0_u8; file.metadata()?.len() as usize];
        prefer_large_pages(&mut bytes);
        let pieces = Mutex::new(bytes.chunks_mut(AT_ONCE).enumerate());
        let next = || pieces.lock().unwrap_or_else(PoisonError::into_inner).next();
        let one = || -> io::Result<()> {
            while let Some((index, piece)) = next() {
                file.read_exact_at(piece, (index * AT_ONCE) as u64)?;
            }
            Ok(())
        };
        thread::scope(|scope| {
            let count = thread::available_parallelism().map_or(1, std::num::NonZero::get);
            let threads: Vec<_> = (0..count).map(|_| scope.spawn(one)).collect();
            threads
                .into_iter()
                .try_for_each(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        })?;
        read.push(bytes);
    }
    let seconds = start.elapsed().as_secs_f64();
    let bytes: usize = read.iter().map(Vec::len).sum();
    println!("{seconds:.3} s, weights {bytes} bytes, peak memory {} bytes", peak()?);
    Ok(())
}

/// The peak memory of this process, in bytes.
fn peak() -> Result<usize> {
    let status = fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).context("no VmHWM")?;
    let kilobytes: usize = line.trim().trim_end_matches(" kB").parse()?;
    Ok(kilobytes * 1024)
}
