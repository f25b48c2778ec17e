//! Lookups of tokens in programs for TPUs, whose devices exchange vectors, compared with one device of a CPU.

use std::sync::Arc;

use mt_derive::Tree;
use mt_ir::{Program, Target};
use mt_nn::{
    Embedding,
    axes::{BATCH, EMBED, POSITION, VOCAB},
};
use mt_shape::{DType, HostArray, LogicalAxis, LogicalRules, Mesh, Placement, axis, logical};
use mt_trace::{ProgramOptions, program};

use crate::harness::{assert_close, execute, integers, numbers};

const ROWS: usize = 8;
const LENGTH: usize = 12;
const TABLE: [Option<LogicalAxis>; 2] = [Some(logical::VOCAB), Some(logical::EMBED_VOCAB)];
const TOKENS: [Option<LogicalAxis>; 2] =
    [Some(logical::ACTIVATION_BATCH), Some(logical::ACTIVATION_NORM_LENGTH)];

#[derive(Tree)]
struct Table<L>(Vec<L>);

/// A program from a table, tokens and a cotangent to the tokens' vectors and the table's gradient.
fn lookup(target: Target, devices: usize, [vocabulary, width]: [usize; 2]) -> Program {
    let mesh = Mesh::new([("fsdp".to_owned(), devices)]).unwrap();
    let split = ["activation_batch", "embed_vocab"];
    let rules = logical::all().map(|axis| {
        let mesh_axes = if split.contains(&axis.name()) { vec!["fsdp".to_owned()] } else { Vec::new() };
        (axis.name().to_owned(), mesh_axes)
    });
    let placement = Arc::new(Placement::new(mesh, LogicalRules(rules.collect())));
    program(&ProgramOptions { placement, ..ProgramOptions::new("lookup", target) }, |inputs| {
        let (rows, positions) = (axis(BATCH, ROWS), axis(POSITION, LENGTH));
        let embed = axis(EMBED, width);
        let vectors = [TOKENS.as_slice(), &[None]].concat();
        let table = inputs.input("table", DType::F32, &[axis(VOCAB, vocabulary), embed], &TABLE, false);
        let tokens = inputs.input("tokens", DType::I32, &[rows, positions], &TOKENS, false);
        let cotangent = inputs.input("cotangent", DType::F32, &[rows, positions, embed], &vectors, false);
        let (_, [made], gradients) = inputs.region().value_and_grad(&Table(vec![table]), |_, table| {
            let made = Embedding { embedding: table.0[0].into() }.lookup(tokens, DType::F32);
            ((made * cotangent).sum_all(), [made])
        });
        let gradient = gradients.0[0].constrain(&TABLE);
        vec![inputs.output("vectors", made, &vectors), inputs.output("gradient", gradient, &TABLE)]
    })
    .unwrap()
}

/// The results for fixed arguments, and the kinds of collectives.
fn looked_up(program: &Program, [vocabulary, width]: [usize; 2]) -> (Vec<HostArray>, Vec<String>) {
    // Tokens repeat, so that devices add gradients to the same rows.
    let tokens: Vec<i32> = (0..ROWS * LENGTH).map(|place| (place * 7 % 23) as i32).collect();
    let arguments = [
        numbers(1, &[vocabulary, width]),
        integers(&[ROWS, LENGTH], &tokens),
        numbers(2, &[ROWS, LENGTH, width]),
    ];
    let (results, collectives) = execute(program, &arguments);
    (results, collectives.into_iter().map(|collective| collective.kind).collect())
}

#[test]
fn devices_exchange_vectors_instead_of_tables() {
    // Twice; then with too few columns per device, and with a table smaller than the vectors of a device's tokens.
    for (devices, sizes, is_exchanged) in
        [(2, [50, 256], true), (4, [24, 512], true), (4, [50, 256], false), (2, [40, 256], false)]
    {
        let what = format!("{devices} devices, {sizes:?}");
        let expected = looked_up(&lookup(Target::CPU, 1, sizes), sizes).0;
        let (made, kinds) = looked_up(&lookup(Target::Tpu, devices, sizes), sizes);
        for (name, (made, expected)) in ["vectors", "gradient"].iter().zip(made.iter().zip(&expected)) {
            assert_close(&format!("{what}: {name}"), made, expected, 1e-6);
        }
        let exchanges = kinds.iter().filter(|kind| *kind == "all-to-all").count();
        assert_eq!(exchanges, if is_exchanged { 2 } else { 0 }, "{what}: {kinds:?}");
    }
}
