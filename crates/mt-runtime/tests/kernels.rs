//! Programs with kernels against programs without.

use std::sync::Arc;

use mt_ir::{
    Binary, Boundary, CpuKernels, Dot, Graph, Literal, Memory, Op, Precision, PrintOptions, Program,
    Reduction, SavePolicy, Scalar, Scan, Target, TensorType, ValueId, eliminate_dead_code, print_program,
};
use mt_runtime::testing;
use mt_shape::{DType, HostArray, Mesh, Sharding};

const ALL: Target = Target::Cpu(CpuKernels { f32: true, bf16: true, ..CpuKernels::NONE });

fn printed(graph: &Graph, target: Target) -> Program {
    printed_with(graph, target, Precision::Default)
}

fn printed_with(graph: &Graph, target: Target, precision: Precision) -> Program {
    let boundary = |ty: &TensorType| Boundary {
        name: "value".into(),
        sharding: Sharding::replicated(Arc::new(Mesh::single()), ty.rank()),
        donated: false,
        memory: Memory::Device,
    };
    let inputs: Vec<Boundary> = graph.input_types().iter().map(boundary).collect();
    let outputs: Vec<Boundary> = graph.output_types().iter().map(boundary).collect();
    let options = PrintOptions { name: "products".into(), mesh: Arc::new(Mesh::single()), target, precision };
    print_program(graph, &inputs, &outputs, &options)
}

/// Numbers in -1..1 that differ from array to array.
fn numbers(ty: &TensorType, seed: usize) -> HostArray {
    let values: Vec<f32> = (0..ty.num_elements())
        .map(|index| ((index * 7919 + seed * 104_729) % 2003) as f32 / 1001.5 - 1.0)
        .collect();
    match ty.dtype {
        DType::BF16 => {
            let values: Vec<half::bf16> = values.into_iter().map(half::bf16::from_f32).collect();
            HostArray::from_slice(DType::BF16, &ty.dims, &values).unwrap()
        }
        DType::F16 => {
            let values: Vec<half::f16> = values.into_iter().map(half::f16::from_f32).collect();
            HostArray::from_slice(DType::F16, &ty.dims, &values).unwrap()
        }
        _ => HostArray::from_slice(DType::F32, &ty.dims, &values).unwrap(),
    }
}

/// Runs the graph with and without kernels and checks that `num_calls` calls are printed.
#[track_caller]
fn check(name: &str, graph: &Graph, num_calls: usize) {
    let graph = eliminate_dead_code(graph);
    let inputs: Vec<HostArray> =
        graph.input_types().iter().enumerate().map(|(index, ty)| numbers(ty, index)).collect();
    let with = printed(&graph, ALL);
    assert_eq!(with.text.matches("maxtext.dot").count(), num_calls, "{name}:\n{}", with.text);
    let with = testing::run(&with, &inputs).unwrap_or_else(|error| panic!("{name}: {error}"));
    let without = testing::run(&printed(&graph, Target::CPU), &inputs).unwrap();
    for (with, without) in with.iter().zip(&without) {
        let (with, without) = (with.to_f64(), without.to_f64());
        let largest = without.iter().fold(0.0_f64, |largest, value| largest.max(value.abs()));
        // Kernels sum in another order; `bf16` results may be off by one representable number.
        let is_narrow = graph.output_types()[0].dtype == DType::BF16;
        let bound = if is_narrow { largest * 2.0_f64.powi(-7) } else { largest * 2e-6 };
        for (index, (with, without)) in with.iter().zip(&without).enumerate() {
            assert!((with - without).abs() <= bound, "{name}, element {index}: {with}, not {without}");
        }
    }
}

fn dot(batch: [&[usize]; 2], contract: [&[usize]; 2], result: DType) -> Op {
    let [lhs_batch, rhs_batch] = batch.map(<[usize]>::to_vec);
    let [lhs_contract, rhs_contract] = contract.map(<[usize]>::to_vec);
    Op::Dot(Dot {
        lhs_batch,
        rhs_batch,
        lhs_contract,
        rhs_contract,
        result,
        precision: Precision::Default,
        may_round: false,
    })
}

fn product(
    types: [TensorType; 2],
    dot: Op,
    prepare: impl Fn(&mut Graph, ValueId, usize) -> ValueId,
) -> Graph {
    let mut graph = Graph::new();
    let inputs = types.map(|ty| graph.input(ty));
    let sides: Vec<ValueId> =
        inputs.iter().enumerate().map(|(side, input)| prepare(&mut graph, *input, side)).collect();
    let result = graph.emit(dot, &sides);
    graph.set_outputs(vec![result]);
    graph
}

fn ty(dtype: DType, dims: &[usize]) -> TensorType {
    TensorType::new(dtype, dims)
}

#[test]
fn products_of_all_orders() {
    for (dtype, result) in [(DType::F32, DType::F32), (DType::BF16, DType::F32), (DType::BF16, DType::BF16)] {
        let check = |name: &str, lhs: &[usize], rhs: &[usize], op: Op| {
            let graph = product([ty(dtype, lhs), ty(dtype, rhs)], op, |_, input, _| input);
            check(&format!("{name} {dtype:?}"), &graph, 1);
        };
        check("forward", &[2, 33, 40], &[40, 70], dot([&[], &[]], [&[2], &[0]], result));
        check("input's gradient", &[2, 33, 70], &[40, 70], dot([&[], &[]], [&[2], &[1]], result));
        check("weight's gradient", &[2, 33, 40], &[2, 33, 70], dot([&[], &[]], [&[0, 1], &[0, 1]], result));
        check("heads", &[3, 17, 4, 24], &[3, 19, 4, 24], dot([&[0, 2], &[0, 2]], [&[3], &[3]], result));
        check("batch last", &[17, 24, 12], &[24, 19, 12], dot([&[2], &[2]], [&[1], &[0]], result));
        check("a row", &[1, 300], &[300, 517], dot([&[], &[]], [&[1], &[0]], result));
        check("a row with a table's rows", &[1, 300], &[517, 300], dot([&[], &[]], [&[1], &[1]], result));
    }
}

/// Products with few rows. The last one multiplies the result of the first.
fn products_of(rows: usize, dtype: DType) -> Graph {
    let mut graph = Graph::new();
    let x = graph.input(ty(dtype, &[rows, 1, 128]));
    let dims: [&[usize]; 4] = [&[128, 5, 60], &[200, 128], &[128, 300], &[rows, 1, 128]];
    let [first, second, third, other] = dims.map(|dims| graph.input(ty(dtype, dims)));
    let by_rows = || dot([&[], &[]], [&[2], &[0]], dtype);
    let first = graph.emit(by_rows(), &[x, first]);
    let named = graph.emit(Op::StopGradient, &[x]);
    let second = graph.emit(dot([&[], &[]], [&[2], &[1]], dtype), &[named, second]);
    // With another left operand.
    let of_other = graph.emit(by_rows(), &[other, third]);
    let third = graph.emit(by_rows(), &[x, third]);
    let made = graph.reshape(of_other, &[300 * rows]);
    let made = graph.emit(Op::Slice { start: vec![0], limit: vec![128 * 2], stride: vec![1] }, &[made]);
    let made = graph.reshape(made, &[128, 2]);
    let wide = Op::Broadcast { dims: vec![128, 2, 70], mapping: vec![0, 1] };
    let made = graph.emit(wide, &[made]);
    let last = graph.emit(by_rows(), &[x, made]);
    graph.set_outputs(vec![first, second, third, of_other, last]);
    graph
}

#[test]
fn few_rows_are_multiplied_together() {
    for dtype in [DType::F32, DType::BF16] {
        for rows in [1, 3, 16] {
            check(&format!("{rows} rows in {dtype}"), &products_of(rows, dtype), 3);
        }
        check(&format!("many rows in {dtype}"), &products_of(17, dtype), 5);
    }
}

#[test]
fn few_rows_in_a_scan_are_multiplied_together() {
    // Weights are slices of stacks and are cast at their use; products are stacked, and one of them is carried.
    let mut body = Graph::new();
    let x = body.input(ty(DType::F32, &[2, 64]));
    let [first, second] = [[64, 200], [300, 64]].map(|dims| body.input(ty(DType::F32, &dims)));
    let narrow = body.convert(x, DType::BF16);
    let mut multiply = |weight: ValueId, contract: usize| {
        let weight = body.convert(weight, DType::BF16);
        body.emit(dot([&[], &[]], [&[1], &[contract]], DType::BF16), &[narrow, weight])
    };
    let (first, second) = (multiply(first, 0), multiply(second, 1));
    let slice = Op::Slice { start: vec![0, 0], limit: vec![2, 64], stride: vec![1, 1] };
    let next = body.emit(slice, &[first]);
    let next = body.convert(next, DType::F32);
    body.set_outputs(vec![next, first, second]);
    for reverse in [false, true] {
        let mut graph = Graph::new();
        let x = graph.input(ty(DType::F32, &[2, 64]));
        let [first, second] = [[3, 64, 200], [3, 300, 64]].map(|dims| graph.input(ty(DType::F32, &dims)));
        let small = graph.emit(
            Op::Constant(Literal::Splat { ty: ty(DType::F32, &[2, 64]), value: Scalar::Float(0.1) }),
            &[],
        );
        let x = graph.emit(Op::Binary(Binary::Multiply), &[x, small]);
        let body = Arc::new(body.clone());
        let scan =
            Scan { body, length: 3, reverse, num_captured: 0, num_carry: 1, save: SavePolicy::Everything };
        let results = graph.emit_all(Op::Scan(scan), &[x, first, second]);
        graph.set_outputs(results[1..].to_vec());
        let text = printed(&graph, ALL).text;
        let call = text.lines().find(|line| line.contains("maxtext.dot")).unwrap();
        assert!(
            call.contains("tensor<3x64x200xf32>, tensor<3x300x64xf32>, tensor<i32>, tensor<i32>)"),
            "{call}"
        );
        check(&format!("reverse: {reverse}"), &graph, 1);
    }
}

#[test]
fn few_rows_with_biases_are_multiplied_together() {
    let mut graph = Graph::new();
    let dims: [&[usize]; 4] = [&[2, 64], &[64, 200], &[64, 200], &[2, 200]];
    let [x, first, second, bias] = dims.map(|dims| graph.input(ty(DType::F32, dims)));
    let sums = [first, second].map(|weight| {
        let product = graph.emit(dot([&[], &[]], [&[1], &[0]], DType::F32), &[x, weight]);
        graph.add(product, bias)
    });
    graph.set_outputs(sums.to_vec());
    check("biases", &graph, 1);
}

#[test]
fn views_are_read_in_place() {
    let transposed = |graph: &mut Graph, input: ValueId, _: usize| {
        graph.emit(Op::Transpose { permutation: vec![2, 0, 1] }, &[input])
    };
    let types = || [ty(DType::F32, &[12, 20, 16]), ty(DType::F32, &[12, 20, 16])];
    check("transposed", &product(types(), dot([&[0], &[0]], [&[1], &[1]], DType::F32), transposed), 1);
    let split = |graph: &mut Graph, input: ValueId, _: usize| {
        let input = graph.emit(Op::Transpose { permutation: vec![1, 0, 2] }, &[input]);
        graph.reshape(input, &[5, 4, 12, 1, 16])
    };
    let op = dot([&[1], &[1]], [&[0, 4], &[0, 4]], DType::F32);
    check("split", &product(types(), op, split), 1);
    // Adjacent elements of the new order are not adjacent in memory, so the compiler must copy them.
    let merged = |graph: &mut Graph, input: ValueId, _: usize| {
        let input = graph.emit(Op::Transpose { permutation: vec![1, 0, 2] }, &[input]);
        graph.reshape(input, &[240, 16])
    };
    check("merged", &product(types(), dot([&[], &[]], [&[1], &[1]], DType::F32), merged), 1);
    let cast = |graph: &mut Graph, input: ValueId, _: usize| graph.convert(input, DType::BF16);
    let types = [ty(DType::F32, &[70, 50]), ty(DType::F32, &[50, 90])];
    let cast = product(types, dot([&[], &[]], [&[1], &[0]], DType::BF16), cast);
    let text = printed(&cast, ALL).text;
    let call = text.lines().find(|line| line.contains("maxtext.dot")).unwrap();
    assert!(call.contains(": (tensor<70x50xf32>, tensor<50x90xf32>) ->"), "{call}");
    check("cast", &cast, 1);
}

#[test]
fn layers_of_a_scan_are_read_from_their_stack() {
    let mut body = Graph::new();
    let x = body.input(ty(DType::F32, &[24, 40]));
    let weight = body.input(ty(DType::F32, &[40, 40]));
    let narrow = [x, weight].map(|value| body.convert(value, DType::BF16));
    let product = body.emit(dot([&[], &[]], [&[1], &[0]], DType::BF16), &narrow);
    let next = body.convert(product, DType::F32);
    body.set_outputs(vec![next, weight]);
    for reverse in [false, true] {
        let mut graph = Graph::new();
        let inputs = [ty(DType::F32, &[24, 40]), ty(DType::F32, &[5, 40, 40])].map(|ty| graph.input(ty));
        let scan = Scan {
            body: Arc::new(body.clone()),
            length: 5,
            reverse,
            num_captured: 0,
            num_carry: 1,
            save: SavePolicy::Everything,
        };
        let results = graph.emit_all(Op::Scan(scan), &inputs);
        graph.set_outputs(results);
        let text = printed(&graph, ALL).text;
        let call = text.lines().find(|line| line.contains("maxtext.dot")).unwrap();
        assert!(call.contains("(tensor<24x40xbf16>, tensor<5x40x40xf32>, tensor<i32>)"), "{call}");
        check("scan", &graph, 1);
    }
}

#[test]
fn small_products_and_other_types_are_left_to_the_compiler() {
    let plain = |_: &mut Graph, input: ValueId, _: usize| input;
    let op = || dot([&[], &[]], [&[1], &[0]], DType::F32);
    check("small", &product([ty(DType::F32, &[4, 8]), ty(DType::F32, &[8, 4])], op(), plain), 0);
    let types = [ty(DType::F16, &[64, 64]), ty(DType::F16, &[64, 64])];
    check("half", &product(types, op(), plain), 0);
}

#[test]
fn products_are_added_in_place() {
    for dtype in [DType::F32, DType::BF16] {
        let types = [ty(dtype, &[30, 50]), ty(dtype, &[50, 70]), ty(DType::F32, &[30, 70])];
        let mut graph = Graph::new();
        let [lhs, rhs, addend] = types.map(|ty| graph.input(ty));
        let product = || dot([&[], &[]], [&[1], &[0]], DType::F32);
        let first = graph.emit(product(), &[lhs, rhs]);
        let second = graph.emit(product(), &[lhs, rhs]);
        // The addend is still needed afterwards.
        let sum = graph.add(first, addend);
        let sum = graph.add(sum, second);
        graph.set_outputs(vec![sum, addend]);
        let text = printed(&graph, ALL).text;
        assert_eq!(text.matches("stablehlo.add").count(), 0, "{text}");
        check("added", &graph, 2);
        // The addend is multiplied as well, so it must not be overwritten in between.
        let mut graph = Graph::new();
        let [both, rhs] = [ty(DType::F32, &[40, 40]), ty(DType::F32, &[40, 40])].map(|ty| graph.input(ty));
        let both = graph.add(both, both);
        let product_of_both = graph.emit(product(), &[both, rhs]);
        let sum = graph.add(both, product_of_both);
        graph.set_outputs(vec![sum]);
        check("added to an operand", &graph, 1);
        // A product with another use is stored anyway.
        let mut graph = Graph::new();
        let types = [ty(dtype, &[30, 50]), ty(dtype, &[50, 70]), ty(DType::F32, &[30, 70])];
        let [lhs, rhs, addend] = types.map(|ty| graph.input(ty));
        let product = graph.emit(product(), &[lhs, rhs]);
        let sum = graph.add(addend, product);
        let twice = graph.add(product, product);
        graph.set_outputs(vec![sum, twice]);
        check("shared", &graph, 1);
    }
}

#[test]
fn slices_are_replaced_in_place() {
    let types = [ty(DType::BF16, &[3, 2, 7, 4, 5]), ty(DType::BF16, &[3, 2, 2, 4, 5])];
    let position = |graph: &mut Graph, value: i64| {
        let ty = TensorType::scalar(DType::I32);
        graph.emit(Op::Constant(Literal::Splat { ty, value: Scalar::Int(value) }), &[])
    };
    // The last start does not fit and is clamped.
    for start in [0, 3, 5, 6] {
        let mut graph = Graph::new();
        let [all, slice] = types.clone().map(|ty| graph.input(ty));
        let starts = [0, 0, start, 0, 0].map(|start| position(&mut graph, start));
        let operands = [[all, slice].as_slice(), &starts].concat();
        let updated = graph.emit(Op::DynamicUpdateSlice, &operands);
        // The previous contents are still needed.
        graph.set_outputs(vec![updated, all]);
        let text = printed(&graph, ALL).text;
        assert_eq!(text.matches("maxtext.update_slice").count(), 1, "{text}");
        check("update", &graph, 0);
    }
}

#[test]
fn products_are_written_into_stacks() {
    for (dtype, result) in [(DType::F32, DType::F32), (DType::BF16, DType::BF16)] {
        for reverse in [false, true] {
            // In each iteration: the product, the product again, and another value computed from it.
            let mut body = Graph::new();
            let [carry, lhs, rhs] = [&[20, 30], &[20, 50], &[50, 30]].map(|dims| body.input(ty(dtype, dims)));
            let product = body.emit(dot([&[], &[]], [&[1], &[0]], result), &[lhs, rhs]);
            let named = body.emit(Op::StopGradient, &[product]);
            let doubled = body.add(product, product);
            body.set_outputs(vec![doubled, named, product, carry]);
            let scan = Scan {
                body: Arc::new(body),
                length: 3,
                reverse,
                num_captured: 0,
                num_carry: 1,
                save: SavePolicy::Everything,
            };
            let mut graph = Graph::new();
            let [carry, lhs, rhs] =
                [[20, 30].as_slice(), &[3, 20, 50], &[3, 50, 30]].map(|dims| graph.input(ty(dtype, dims)));
            let results = graph.emit_all(Op::Scan(scan), &[carry, lhs, rhs]);
            graph.set_outputs(results);
            check(&format!("{dtype}, {reverse}"), &graph, 1);
            let text = printed(&graph, ALL).text;
            assert_eq!(text.matches("into = 600").count(), 1, "{text}");
        }
    }
}

#[test]
fn sums_over_leading_dimensions_are_products() {
    let check = |dtype: DType, dims: &[usize], dimensions: &[usize], num_calls: usize| {
        let mut graph = Graph::new();
        let input = graph.input(ty(dtype, dims));
        let op = Op::Reduce { kind: Reduction::Sum, dimensions: dimensions.to_vec() };
        let sum = graph.emit(op, &[input]);
        graph.set_outputs(vec![sum]);
        let program = printed(&graph, ALL);
        assert_eq!(program.text.matches("maxtext.dot").count(), num_calls, "{dims:?}");
        let input = numbers(&ty(dtype, dims), 1);
        let sums = testing::run(&program, std::slice::from_ref(&input)).unwrap()[0].to_f64();
        if num_calls == 0 {
            return;
        }
        // Not compared with the program without kernels, which rounds partial sums to `bf16`.
        let input = input.to_f64();
        for (index, sum) in sums.iter().enumerate() {
            let wanted: f64 = input.iter().skip(index).step_by(sums.len()).sum();
            let bound = if dtype == DType::BF16 { wanted.abs() * 2.0_f64.powi(-8) } else { 1e-4 };
            assert!((sum - wanted).abs() <= bound, "{dtype}, {dims:?}, element {index}: {sum}, not {wanted}");
        }
    };
    for dtype in [DType::F32, DType::BF16] {
        check(dtype, &[3, 129, 70], &[0, 1], 1);
        check(dtype, &[300, 5, 33], &[0], 1);
        check(dtype, &[40_000, 65], &[0], 1);
        check(dtype, &[70_000, 65], &[0], 0);
        check(dtype, &[40_000, 2], &[0], 0);
        check(dtype, &[3, 9, 7], &[0, 1], 0);
        check(dtype, &[30, 129, 70], &[2], 0);
        check(dtype, &[30, 129, 70], &[1], 0);
    }
}

#[test]
fn products_of_f32_keep_the_precision_of_the_program() {
    const DIMS: [usize; 3] = [70, 300, 130];
    let [rows, depth, columns] = DIMS;
    let types = [ty(DType::F32, &[rows, depth]), ty(DType::F32, &[depth, columns])];
    let graph = product(types.clone(), dot([&[], &[]], [&[1], &[0]], DType::F32), |_, input, _| input);
    let inputs = [0, 1].map(|side| numbers(&types[side], side));
    let [lhs, rhs] = [0, 1].map(|side| inputs[side].to_f64());
    // For each element of the result: the terms that it is the sum of.
    let terms = |index: usize| {
        let (row, column) = (index / columns, index % columns);
        let (lhs, rhs) = (&lhs, &rhs);
        (0..depth).map(move |step| lhs[row * depth + step] * rhs[step * columns + column])
    };
    // Sums of 300 terms lose less than 2^-18 in `f32`.
    for (precision, arithmetic, bound) in
        [(Precision::Default, 0, -18), (Precision::High, 2, -14), (Precision::Highest, 0, -18)]
    {
        let program = printed_with(&graph, ALL, precision);
        let attribute = format!("arithmetic = {arithmetic} : i64");
        assert!(program.text.contains(&attribute), "{precision:?}:\n{}", program.text);
        let result = testing::run(&program, &inputs).unwrap()[0].to_f64();
        for (index, value) in result.iter().enumerate() {
            let exact: f64 = terms(index).sum();
            let size: f64 = terms(index).map(f64::abs).sum();
            let error = (value - exact).abs();
            assert!(
                error <= size * f64::powi(2.0, bound),
                "{precision:?}, element {index}: {value}, not {exact}"
            );
        }
    }
}
