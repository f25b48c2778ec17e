//! Operations with regions.

use std::sync::Arc;

use mt_shape::DType;

use super::{
    Name, Printer, i64_array,
    kernels::{Slice, Slices},
    list, location, string, tensor,
};
use crate::{Graph, ManualComputation, Scan, TensorType, While};

impl Printer<'_> {
    fn block_arguments(&mut self, types: &[TensorType]) -> (Vec<Name>, String) {
        let names: Vec<Name> = types.iter().map(|_| self.fresh()).collect();
        let text: Vec<String> =
            names.iter().zip(types).map(|(name, ty)| format!("%{name}: {}", tensor(ty))).collect();
        (names, text.join(", "))
    }

    pub(super) fn case(
        &mut self,
        branches: &[Arc<Graph>],
        operands: &[(Name, &TensorType)],
        results: &[&TensorType],
        scope: &str,
    ) -> Vec<Name> {
        let names: Vec<Name> = results.iter().map(|_| self.fresh()).collect();
        let left: Vec<String> = names.iter().map(|name| format!("%{name}")).collect();
        self.line(&format!("{} = \"stablehlo.case\"(%{}) ({{", left.join(", "), operands[0].0));
        let arguments: Vec<Name> = operands[1..].iter().map(|(name, _)| *name).collect();
        for (index, branch) in branches.iter().enumerate() {
            if index > 0 {
                self.line("}, {");
            }
            self.indent += 2;
            let outputs = self.inline(branch, &arguments);
            self.indent -= 2;
            self.terminator("stablehlo.return", &outputs, &branch.output_types());
        }
        let types: Vec<String> = results.iter().map(|ty| tensor(ty)).collect();
        self.line(&format!("}}) : (tensor<i32>) -> ({}){}", types.join(", "), location(scope)));
        names
    }

    /// Opens a `while` over values of `types`, prints the condition, then the body.
    fn loop_over(
        &mut self,
        initial: &[Name],
        types: &[TensorType],
        condition: impl FnOnce(&mut Self, &[Name]) -> Name,
        body: impl FnOnce(&mut Self, &[Name]) -> Vec<Name>,
        scope: &str,
    ) -> Vec<Name> {
        let results: Vec<Name> = types.iter().map(|_| self.fresh()).collect();
        let left: Vec<String> = results.iter().map(|name| format!("%{name}")).collect();
        let operands: Vec<String> = initial.iter().map(|name| format!("%{name}")).collect();
        self.line(&format!("{} = \"stablehlo.while\"({}) ({{", left.join(", "), operands.join(", ")));
        let (names, text) = self.block_arguments(types);
        self.line(&format!("^bb0({text}):"));
        self.indent += 2;
        let proceed = condition(self, &names);
        self.indent -= 2;
        self.terminator("stablehlo.return", &[proceed], &[TensorType::scalar(DType::Bool)]);
        self.line("}, {");
        let (names, text) = self.block_arguments(types);
        self.line(&format!("^bb0({text}):"));
        self.indent += 2;
        let next = self.in_loop(|printer| body(printer, &names));
        self.indent -= 2;
        self.terminator("stablehlo.return", &next, types);
        let types: Vec<String> = types.iter().map(tensor).collect();
        self.line(&format!("}}) : ({}) -> ({}){}", types.join(", "), types.join(", "), location(scope)));
        results
    }

    pub(super) fn while_loop(
        &mut self,
        op: &While,
        operands: &[(Name, &TensorType)],
        scope: &str,
    ) -> Vec<Name> {
        let names: Vec<Name> = operands.iter().map(|(name, _)| *name).collect();
        let (captured, carry) = names.split_at(op.num_captured);
        let types: Vec<TensorType> =
            operands[op.num_captured..].iter().map(|(_, ty)| (*ty).clone()).collect();
        self.loop_over(
            carry,
            &types,
            |printer, carry| printer.inline(&op.condition, &[captured, carry].concat())[0],
            |printer, carry| printer.inline(&op.body, &[captured, carry].concat()),
            scope,
        )
    }

    /// Prints a scan as a loop with a counter that slices the scan's inputs and writes its stacks in place.
    pub(super) fn scan(&mut self, scan: &Scan, operands: &[(Name, &TensorType)], scope: &str) -> Vec<Name> {
        let names: Vec<Name> = operands.iter().map(|(name, _)| *name).collect();
        let (captured, rest) = names.split_at(scan.num_captured);
        let (carry, inputs) = rest.split_at(scan.num_carry);
        let index_type = TensorType::scalar(DType::I32);
        let stacked_types: Vec<TensorType> = scan.body.output_types()[scan.num_carry..]
            .iter()
            .map(|ty| TensorType::new(ty.dtype, [&[scan.length], ty.dims.as_slice()].concat()))
            .collect();
        let stacks: Vec<Name> = stacked_types.iter().map(|ty| self.empty_stack(ty, scope)).collect();
        if scan.length == 0 {
            return [carry, &stacks].concat();
        }
        let start = self.scalar_i32(0);
        let carry_types = operands[scan.num_captured..][..scan.num_carry].iter().map(|(_, ty)| (*ty).clone());
        let types: Vec<TensorType> = std::iter::once(index_type.clone())
            .chain(carry_types)
            .chain(stacked_types.iter().cloned())
            .collect();
        let initial = [&[start], carry, &stacks].concat();
        let slice_types = &operands[scan.num_captured + scan.num_carry..];
        let results = self.loop_over(
            &initial,
            &types,
            |printer, state| {
                let length = printer.scalar_i32(scan.length as i64);
                let attribute = "comparison_direction = #stablehlo<comparison_direction LT>".to_owned();
                let operands = [(state[0], &index_type), (length, &index_type)];
                printer.operation(
                    "stablehlo.compare",
                    &operands,
                    &[attribute],
                    &TensorType::scalar(DType::Bool),
                    scope,
                )
            },
            |printer, state| {
                let zero = printer.scalar_i32(0);
                let position = if scan.reverse {
                    let last = printer.scalar_i32(scan.length as i64 - 1);
                    let operands = [(last, &index_type), (state[0], &index_type)];
                    printer.operation("stablehlo.subtract", &operands, &[], &index_type, scope)
                } else {
                    state[0]
                };
                let (carry, stacks) = state[1..].split_at(scan.num_carry);
                let slices: Vec<Name> = inputs
                    .iter()
                    .zip(slice_types)
                    .map(|(input, (_, ty))| printer.slice_at(*input, ty, position, zero, scope))
                    .collect();
                let products = printer.stacked_products(&scan.body, &scan.body.outputs()[scan.num_carry..]);
                let mut written: Slices = products
                    .iter()
                    .zip(stacks.iter().zip(&stacked_types))
                    .filter_map(|(product, (stack, ty))| {
                        Some(((*product)?, Slice { stack: *stack, ty: ty.clone(), position }))
                    })
                    .collect();
                let arguments = [captured, carry, &slices].concat();
                let outputs = printer.inline_into(&scan.body, &arguments, &mut written);
                let (next, pieces) = outputs.split_at(scan.num_carry);
                let stacks: Vec<Name> = stacks
                    .iter()
                    .zip(pieces.iter().zip(products))
                    .zip(&stacked_types)
                    .map(|((stack, (piece, product)), ty)| match product {
                        Some(product) => written[&product].stack,
                        None => printer.write_at(*stack, *piece, ty, position, zero, scope),
                    })
                    .collect();
                let one = printer.scalar_i32(1);
                let operands = [(state[0], &index_type), (one, &index_type)];
                let counter = printer.operation("stablehlo.add", &operands, &[], &index_type, scope);
                [&[counter], next, &stacks].concat()
            },
            scope,
        );
        results[1..].to_vec()
    }

    /// A stack whose elements the loop writes before anything reads them.
    fn empty_stack(&mut self, ty: &TensorType, scope: &str) -> Name {
        if ty.num_elements() != 0 && self.leaves_stacks_unwritten() {
            self.uninitialized(ty, scope)
        } else {
            self.zeros(ty, scope)
        }
    }

    fn zeros(&mut self, ty: &TensorType, scope: &str) -> Name {
        let value = match ty.dtype {
            DType::Bool => "false",
            dtype if dtype.is_float() => "0.0",
            _ => "0",
        };
        self.operation(
            "stablehlo.constant",
            &[],
            &[format!("value = dense<{value}> : {}", tensor(ty))],
            ty,
            scope,
        )
    }

    pub(super) fn slice_at(
        &mut self,
        stack: Name,
        ty: &TensorType,
        position: Name,
        zero: Name,
        scope: &str,
    ) -> Name {
        let index_type = TensorType::scalar(DType::I32);
        let mut operands = vec![(stack, ty), (position, &index_type)];
        operands.extend((1..ty.rank()).map(|_| (zero, &index_type)));
        let slice = TensorType::new(ty.dtype, [&[1], &ty.dims[1..]].concat());
        let attribute = format!("slice_sizes = {}", i64_array(&slice.dims));
        let name = self.operation("stablehlo.dynamic_slice", &operands, &[attribute], &slice, scope);
        let result = TensorType::new(ty.dtype, &ty.dims[1..]);
        let name = self.operation("stablehlo.reshape", &[(name, &slice)], &[], &result, scope);
        self.note_slice((stack, ty), position, name);
        name
    }

    fn write_at(
        &mut self,
        stack: Name,
        piece: Name,
        ty: &TensorType,
        position: Name,
        zero: Name,
        scope: &str,
    ) -> Name {
        let index_type = TensorType::scalar(DType::I32);
        let flat = TensorType::new(ty.dtype, &ty.dims[1..]);
        let slice = TensorType::new(ty.dtype, [&[1], &ty.dims[1..]].concat());
        let piece = self.operation("stablehlo.reshape", &[(piece, &flat)], &[], &slice, scope);
        let mut operands = vec![(stack, ty), (piece, &slice), (position, &index_type)];
        operands.extend((1..ty.rank()).map(|_| (zero, &index_type)));
        self.operation("stablehlo.dynamic_update_slice", &operands, &[], ty, scope)
    }

    pub(super) fn manual(
        &mut self,
        op: &ManualComputation,
        operands: &[(Name, &TensorType)],
        results: &[&TensorType],
        scope: &str,
    ) -> Vec<Name> {
        if self.options.mesh.num_devices() == 1 {
            let arguments: Vec<Name> = operands.iter().map(|(name, _)| *name).collect();
            return self.inline(&op.body, &arguments);
        }
        let names: Vec<Name> = results.iter().map(|_| self.fresh()).collect();
        let left: Vec<String> = names.iter().map(|name| format!("%{name}")).collect();
        let arguments: Vec<String> = operands.iter().map(|(name, _)| format!("%{name}")).collect();
        let placements = |printer: &Self, specs: &[mt_shape::PartitionSpec]| {
            let inner = list(specs.iter().map(|spec| format!("<@mesh, {}>", printer.spec(spec))));
            format!("#sdy.sharding_per_value<{inner}>")
        };
        let axes: Vec<String> = op.manual_axes.iter().map(|(axis, _)| string(axis)).collect();
        let (inputs, outputs) = (placements(self, &op.input_specs), placements(self, &op.output_specs));
        self.line(&format!(
            "{} = \"sdy.manual_computation\"({}) <{{in_shardings = {inputs}, out_shardings = {outputs}, manual_axes = #sdy<manual_axes{{{}}}>}}> ({{",
            left.join(", "),
            arguments.join(", "),
            axes.join(", ")
        ));
        let (inner, text) = self.block_arguments(&op.body.input_types());
        self.line(&format!("^bb0({text}):"));
        self.indent += 2;
        let returned = self.inline(&op.body, &inner);
        self.indent -= 2;
        self.terminator("sdy.return", &returned, &op.body.output_types());
        let operand_types: Vec<String> = operands.iter().map(|(_, ty)| tensor(ty)).collect();
        let result_types: Vec<String> = results.iter().map(|ty| tensor(ty)).collect();
        self.line(&format!(
            "}}) : ({}) -> ({}){}",
            operand_types.join(", "),
            result_types.join(", "),
            location(scope)
        ));
        names
    }
}
