//! Each operation of a kernel matters: a kernel with one operation changed breaks an invariant, has another result, or runs
//! another number of branches.

#![forbid(unsafe_code)]

mod support;

use mt_mosaic::{
    Binary, Comparison, Condition, Kernel, Operation, Place, Reduction, Scalar, Statement, Unary, flash::Mask,
};
use mt_shape::DType;
use support::{CASE, CAUSAL, Case, Pass, Prepared, are_small};

/// Kernels that differ from `kernel` in one operation, with descriptions.
fn mutants(kernel: &Kernel) -> Vec<(String, Kernel)> {
    let mut made = Vec::new();
    for (number, body) in changed_bodies(kernel, &kernel.body).into_iter().enumerate() {
        made.push((format!("{number}: {}", body.0), Kernel { body: body.1, ..kernel.clone() }));
    }
    for (number, window) in kernel.windows.iter().enumerate() {
        for (dimension, index) in window.index.iter().enumerate() {
            if *index != Scalar::Constant(0) {
                let mut mutant = kernel.clone();
                mutant.windows[number].index[dimension] = Scalar::Constant(0);
                made.push((format!("the index of window {number} in dimension {dimension}"), mutant));
            }
        }
    }
    for (number, table) in kernel.tables.iter().enumerate() {
        for index in 0..table.entries.as_ref().map_or(0, Vec::len) {
            let mut mutant = kernel.clone();
            let entries = mutant.tables[number].entries.as_mut().unwrap();
            let neighbors = [index.wrapping_sub(1), index + 1].map(|other| entries.get(other).copied());
            let other = neighbors.into_iter().flatten().find(|other| *other != entries[index]);
            entries[index] = other.unwrap_or(entries[index] + 1);
            made.push((format!("entry {index} of table {number}"), mutant));
        }
    }
    made
}

/// Bodies with one statement dropped or changed.
fn changed_bodies(kernel: &Kernel, body: &[Statement]) -> Vec<(String, Vec<Statement>)> {
    let mut made = Vec::new();
    for (place, statement) in body.iter().enumerate() {
        let with = |statement: Option<Statement>| {
            let (before, after) = (&body[..place], &body[place + 1..]);
            [before, statement.as_slice(), after].concat()
        };
        match statement {
            Statement::Let(value, operation) => {
                for changed in changed(kernel, operation) {
                    made.push((
                        format!("{operation:?} becomes {changed:?}"),
                        with(Some(Statement::Let(*value, changed))),
                    ));
                }
            }
            Statement::Store(..) => made.push((format!("{statement:?} is dropped"), with(None))),
            Statement::If(condition, inner) => {
                for condition in changed_conditions(condition) {
                    let description = format!("a branch runs if {condition:?}");
                    made.push((description, with(Some(Statement::If(condition, inner.clone())))));
                }
                for (description, inner) in changed_bodies(kernel, inner) {
                    made.push((description, with(Some(Statement::If(condition.clone(), inner)))));
                }
            }
        }
    }
    made
}

fn changed_conditions(condition: &Condition) -> Vec<Condition> {
    let mut made = Vec::new();
    for index in 0..condition.0.len() {
        let mut fewer = condition.clone();
        fewer.0.remove(index);
        made.push(fewer);
        let mut other = condition.clone();
        other.0[index].0 = opposite(other.0[index].0);
        made.push(other);
    }
    made
}

fn opposite(comparison: Comparison) -> Comparison {
    match comparison {
        Comparison::Equal => Comparison::Different,
        Comparison::Different => Comparison::Equal,
        Comparison::Less => Comparison::AtMost,
        Comparison::AtMost => Comparison::Less,
    }
}

/// Operations that could stand for another by mistake.
fn changed(kernel: &Kernel, operation: &Operation) -> Vec<Operation> {
    match operation {
        Operation::Load(place) => {
            let tile = kernel.tile_of(place);
            let windows = (0..kernel.num_operands()).map(Place::Window);
            let places = windows
                .chain((0..kernel.scratch.len()).map(|scratch| Place::Scratch(scratch, Scalar::Constant(0))));
            let others: Vec<Operation> = places
                .filter(|other| other != place && kernel.tile_of(other) == tile)
                .map(Operation::Load)
                .collect();
            let zero = tile.filter(|_| others.is_empty()).map(|tile| Operation::Constant(tile, 0.0));
            others.into_iter().chain(zero).collect()
        }
        Operation::Constant(tile, value) => vec![Operation::Constant(*tile, value * 1e-30 + 0.5)],
        Operation::Scalar(tile, scalar) => vec![Operation::Scalar(*tile, scalar.clone() + 1)],
        Operation::Iota(tile, dimension) => vec![Operation::Iota(*tile, 1 - dimension)],
        Operation::Product { left, right, contract: [of_left, of_right] } => {
            vec![Operation::Product { left: *left, right: *right, contract: [*of_left, 1 - of_right] }]
        }
        Operation::Unary(function, value) => {
            let functions = [Unary::Exponential, Unary::Logarithm, Unary::Tanh];
            let others = functions.into_iter().filter(|other| other != function);
            others.map(|other| Operation::Unary(other, *value)).collect()
        }
        Operation::Binary(Binary::And, one, other) => {
            vec![Operation::Binary(Binary::And, *one, *one), Operation::Binary(Binary::And, *other, *other)]
        }
        Operation::Binary(operation, one, other) => {
            let operations =
                [Binary::Add, Binary::Subtract, Binary::Multiply, Binary::Divide, Binary::Maximum];
            let others = operations.into_iter().filter(|other| other != operation);
            others.map(|operation| Operation::Binary(operation, *one, *other)).collect()
        }
        Operation::Compare(comparison, one, other) => {
            vec![Operation::Compare(opposite(*comparison), *one, *other)]
        }
        Operation::Select(condition, one, other) => vec![Operation::Select(*condition, *other, *one)],
        Operation::Cast(value, DType::F32) => vec![Operation::Cast(*value, DType::BF16)],
        Operation::Cast(value, _) => vec![Operation::Cast(*value, DType::F32)],
        Operation::Reduce(reduction, value, dimension) => {
            let other = match reduction {
                Reduction::Sum => Reduction::Maximum,
                Reduction::Maximum => Reduction::Sum,
            };
            vec![
                Operation::Reduce(other, *value, *dimension),
                Operation::Reduce(*reduction, *value, 1 - dimension),
            ]
        }
        Operation::Broadcast(value, rows, columns) => {
            vec![Operation::Broadcast(*value, *rows, 2 * columns)]
        }
        Operation::Repeat(value, times) => vec![Operation::Repeat(*value, times + 1)],
        Operation::Transpose(value) => vec![Operation::Repeat(*value, 1)],
    }
}

/// Whether a mutant differs from the kernel on a case.
fn is_caught(prepared: &Prepared, kernel: &Kernel, mutant: &Kernel) -> bool {
    let runs = |kernel: &Kernel| kernel.branch_runs(&prepared.case.tables());
    match (runs(kernel), runs(mutant), prepared.errors(mutant)) {
        (Ok(own), Ok(other), Ok(errors)) => own != other || !are_small(&errors),
        _ => true,
    }
}

/// Checks that all mutants of a kernel are caught by one of the cases, which have the kernel's sizes and mask.
#[track_caller]
fn check(pass: Pass, cases: &[Case]) {
    let kernel = pass.kernel(&cases[0]);
    let cases: Vec<Prepared> = cases.iter().map(|case| pass.prepare(case)).collect();
    for case in &cases {
        let errors = case.errors(&kernel).unwrap();
        assert!(are_small(&errors), "{:?}: {errors:?}", case.case);
    }
    let survivors: Vec<String> = mutants(&kernel)
        .into_iter()
        .filter(|(_, mutant)| !cases.iter().any(|case| is_caught(case, &kernel, mutant)))
        .map(|(description, _)| description)
        .filter(|description| !(pass == Pass::Backward && description.ends_with(EQUAL_BLOCKS)))
        .collect();
    assert!(survivors.is_empty(), "{survivors:#?}");
}

/// Two heads of keys, and segments that end within blocks.
const MIXED: Case = Case { kv_heads: 2, segments: &[(1, 128), (2, 100), (3, 58)], ..CASE };
const WHOLE: &[(i32, usize)] = &[(1, 286)];
/// In the second row, which has them in reverse, the first block of keys has a larger segment than later queries.
const APART: &[(i32, usize)] = &[(1, 158), (3, 128)];

/// Segments of keys are put into rows at the first step of their block, at which queries have the same places.
const EQUAL_BLOCKS: &str = "Load(Window(4)) becomes Load(Window(3))";

#[test]
fn no_change_of_the_forward_pass_goes_unnoticed() {
    let others = [WHOLE, APART].map(|segments| Case { segments, ..MIXED });
    check(Pass::Forward, &[MIXED, Case { sink: 0.5, ..MIXED }, others[0], others[1]]);
}

#[test]
fn no_change_of_the_backward_pass_goes_unnoticed() {
    let others = [WHOLE, APART].map(|segments| Case { segments, ..MIXED });
    check(Pass::Backward, &[MIXED, others[0], others[1]]);
}

#[test]
fn no_change_of_a_window_or_cap_goes_unnoticed() {
    let case = Case { mask: Mask { window: Some(60), ..CAUSAL }, soft_cap: Some(0.9), ..MIXED };
    let others = [WHOLE, APART].map(|segments| Case { segments, ..case });
    check(Pass::Forward, &[case, Case { sink: 0.5, ..case }, others[0], others[1]]);
}
