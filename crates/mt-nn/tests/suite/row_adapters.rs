//! Adapters among which the rows of a batch choose, compared with one adapter of all rows.

use mt_ir::{CpuKernels, Target};
use mt_nn::{
    ADAPTER, Adapter, DENSE, Initializer, LORA_RANK, ParamSpec, Weight,
    axes::{BATCH, HEAD_DIM, KV_HEADS, MLP, POSITION, QUERY_HEADS},
};
use mt_shape::{AdapterChoices, Attached, Axis, DType, HostArray, Tree, axis, logical};
use mt_testing::Random;
use mt_trace::Tensor;

use crate::harness::{Argument, assert_close, run_for};

const RANKS: [usize; 3] = [1, 4, 2];
const TOLERANCE: f64 = 1e-5;

fn random(axes: &[Axis], seed: u64) -> Argument {
    let mut random = Random::new(seed);
    let dims: Vec<usize> = axes.iter().map(|axis| axis.size).collect();
    let elements: Vec<f32> =
        (0..dims.iter().product()).map(|_| random.below(2001) as f32 / 1000.0 - 1.0).collect();
    (axes.to_vec(), HostArray::from_slice(DType::F32, &dims, &elements).unwrap())
}

/// The product of a weight with `num_inputs` input axes, whose rows choose `choices`, is that of each row with its adapter.
fn check(inputs: &[Axis], outputs: &[Axis], choices: &[i32]) {
    let (batch, position) = (axis(BATCH, choices.len()), axis(POSITION, 3));
    let (most, rank) = (axis(ADAPTER, RANKS.len()), axis(LORA_RANK, 4));
    // The context of attention has its heads before its positions.
    let of_x = [&[batch], &inputs[..1], &[position], &inputs[1..]].concat();
    let arguments = vec![
        random(&of_x, 1),
        random(&[inputs, outputs].concat(), 2),
        random(&[&[most], inputs, &[rank]].concat(), 3),
        random(&[&[most, rank], outputs].concat(), 4),
        (vec![batch], HostArray::from_slice(DType::I32, &[choices.len()], choices).unwrap()),
    ];
    for target in [Target::CPU, Target::Cpu(CpuKernels { f32: true, bf16: true, ..CpuKernels::NONE })] {
        check_for(target, (inputs, outputs), choices, &arguments);
    }
}

fn check_for(target: Target, (inputs, outputs): (&[Axis], &[Axis]), choices: &[i32], arguments: &[Argument]) {
    let over: Vec<&'static str> = inputs.iter().map(|axis| axis.name).collect();
    let batch = axis(BATCH, choices.len());
    let (most, rank) = (axis(ADAPTER, RANKS.len()), axis(LORA_RANK, 4));
    let declared = |rank, choices| {
        let spec = ParamSpec {
            axes: [inputs, outputs].concat(),
            logical_axes: vec![Some(logical::EMBED); inputs.len() + outputs.len()],
            ..ParamSpec::new([], Initializer::Zeros)
        };
        let adapter = Adapter { rank, scale: 1.0, has_magnitude: false, dropout: 0.0, choices };
        Weight::declare_adapted(&DENSE, spec, inputs.len(), adapter)
    };
    let results = run_for(target, "row_adapters", arguments, |region, t| {
        let [x, weight, a, b, chosen] = t[..] else { unreachable!("there are five arguments") };
        // Ranks are padded with zeros.
        let ranks: Vec<i32> = RANKS.iter().map(|rank| *rank as i32).collect();
        let ranks = HostArray::from_slice(DType::I32, &[RANKS.len()], &ranks).unwrap();
        let is_used =
            region.iota(DType::I32, rank).broadcast(&[most, rank]).less(region.table(ranks, &[most]));
        let [a, b] =
            [a, b].map(|array: Tensor<'_>| array * is_used.cast(DType::F32).broadcast(&array.axes()));
        let numbers = region.iota(DType::I32, most).broadcast(&[batch, most]) + 1.0;
        let counts = numbers.equals(chosen).cast(DType::I32).sum(&[BATCH]);
        let mut of_rows = declared(rank.size, Some(RANKS.len())).with_leaves([weight, a, b]);
        of_rows.attach(|_| Attached::Rows(AdapterChoices { choices: chosen, counts }));
        let made = of_rows.dot(x, &over);
        // Without choices, no row has an adapter.
        let without = declared(rank.size, Some(RANKS.len())).with_leaves([weight, a, b]).dot(x, &over);
        let each: Vec<Tensor<'_>> = choices
            .iter()
            .enumerate()
            .map(|(row, choice)| {
                let x = x.slice(BATCH, row, row + 1);
                match choice.checked_sub(1) {
                    Some(index) if *choice > 0 => {
                        let index = index as usize;
                        let a = a.at(ADAPTER, index).slice(LORA_RANK, 0, RANKS[index]);
                        let b = b.at(ADAPTER, index).slice(LORA_RANK, 0, RANKS[index]);
                        declared(RANKS[index], None).with_leaves([weight, a, b]).dot(x, &over)
                    }
                    _ => weight.dot(x, &over),
                }
            })
            .collect();
        vec![made, each[0].concatenate(&each[1..], BATCH), without, weight.dot(x, &over)]
    });
    assert_close("rows", &results[0], &results[1], TOLERANCE);
    assert_close("without choices", &results[2], &results[3], TOLERANCE);
}

#[test]
fn each_row_has_its_adapter() {
    let [heads, dim, mlp] = [axis(KV_HEADS, 2), axis(HEAD_DIM, 5), axis(MLP, 7)];
    for choices in [&[1, 1, 3, 0][..], &[2, 3], &[0, 0], &[3, 0, 0, 0, 0], &[1, 2, 3]] {
        check(&[heads, dim], &[mlp], choices);
        check(&[mlp], &[axis(QUERY_HEADS, 3), dim], choices);
        check(&[mlp], &[dim], choices);
    }
}
