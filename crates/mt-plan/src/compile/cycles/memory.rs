//! The bytes that an operation moves between the chip's main memory and its cores.

use super::module::{Computation, Instruction, Module, arrays, without_index};

/// The depth to which uses of an operand are followed through other fusions.
const DEPTH: usize = 8;

impl Module {
    /// The bytes that an operation reads from and writes to main memory. A slice counts alone, and what lies in vector
    /// memory does not count.
    pub(super) fn memory_bytes(&self, computation: &Computation, instruction: &Instruction) -> u64 {
        let called = self.called_by(instruction);
        self.bytes_read(computation, instruction, called) + self.bytes_written(instruction, called)
    }

    fn bytes_read(
        &self,
        computation: &Computation,
        instruction: &Instruction,
        called: Option<&Computation>,
    ) -> u64 {
        let own = |shape: &str| arrays(shape).first().map_or(0, |array| array.bytes);
        let mut total = 0;
        for (number, operand) in instruction.operands.iter().enumerate() {
            let parameter = called.and_then(|called| Some((called, called.parameter(number)?)));
            for array in arrays(computation.shape(operand)).iter().filter(|array| array.is_in_memory) {
                total += match (parameter, instruction.opcode.as_str(), number) {
                    (Some((called, parameter)), _, _) => {
                        self.bytes_of_uses(called, &parameter.name, array.bytes, 0)
                    }
                    (None, "dynamic-slice", 0) => own(&instruction.shape),
                    (None, "dynamic-update-slice", 0) => 0,
                    _ => array.bytes,
                };
            }
        }
        total
    }

    /// The bytes that a fused computation reads of one of its values, which has `full` bytes.
    fn bytes_of_uses(&self, computation: &Computation, name: &str, full: u64, depth: usize) -> u64 {
        let own = |shape: &str| arrays(shape).first().map_or(0, |array| array.bytes);
        let is_it = |operand: &String| without_index(operand).0 == name;
        let mut total = 0;
        for user in computation.instructions.iter().filter(|user| user.operands.iter().any(is_it)) {
            let is_first = user.operands.first().is_some_and(|operand| operand == name);
            total += match user.opcode.as_str() {
                "dynamic-slice" | "gather" if is_first => own(&user.shape),
                "slice" => own(&user.shape),
                "dynamic-update-slice" if is_first => 0,
                "bitcast" | "copy" | "convert" if depth < DEPTH => match user.is_root {
                    true => full,
                    false => self.bytes_of_uses(computation, &user.name, full, depth + 1),
                },
                "fusion" if depth < DEPTH => self.bytes_of_fused_use(computation, user, name, full, depth),
                _ => return full,
            };
        }
        total.min(full)
    }

    fn bytes_of_fused_use(
        &self,
        computation: &Computation,
        user: &Instruction,
        name: &str,
        full: u64,
        depth: usize,
    ) -> u64 {
        let Some(called) = self.called_by(user) else { return full };
        let is_plain = |each: &Instruction| ["parameter", "copy", "bitcast"].contains(&each.opcode.as_str());
        if called.instructions.iter().all(is_plain) {
            return match user.is_root {
                true => full,
                false => self.bytes_of_uses(computation, &user.name, full, depth + 1),
            };
        }
        let numbers =
            user.operands.iter().enumerate().filter(|(_, operand)| without_index(operand).0 == name);
        numbers
            .filter_map(|(number, _)| called.parameter(number))
            .map(|parameter| self.bytes_of_uses(called, &parameter.name, full, depth + 1))
            .sum()
    }

    fn bytes_written(&self, instruction: &Instruction, called: Option<&Computation>) -> u64 {
        let results = arrays(&instruction.shape);
        let root = called.and_then(Computation::root);
        let made: Vec<Option<&Instruction>> = match (called, root) {
            (Some(called), Some(root)) if root.opcode == "tuple" => {
                root.operands.iter().map(|operand| called.instruction(operand)).collect()
            }
            (Some(_), root) => vec![root],
            (None, _) => vec![None; results.len()],
        };
        let written = results.iter().zip(made).filter(|(result, _)| result.is_in_memory);
        written
            .map(|(result, made)| {
                let mut made = made;
                while let (Some(called), Some(bitcast)) =
                    (called, made.filter(|made| made.opcode == "bitcast"))
                {
                    made = bitcast.operands.first().and_then(|operand| called.instruction(operand));
                }
                let update = made.filter(|made| made.opcode == "dynamic-update-slice");
                match (called, update.and_then(|update| update.operands.get(1))) {
                    (Some(called), Some(update)) => {
                        arrays(called.shape(update)).first().map_or(result.bytes, |array| array.bytes)
                    }
                    _ => result.bytes,
                }
            })
            .sum()
    }
}
