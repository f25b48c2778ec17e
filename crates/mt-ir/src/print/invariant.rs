//! Operations that batch-invariant programs print in another way, because XLA's own way depends on the number of elements.

use mt_shape::DType;

use super::{Name, Printer, operations::literal};
use crate::{Literal, Scalar, TensorType};

impl Printer<'_> {
    /// Prints the logarithm of 1 plus each element, by operations that are rounded alike in vectors and alone. XLA takes
    /// two approximations for the whole vectors of an array and for the rest.
    ///
    /// `log(u) · x / (u − 1)`, with `u = 1 + x` as rounded, corrects the rounding of `u` (Kahan; Higham, 2002, section
    /// 1.14.1). Where `u` is 1, the result is `x`; where `x` is so large that `u` is `x`, it is `log(u)`.
    pub(super) fn invariant_log_1p(&mut self, (operand, ty): (Name, &TensorType), scope: &str) -> Name {
        if ty.dtype != DType::F32 {
            let wide = TensorType::new(DType::F32, ty.dims.clone());
            let own = self.operation("stablehlo.convert", &[(operand, ty)], &[], &wide, scope);
            let made = self.invariant_log_1p((own, &wide), scope);
            return self.operation("stablehlo.convert", &[(made, &wide)], &[], ty, scope);
        }
        let truth = TensorType::new(DType::Bool, ty.dims.clone());
        let one = literal(&Literal::Splat { ty: ty.clone(), value: Scalar::Float(1.0) });
        let one = self.operation("stablehlo.constant", &[], &[one], ty, scope);
        let binary = |printer: &mut Self, name: &str, left: Name, right: Name| {
            printer.operation(name, &[(left, ty), (right, ty)], &[], ty, scope)
        };
        let sum = binary(self, "stablehlo.add", operand, one);
        let logarithm = self.operation("stablehlo.log", &[(sum, ty)], &[], ty, scope);
        let rounded = binary(self, "stablehlo.subtract", sum, one);
        let factor = binary(self, "stablehlo.divide", operand, rounded);
        let corrected = binary(self, "stablehlo.multiply", logarithm, factor);
        let equal = ["comparison_direction = #stablehlo<comparison_direction EQ>".to_owned()];
        let choose = |printer: &mut Self, other: Name, yes: Name, no: Name| {
            let is_equal =
                printer.operation("stablehlo.compare", &[(sum, ty), (other, ty)], &equal, &truth, scope);
            let operands = [(is_equal, &truth), (yes, ty), (no, ty)];
            printer.operation("stablehlo.select", &operands, &[], ty, scope)
        };
        let large = choose(self, operand, logarithm, corrected);
        choose(self, one, operand, large)
    }
}
