//! The category of an operation.

use serde::Serialize;

use super::{
    clock::{Timed, collective},
    module::Module,
};

/// The scope of attention's scores, softmax and weighted values, within that of a layer's attention.
const ATTENTION_CORE: &str = "core";

/// A category of operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Part {
    /// Matrix products with weights in the layers.
    DenseProducts,
    /// Scores of queries and keys, their softmax and the weighted values.
    Attention,
    /// The head, the loss and the embedding, with their gradients.
    HeadAndLoss,
    /// The optimizer's step with clipping.
    Optimizer,
    /// Collectives for which the program waits.
    WaitedCollectives,
    /// Changes of layout.
    Copies,
    /// Norms, rotations, activation functions and casts in the layers.
    NormsAndCasts,
}

impl Part {
    /// The category of an operation, by the scope in the model that its metadata names.
    pub(super) fn of(module: &Module, timed: &Timed<'_>) -> Self {
        let instruction = timed.instruction;
        if collective(instruction).is_some() {
            return Self::WaitedCollectives;
        }
        let scope = instruction.scope();
        let is_in = |name: &str| scope.split('/').any(|part| part == name);
        if is_in(ATTENTION_CORE) {
            return Self::Attention;
        }
        if is_in("optimizer") {
            return Self::Optimizer;
        }
        // An operation that XLA made of several ones may have lost its scope. Those outside of all loops are not of
        // scanned layers.
        if !is_in("decoder") && !is_in("encoder") && (timed.depth == 0 || is_in("logits")) {
            return Self::HeadAndLoss;
        }
        let has_product = match module.called_by(instruction) {
            Some(called) => module.has(called, &["convolution", "dot"]),
            None => ["convolution", "dot"].contains(&instruction.opcode.as_str()),
        };
        match instruction.opcode.as_str() {
            _ if has_product => Self::DenseProducts,
            "copy" | "transpose" | "reshape" | "slice" | "concatenate" => Self::Copies,
            _ => Self::NormsAndCasts,
        }
    }

    /// The name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::DenseProducts => "dense products",
            Self::Attention => "attention",
            Self::HeadAndLoss => "head, loss and embedding",
            Self::Optimizer => "optimizer and clipping",
            Self::WaitedCollectives => "collectives waited for",
            Self::Copies => "copies",
            Self::NormsAndCasts => "norms, rotations and casts",
        }
    }
}
