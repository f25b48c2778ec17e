//! The text of tiny programs. A snapshot proves structure, never numbers; `UPDATE_SNAPSHOTS=1` writes them anew.

use std::{env, fs, path::Path};

use mt_shape::{Axis, DType, HostArray, LogicalAxis, Placement, axis};
use mt_trace::{Inputs, Memory, Output, SavePolicy, ScanOptions};

use crate::{Leaf, leaves, mesh, options};

fn rows() -> Option<LogicalAxis> {
    Some(LogicalAxis::named("rows"))
}

const A: Axis = axis("a", 4);
const B: Axis = axis("b", 2);
const LAYERS: Axis = axis("layers", 3);

#[track_caller]
fn check(name: &str, placement: Placement, code: impl for<'t> FnOnce(&Inputs<'t>) -> Vec<Output<'t>>) {
    let actual = mt_trace::program(&options(placement), code).unwrap().text;
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/snapshots").join(format!("{name}.mlir"));
    if env::var_os("UPDATE_SNAPSHOTS").is_some() {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, &actual).unwrap();
    }
    let expected = fs::read_to_string(&path).unwrap_or_default();
    assert!(
        actual == expected,
        "{} differs; run with UPDATE_SNAPSHOTS=1 if that is right\n{actual}",
        path.display()
    );
}

#[test]
fn product() {
    check("product", Placement::single(), |inputs| {
        let x = inputs.input("x", DType::BF16, &[A], &[None], false);
        let weight = inputs.input("weight", DType::BF16, &[A, B], &[None, None], false);
        let result = inputs.region().scope("mlp", || weight.dot(x, &["a"]).silu());
        vec![inputs.replicated("result", result)]
    });
}

#[test]
fn constants() {
    check("constants", Placement::single(), |inputs| {
        let region = inputs.region();
        let truths = HostArray::from_bytes(DType::Bool, &[2, 3], &[1, 0, 1, 1, 1, 0]).unwrap();
        let table = HostArray::from_slice(DType::F32, &[2], &[1.5_f32, f32::NAN]).unwrap();
        let tensors = [
            region.table(truths, &[B, axis("c", 3)]),
            region.table(table, &[B]),
            region.full(DType::F32, &[A], f64::INFINITY),
            region.full(DType::F64, &[], -0.0),
            region.full(DType::BF16, &[], 0.1),
            region.integer(DType::U64, -1),
            region.integer(DType::I8, -128),
            region.full(DType::Bool, &[B], 1.0),
        ];
        tensors.iter().map(|tensor| inputs.replicated("constant", *tensor)).collect()
    });
}

#[test]
fn scan_with_gradient() {
    check("scan_with_gradient", Placement::single(), |inputs| {
        let x = inputs.input("x", DType::F32, &[A], &[None], false);
        let weights = inputs.input("weights", DType::F32, &[LAYERS, A], &[None, None], true);
        let (value, [], gradients) = inputs.region().value_and_grad(&leaves(&[weights]), |body, weights| {
            let options = ScanOptions::over(LAYERS)
                .saving(SavePolicy::Names([("out".to_owned(), Memory::Device)].into()));
            let ([last], []) = body.scan(options, [x], &weights, |body, [x], weights| {
                ([body.scope("layer", || (x * weights[0].value).named("out").sin())], [])
            });
            (last.sum_all(), [])
        });
        vec![inputs.replicated("loss", value), inputs.replicated("weights", weights - gradients[0].value)]
    });
}

#[test]
fn offloaded() {
    check("offloaded", Placement::single(), |inputs| {
        let x = inputs.input("x", DType::F32, &[A], &[None], false);
        let weights = inputs.input("weights", DType::F32, &[LAYERS, A], &[None, None], true);
        let (value, [], gradients) = inputs.region().value_and_grad(&leaves(&[weights]), |body, weights| {
            let names = ["input", "out"].map(|name| (name.to_owned(), Memory::Host));
            let options = ScanOptions::over(LAYERS).saving(SavePolicy::Names(names.into()));
            let ([last], []) = body.scan(options, [x], &weights, |_, [x], weights| {
                ([(x.named("input").tanh() * weights[0].value).named("out").sin()], [])
            });
            (last.sum_all(), [])
        });
        vec![inputs.replicated("loss", value), inputs.replicated("gradient", gradients[0].value)]
    });
}

#[test]
fn control_flow() {
    check("control_flow", Placement::single(), |inputs| {
        let x = inputs.input("x", DType::F32, &[A], &[None], false);
        let index = inputs.input("index", DType::I32, &[], &[], false);
        let [chosen] = inputs.region().case(index, &[&|_| [x.sin()], &|_| [x * 2.0]]);
        let [last] =
            inputs.region().while_loop(None, [chosen], |_, [x]| x.sum_all().less(10.0), |_, [y]| [y + x]);
        let nothing: Vec<Leaf<mt_trace::Tensor<'_>>> = Vec::new();
        let [result] = inputs
            .region()
            .remat(SavePolicy::Everything, [last], &nothing, |_, [x], _| [x.sort_with(&[], "a", true)[0]]);
        vec![inputs.replicated("result", result)]
    });
}

#[test]
fn sharded() {
    check("sharded", mesh(), |inputs| {
        let x = inputs.input("x", DType::F32, &[A, B], &[rows(), None], true);
        let key = inputs.region().key(1).fold_in_name("dropout");
        let kept = key.uniform(&[A, B]).less(0.5);
        let result = kept.select(x, x * 0.0).constrain(&[rows(), None]);
        vec![inputs.output("result", result, &[rows(), None]), inputs.replicated("sum", result.sum(&["a"]))]
    });
}
