//! Heads that each predict a later token from the model's last state (Cai et al., 2024: Medusa: Simple LLM Inference
//! Acceleration Framework with Multiple Decoding Heads).
//!
//! A head is a few residual blocks and an output matrix. Two forms are published: the authors' `medusa_lm_head.pt` or
//! `medusa_lm_head.safetensors`, with the tensors `HEAD.BLOCK.linear.weight`, `HEAD.BLOCK.linear.bias` and
//! `HEAD.BLOCKS.weight`; and that of vLLM, `model.safetensors` with `blocks.HEAD.layers.BLOCK.weight` and
//! `lm_heads.HEAD.weight`. The authors verify a tree of several candidates for each place; here each head drafts its most
//! probable token.

use std::{path::Path, sync::Arc};

use mt_checkpoint::{CheckpointError, TorchFile, WeightsDirectory};
use mt_nn::axes::{BATCH, EMBED, POSITION, VOCAB};
use mt_runtime::Array;
use mt_shape::{Axis, DType, HostArray, Sharding, axis};
use mt_trace::{Inputs, Tensor};

use super::{
    predictions::at_place,
    program::{Rows, ServePrograms},
    speculation::States,
};
use crate::{EngineError, LoadedModel, sampler::Sampler};

/// The names of files with heads, in order of preference.
const FILES: [&str; 3] = ["medusa_lm_head.safetensors", "medusa_lm_head.pt", "model.safetensors"];
/// The output axis of a block.
const BLOCK: &str = "block";

/// Heads on the devices of a model.
#[derive(Clone, Debug)]
pub struct MedusaHeads {
    heads: Vec<Head>,
    /// For each head the weights of blocks, each with its bias if it has one, and then the output matrix.
    arrays: Arc<Vec<Array>>,
}

/// The blocks of a head, and whether each has a bias.
#[derive(Clone, Debug)]
struct Head {
    biases: Vec<bool>,
}

/// A file with tensors.
enum HeadsFile {
    Torch(TorchFile),
    Safetensors(WeightsDirectory),
}

impl HeadsFile {
    fn open(directory: &Path) -> Result<Self, EngineError> {
        let paths = FILES.iter().map(|name| directory.join(name));
        let Some(path) = paths.into_iter().find(|path| path.is_file()) else {
            return Err(wrong(
                format!("`{}` has no Medusa heads", directory.display()),
                "name a directory with `medusa_lm_head.pt`, `medusa_lm_head.safetensors` or `model.safetensors`",
            ));
        };
        Ok(match path.extension().is_some_and(|extension| extension == "pt") {
            true => Self::Torch(TorchFile::open(&path)?),
            false => Self::Safetensors(WeightsDirectory::open(&path)?),
        })
    }

    fn has(&self, name: &str) -> bool {
        match self {
            Self::Torch(file) => file.tensor(name).is_some(),
            Self::Safetensors(directory) => directory.tensor(name).is_some(),
        }
    }

    fn names(&self) -> Vec<&str> {
        match self {
            Self::Torch(file) => file.tensors().iter().map(|tensor| tensor.name.as_str()).collect(),
            Self::Safetensors(directory) => directory.names().collect(),
        }
    }

    fn read(&self, name: &str) -> Result<HostArray, CheckpointError> {
        match self {
            Self::Torch(file) => file.read(name),
            Self::Safetensors(directory) => directory.read(name),
        }
    }
}

/// The names of a head's tensors in one of the published forms.
struct Names {
    weight: fn(usize, usize) -> String,
    bias: fn(usize, usize) -> String,
    /// The output matrix, by head and number of blocks.
    output: fn(usize, usize) -> String,
}

const FORMS: [Names; 2] = [
    Names {
        weight: |head, block| format!("{head}.{block}.linear.weight"),
        bias: |head, block| format!("{head}.{block}.linear.bias"),
        output: |head, blocks| format!("{head}.{blocks}.weight"),
    },
    Names {
        weight: |head, block| format!("blocks.{head}.layers.{block}.weight"),
        bias: |head, block| format!("blocks.{head}.layers.{block}.bias"),
        output: |head, _| format!("lm_heads.{head}.weight"),
    },
];

impl MedusaHeads {
    /// Loads the heads of a directory onto the devices of the model for which they draft.
    ///
    /// # Errors
    /// There are no heads, or they do not fit the model.
    pub fn load(directory: &Path, loaded: &LoadedModel) -> Result<Self, EngineError> {
        let file = HeadsFile::open(directory)?;
        let is_used = |names: &&Names| file.has(&(names.weight)(0, 0));
        let Some(names) = FORMS.iter().find(is_used) else {
            return Err(wrong(
                format!("`{}` has tensors of other names than Medusa heads", directory.display()),
                "name a directory with heads in the form of the authors or of vLLM",
            ));
        };
        let width = loaded.model.width();
        let sharding = |rank| Sharding::replicated(loaded.placement.mesh().clone(), rank);
        let (mut heads, mut arrays, mut used) = (Vec::new(), Vec::new(), 0);
        let mut add = |name: &str, expected: &[usize]| -> Result<(), EngineError> {
            let array = file.read(name)?;
            if array.dims() != expected || !array.dtype().is_float() {
                return Err(wrong(
                    format!(
                        "`{name}` of `{}` is `{}{:?}`, but the served model needs numbers of the shape {expected:?}",
                        directory.display(),
                        array.dtype(),
                        array.dims()
                    ),
                    "use heads that were trained for the served model",
                ));
            }
            arrays.push(Array::from_host(&loaded.runtime, &array, &sharding(expected.len()))?);
            used += 1;
            Ok(())
        };
        while file.has(&(names.weight)(heads.len(), 0)) {
            let number = heads.len();
            let mut biases = Vec::new();
            while file.has(&(names.weight)(number, biases.len())) {
                let block = biases.len();
                add(&(names.weight)(number, block), &[width, width])?;
                let bias = (names.bias)(number, block);
                biases.push(file.has(&bias));
                if biases[block] {
                    add(&bias, &[width])?;
                }
            }
            let output = (names.output)(number, biases.len());
            if !file.has(&output) {
                return Err(wrong(
                    format!("`{}` has no `{output}`", directory.display()),
                    "the file is damaged, or of another version of Medusa",
                ));
            }
            add(&output, &[loaded.vocab_size, width])?;
            heads.push(Head { biases });
        }
        if used < file.names().len() {
            return Err(wrong(
                format!(
                    "{} of the {} tensors of `{}` do not belong to Medusa heads",
                    file.names().len() - used,
                    file.names().len(),
                    directory.display()
                ),
                "name a directory with the heads alone",
            ));
        }
        Ok(Self { heads, arrays: Arc::new(arrays) })
    }

    /// The number of heads.
    pub fn count(&self) -> usize {
        self.heads.len()
    }

    pub(super) fn arrays(&self) -> Arc<Vec<Array>> {
        self.arrays.clone()
    }

    /// Declares the arrays as inputs.
    pub(super) fn parameters<'t>(&self, inputs: &Inputs<'t>) -> Vec<Tensor<'t>> {
        let mut arrays = self.arrays.iter();
        let mut made = Vec::new();
        let mut declare = |name: String, axes: [Option<&'static str>; 2]| {
            let array = arrays.next().expect("each head has its arrays");
            let axes: Vec<Axis> =
                axes.into_iter().flatten().zip(array.dims()).map(|(name, size)| axis(name, *size)).collect();
            made.push(inputs.input(&name, array.dtype(), &axes, &vec![None; axes.len()], false));
        };
        for (number, head) in self.heads.iter().enumerate() {
            for (block, has_bias) in head.biases.iter().enumerate() {
                declare(format!("medusa.{number}.{block}.weight"), [Some(BLOCK), Some(EMBED)]);
                if *has_bias {
                    declare(format!("medusa.{number}.{block}.bias"), [Some(BLOCK), None]);
                }
            }
            declare(format!("medusa.{number}.output"), [Some(VOCAB), Some(EMBED)]);
        }
        made
    }
}

impl ServePrograms {
    /// The most probable token of each head behind the last of the tokens of each row: `i32[batch, position]`.
    pub(super) fn medusa_drafts<'t>(
        &self,
        medusa: &MedusaHeads,
        rows: &Rows<'t>,
        states: States<'t>,
        count: Tensor<'t>,
    ) -> Tensor<'t> {
        let hidden = at_place(states.hidden, count - 1.0).squeeze(POSITION);
        let mut arrays = rows.drafter.iter().copied();
        let mut next = || arrays.next().expect("each head has its arrays");
        let mut drafts = Vec::new();
        for head in medusa.heads.iter().take(self.num_drafts) {
            let mut x = hidden;
            for has_bias in &head.biases {
                let weight = next();
                let made = x.cast(weight.dtype()).contract_into(weight, &[EMBED], DType::F32);
                let made = if *has_bias { made + next().cast(DType::F32) } else { made };
                x = x.cast(DType::F32) + made.silu().rename(BLOCK, EMBED);
            }
            let output = next();
            let logits = x.cast(output.dtype()).contract_into(output, &[EMBED], DType::F32);
            let possible = logits.order(&[BATCH, VOCAB]).slice(VOCAB, 0, self.programs.num_choices);
            let token = Sampler::Greedy.choose(possible, rows.read.before, None);
            drafts.push(token.unsqueeze(POSITION).order(&[BATCH, POSITION]));
        }
        drafts[0].concatenate(&drafts[1..], POSITION)
    }
}

fn wrong(problem: String, hint: &str) -> EngineError {
    EngineError::Speculation { problem, hint: hint.to_owned() }
}
