//! What the compiler's optimized program does, of what the compiler does not say itself: which collectives run, how
//! often, and how much they carry.
//!
//! The messages have the fields that are read here, with the numbers that XLA's `hlo.proto` and `xla_data.proto` give
//! them; others are passed over.

use std::collections::HashMap;

use prost::Message;

use crate::RuntimeError;

/// A collective operation of an optimized program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Collective {
    /// Such as `all-gather`.
    pub kind: String,
    /// Bytes on each device, of what is gathered, reduced or exchanged: the larger of operand and result.
    pub bytes: u64,
    /// Bytes on each device of every array that results: one operation may carry several.
    pub arrays: Vec<u64>,
    /// How often it runs in one run of the program. Loops whose number of turns is unknown count once.
    pub times: u64,
    /// The name scope of the operation that it comes from.
    pub source: String,
}

const KINDS: [&str; 6] =
    ["all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute"];

#[derive(Clone, PartialEq, Message)]
struct ModuleWithConfig {
    #[prost(message, optional, tag = "1")]
    module: Option<Module>,
}

#[derive(Clone, PartialEq, Message)]
struct Module {
    #[prost(message, repeated, tag = "3")]
    computations: Vec<Computation>,
    #[prost(int64, tag = "6")]
    entry_computation_id: i64,
}

#[derive(Clone, PartialEq, Message)]
struct Computation {
    #[prost(message, repeated, tag = "2")]
    instructions: Vec<Instruction>,
    #[prost(int64, tag = "5")]
    id: i64,
    #[prost(int64, tag = "6")]
    root_id: i64,
}

#[derive(Clone, PartialEq, Message)]
struct Instruction {
    #[prost(string, tag = "2")]
    opcode: String,
    #[prost(message, optional, tag = "3")]
    shape: Option<Shape>,
    #[prost(message, optional, tag = "7")]
    metadata: Option<Metadata>,
    #[prost(message, optional, tag = "8")]
    literal: Option<Literal>,
    #[prost(int64, tag = "35")]
    id: i64,
    #[prost(int64, repeated, tag = "36")]
    operand_ids: Vec<i64>,
    #[prost(int64, repeated, tag = "38")]
    called_computation_ids: Vec<i64>,
    #[prost(bytes = "vec", tag = "43")]
    backend_config: Vec<u8>,
    #[prost(string, tag = "63")]
    comparison_direction: String,
}

#[derive(Clone, PartialEq, Message)]
struct Metadata {
    #[prost(string, tag = "2")]
    op_name: String,
}

#[derive(Clone, PartialEq, Message)]
struct Shape {
    #[prost(int32, tag = "2")]
    element_type: i32,
    #[prost(int64, repeated, tag = "3")]
    dimensions: Vec<i64>,
    #[prost(message, repeated, tag = "4")]
    tuple_shapes: Vec<Shape>,
}

#[derive(Clone, PartialEq, Message)]
struct Literal {
    #[prost(int32, repeated, tag = "4")]
    s32s: Vec<i32>,
    #[prost(int64, repeated, tag = "5")]
    s64s: Vec<i64>,
}

impl Shape {
    fn bytes(&self) -> u64 {
        // The numbers of `PrimitiveType`, by the bits of an element; those under a byte are packed.
        let bits = match self.element_type {
            1 | 2 | 6 | 19 | 20 | 23..=25 | 28 | 29 | 33 => 8,
            3 | 7 | 10 | 16 => 16,
            4 | 8 | 11 => 32,
            5 | 9 | 12 | 15 => 64,
            18 => 128,
            21 | 22 | 32 => 4,
            26 | 27 => 2,
            30 | 31 => 1,
            _ => 0,
        };
        let elements: i64 = self.dimensions.iter().product();
        let own = (elements.max(0) as u64 * bits).div_ceil(8);
        own + self.tuple_shapes.iter().map(Self::bytes).sum::<u64>()
    }

    /// The bytes of each array of a tuple, or of the only one.
    fn arrays(&self) -> Vec<u64> {
        if self.tuple_shapes.is_empty() {
            return vec![self.bytes()];
        }
        self.tuple_shapes.iter().map(Self::bytes).collect()
    }
}

/// The collectives of an optimized program, the largest first; alike ones of one source are one.
///
/// # Errors
/// The bytes are no optimized program.
pub(crate) fn collectives(format: &str, bytes: &[u8]) -> Result<Vec<Collective>, RuntimeError> {
    let unreadable = |reason: String| RuntimeError::OptimizedProgram { format: format.to_owned(), reason };
    let module = match format {
        "hlo_with_config" => ModuleWithConfig::decode(bytes).map(|with_config| with_config.module),
        "hlo" => Module::decode(bytes).map(Some),
        _ => return Err(unreadable("its format is unknown".to_owned())),
    };
    let module = module.map_err(|error| unreadable(error.to_string()))?;
    let module = module.ok_or_else(|| unreadable("it is empty".to_owned()))?;
    let computations = module.computations.iter().map(|computation| (computation.id, computation)).collect();
    let mut walk = Walk { computations, found: HashMap::new() };
    walk.visit(module.entry_computation_id, 1);
    let mut found: Vec<Collective> = walk
        .found
        .into_iter()
        .map(|((kind, bytes, arrays, source), times)| Collective { kind, bytes, arrays, times, source })
        .collect();
    found.sort_by(|a, b| {
        (b.bytes * b.times, &a.kind, &a.source).cmp(&(a.bytes * a.times, &b.kind, &b.source))
    });
    Ok(found)
}

struct Walk<'m> {
    computations: HashMap<i64, &'m Computation>,
    found: HashMap<(String, u64, Vec<u64>, String), u64>,
}

impl Walk<'_> {
    /// Counts what a computation does when it runs `times` times.
    fn visit(&mut self, id: i64, times: u64) {
        let Some(&computation) = self.computations.get(&id) else { return };
        for instruction in &computation.instructions {
            let opcode = instruction.opcode.trim_end_matches("-start");
            if KINDS.contains(&opcode) {
                let source = instruction
                    .metadata
                    .as_ref()
                    .map(|metadata| metadata.op_name.clone())
                    .unwrap_or_default();
                let bytes = collective_bytes(computation, instruction);
                let arrays = result(instruction).map(Shape::arrays).unwrap_or_default();
                let key = (opcode.to_owned(), bytes, arrays, source);
                *self.found.entry(key).or_default() += times;
                // What it calls combines two numbers.
                continue;
            }
            let turns = if opcode == "while" { self.turns(instruction).unwrap_or(1) } else { 1 };
            for called in &instruction.called_computation_ids {
                self.visit(*called, times * turns);
            }
        }
    }

    /// How often a loop turns: what the compiler notes, or the bound that a counter from 0 is compared with.
    fn turns(&self, instruction: &Instruction) -> Option<u64> {
        let noted = String::from_utf8_lossy(&instruction.backend_config);
        if let Some((_, rest)) = noted.split_once("\"known_trip_count\"") {
            let digits: String = rest
                .chars()
                .skip_while(|letter| !letter.is_ascii_digit())
                .take_while(char::is_ascii_digit)
                .collect();
            return digits.parse().ok();
        }
        // The condition is the second computation that a loop calls.
        let condition = self.computations.get(instruction.called_computation_ids.get(1)?)?;
        let find = |id: i64| condition.instructions.iter().find(|instruction| instruction.id == id);
        let mut root = find(condition.root_id)?;
        let mut bounds = condition.instructions.iter().filter_map(constant);
        if root.opcode == "fusion" {
            let called = self.computations.get(root.called_computation_ids.first()?)?;
            root = called.instructions.iter().find(|instruction| instruction.id == called.root_id)?;
        }
        let bound = bounds.next().filter(|_| bounds.next().is_none())?;
        (root.opcode == "compare" && root.comparison_direction == "LT").then_some(bound)
    }
}

/// The number that an instruction is, if it is a whole one.
fn constant(instruction: &Instruction) -> Option<u64> {
    let literal = instruction.literal.as_ref()?;
    let number = literal.s32s.first().map(|number| i64::from(*number)).or(literal.s64s.first().copied())?;
    u64::try_from(number).ok()
}

fn collective_bytes(computation: &Computation, instruction: &Instruction) -> u64 {
    let bytes_of = |id: &i64| {
        let operand = computation.instructions.iter().find(|instruction| instruction.id == *id);
        operand.and_then(|operand| operand.shape.as_ref()).map_or(0, Shape::bytes)
    };
    let operands: u64 = instruction.operand_ids.iter().map(bytes_of).sum();
    operands.max(result(instruction).map_or(0, Shape::bytes))
}

/// What a collective makes.
fn result(instruction: &Instruction) -> Option<&Shape> {
    let shape = instruction.shape.as_ref()?;
    // What starts a gathering or an exchange returns its operands, too.
    let with_operands = instruction.opcode.ends_with("-start") && shape.tuple_shapes.len() > 1;
    Some(if with_operands { &shape.tuple_shapes[1] } else { shape })
}
