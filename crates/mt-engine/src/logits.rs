//! Logits of given tokens, in one forward pass.

use std::ops::Deref;

use mt_models::{Forward, Tokens};
use mt_nn::axes::{BATCH, POSITION};
use mt_runtime::{Array, CompileSettings, Executable, Input};
use mt_shape::{Axis, DType, HostArray, Sharding, axis};
use mt_trace::{Inputs, ProgramOptions, Tensor, program};

use crate::{EngineError, LoadedModel, engine::LESS_MEMORY, error::RowKind};

/// The name of the program that computes logits.
pub const LOGITS_PROGRAM: &str = "logits";

/// The beginning of the names of an encoder's intermediate activations, which have the length of the source.
const ENCODER: &str = "encoder.";

/// The tokens of a call.
#[derive(Clone, Copy)]
pub struct ScoredRows<'a> {
    /// The rows, which may differ in length.
    pub tokens: &'a [Vec<u32>],
    /// The source of each row, if the model has an encoder. The rows of tokens then begin with the decoder's start token.
    pub sources: Option<&'a [Vec<u32>]>,
}

/// The maximum sizes of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScoredSizes {
    pub rows: usize,
    /// The number of tokens in a row.
    pub length: usize,
    /// The number of tokens in a source; 0 without an encoder.
    pub source: usize,
}

/// The logits and intermediate activations of rows of tokens.
pub struct Scores {
    /// `f32[rows, length, vocab]`, or `f32[rows, length, score]` of a reward model; positions beyond the end of a row are zero.
    pub logits: HostArray,
    /// The outputs of the embedding, of each layer's modules and of the final norm, by name: `f32[rows, length,
    /// embed]`. Names of an encoder's outputs begin with `encoder.`; their length is that of the longest source.
    pub intermediates: Vec<(String, HostArray)>,
}

impl<'a> From<&'a [Vec<u32>]> for ScoredRows<'a> {
    /// Rows for a model without an encoder.
    fn from(tokens: &'a [Vec<u32>]) -> Self {
        Self { tokens, sources: None }
    }
}

impl ScoredRows<'_> {
    fn sizes(&self) -> ScoredSizes {
        let longest = |rows: &[Vec<u32>]| rows.iter().map(Vec::len).max().unwrap_or_default();
        let source = self.sources.map_or(0, longest);
        ScoredSizes { rows: self.tokens.len(), length: longest(self.tokens), source }
    }

    fn check(&self, loaded: &LoadedModel) -> Result<(), EngineError> {
        check_sources(loaded, self.sources.is_some())?;
        check_rows(loaded, self.tokens, RowKind::Row)?;
        let Some(sources) = self.sources else { return Ok(()) };
        if sources.len() != self.tokens.len() {
            return Err(EngineError::SourceCount { rows: self.tokens.len(), sources: sources.len() });
        }
        check_rows(loaded, sources, RowKind::Source)
    }
}

/// Computes the logits of rows of tokens, and with `intermediates` also activations.
///
/// # Errors
/// A row or source is empty or too long, a token is outside the vocabulary, sources are missing or too many, or the
/// program does not fit into memory.
pub fn score(
    loaded: &LoadedModel,
    rows: ScoredRows<'_>,
    intermediates: bool,
    compile: &CompileSettings,
) -> Result<Scores, EngineError> {
    if rows.tokens.is_empty() {
        return Err(EngineError::EmptyRow { kind: RowKind::Row, number: 1 });
    }
    rows.check(loaded)?;
    Scorer::new(loaded, rows.sizes(), intermediates, compile)?.score(rows)
}

/// The compiled program that computes the logits, or the scores of a reward model, of rows of tokens.
pub struct Scorer<L> {
    loaded: L,
    executable: Executable,
    sizes: ScoredSizes,
    /// The names of intermediate activations.
    names: Vec<String>,
}

impl<L: Deref<Target = LoadedModel>> Scorer<L> {
    /// Compiles the program for rows of up to these sizes.
    ///
    /// # Errors
    /// The model has an encoder and the source no tokens, or the other way round, or the program does not fit into memory.
    pub fn new(
        loaded: L,
        sizes: ScoredSizes,
        intermediates: bool,
        compile: &CompileSettings,
    ) -> Result<Self, EngineError> {
        let LoadedModel { runtime, placement, model, parameters, .. } = &*loaded;
        let ScoredSizes { rows, length, source } = sizes;
        check_sources(&loaded, source > 0)?;
        let target = runtime.target();
        let (name, precision) = (LOGITS_PROGRAM.to_owned(), model.precision());
        let options = ProgramOptions { name, placement: placement.clone(), target, precision };
        let specs = model.parameters();
        let axes = [axis(BATCH, rows), axis(POSITION, length)];
        let mut names = Vec::new();
        let traced = program(&options, |inputs| {
            let weights: Vec<_> = specs
                .iter()
                .zip(parameters)
                .map(|((path, spec), array)| {
                    inputs.input(
                        &format!("params.{path}"),
                        array.dtype(),
                        &spec.axes,
                        &spec.logical_axes,
                        false,
                    )
                })
                .collect();
            let [tokens, positions, segmentation] = declared(inputs, ["tokens", "lengths"], axes);
            let tokens = Tokens::as_read(tokens, positions, segmentation);
            let tokens = if source > 0 {
                let axes = [axes[0], axis(POSITION, source)];
                let [source, _, segmentation] = declared(inputs, ["source", "source_lengths"], axes);
                tokens.with_source(source, segmentation)
            } else {
                tokens
            };
            let forward = Forward { taps: intermediates, ..Forward::default() };
            let hidden = model.hidden(&weights, tokens, forward);
            let logits = model.head(&weights, hidden.hidden).cast(DType::F32);
            names = hidden.taps.iter().map(|(name, _)| name.clone()).collect();
            let taps = hidden.taps.iter().map(|(name, tap)| inputs.replicated(name, tap.cast(DType::F32)));
            [inputs.replicated("logits", logits)].into_iter().chain(taps).collect()
        })?;
        let executable = runtime.compile(&traced, compile)?;
        runtime.check_memory(&[&executable], LESS_MEMORY)?;
        Ok(Self { loaded, executable, sizes, names })
    }

    /// The logits of rows of tokens.
    ///
    /// # Errors
    /// A row or source is empty or too long, a token is outside the vocabulary, or sources are missing or too many.
    ///
    /// # Panics
    /// There are more rows, or longer ones, than the program takes.
    pub fn score(&self, rows: ScoredRows<'_>) -> Result<Scores, EngineError> {
        rows.check(&self.loaded)?;
        let mut inputs = self.arrays(rows.tokens, self.sizes.length)?;
        if let Some(sources) = rows.sources {
            inputs.extend(self.arrays(sources, self.sizes.source)?);
        }
        let inputs = self.loaded.parameters.iter().chain(&inputs).map(Input::from);
        let outputs = self.executable.run(inputs.collect())?;
        let mut logits = outputs[0].to_host()?;
        clear_filler(&mut logits, rows.tokens, self.sizes.length);
        let mut intermediates = Vec::new();
        for (name, output) in self.names.iter().zip(&outputs[1..]) {
            let mut array = output.to_host()?;
            match rows.sources.filter(|_| name.starts_with(ENCODER)) {
                Some(sources) => clear_filler(&mut array, sources, self.sizes.source),
                None => clear_filler(&mut array, rows.tokens, self.sizes.length),
            }
            intermediates.push((name.clone(), array));
        }
        Ok(Scores { logits, intermediates })
    }

    /// The tokens of rows, filled up to `length`, and the number of tokens in each.
    fn arrays(&self, rows: &[Vec<u32>], length: usize) -> Result<Vec<Array>, EngineError> {
        let LoadedModel { runtime, placement, .. } = &*self.loaded;
        let num_rows = self.sizes.rows;
        let replicated = |dims: &[usize], values: &[i32]| -> Result<Array, EngineError> {
            let host =
                HostArray::from_slice(DType::I32, dims, values).map_err(mt_runtime::RuntimeError::from)?;
            let sharding = Sharding::replicated(placement.mesh().clone(), dims.len());
            Ok(Array::from_host(runtime, &host, &sharding)?)
        };
        let mut tokens = vec![0_i32; num_rows * length];
        for (index, row) in rows.iter().enumerate() {
            for (place, token) in row.iter().enumerate() {
                tokens[index * length + place] = *token as i32;
            }
        }
        let mut lengths: Vec<i32> = rows.iter().map(|row| row.len() as i32).collect();
        // Rows that fill the batch have one token.
        lengths.resize(num_rows, 1);
        Ok(vec![replicated(&[num_rows, length], &tokens)?, replicated(&[num_rows], &lengths)?])
    }
}

/// Declares the tokens of rows and their lengths. Returns tokens, positions and segmentation.
fn declared<'t>(inputs: &Inputs<'t>, [tokens, lengths]: [&str; 2], axes: [Axis; 2]) -> [Tensor<'t>; 3] {
    let tokens = inputs.input(tokens, DType::I32, &axes, &[None, None], false);
    let lengths = inputs.input(lengths, DType::I32, &axes[..1], &[None], false);
    let positions = inputs.region().iota(DType::I32, axes[1]).broadcast(&axes);
    [tokens, positions, positions.less(lengths).cast(DType::I32)]
}

/// Checks that there are sources exactly if the model has an encoder.
fn check_sources(loaded: &LoadedModel, has_sources: bool) -> Result<(), EngineError> {
    match (loaded.model.reads_source(), has_sources) {
        (true, false) => Err(EngineError::NoSource { command: "logits" }),
        (false, true) => Err(EngineError::NoEncoder),
        _ => Ok(()),
    }
}

fn check_rows(loaded: &LoadedModel, rows: &[Vec<u32>], kind: RowKind) -> Result<(), EngineError> {
    let LoadedModel { model, vocab_size, .. } = loaded;
    let positions = model.num_learned_positions().unwrap_or(usize::MAX);
    for (row, number) in rows.iter().zip(1..) {
        if row.is_empty() {
            return Err(EngineError::EmptyRow { kind, number });
        }
        if row.len() > positions {
            return Err(EngineError::RowTooLong { number, length: row.len(), positions });
        }
        if let Some(token) = row.iter().find(|token| **token as usize >= *vocab_size) {
            let (token, vocab_size) = (*token, *vocab_size);
            return Err(EngineError::TokenOutOfRange { kind, number, token, vocab_size });
        }
    }
    Ok(())
}

/// Zeroes the results beyond the ends of rows.
fn clear_filler(array: &mut HostArray, rows: &[Vec<u32>], length: usize) {
    let row_bytes = array.bytes().len() / (array.dims()[0] * length).max(1);
    for (index, row) in rows.iter().enumerate() {
        let (from, to) = ((index * length + row.len()) * row_bytes, (index + 1) * length * row_bytes);
        array.bytes_mut()[from..to].fill(0);
    }
}
