//! Weights in Hugging Face's format: safetensors files, one or several with an index.
//!
//! ```text
//! model.safetensors                    all tensors, or
//! model-00001-of-00003.safetensors     one of several files
//! model.safetensors.index.json         the file of each tensor
//! ```

mod directory;
mod header;
mod writer;

use serde_json::{Map, Value as Json, json};

pub use directory::WeightsDirectory;
pub use writer::{TensorSpec, WeightsOptions, WeightsWriter, WrittenWeights};

const SINGLE_FILE: &str = "model.safetensors";
const INDEX_FILE: &str = "model.safetensors.index.json";
const EXTENSION: &str = ".safetensors";

/// The name of the file with this index, counted from 0.
fn shard_name(index: usize, count: usize) -> String {
    format!("model-{:05}-of-{count:05}{EXTENSION}", index + 1)
}

/// The number of a file, counted from 1, and the number of files, if the name contains them.
fn shard_number(name: &str) -> Option<(&str, usize, usize)> {
    let (rest, count) = name.strip_suffix(EXTENSION)?.rsplit_once("-of-")?;
    let (series, number) = rest.rsplit_once('-')?;
    let number_of = |digits: &str| {
        let plain = digits.len() >= 5 && digits.bytes().all(|byte| byte.is_ascii_digit());
        plain.then(|| digits.parse().ok()).flatten()
    };
    Some((series, number_of(number)?, number_of(count)?))
}

/// The index of a directory with several files, sorted as transformers writes it.
fn index_text(total_size: u64, shard_of_tensor: &[(&str, String)]) -> String {
    let mut sorted: Vec<_> = shard_of_tensor.iter().collect();
    sorted.sort_unstable();
    let map: Map<_, _> =
        sorted.into_iter().map(|(name, file)| ((*name).to_owned(), Json::from(file.as_str()))).collect();
    format!("{:#}\n", json!({"metadata": {"total_size": total_size}, "weight_map": map}))
}
