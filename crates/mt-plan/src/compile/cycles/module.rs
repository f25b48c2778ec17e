//! The text of an optimized module, as the compiler dumps it after it has generated code.

use std::collections::HashMap;

/// A module: computations by name, of which one is the entry.
#[derive(Debug, Default)]
pub(super) struct Module {
    pub entry: String,
    computations: HashMap<String, Computation>,
}

/// Instructions in the order of their schedule.
#[derive(Debug, Default)]
pub(super) struct Computation {
    pub instructions: Vec<Instruction>,
    places: HashMap<String, usize>,
}

/// An instruction of a computation.
#[derive(Debug)]
pub(super) struct Instruction {
    pub name: String,
    pub is_root: bool,
    /// The text of the result's type.
    pub shape: String,
    pub opcode: String,
    /// Names of the operands; `name#index` for an element of a tuple.
    pub operands: Vec<String>,
    /// The text between the parentheses of the operands, with these: the number of a parameter, or a constant.
    pub operand_text: String,
    pub attributes: String,
}

/// An array of a type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Array {
    pub bytes: u64,
    pub dimensions: Vec<u64>,
    /// Whether the array lies in the chip's main memory, rather than in its vector memory.
    pub is_in_memory: bool,
}

impl Module {
    /// Reads the text of a module. `None` if it has no entry computation.
    pub fn parse(text: &str) -> Option<Self> {
        let mut module = Self::default();
        let mut current: Option<(String, Computation)> = None;
        for line in text.lines() {
            if let Some((name, is_entry)) = computation_header(line) {
                module.add(current.take());
                if is_entry {
                    name.clone_into(&mut module.entry);
                }
                current = Some((name.to_owned(), Computation::default()));
            } else if let (Some((_, computation)), Some(instruction)) = (&mut current, instruction(line)) {
                computation.places.insert(instruction.name.clone(), computation.instructions.len());
                computation.instructions.push(instruction);
            }
        }
        module.add(current);
        (!module.entry.is_empty()).then_some(module)
    }

    fn add(&mut self, made: Option<(String, Computation)>) {
        if let Some((name, computation)) = made {
            self.computations.insert(name, computation);
        }
    }

    pub fn computation(&self, name: &str) -> Option<&Computation> {
        self.computations.get(name)
    }

    pub fn computations(&self) -> impl Iterator<Item = &Computation> {
        self.computations.values()
    }

    /// The computation that a fusion applies.
    pub fn called_by(&self, instruction: &Instruction) -> Option<&Computation> {
        self.computation(instruction.reference("calls")?)
    }

    /// Whether a computation, or one that it calls, has an instruction of one of these opcodes.
    pub fn has(&self, computation: &Computation, opcodes: &[&str]) -> bool {
        computation.instructions.iter().any(|instruction| {
            opcodes.contains(&instruction.opcode.as_str())
                || self.called_by(instruction).is_some_and(|called| self.has(called, opcodes))
        })
    }
}

impl Computation {
    /// The instruction with this name; the tuple for the name of a tuple's element.
    pub fn instruction(&self, name: &str) -> Option<&Instruction> {
        self.places.get(without_index(name).0).map(|place| &self.instructions[*place])
    }

    pub fn root(&self) -> Option<&Instruction> {
        self.instructions.iter().find(|instruction| instruction.is_root)
    }

    /// The parameter with this number.
    pub fn parameter(&self, number: usize) -> Option<&Instruction> {
        self.instructions.iter().find(|instruction| instruction.parameter_number() == Some(number))
    }

    /// The text of an operand's type.
    pub fn shape(&self, operand: &str) -> &str {
        let Some(instruction) = self.instruction(operand) else { return "" };
        match without_index(operand).1 {
            Some(index) => array_texts(&instruction.shape).nth(index).unwrap_or(""),
            None => &instruction.shape,
        }
    }

    /// The constant integer that an operand holds, if one can be found. `depth` bounds the search.
    pub fn constant(&self, operand: &str, depth: usize) -> Option<i64> {
        let instruction = self.instruction(operand)?;
        let through = |operand: &str| depth.checked_sub(1).and_then(|depth| self.constant(operand, depth));
        match (without_index(operand).1, instruction.opcode.as_str()) {
            (Some(index), "tuple") => through(instruction.operands.get(index)?),
            (Some(index), "while" | "optimization-barrier") => {
                through(&format!("{}#{index}", instruction.operands.first()?))
            }
            (Some(_), _) => None,
            (None, "constant") => instruction.literal(),
            (None, "copy" | "bitcast") => through(instruction.operands.first()?),
            (None, _) => None,
        }
    }
}

impl Instruction {
    /// The name that follows `key=%` in the attributes.
    pub fn reference(&self, key: &str) -> Option<&str> {
        let start = self.attributes.find(&format!("{key}=%"))? + key.len() + 2;
        let rest = &self.attributes[start..];
        Some(&rest[..rest.find(|letter| !is_of_name(letter)).unwrap_or(rest.len())])
    }

    /// The names in braces that follow `key=` in the attributes.
    pub fn references(&self, key: &str) -> Vec<&str> {
        let Some(start) = self.attributes.find(&format!("{key}={{")) else { return Vec::new() };
        let rest = &self.attributes[start..];
        let list = &rest[..rest.find('}').unwrap_or(rest.len())];
        list.split('%')
            .skip(1)
            .map(|part| &part[..part.find(|l| !is_of_name(l)).unwrap_or(part.len())])
            .collect()
    }

    /// The text in quotes after `key` in the attributes.
    pub fn quoted(&self, key: &str) -> Option<&str> {
        let rest = &self.attributes[self.attributes.find(key)? + key.len()..];
        let rest = &rest[rest.find('"')? + 1..];
        Some(&rest[..rest.find('"')?])
    }

    /// The path of scopes in the model under which the tracer made the operation.
    pub fn scope(&self) -> &str {
        self.quoted("op_name=").unwrap_or("")
    }

    /// The cycles of the compiler's model of fusions.
    pub fn estimated_cycles(&self) -> Option<u64> {
        self.quoted("\"estimated_cycles\":")?.parse().ok()
    }

    /// The number of windows that an operation computes one after another.
    pub fn iterations(&self) -> Option<u64> {
        let key = "\"iteration_bounds\":[";
        let rest = &self.attributes[self.attributes.find(key)? + key.len()..];
        Some(numbers(&rest[..rest.find(']')?]).product())
    }

    /// The number of times a loop runs, where the compiler knows it.
    pub fn known_trip_count(&self) -> Option<u64> {
        let rest = &self.attributes[self.attributes.find("known_trip_count")?..];
        numbers(rest).next()
    }

    pub fn parameter_number(&self) -> Option<usize> {
        if self.opcode != "parameter" { None } else { numbers(&self.operand_text).next()?.try_into().ok() }
    }

    /// The integer of a constant.
    pub fn literal(&self) -> Option<i64> {
        if self.opcode != "constant" {
            return None;
        }
        let inner = self.operand_text.strip_prefix('(')?;
        let end = inner.find(|letter: char| letter != '-' && !letter.is_ascii_digit()).unwrap_or(inner.len());
        inner[..end].parse().ok()
    }

    /// The bytes of all results.
    pub fn bytes(&self) -> u64 {
        arrays(&self.shape).iter().map(|array| array.bytes).sum()
    }
}

/// All numbers without a sign in a text.
pub(super) fn numbers(text: &str) -> impl Iterator<Item = u64> {
    text.split(|letter: char| !letter.is_ascii_digit()).filter_map(|digits| digits.parse().ok())
}

/// The name and the index of `name#index`.
pub(super) fn without_index(operand: &str) -> (&str, Option<usize>) {
    match operand.split_once('#') {
        Some((name, index)) => (name, index.parse().ok()),
        None => (operand, None),
    }
}

/// The arrays of a type.
pub(super) fn arrays(shape: &str) -> Vec<Array> {
    array_texts(shape).filter_map(array).collect()
}

fn array(text: &str) -> Option<Array> {
    let (dtype, rest) = text.split_once('[')?;
    let (dimensions, layout) = rest.split_once(']')?;
    let dimensions: Vec<u64> = numbers(dimensions).collect();
    let bits = match dtype {
        "s4" | "u4" => 4,
        "pred" | "s8" | "u8" | "f8e4m3fn" | "f8e5m2" | "f8e4m3b11fnuz" => 8,
        "bf16" | "f16" | "s16" | "u16" => 16,
        "f32" | "s32" | "u32" => 32,
        "s64" | "u64" | "f64" => 64,
        _ => return None,
    };
    let space = layout.find("S(").map(|start| &layout[start + 2..]);
    let is_in_memory = space.is_none_or(|space| space.starts_with('0'));
    Some(Array { bytes: (dimensions.iter().product::<u64>() * bits).div_ceil(8), dimensions, is_in_memory })
}

/// The texts of the arrays in a type: `f32[8,128]{1,0:T(8,128)S(1)}`.
fn array_texts(shape: &str) -> impl Iterator<Item = &str> {
    let mut rest = shape;
    std::iter::from_fn(move || {
        loop {
            let open = rest.find('[')?;
            let start = rest[..open]
                .rfind(|letter: char| !letter.is_ascii_alphanumeric())
                .map_or(0, |place| place + 1);
            let close = open + rest[open..].find(']')?;
            let mut end = close + 1;
            if rest[end..].starts_with('{') {
                end += rest[end..].find('}')? + 1;
            }
            let text = &rest[start..end];
            rest = &rest[end..];
            if start < open {
                return Some(text);
            }
        }
    })
}

fn is_of_name(letter: char) -> bool {
    letter.is_ascii_alphanumeric() || "_-.".contains(letter)
}

/// The name of a computation, and whether it is the entry, from the line that begins it.
fn computation_header(line: &str) -> Option<(&str, bool)> {
    let (rest, is_entry) = match line.strip_prefix("ENTRY %") {
        Some(rest) => (rest, true),
        None => (line.strip_prefix('%')?, false),
    };
    let (name, rest) = rest.split_once(' ')?;
    (rest.starts_with('(') && line.ends_with('{')).then_some((name, is_entry))
}

fn instruction(line: &str) -> Option<Instruction> {
    let rest = line.strip_prefix("  ")?;
    let (rest, is_root) = match rest.strip_prefix("ROOT ") {
        Some(rest) => (rest, true),
        None => (rest, false),
    };
    let (name, rest) = rest.strip_prefix('%')?.split_once(" = ")?;
    let end = if rest.starts_with('(') { balanced(rest, 0) } else { type_end(rest) };
    let (shape, rest) = rest.split_at(end);
    let rest = rest.trim_start();
    let open = rest.find('(')?;
    let opcode = &rest[..open];
    if opcode.is_empty() || !opcode.chars().all(|letter| is_of_name(letter) && letter != '.') {
        return None;
    }
    let close = balanced(rest, open);
    let operand_text = &rest[open..close];
    let is_of_operand = |letter: char| is_of_name(letter) || letter == '#';
    let operands = operand_text
        .split('%')
        .skip(1)
        .map(|part| part[..part.find(|letter| !is_of_operand(letter)).unwrap_or(part.len())].to_owned())
        .collect();
    Some(Instruction {
        name: name.to_owned(),
        is_root,
        shape: shape.to_owned(),
        opcode: opcode.to_owned(),
        operands,
        operand_text: operand_text.to_owned(),
        attributes: rest[close..].to_owned(),
    })
}

/// The end of the type of one array, or of one word such as `token[]`.
fn type_end(text: &str) -> usize {
    let Some(close) = text.find(']').filter(|close| !text[..*close].contains(' ')) else {
        return text.find(' ').unwrap_or(text.len());
    };
    match text[close + 1..].starts_with('{') {
        true => text[close..].find('}').map_or(text.len(), |end| close + end + 1),
        false => close + 1,
    }
}

/// The end of the brackets that open at `start`.
fn balanced(text: &str, start: usize) -> usize {
    let mut depth = 0_usize;
    for (place, letter) in text.bytes().enumerate().skip(start) {
        match letter {
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => {
                depth = depth.saturating_sub(1);
                if depth == 0 {
                    return place + 1;
                }
            }
            _ => {}
        }
    }
    text.len()
}
