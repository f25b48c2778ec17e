//! Operations that batch-invariant programs print in another way, because XLA's own way depends on the number of elements.

use mt_shape::DType;

use super::{Name, Printer, operations::literal};
use crate::{Literal, Scalar, TensorType, Unary};

impl Printer<'_> {
    /// Prints an elementwise function of one operand.
    pub(super) fn unary(
        &mut self,
        unary: Unary,
        operand: (Name, &TensorType),
        result: &TensorType,
        scope: &str,
    ) -> Name {
        match unary {
            Unary::Log1p if self.is_invariant() => self.invariant_log_1p(operand, scope),
            _ => self.operation(unary.mnemonic(), &[operand], &[], result, scope),
        }
    }

    /// Prints the logarithm of 1 plus each element, by operations that are rounded alike in vectors and alone. XLA takes
    /// two approximations for the whole vectors of an array and for the rest.
    ///
    /// Between -0.3 and 1 it is `2 atanh(s) = 2s (1 + s²/3 + s⁴/5 + …)` with `s = x / (2 + x)`, elsewhere `log(1 + x)`. A
    /// formula that subtracts the 1 again does not work: XLA would simplify the difference.
    fn invariant_log_1p(&mut self, (operand, ty): (Name, &TensorType), scope: &str) -> Name {
        if ty.dtype != DType::F32 {
            let wide = TensorType::new(DType::F32, ty.dims.clone());
            let own = self.operation("stablehlo.convert", &[(operand, ty)], &[], &wide, scope);
            let made = self.invariant_log_1p((own, &wide), scope);
            return self.operation("stablehlo.convert", &[(made, &wide)], &[], ty, scope);
        }
        let truth = TensorType::new(DType::Bool, ty.dims.clone());
        let number = |printer: &mut Self, value: f64| {
            let value = literal(&Literal::Splat { ty: ty.clone(), value: Scalar::Float(value) });
            printer.operation("stablehlo.constant", &[], &[value], ty, scope)
        };
        let binary = |printer: &mut Self, name: &str, left: Name, right: Name| {
            printer.operation(name, &[(left, ty), (right, ty)], &[], ty, scope)
        };
        let [one, two] = [1.0, 2.0].map(|value| number(self, value));
        let sum = binary(self, "stablehlo.add", operand, one);
        let far = self.operation("stablehlo.log", &[(sum, ty)], &[], ty, scope);
        let divisor = binary(self, "stablehlo.add", operand, two);
        let quotient = binary(self, "stablehlo.divide", operand, divisor);
        let square = binary(self, "stablehlo.multiply", quotient, quotient);
        let mut series = number(self, 1.0 / 15.0);
        for power in [13.0, 11.0, 9.0, 7.0, 5.0, 3.0, 1.0] {
            let product = binary(self, "stablehlo.multiply", series, square);
            let coefficient = number(self, 1.0 / power);
            series = binary(self, "stablehlo.add", product, coefficient);
        }
        let twice = binary(self, "stablehlo.add", quotient, quotient);
        let near = binary(self, "stablehlo.multiply", twice, series);
        let mut choose = |bound: f64, direction: &str, near: Name| {
            let bound = number(self, bound);
            let direction = [format!("comparison_direction = #stablehlo<comparison_direction {direction}>")];
            let operands = [(operand, ty), (bound, ty)];
            let is_near = self.operation("stablehlo.compare", &operands, &direction, &truth, scope);
            let operands = [(is_near, &truth), (near, ty), (far, ty)];
            self.operation("stablehlo.select", &operands, &[], ty, scope)
        };
        let near = choose(1.0, "LE", near);
        choose(-0.3, "GE", near)
    }
}
