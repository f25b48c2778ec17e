//! General dot products.
//!
//! A product is reduced to one batch, rows, columns and one contraction ([`shape`]). Blocks of both operands are copied
//! into panels, in the order in which the innermost loop reads them ([`pack`]), and tiles of the result are computed in
//! registers ([`kernel`]). [`driver`] divides the work among threads. If one side has few lines, as in decoding,
//! [`stream`] reads the other side in place.

// Other processors have only the portable kernels, which leave some items below unused.
#![cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]

mod ahead;
mod blocks;
mod buffer;
mod driver;
mod kernel;
mod pack;
mod shape;
mod stream;
#[cfg(test)]
mod tests;
mod unit;
#[cfg(target_arch = "x86_64")]
pub(crate) mod x86;

use half::bf16;

use crate::{Candidate, Kernels, Purpose, Team};
use kernel::Out;
use shape::{Problem, Summation};
use stream::{Form, Streamed};

#[cfg(test)]
pub(crate) use kernel::{EMULATED_BF16, EMULATED_BF16_X3};
pub(crate) use kernel::{Kernel, PORTABLE, PORTABLE_INT8, PORTABLE_WIDENED};

/// A dimension of an operand; the stride counts elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dim {
    pub size: usize,
    pub stride: usize,
}

/// The elements of an operand.
#[derive(Clone, Copy, Debug)]
pub enum Elements<'a> {
    F32(&'a [f32]),
    Bf16(&'a [bf16]),
    /// For [`Arithmetic::Int8`] only.
    I8(&'a [i8]),
}

/// The elements of a result.
#[derive(Debug)]
pub enum ElementsMut<'a> {
    F32(&'a mut [f32]),
    /// The product is added to the present elements.
    Added(&'a mut [f32]),
    /// The sums are of `f32` and are rounded to nearest even.
    Bf16(&'a mut [bf16]),
    /// The sums of [`Arithmetic::Int8`].
    I32(&'a mut [i32]),
}

/// One side of a general dot product. Dimensions are listed outermost first. Batch and contracted dimensions of both
/// sides correspond one to one.
#[derive(Clone, Debug)]
pub struct Operand<'a> {
    pub elements: Elements<'a>,
    pub batch: Vec<Dim>,
    pub free: Vec<Dim>,
    pub contract: Vec<Dim>,
}

/// The arithmetic of products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arithmetic {
    /// Multiplications of `f32`, to which operands of `bf16` are widened.
    F32,
    /// Operands of `f32` are rounded to `bf16`, to nearest even, and products are summed in `f32`. Processors with
    /// instructions for `bf16` count subnormal numbers as zero.
    Bf16,
    /// Each `f32` is split into two `bf16`, and three products of these are summed in `f32`. Without a kernel for this
    /// arithmetic, `F32` replaces it. An element that `bf16` rounds to an infinity makes its sums NaN.
    Bf16X3,
    /// Operands are `i8`, summed in `i32`. Sums wrap around.
    Int8,
}

impl Arithmetic {
    pub const ALL: [Self; 4] = [Self::F32, Self::Bf16, Self::Bf16X3, Self::Int8];

    /// The name in lists and files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::Bf16X3 => "bf16x3",
            Self::Int8 => "int8",
        }
    }
}

/// Computes the general dot product of `lhs` and `rhs`: dense, row-major, of shape
/// `[batch…, free dimensions of lhs…, free dimensions of rhs…]`.
///
/// # Panics
/// The batch or contracted dimensions of the two sides differ in size, an operand's dimensions extend beyond its
/// elements, the result has another number of elements, or the arithmetic does not take these types.
pub fn dot(team: &dyn Team, lhs: &Operand, rhs: &Operand, arithmetic: Arithmetic, result: ElementsMut) {
    dots(team, arithmetic, vec![Product { lhs, rhs, result }]);
}

/// One of several products that do not depend on each other.
#[derive(Debug)]
pub struct Product<'a> {
    pub lhs: &'a Operand<'a>,
    pub rhs: &'a Operand<'a>,
    pub result: ElementsMut<'a>,
}

/// Computes products as [`dot`] does. Products with few rows or columns run concurrently.
///
/// # Panics
/// As [`dot`].
pub fn dots(team: &dyn Team, arithmetic: Arithmetic, products: Vec<Product>) {
    let kernels = Kernels::in_use();
    let [many, few] = [Purpose::ManyRows, Purpose::FewRows].map(|purpose| kernels.of(arithmetic, purpose));
    dots_with(team, many.kernel(), Some(few.kernel()), products);
}

/// Computes products as [`dots`] does, but the sums of an element depend only on its own row and column: the number of
/// rows, their neighbors, the strides and the threads do not change a bit of it. Few rows take longer than those of
/// [`dots`] where the other operand has to be packed for them, too.
///
/// # Panics
/// As [`dot`].
pub fn invariant_dots(team: &dyn Team, arithmetic: Arithmetic, products: Vec<Product>) {
    let many = Kernels::in_use().of(arithmetic, Purpose::ManyRows);
    dots_with(team, many.kernel(), None, products);
}

/// Computes a product as [`invariant_dots`] does, by a kernel of the caller's choice.
///
/// # Panics
/// As [`dot`].
pub fn invariant_dot_by(
    team: &dyn Team,
    candidate: &Candidate,
    lhs: &Operand,
    rhs: &Operand,
    result: ElementsMut,
) {
    dots_with(team, candidate.kernel(), None, vec![Product { lhs, rhs, result }]);
}

/// Computes a product as [`dot`] does, by a kernel of the caller's choice.
///
/// # Panics
/// As [`dot`].
pub fn dot_by(team: &dyn Team, candidate: &Candidate, lhs: &Operand, rhs: &Operand, result: ElementsMut) {
    dots_with(team, candidate.kernel(), Some(candidate.kernel()), vec![Product { lhs, rhs, result }]);
}

/// Computes products by a kernel for many rows and, if it can stream, another one for few rows. Without the latter, few
/// rows are summed in the same order as many.
fn dots_with(team: &dyn Team, kernel: &Kernel, few_rows: Option<&Kernel>, products: Vec<Product>) {
    let summation = if few_rows.is_some() { Summation::Fastest } else { Summation::AsGiven };
    let mut streamed = Vec::new();
    for Product { lhs, rhs, mut result } in products {
        let problem = Problem::new(lhs, rhs, summation);
        let are_integers = matches!(
            (lhs.elements, rhs.elements, &result),
            (Elements::I8(_), Elements::I8(_), ElementsMut::I32(_))
        );
        let has_integers = matches!(lhs.elements, Elements::I8(_))
            || matches!(rhs.elements, Elements::I8(_))
            || matches!(result, ElementsMut::I32(_));
        assert_eq!([are_integers, has_integers], [kernel.is_for_integers(); 2], "types of the arithmetic");
        assert_eq!(
            result.len(),
            problem.batch_len() * problem.rows * problem.columns,
            "elements of the result"
        );
        if result.len() == 0 {
            continue;
        }
        if problem.depth == 0 {
            result.clear();
            continue;
        }
        let out = result.out();
        if matches!(result, ElementsMut::Added(_)) {
            driver::run(team, kernel, &problem, out, true);
            continue;
        }
        let (form, block) = match few_rows {
            Some(few_rows) => (Form::of(few_rows, &problem), None),
            None => (Form::in_order(kernel, &problem), Some(kernel.depth)),
        };
        match form {
            Some(form) => streamed.push(Streamed { problem, form, out, block }),
            None => driver::run(team, kernel, &problem, out, false),
        }
    }
    stream::run(team, few_rows.unwrap_or(kernel), &streamed);
}

impl ElementsMut<'_> {
    fn len(&self) -> usize {
        match self {
            Self::F32(elements) | Self::Added(elements) => elements.len(),
            Self::Bf16(elements) => elements.len(),
            Self::I32(elements) => elements.len(),
        }
    }

    fn out(&mut self) -> Out {
        match self {
            Self::F32(elements) | Self::Added(elements) => Out::F32(elements.as_mut_ptr()),
            Self::Bf16(elements) => Out::Bf16(elements.as_mut_ptr()),
            Self::I32(elements) => Out::I32(elements.as_mut_ptr()),
        }
    }

    /// Writes the result of an empty contraction.
    fn clear(&mut self) {
        match self {
            Self::F32(elements) => elements.fill(0.0),
            Self::Added(_) => {}
            Self::Bf16(elements) => elements.fill(bf16::ZERO),
            Self::I32(elements) => elements.fill(0),
        }
    }
}

impl Elements<'_> {
    fn len(&self) -> usize {
        match self {
            Self::F32(elements) => elements.len(),
            Self::Bf16(elements) => elements.len(),
            Self::I8(elements) => elements.len(),
        }
    }
}
