//! Calls of CPU kernels, for dot products and for operations that have a kernel of their own.
//!
//! A kernel reads its operands through sizes and strides. Operations that only change the view of an operand
//! (transposes, slices) or its type (the cast of a weight) are therefore left to the kernel. The compiler then finds
//! them unused and drops them.

use std::collections::{HashMap, HashSet};

use mt_shape::{
    DType,
    kernels::{self, Arithmetic, KernelCall, KernelOperands, attributes},
};

use super::{Name, Names, Printer, i64_array, list, string, tensor};
use crate::{Dot, Graph, Kernel, Node, Op, Precision, TensorType, ValueId};

/// How to read a value from an array that exists anyway.
#[derive(Clone, Debug)]
struct View {
    array: Name,
    ty: TensorType,
    dims: Vec<Extent>,
    /// The position in the array's leading dimension, which `dims` omits.
    position: Option<Name>,
    /// For elements that are rounded to `bf16` when read: the number of loops around the cast.
    cast: Option<usize>,
}

#[derive(Clone, Copy, Debug)]
struct Extent {
    size: usize,
    /// In elements.
    stride: usize,
}

/// The slice of a stack into which a product is written.
pub(super) struct Slice {
    /// The stack. Once the product is printed, the updated stack.
    pub stack: Name,
    /// The stack's type.
    pub ty: TensorType,
    /// The slice's position in the leading dimension.
    pub position: Name,
}

/// Slices for products of a graph, by the indices of their nodes.
pub(super) type Slices = HashMap<usize, Slice>;

/// Where a kernel writes a product.
enum Destination<'a> {
    New,
    /// Added to this value, in place.
    Added(Name),
    Slice(&'a Slice),
}

/// An operand of a product, with its batch and contracting dimensions.
struct Side<'a> {
    value: (Name, &'a TensorType),
    batch: &'a [usize],
    contract: &'a [usize],
}

impl<'a> Side<'a> {
    fn left(dot: &'a Dot, value: (Name, &'a TensorType)) -> Self {
        Self { value, batch: &dot.lhs_batch, contract: &dot.lhs_contract }
    }

    fn right(dot: &'a Dot, value: (Name, &'a TensorType)) -> Self {
        Self { value, batch: &dot.rhs_batch, contract: &dot.rhs_contract }
    }
}

/// The views of values printed so far.
#[derive(Default)]
pub(super) struct Views {
    views: HashMap<Name, View>,
    /// Arguments of the program, which exist in memory before the program runs.
    arguments: HashSet<Name>,
    num_loops: usize,
}

impl View {
    fn of_array(array: Name, ty: &TensorType) -> Self {
        Self { array, ty: ty.clone(), dims: dense(&ty.dims), position: None, cast: None }
    }

    /// The number of elements between two positions of a slice, or 0 if the view is no slice.
    fn slice_stride(&self) -> usize {
        if self.position.is_some() { self.ty.dims[1..].iter().product() } else { 0 }
    }

    /// The view in another shape, if strides can express it.
    fn reshaped(&self, dims: &[usize]) -> Option<Self> {
        let mut result = Vec::with_capacity(dims.len());
        // Groups dimensions of both shapes with equal products.
        let mut rest = self.dims.as_slice();
        let mut wanted = dims;
        while !wanted.is_empty() {
            let (mut num_wanted, mut num_own) = (1, 0);
            let (mut size, mut own) = (wanted[0], 1);
            while size != own {
                if own < size {
                    own *= rest.get(num_own)?.size;
                    num_own += 1;
                } else {
                    size *= *wanted.get(num_wanted)?;
                    num_wanted += 1;
                }
            }
            let run = &rest[..num_own];
            let is_dense = run.windows(2).all(|pair| pair[0].stride == pair[1].stride * pair[1].size);
            if !is_dense {
                return None;
            }
            let stride = run.last().map_or(1, |extent| extent.stride);
            let split = dense(&wanted[..num_wanted]);
            result.extend(split.iter().map(|extent| Extent { stride: extent.stride * stride, ..*extent }));
            (rest, wanted) = (&rest[num_own..], &wanted[num_wanted..]);
        }
        rest.iter().all(|extent| extent.size == 1).then(|| Self { dims: result, ..self.clone() })
    }
}

/// Extents of a row-major array.
fn dense(dims: &[usize]) -> Vec<Extent> {
    let mut stride = 1;
    let mut extents: Vec<Extent> = dims
        .iter()
        .rev()
        .map(|size| {
            let extent = Extent { size: *size, stride };
            stride *= size;
            extent
        })
        .collect();
    extents.reverse();
    extents
}

impl Printer<'_> {
    pub(super) fn note_argument(&mut self, name: Name) {
        self.views.arguments.insert(name);
    }

    /// Runs `print` for the inside of a loop.
    pub(super) fn in_loop<R>(&mut self, print: impl FnOnce(&mut Self) -> R) -> R {
        self.views.num_loops += 1;
        let result = print(self);
        self.views.num_loops -= 1;
        result
    }

    fn view(&self, name: Name, ty: &TensorType) -> View {
        self.views.views.get(&name).cloned().unwrap_or_else(|| View::of_array(name, ty))
    }

    pub(super) fn note_transpose(&mut self, from: (Name, &TensorType), permutation: &[usize], to: Name) {
        let view = self.view(from.0, from.1);
        let dims = permutation.iter().map(|dim| view.dims[*dim]).collect();
        self.views.views.insert(to, View { dims, ..view });
    }

    pub(super) fn note_reshape(&mut self, from: (Name, &TensorType), dims: &[usize], to: Name) {
        if let Some(view) = self.view(from.0, from.1).reshaped(dims) {
            self.views.views.insert(to, view);
        }
    }

    /// Records that `to` is the slice of `stack` at `position` of its leading dimension.
    pub(super) fn note_slice(&mut self, stack: (Name, &TensorType), position: Name, to: Name) {
        let whole = View::of_array(stack.0, stack.1);
        let view = View { dims: whole.dims[1..].to_vec(), position: Some(position), ..whole };
        self.views.views.insert(to, view);
    }

    /// Records a cast of an argument. Casts of other values are better stored in the narrow type.
    pub(super) fn note_convert(&mut self, from: (Name, &TensorType), dtype: DType, to: Name) {
        let view = self.view(from.0, from.1);
        let is_stored = view.position.is_some() || self.views.arguments.contains(&view.array);
        if is_stored && view.cast.is_none() && (from.1.dtype, dtype) == (DType::F32, DType::BF16) {
            self.views.views.insert(to, View { cast: Some(self.views.num_loops), ..view });
        }
    }

    /// Prints a product that is written into a slice, and reads it from there.
    pub(super) fn product_into(
        &mut self,
        graph: &Graph,
        node: &Node,
        slice: &mut Slice,
        names: &Names,
    ) -> Name {
        let Op::Dot(dot) = &node.op else { unreachable!("what is written to slices is a product") };
        let operands: Vec<(Name, &TensorType)> =
            node.operands.iter().map(|id| (Self::name(names, *id), graph.ty(*id))).collect();
        let result = graph.ty(node.results[0]);
        let into = Destination::Slice(slice);
        slice.stack = self.call_dot(dot, &operands, into, result, &node.scope).expect("it is a kernel's");
        let zero = self.scalar_i32(0);
        self.slice_at(slice.stack, &slice.ty, slice.position, zero, &node.scope)
    }

    /// Prints a sum together with the product that the kernel adds in place.
    pub(super) fn added_product(&mut self, graph: &Graph, sum: &Node, product: &Node, names: &Names) -> Name {
        let Op::Dot(dot) = &product.op else { unreachable!("what is added is a product") };
        let operands: Vec<(Name, &TensorType)> =
            product.operands.iter().map(|id| (Self::name(names, *id), graph.ty(*id))).collect();
        let is_other = |id: &&ValueId| **id != product.results[0];
        let addend = sum.operands.iter().find(is_other).expect("a product that is used once has an addend");
        let added = Destination::Added(Self::name(names, *addend));
        let result = graph.ty(sum.results[0]);
        self.call_dot(dot, &operands, added, result, &product.scope).expect("it is a kernel's")
    }

    /// Prints products with the same left operand as one call, in the scope of the first; returns a name for each.
    pub(super) fn products_together(
        &mut self,
        graph: &Graph,
        products: &[&Node],
        names: &Names,
    ) -> Vec<Name> {
        let value = |id: ValueId| (Self::name(names, id), graph.ty(id));
        let mut sides = Vec::new();
        for product in products {
            let Op::Dot(dot) = &product.op else { unreachable!("only products are printed together") };
            if sides.is_empty() {
                sides.push(Side::left(dot, value(product.operands[0])));
            }
            sides.push(Side::right(dot, value(product.operands[1])));
        }
        let results: Vec<&TensorType> = products.iter().map(|product| graph.ty(product.results[0])).collect();
        let Op::Dot(first) = &products[0].op else { unreachable!("only products are printed together") };
        let arithmetic = self.arithmetic(first, sides[0].value.1.dtype);
        self.call_dots(&sides, arithmetic, Destination::New, &results, &products[0].scope)
    }

    /// Prints a dot product as the call of a kernel, if one applies.
    pub(super) fn kernel_dot(
        &mut self,
        dot: &Dot,
        operands: &[(Name, &TensorType)],
        result: &TensorType,
        scope: &str,
    ) -> Option<Name> {
        self.call_dot(dot, operands, Destination::New, result, scope)
    }

    /// Prints a sum over leading dimensions, such as the gradient of a scale or bias, as a product with ones. XLA's
    /// code for such sums strides across memory.
    pub(super) fn kernel_sum(
        &mut self,
        dimensions: &[usize],
        operand: (Name, &TensorType),
        result: &TensorType,
        scope: &str,
    ) -> Option<Name> {
        let (dot, ones) = self.sum_as_product(dimensions, operand.1, result)?;
        let value = [format!("value = dense<1.0> : {}", tensor(&ones))];
        let name = self.operation("stablehlo.constant", &[], &value, &ones, scope);
        self.kernel_dot(&dot, &[(name, &ones), operand], result, scope)
    }

    /// Prints a sum over rows as a product with ones, in batch-invariant programs.
    pub(super) fn kernel_sum_of_rows(
        &mut self,
        dimensions: &[usize],
        operand: (Name, &TensorType),
        result: &TensorType,
        scope: &str,
    ) -> Option<Name> {
        let (dot, ones) = self.invariant_sum(dimensions, operand.1)?;
        let value = [format!("value = dense<1.0> : {}", tensor(&ones))];
        let name = self.operation("stablehlo.constant", &[], &value, &ones, scope);
        self.kernel_dot(&dot, &[operand, (name, &ones)], result, scope)
    }

    /// As [`Self::kernel_dot`], but writes the result to `destination`; returns the name of the written value.
    fn call_dot(
        &mut self,
        dot: &Dot,
        operands: &[(Name, &TensorType)],
        destination: Destination<'_>,
        result: &TensorType,
        scope: &str,
    ) -> Option<Name> {
        if !self.applies_to_product(dot, &[operands[0].1, operands[1].1], result) {
            return None;
        }
        let sides = [Side::left(dot, operands[0]), Side::right(dot, operands[1])];
        let arithmetic = self.arithmetic(dot, operands[0].1.dtype);
        Some(self.call_dots(&sides, arithmetic, destination, &[result], scope)[0])
    }

    /// The kernel's arithmetic for a product whose operands have this type.
    fn arithmetic(&self, dot: &Dot, operands: DType) -> Arithmetic {
        match (operands, self.precision(dot, operands)) {
            (DType::BF16, _) => Arithmetic::Bf16,
            (_, Precision::High) => Arithmetic::Bf16X3,
            (_, Precision::Default | Precision::Highest) => Arithmetic::F32,
        }
    }

    /// Prints one kernel call for the products of the first operand with each of the others. Only a single product can
    /// have a destination other than `New`.
    fn call_dots(
        &mut self,
        sides: &[Side],
        arithmetic: Arithmetic,
        destination: Destination<'_>,
        results: &[&TensorType],
        scope: &str,
    ) -> Vec<Name> {
        let mut arguments: Vec<(Name, TensorType)> = Vec::new();
        let mut positions = Vec::new();
        let mut read = Vec::new();
        for Side { value: (name, ty), batch, contract } in sides {
            let view = self.view(*name, ty);
            // A value that is cast once and read in each iteration of a loop is cheaper to read in its narrow type.
            let view = if view.cast.is_some_and(|num_loops| num_loops < self.views.num_loops) {
                View::of_array(*name, ty)
            } else {
                view
            };
            let free: Vec<usize> =
                (0..ty.rank()).filter(|dim| !batch.contains(dim) && !contract.contains(dim)).collect();
            read.push(view.slice_stride());
            for dims in [*batch, &free, *contract] {
                read.push(dims.len());
                read.extend(dims.iter().flat_map(|dim| [view.dims[*dim].size, view.dims[*dim].stride]));
            }
            positions.extend(view.position.map(|position| (position, TensorType::scalar(DType::I32))));
            arguments.push((view.array, view.ty));
        }
        let (mut adds, mut into, mut aliases, mut written) = (0, 0, String::new(), results.to_vec());
        match destination {
            Destination::New => {}
            Destination::Added(addend) => {
                adds = 1;
                aliases = alias("", arguments.len());
                arguments.push((addend, results[0].clone()));
            }
            Destination::Slice(slice) => {
                into = results[0].num_elements();
                aliases = alias("", arguments.len());
                arguments.push((slice.stack, slice.ty.clone()));
                positions.push((slice.position, TensorType::scalar(DType::I32)));
                written = vec![&slice.ty];
            }
        }
        arguments.append(&mut positions);
        let mut attributes = vec![
            format!("{} = {}", attributes::OPERANDS, i64_array(read)),
            integer(attributes::ADDS, adds),
            integer(attributes::INTO, into as i64),
            integer(attributes::ARITHMETIC, arithmetic as i64),
        ];
        attributes.extend(self.invariant(&kernels::DOT));
        self.call(&kernels::DOT, &arguments, &attributes, &aliases, &written, scope)
    }

    /// The attribute of a call whose results for a row must not depend on other rows.
    fn invariant(&self, call: &KernelCall) -> Option<String> {
        let is_given = self.is_invariant() && call.has_attribute(attributes::INVARIANT);
        is_given.then(|| integer(attributes::INVARIANT, 1))
    }

    /// Prints the kernel call that computes `kernel.body`, if the kernel applies.
    ///
    /// The attribute `operands` describes each operand that is read through strides: the number of elements between two
    /// positions of a slice, or 0 if the operand is no slice; the number of dimensions; and their sizes and strides.
    /// Slice positions follow the operands.
    pub(super) fn kernel_call(
        &mut self,
        kernel: &Kernel,
        operands: &[(Name, &TensorType)],
        results: &[&TensorType],
        scope: &str,
    ) -> Option<Vec<Name>> {
        let types: Vec<&TensorType> = operands.iter().map(|(_, ty)| *ty).collect();
        if !self.applies(kernel, &types, results) {
            return None;
        }
        let own = kernel.attributes.iter().map(|(name, value)| integer(name, *value));
        let own: Vec<String> = own.chain(self.invariant(kernel.call)).collect();
        if let KernelOperands::Dense { num_updated } = kernel.call.operands {
            let arguments = whole(operands);
            let place = |result: usize| if results.len() == 1 { String::new() } else { result.to_string() };
            let aliases: Vec<String> = (0..num_updated).map(|index| alias(&place(index), index)).collect();
            return Some(self.call(kernel.call, &arguments, &own, &aliases.join(", "), results, scope));
        }
        let mut arguments: Vec<(Name, TensorType)> = Vec::new();
        let mut positions = Vec::new();
        let mut read = Vec::new();
        for (name, ty) in operands {
            let view = self.view(*name, ty);
            // Kernels read contiguous runs of the last dimension, in the type in which they compute.
            let is_run = view.dims.last().is_none_or(|extent| extent.stride == 1);
            let view = if is_run && view.cast.is_none() { view } else { View::of_array(*name, ty) };
            positions.extend(view.position.map(|position| (position, TensorType::scalar(DType::I32))));
            read.extend([view.slice_stride(), view.dims.len()]);
            read.extend(view.dims.iter().flat_map(|extent| [extent.size, extent.stride]));
            arguments.push((view.array, view.ty));
        }
        arguments.append(&mut positions);
        let mut attributes = vec![format!("{} = {}", attributes::OPERANDS, i64_array(read))];
        attributes.extend(own);
        Some(self.call(kernel.call, &arguments, &attributes, "", results, scope))
    }

    /// Prints the update of a `bf16` slice as the call of a kernel. XLA would convert the whole array to `f32` and
    /// back.
    pub(super) fn kernel_update(
        &mut self,
        operands: &[(Name, &TensorType)],
        result: &TensorType,
        scope: &str,
    ) -> Option<Name> {
        if !self.applies_to_update(result) {
            return None;
        }
        Some(self.call(&kernels::UPDATE_SLICE, &whole(operands), &[], &alias("", 0), &[result], scope)[0])
    }

    /// An array of arbitrary content.
    pub(super) fn uninitialized(&mut self, ty: &TensorType, scope: &str) -> Name {
        // Compilers may merge equal calls, and would then copy the result.
        let index = integer(attributes::INDEX, i64::from(self.next));
        self.call(&kernels::UNINITIALIZED, &[], &[index], "", &[ty], scope)[0]
    }

    /// Prints the call of a handler with dense row-major operands and results. `aliases` lists which results share
    /// memory with which operands.
    fn call(
        &mut self,
        kernel: &KernelCall,
        arguments: &[(Name, TensorType)],
        attributes: &[String],
        aliases: &str,
        results: &[&TensorType],
        scope: &str,
    ) -> Vec<Name> {
        let attributes = [
            "api_version = 4 : i32".to_owned(),
            format!("call_target_name = {}", string(kernel.name)),
            format!("backend_config = {{{}}}", attributes.join(", ")),
            format!("operand_layouts = {}", list(arguments.iter().map(|(_, ty)| row_major(ty.rank())))),
            format!("result_layouts = {}", list(results.iter().map(|ty| row_major(ty.rank())))),
            format!("output_operand_aliases = [{aliases}]"),
        ];
        let arguments: Vec<(Name, &TensorType)> = arguments.iter().map(|(name, ty)| (*name, ty)).collect();
        self.variadic("stablehlo.custom_call", &arguments, &attributes, results, scope)
    }
}

/// An attribute that is an integer.
fn integer(name: &str, value: i64) -> String {
    format!("{name} = {value} : i64")
}

/// Operands that are passed on unchanged.
fn whole(operands: &[(Name, &TensorType)]) -> Vec<(Name, TensorType)> {
    operands.iter().map(|(name, ty)| (*name, (*ty).clone())).collect()
}

/// The alias of a result with an operand. `result` is its index among several results, or empty.
fn alias(result: &str, operand: usize) -> String {
    format!(
        "#stablehlo.output_operand_alias<output_tuple_indices = [{result}], operand_index = {operand}, operand_tuple_indices = []>"
    )
}

/// The layout of a dense row-major array, the fastest dimension first.
pub(super) fn row_major(rank: usize) -> String {
    if rank == 0 {
        return "dense<> : tensor<0xindex>".to_owned();
    }
    format!("dense<{}> : tensor<{rank}xindex>", list((0..rank).rev()))
}
