//! Decides which operations CPU kernels compute. Each kernel has one function or one line here.
//!
//! Layers trace a [`Kernel`] wherever a kernel computes their formula, on every target and for all types and sizes.
//! Whether a call is printed, or the operations of the kernel's body, is decided here alone: by the target, the mesh,
//! the types and the sizes.

use mt_shape::{
    DType,
    kernels::{self, KernelCall, thresholds},
};

use super::{Printer, Target};
use crate::{CpuKernels, Dot, Kernel, Precision, TensorType};

impl Printer<'_> {
    /// The types for which the program may call kernels.
    pub(super) fn kernels(&self) -> CpuKernels {
        match self.options.target {
            // Programs for several devices are partitioned, and the partitioner cannot split calls.
            Target::Cpu(kernels) if self.options.mesh.num_devices() == 1 => kernels,
            _ => CpuKernels::NONE,
        }
    }

    /// Whether a kernel computes an operation that a layer traced as its call.
    pub(super) fn applies(&self, kernel: &Kernel, operands: &[&TensorType], results: &[&TensorType]) -> bool {
        let in_type = operands.first().is_some_and(|first| self.kernels().are_for(first.dtype));
        in_type && takes(kernel.call, operands, results, self.is_invariant())
    }

    /// Whether a row's results must not depend on other rows. Programs for several devices have no such form.
    pub(super) fn is_invariant(&self) -> bool {
        self.kernels().invariant
    }

    /// Whether a kernel computes a product.
    pub(super) fn applies_to_product(
        &self,
        dot: &Dot,
        operands: &[&TensorType],
        result: &TensorType,
    ) -> bool {
        let contracted: usize = dot.lhs_contract.iter().map(|dim| operands[0].dims[*dim]).product();
        operands[0].dtype == operands[1].dtype
            && self.kernels().are_for(operands[0].dtype)
            && matches!(result.dtype, DType::F32 | DType::BF16)
            // The size of a product depends on the number of rows.
            && (self.is_invariant()
                || result.num_elements() * contracted >= thresholds::FEWEST_MULTIPLICATIONS)
    }

    /// The product with ones that computes a sum over dimensions, the last one among them, in batch-invariant programs,
    /// and the type of the ones. The order in which XLA sums may depend on the number of rows.
    pub(super) fn invariant_sum(
        &self,
        dimensions: &[usize],
        operand: &TensorType,
    ) -> Option<(Dot, TensorType)> {
        let is_of_rows = operand.rank() > 0 && dimensions.contains(&(operand.rank() - 1));
        if !self.is_invariant() || !is_of_rows || !self.kernels().are_for(operand.dtype) {
            return None;
        }
        let dot = Dot {
            lhs_batch: Vec::new(),
            rhs_batch: Vec::new(),
            lhs_contract: dimensions.to_vec(),
            rhs_contract: (0..dimensions.len()).collect(),
            result: operand.dtype,
            precision: Precision::Highest,
            may_round: false,
        };
        let sizes: Vec<usize> = dimensions.iter().map(|dimension| operand.dims[*dimension]).collect();
        Some((dot, TensorType::new(operand.dtype, sizes)))
    }

    /// The product with ones that computes a sum over dimensions, and the type of the ones, if a kernel computes it:
    /// the dimensions are the leading ones, and the result has others.
    pub(super) fn sum_as_product(
        &self,
        dimensions: &[usize],
        operand: &TensorType,
        result: &TensorType,
    ) -> Option<(Dot, TensorType)> {
        let contract: Vec<usize> = (0..dimensions.len()).collect();
        let (dtype, count) = (operand.dtype, operand.num_elements() / result.num_elements().max(1));
        let is_leading = dimensions.len() < operand.rank() && *dimensions == contract;
        if !is_leading || count > thresholds::MOST_ADDED || result.num_elements() < thresholds::FEWEST_SUMS {
            return None;
        }
        let dot = Dot {
            lhs_batch: Vec::new(),
            rhs_batch: Vec::new(),
            lhs_contract: contract.clone(),
            rhs_contract: contract,
            result: dtype,
            precision: Precision::Highest,
            may_round: false,
        };
        let ones = TensorType::new(dtype, &operand.dims[..dimensions.len()]);
        self.applies_to_product(&dot, &[&ones, operand], result).then_some((dot, ones))
    }

    /// Whether the stacks of scans begin with arbitrary content instead of zeros, which would be written to memory.
    pub(super) fn leaves_stacks_unwritten(&self) -> bool {
        self.kernels() != CpuKernels::NONE
    }

    /// Whether a kernel computes the update of a slice. XLA would convert a whole array of `bf16` to `f32` and back.
    pub(super) fn applies_to_update(&self, result: &TensorType) -> bool {
        result.dtype == DType::BF16 && self.kernels().are_for(DType::BF16)
    }
}

/// Whether a kernel takes operands of these types and is faster than the operations of its body. `invariant` kernels also
/// replace bodies that would be faster.
fn takes(call: &KernelCall, operands: &[&TensorType], results: &[&TensorType], invariant: bool) -> bool {
    let is_f32 = |ty: &&TensorType| ty.dtype == DType::F32;
    match *call {
        kernels::ATTENTION_FORWARD | kernels::ATTENTION_TO_PAGES if invariant => are_of_one_type(operands),
        kernels::ATTENTION_TO_CACHE if invariant => operands[0].dims[1] == 1 && are_of_one_type(operands),
        kernels::ATTENTION_FORWARD | kernels::ATTENTION_BACKWARD => {
            let [query, key, value, ..] = operands else {
                unreachable!("attention has queries, keys and values")
            };
            are_alike(query, &[key, value])
        }
        kernels::ATTENTION_TO_CACHE | kernels::ATTENTION_TO_PAGES => {
            let [query, _, _, key, value, ..] = operands else { unreachable!("attention reads a cache") };
            let positions = query.dims[1];
            positions == 1 && are_alike(query, &[key, value])
        }
        kernels::ADAM => operands[..4].iter().all(is_f32),
        kernels::CROSS_ENTROPY | kernels::CROSS_ENTROPY_GRADIENT => operands[1].dtype == DType::I32,
        kernels::GATED | kernels::GATED_GRADIENT => {
            let [gate, up, ..] = operands else { unreachable!("a gated product has two operands") };
            gate == up && (invariant || gate.num_elements() >= thresholds::FEWEST_GATED)
        }
        kernels::RMS_NORM => {
            let [x, scale @ ..] = operands else { unreachable!("a norm has an operand") };
            (invariant || x.num_elements() >= thresholds::FEWEST_NORMALIZED) && scale.iter().all(is_f32)
        }
        kernels::RMS_NORM_GRADIENT => {
            let [of_result, _, scale @ .., _] = operands else { unreachable!("there are at least three") };
            of_result.num_elements() >= thresholds::FEWEST_NORMALIZED && scale.iter().all(is_f32)
        }
        kernels::GROUPED_DOT | kernels::GROUPED_OUTER => operands[2].dtype == DType::I32,
        kernels::NORMAL => {
            let [drawn] = results else { unreachable!("one array is drawn") };
            is_f32(drawn) && drawn.dims[1..].iter().product::<usize>() <= thresholds::MOST_DRAWN
        }
        kernels::SUM_OF_SQUARES | kernels::LARGEST => true,
        // Kernels for TPUs.
        kernels::FLASH_FORWARD | kernels::FLASH_BACKWARD => false,
        ref other => unreachable!("no layer traces a call of `{}`", other.name),
    }
}

/// Whether the floating-point operands have the type of the queries, except for sinks, which come last.
fn are_of_one_type(operands: &[&TensorType]) -> bool {
    let others = operands.iter().take(operands.len() - 1).filter(|operand| operand.dtype.is_float());
    others.into_iter().all(|operand| operand.dtype == operands[0].dtype)
}

/// Whether keys and values have the type of the queries, and values are as wide as queries.
fn are_alike(query: &TensorType, [key, value]: &[&TensorType; 2]) -> bool {
    let is_of_one_type = [key, value].iter().all(|other| other.dtype == query.dtype);
    is_of_one_type && query.dims.last() == value.dims.last()
}
