//! The order of tokens by the experts that they choose.

use mt_shape::{Axis, DType, axis};
use mt_trace::Tensor;

use crate::axes::{CHOICE, EXPERT, ROW, TOKEN};

/// Tokens sorted by expert: a row for each choice of a token. Rows of one expert are consecutive, in the order of the
/// tokens.
pub(super) struct Dispatch<'t> {
    /// The token of each row: `i32[row]`.
    token: Tensor<'t>,
    /// The index of each row among all choices of all tokens: `i32[row]`.
    choice: Tensor<'t>,
    /// The row of each choice: `i32[token, choice]`.
    row: Tensor<'t>,
    /// The number of rows of each expert: `i32[expert]`.
    pub sizes: Tensor<'t>,
}

impl<'t> Dispatch<'t> {
    /// Sorts the choices `i32[token, choice]` of experts.
    pub fn new(chosen: Tensor<'t>, experts: Axis) -> Self {
        let region = chosen.region();
        let (tokens, choices) = (chosen.axis(TOKEN), chosen.axis(CHOICE));
        let rows = axis(ROW, tokens.size * choices.size);
        let flat = |tensor: Tensor<'t>| tensor.merge(&[TOKEN, CHOICE], ROW);
        let token = region.iota(DType::I32, tokens).broadcast(&[tokens, choices]);
        let index = region.iota(DType::I32, rows);
        // Sorts are stable.
        let sorted = flat(chosen).sort_with(&[flat(token), index], ROW, false);
        let (token, choice) = (sorted[1], sorted[2]);
        let row = choice.sort_with(&[index], ROW, false)[1].split(ROW, &[tokens, choices]);
        let all = region.iota(DType::I32, experts).broadcast(&[tokens, choices, experts]);
        let sizes = all.equals(chosen).cast(DType::I32).sum(&[TOKEN, CHOICE]);
        Self { token, choice, row, sizes }
    }

    /// A row for each choice.
    ///
    /// # Shapes
    /// `[token, embed] -> [row, embed]`
    pub fn rows(&self, tokens: Tensor<'t>) -> Tensor<'t> {
        let [rows] = tokens.region().custom_vjp(
            "rows_of_experts",
            [tokens, self.token, self.row],
            [true, false, false],
            |_, [tokens, token, _]| [tokens.take(TOKEN, token)],
            |_, [tokens, token, row]| ([tokens.take(TOKEN, token)], vec![row]),
            // Each choice of a token contributes. Taking rows is faster than adding them one after the other.
            |_, residuals, [cotangent]| {
                let sum = cotangent.take(ROW, residuals[0]).cast(DType::F32).sum(&[CHOICE]);
                vec![sum.cast(cotangent.dtype())]
            },
        );
        rows
    }

    /// The choices of tokens in the order of the rows; the inverse of [`Self::choices`].
    ///
    /// # Shapes
    /// `[token, choice, embed] -> [row, embed]`
    pub fn rows_of_choices(&self, choices: Tensor<'t>) -> Tensor<'t> {
        let [rows] = choices.region().custom_vjp(
            "rows_of_choices",
            [choices, self.choice, self.row],
            [true, false, false],
            |_, [choices, choice, _]| [sorted(choices, choice)],
            |_, [choices, choice, row]| ([sorted(choices, choice)], vec![row]),
            |_, residuals, [cotangent]| vec![cotangent.take(ROW, residuals[0])],
        );
        rows
    }

    /// The rows of each token.
    ///
    /// # Shapes
    /// `[row, embed] -> [token, choice, embed]`
    pub fn choices(&self, rows: Tensor<'t>) -> Tensor<'t> {
        let [choices] = rows.region().custom_vjp(
            "choices_of_tokens",
            [rows, self.row, self.choice],
            [true, false, false],
            |_, [rows, row, _]| [rows.take(ROW, row)],
            |_, [rows, row, choice]| ([rows.take(ROW, row)], vec![choice]),
            |_, residuals, [cotangent]| vec![sorted(cotangent, residuals[0])],
        );
        choices
    }

    /// One row of a matrix for each row, that of the row's expert.
    ///
    /// # Shapes
    /// `[expert, x] -> [row, x]`
    pub fn of_expert(&self, matrix: Tensor<'t>) -> Tensor<'t> {
        let experts = matrix.axis(EXPERT);
        let rows = self.token.axis(ROW);
        let ends = self.sizes.cumulative_sum(EXPERT);
        let starts = ends - self.sizes;
        let both = [rows, experts];
        let place = self.token.region().iota(DType::I32, rows).broadcast(&both);
        let is_own = place.greater_equal(starts).logical_and(place.less(ends)).cast(matrix.dtype());
        is_own.contract(matrix, &[EXPERT])
    }
}

/// # Shapes
/// `[token, choice, embed], i32[row] -> [row, embed]`
fn sorted<'t>(choices: Tensor<'t>, choice: Tensor<'t>) -> Tensor<'t> {
    choices.merge(&[TOKEN, CHOICE], TOKEN).take(TOKEN, choice)
}
