//! SSA graphs.

use std::{collections::HashMap, sync::Arc};

use mt_shape::DType;

use crate::{Binary, Literal, Op, Scalar, ShapeError, TensorType, Unary, shape_rules::infer};

/// A value of one graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ValueId(u32);

impl ValueId {
    /// The value's index in its graph.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// An operation with its operands and results.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    pub op: Op,
    pub operands: Vec<ValueId>,
    pub results: Vec<ValueId>,
    /// The scope path in which the operation was traced, such as `decoder/layers/mlp`.
    pub scope: Arc<str>,
}

/// A function of its inputs: operations in order, each before its uses.
#[derive(Clone, Debug, PartialEq)]
pub struct Graph {
    types: Vec<TensorType>,
    inputs: Vec<ValueId>,
    nodes: Vec<Node>,
    outputs: Vec<ValueId>,
    scope: Arc<str>,
}

impl Default for Graph {
    fn default() -> Self {
        Self {
            types: Vec::new(),
            inputs: Vec::new(),
            nodes: Vec::new(),
            outputs: Vec::new(),
            scope: "".into(),
        }
    }
}

impl Graph {
    /// A graph without inputs, nodes or outputs.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an input.
    pub fn input(&mut self, ty: TensorType) -> ValueId {
        let value = self.value(ty);
        self.inputs.push(value);
        value
    }

    /// Sets the scope path of the nodes added from now on.
    pub fn set_scope(&mut self, scope: Arc<str>) {
        self.scope = scope;
    }

    /// Adds an operation and returns its results.
    ///
    /// # Errors
    /// The operands do not fit the operation.
    pub fn push(&mut self, op: Op, operands: &[ValueId]) -> Result<Vec<ValueId>, ShapeError> {
        let operand_types: Vec<&TensorType> = operands.iter().map(|value| self.ty(*value)).collect();
        let result_types = infer(&op, &operand_types)?;
        let results: Vec<ValueId> = result_types.into_iter().map(|ty| self.value(ty)).collect();
        let (operands, scope) = (operands.to_vec(), self.scope.clone());
        self.nodes.push(Node { op, operands, results: results.clone(), scope });
        Ok(results)
    }

    /// Adds an operation that has one result and whose operands are known to fit. Transforms use it to build well-typed
    /// code from well-typed code.
    ///
    /// # Panics
    /// The operands do not fit the operation, or it does not have one result.
    #[track_caller]
    pub fn emit(&mut self, op: Op, operands: &[ValueId]) -> ValueId {
        let results = self.emit_all(op, operands);
        assert_eq!(results.len(), 1, "the operation has one result");
        results[0]
    }

    /// As [`Graph::emit`], for operations with any number of results.
    ///
    /// # Panics
    /// The operands do not fit the operation.
    #[track_caller]
    pub fn emit_all(&mut self, op: Op, operands: &[ValueId]) -> Vec<ValueId> {
        let name = op.name();
        match self.push(op, operands) {
            Ok(results) => results,
            Err(error) => panic!("a transform made an ill-typed `{name}`: {error}"),
        }
    }

    /// Sets the outputs.
    pub fn set_outputs(&mut self, outputs: Vec<ValueId>) {
        self.outputs = outputs;
    }

    /// The type of a value.
    pub fn ty(&self, value: ValueId) -> &TensorType {
        &self.types[value.index()]
    }

    /// The inputs, in order.
    pub fn inputs(&self) -> &[ValueId] {
        &self.inputs
    }

    /// The nodes, in order.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// The outputs, in order.
    pub fn outputs(&self) -> &[ValueId] {
        &self.outputs
    }

    /// The number of values.
    pub fn num_values(&self) -> usize {
        self.types.len()
    }

    /// The types of the inputs.
    pub fn input_types(&self) -> Vec<TensorType> {
        self.inputs.iter().map(|value| self.ty(*value).clone()).collect()
    }

    /// The types of the outputs.
    pub fn output_types(&self) -> Vec<TensorType> {
        self.outputs.iter().map(|value| self.ty(*value).clone()).collect()
    }

    /// For each value, the index of the node that computes it; `None` for inputs.
    pub fn producers(&self) -> Vec<Option<usize>> {
        let mut producers = vec![None; self.num_values()];
        for (index, node) in self.nodes.iter().enumerate() {
            for result in &node.results {
                producers[result.index()] = Some(index);
            }
        }
        producers
    }

    /// Copies the nodes of `other` into this graph, replacing its inputs by `arguments`, and returns its outputs here.
    ///
    /// # Panics
    /// The arguments do not have the inputs' types.
    #[track_caller]
    pub fn inline(&mut self, other: &Self, arguments: &[ValueId]) -> Vec<ValueId> {
        let map = self.inline_mapped(other, arguments);
        other.outputs.iter().map(|value| map[value]).collect()
    }

    /// As [`Graph::inline`], but returns the map from all values of `other` to values here.
    ///
    /// # Panics
    /// The arguments do not have the inputs' types.
    #[track_caller]
    pub fn inline_mapped(&mut self, other: &Self, arguments: &[ValueId]) -> HashMap<ValueId, ValueId> {
        assert_eq!(arguments.len(), other.inputs.len(), "one argument for each input");
        for (argument, input) in arguments.iter().zip(&other.inputs) {
            assert_eq!(self.ty(*argument), other.ty(*input), "an argument has its input's type");
        }
        let mut map: HashMap<ValueId, ValueId> =
            other.inputs.iter().copied().zip(arguments.iter().copied()).collect();
        for node in &other.nodes {
            self.copy_node(other, node, &mut map);
        }
        map
    }

    /// Copies one node of `other`, whose operands are already in `map`, and adds its results to `map`.
    pub fn copy_node(&mut self, other: &Self, node: &Node, map: &mut HashMap<ValueId, ValueId>) {
        let operands = node.operands.iter().map(|value| map[value]).collect();
        let results: Vec<ValueId> =
            node.results.iter().map(|value| self.value(other.ty(*value).clone())).collect();
        map.extend(node.results.iter().copied().zip(results.iter().copied()));
        self.nodes.push(Node { op: node.op.clone(), operands, results, scope: node.scope.clone() });
    }

    fn value(&mut self, ty: TensorType) -> ValueId {
        let id = u32::try_from(self.types.len()).expect("fewer than 2^32 values");
        self.types.push(ty);
        ValueId(id)
    }
}

/// Shorthands for transforms.
impl Graph {
    /// A constant with the same number in every element.
    pub fn splat(&mut self, ty: TensorType, value: f64) -> ValueId {
        let value = Scalar::new(ty.dtype, value);
        self.emit(Op::Constant(Literal::Splat { ty, value }), &[])
    }

    /// A constant with the type of `like`.
    pub fn splat_like(&mut self, like: ValueId, value: f64) -> ValueId {
        self.splat(self.ty(like).clone(), value)
    }

    /// An elementwise operation of one operand.
    #[track_caller]
    pub fn unary(&mut self, unary: Unary, operand: ValueId) -> ValueId {
        self.emit(Op::Unary(unary), &[operand])
    }

    /// An elementwise operation of two operands.
    #[track_caller]
    pub fn binary(&mut self, binary: Binary, lhs: ValueId, rhs: ValueId) -> ValueId {
        self.emit(Op::Binary(binary), &[lhs, rhs])
    }

    /// The sum of two values of one type.
    #[track_caller]
    pub fn add(&mut self, lhs: ValueId, rhs: ValueId) -> ValueId {
        self.binary(Binary::Add, lhs, rhs)
    }

    /// The product of two values of one type.
    #[track_caller]
    pub fn multiply(&mut self, lhs: ValueId, rhs: ValueId) -> ValueId {
        self.binary(Binary::Multiply, lhs, rhs)
    }

    /// The value in another element type; the value itself if it has that type.
    #[track_caller]
    pub fn convert(&mut self, value: ValueId, dtype: DType) -> ValueId {
        if self.ty(value).dtype == dtype { value } else { self.emit(Op::Convert(dtype), &[value]) }
    }

    /// The value with other dimensions; the value itself if it has those.
    #[track_caller]
    pub fn reshape(&mut self, value: ValueId, dims: &[usize]) -> ValueId {
        if self.ty(value).dims == dims {
            value
        } else {
            self.emit(Op::Reshape { dims: dims.to_vec() }, &[value])
        }
    }
}
