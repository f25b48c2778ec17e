//! Linear attention and Gated DeltaNet, compared with their recurrences in `f64` on the host, and with themselves over
//! other chunks of a sequence.

use mt_nn::{
    Linear, NormOptions, RmsNorm, SequenceOrder,
    attention::Segments,
    axes::{BATCH, EMBED, HEAD_DIM, KEY_HEADS, KV_POSITION, POSITION, VALUE_DIM, VALUE_GROUP},
    gated_delta::{
        CHANNEL, DeltaOptions, DeltaSizes, DeltaState, DepthwiseKernel, GatedDelta, ONE, PROJECTED, RATES,
        TAP, VALUE_HEADS, VALUES,
    },
    linear_attention::{
        LinearAttentionInputs, LinearAttentionOptions, MemoryUpdate, empty_memory, linear_attention,
        unit_lower_inverse,
    },
};
use mt_shape::{Axis, DType, HostArray, axis};
use mt_trace::Tensor;

use crate::harness::{Argument, assert_close, gradients, integers, numbers, run};

const SIZES: DeltaSizes = DeltaSizes { key_heads: 2, group: 3, key: 5, value: 4, taps: 4 };

fn options(sizes: DeltaSizes, chunk: usize) -> DeltaOptions {
    DeltaOptions { sizes, chunk, normalizes: true, norm: NormOptions { epsilon: 1e-6, offset: 0.0 } }
}

const UPDATES: [MemoryUpdate; 2] = [MemoryUpdate::Sum, MemoryUpdate::Correction];

/// The axes and dimensions of the rule's inputs.
fn rule_axes(sizes: DeltaSizes, batch: usize, length: usize) -> [Vec<Axis>; 6] {
    let rows = [axis(BATCH, batch), axis(POSITION, length)];
    let heads = axis(KEY_HEADS, sizes.key_heads);
    let of = |own: &[Axis]| [&rows[..], own].concat();
    let (group, key) = (axis(VALUE_GROUP, sizes.group), axis(HEAD_DIM, sizes.key));
    [
        of(&[heads, key]),
        of(&[heads, key]),
        of(&[heads, group, axis(VALUE_DIM, sizes.value)]),
        of(&[heads, group]),
        of(&[heads, group]),
        of(&[]),
    ]
}

fn dims(axes: &[Axis]) -> Vec<usize> {
    axes.iter().map(|axis| axis.size).collect()
}

/// Inputs of the rule: strengths between 0 and 1, and decays of `e^-rate` on average. Padding neither writes nor decays.
fn rule_arguments(sizes: DeltaSizes, segments: &[&[i32]], rate: f64) -> Vec<Argument> {
    let (batch, length) = (segments.len(), segments[0].len());
    let segments: Vec<i32> = segments.concat();
    let axes = rule_axes(sizes, batch, length);
    let mut arguments: Vec<Argument> = Vec::new();
    for (index, axes) in axes.into_iter().enumerate() {
        let dims = dims(&axes);
        if index == 5 {
            arguments.push((axes, integers(&dims, &segments)));
            continue;
        }
        let drawn = numbers(index as u64 + 1, &dims).to_f64();
        let of_token = drawn.len() / (batch * length);
        let values = drawn.iter().enumerate().map(|(place, value)| {
            let is_token = segments[place / of_token] != 0;
            let value = match index {
                3 => 1.0 / (1.0 + (-2.0 * value).exp()),
                4 => -rate * value.abs(),
                _ => *value,
            };
            if index < 3 || is_token { value as f32 } else { 0.0 }
        });
        arguments
            .push((axes, HostArray::from_slice(DType::F32, &dims, &values.collect::<Vec<_>>()).unwrap()));
    }
    arguments
}

fn rule<'t>(t: &[Tensor<'t>], update: MemoryUpdate, options: &DeltaOptions) -> (Tensor<'t>, Tensor<'t>) {
    let [query, key, value, write, log_decay, segments] = [t[0], t[1], t[2], t[3], t[4], t[5]];
    let inputs = LinearAttentionInputs { query, key, value, write, log_decay, segments };
    linear_attention(&inputs, empty_memory(&inputs), &LinearAttentionOptions { update, ..options.rule() })
}

/// The outputs, and the memory at the end, token by token.
fn recurrence(
    sizes: DeltaSizes,
    update: MemoryUpdate,
    arguments: &[Argument],
    segments: &[&[i32]],
) -> (Vec<f64>, Vec<f64>) {
    let DeltaSizes { key_heads, group, key: width, value: value_width, .. } = sizes;
    let values: Vec<Vec<f64>> = arguments.iter().map(|(_, array)| array.to_f64()).collect();
    let length = segments[0].len();
    let unit = |of: &[f64]| -> Vec<f64> {
        let scale = (of.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
        of.iter().map(|x| x / scale).collect()
    };
    let mut output = vec![0.0; segments.len() * length * key_heads * group * value_width];
    let mut memory = vec![0.0; segments.len() * key_heads * width * group * value_width];
    for (row, segments) in segments.iter().enumerate() {
        for head in 0..key_heads {
            for member in 0..group {
                let mut state = vec![vec![0.0; value_width]; width];
                let mut document = segments[0];
                for (place, segment) in segments.iter().enumerate().filter(|(_, segment)| **segment != 0) {
                    let token = row * length + place;
                    let of_key = (token * key_heads + head) * width;
                    let (query, key) =
                        (unit(&values[0][of_key..][..width]), unit(&values[1][of_key..][..width]));
                    let of_head = (token * key_heads + head) * group + member;
                    let written = &values[2][of_head * value_width..][..value_width];
                    let (strength, decay) = (values[3][of_head], values[4][of_head].exp());
                    if *segment != document {
                        state.iter_mut().flatten().for_each(|element| *element = 0.0);
                        document = *segment;
                    }
                    state.iter_mut().flatten().for_each(|element| *element *= decay);
                    for (column, written) in written.iter().enumerate() {
                        let read = |with: &[f64], state: &[Vec<f64>]| -> f64 {
                            state.iter().zip(with).map(|(row, with)| row[column] * with).sum()
                        };
                        let recalled = match update {
                            MemoryUpdate::Sum => 0.0,
                            MemoryUpdate::Correction => read(&key, &state),
                        };
                        let added = strength * (written - recalled);
                        for (row, key) in state.iter_mut().zip(&key) {
                            row[column] += key * added;
                        }
                        output[of_head * value_width + column] = read(&query, &state) / (width as f64).sqrt();
                    }
                }
                for (place, row_of_state) in state.iter().enumerate() {
                    let start = (((row * key_heads + head) * width + place) * group + member) * value_width;
                    memory[start..start + value_width].copy_from_slice(row_of_state);
                }
            }
        }
    }
    (output, memory)
}

fn largest(values: &[f64]) -> f64 {
    values.iter().fold(0.0, |largest: f64, value| largest.max(value.abs()))
}

/// Checks outputs at tokens, and the memory after them.
#[track_caller]
fn check_rule(sizes: DeltaSizes, segments: &[&[i32]], rate: f64, chunk: usize, bound: f64) {
    for update in UPDATES {
        check_update(sizes, update, segments, rate, chunk, bound);
    }
}

#[track_caller]
fn check_update(
    sizes: DeltaSizes,
    update: MemoryUpdate,
    segments: &[&[i32]],
    rate: f64,
    chunk: usize,
    bound: f64,
) {
    let arguments = rule_arguments(sizes, segments, rate);
    let (output, memory) = recurrence(sizes, update, &arguments, segments);
    let made = run("linear_attention", &arguments, |_, t| {
        let (output, memory) = rule(&t, update, &options(sizes, chunk));
        vec![output, memory]
    });
    let is_token: Vec<bool> =
        segments.iter().flat_map(|row| row.iter().map(|segment| *segment != 0)).collect();
    let of_token = output.len() / is_token.len();
    let own = made[0].to_f64();
    let difference = own
        .iter()
        .zip(&output)
        .enumerate()
        .map(|(place, (own, expected))| if is_token[place / of_token] { own - expected } else { 0.0 });
    let error = largest(&difference.collect::<Vec<_>>()) / largest(&output);
    assert!(error < bound, "{update:?} {sizes:?} {chunk} {rate}: outputs differ by {error:e}");
    let difference: Vec<f64> = made[1].to_f64().iter().zip(&memory).map(|(a, b)| a - b).collect();
    let error = largest(&difference) / largest(&memory);
    assert!(error < bound, "{update:?} {sizes:?} {chunk} {rate}: memories differ by {error:e}");
}

#[test]
fn chunks_follow_the_recurrence() {
    let row = |length: usize| vec![1; length];
    for length in [1, 2, 7, 21, 64, 130] {
        let (one, two) = (row(length), row(length));
        for chunk in [1, 4, 8, 64] {
            check_rule(SIZES, &[&one, &two], 0.3, chunk, 1e-5);
        }
    }
    let long = row(200);
    let one_head = DeltaSizes { key_heads: 1, group: 1, key: 16, value: 8, taps: 2 };
    check_rule(one_head, &[&long], 0.0, 64, 2e-5);
    // Sums of a chunk's decays reach -640, whose differences have fewer digits.
    check_rule(one_head, &[&long], 20.0, 64, 1e-4);
}

#[test]
fn documents_begin_with_an_empty_memory() {
    let packed: Vec<i32> = [vec![1; 3], vec![2; 9], vec![5; 1], vec![6; 6], vec![0; 4]].concat();
    let whole = [vec![4; 11], vec![3; 12]].concat();
    let empty = vec![0; 23];
    for chunk in [1, 5, 8, 64] {
        check_rule(SIZES, &[&packed, &whole, &empty], 0.2, chunk, 1e-5);
    }
}

/// The gradients of a chunked rule are those of one without chunks, and the slope of the recurrence.
#[test]
fn gradients_do_not_depend_on_the_chunk() {
    for update in UPDATES {
        check_gradients(update);
    }
}

#[track_caller]
fn check_gradients(update: MemoryUpdate) {
    let segments: Vec<i32> = [vec![1; 8], vec![2; 11], vec![0; 2]].concat();
    let (segments, other) = (segments.as_slice(), vec![1; 21]);
    let rows: [&[i32]; 2] = [segments, &other];
    let arguments = rule_arguments(SIZES, &rows, 0.2);
    let axes = rule_axes(SIZES, 2, 21);
    // Outputs of padding are not defined.
    let mut cotangent = numbers(50, &dims(&axes[2])).to_f64();
    let of_token = cotangent.len() / 42;
    cotangent[19 * of_token..21 * of_token].fill(0.0);
    let narrow: Vec<f32> = cotangent.iter().map(|value| *value as f32).collect();
    let narrow = HostArray::from_slice(DType::F32, &dims(&axes[2]), &narrow).unwrap();
    let of = |chunk| {
        gradients("linear_attention", &arguments, &narrow, |t| rule(t, update, &options(SIZES, chunk)).0).1
    };
    let expected = of(1);
    for chunk in [4, 8, 64] {
        for (index, (own, expected)) in of(chunk).iter().zip(&expected).enumerate() {
            assert_close(&format!("{update:?}, chunk {chunk}, gradient {index}"), own, expected, 2e-5);
        }
    }
    for (index, gradient) in of(8).iter().enumerate() {
        let direction = numbers(70 + index as u64, gradient.dims()).to_f64();
        let along = |step: f64| {
            let mut moved = arguments.clone();
            let values: Vec<f64> =
                moved[index].1.to_f64().iter().zip(&direction).map(|(x, d)| x + step * d).collect();
            moved[index].1 = HostArray::from_slice(DType::F64, gradient.dims(), &values).unwrap();
            let (output, _) = recurrence(SIZES, update, &moved, &rows);
            output.iter().zip(&cotangent).map(|(y, c)| y * c).sum::<f64>()
        };
        let slope = (along(1e-5) - along(-1e-5)) / 2e-5;
        // Padding has no slope on the host.
        let own: f64 = gradient
            .to_f64()
            .iter()
            .zip(&direction)
            .enumerate()
            .filter(|(place, _)| rows.concat()[place * 42 / direction.len()] != 0)
            .map(|(_, (gradient, direction))| gradient * direction)
            .sum();
        assert!(
            (own - slope).abs() < 1e-4 * slope.abs().max(1.0),
            "{update:?}, gradient {index}: {own} instead of {slope}"
        );
    }
}

/// The inverse of `1 + lower` by substitution.
fn substituted(lower: &[f64], size: usize) -> Vec<f64> {
    let mut inverse = vec![0.0; size * size];
    for row in 0..size {
        for column in 0..=row {
            let identity = if row == column { 1.0 } else { 0.0 };
            let known: f64 = (column..row).map(|k| lower[row * size + k] * inverse[k * size + column]).sum();
            inverse[row * size + column] = identity - known;
        }
    }
    inverse
}

/// With equal keys all elements are 1, and powers of the matrix reach 10¹⁷.
#[test]
fn inverses_are_accurate_for_equal_keys() {
    for size in [1, 2, 5, 16, 17, 33, 64, 100] {
        let random = numbers(7, &[size * size]).to_f64();
        let kinds: [(&str, &dyn Fn(usize) -> f64); 2] =
            [("ones", &|_| 1.0), ("random", &|i| random[i] * 0.3)];
        for (what, element) in kinds {
            let lower: Vec<f64> = (0..size * size)
                .map(|i| if i % size < i / size { f64::from(element(i) as f32) } else { 0.0 })
                .collect();
            let narrow: Vec<f32> = lower.iter().map(|value| *value as f32).collect();
            let axes = vec![axis(POSITION, size), axis(KV_POSITION, size)];
            let array = HostArray::from_slice(DType::F32, &[size, size], &narrow).unwrap();
            let made = run("inverse", &[(axes, array)], |_, t| vec![unit_lower_inverse(t[0])]);
            let expected = substituted(&lower, size);
            let difference: Vec<f64> = made[0].to_f64().iter().zip(&expected).map(|(a, b)| a - b).collect();
            let error = largest(&difference) / largest(&expected);
            assert!(error < 1e-5, "{what} of {size}: {error:e}");
        }
    }
}

const WIDTH: usize = 10;

/// The input of a layer and its parameters.
fn layer_arguments(sizes: DeltaSizes, batch: usize, length: usize) -> Vec<Argument> {
    let embed = axis(EMBED, WIDTH);
    let shapes: [Vec<Axis>; 8] = [
        vec![axis(BATCH, batch), axis(POSITION, length), embed],
        vec![embed, axis(PROJECTED, sizes.projected())],
        vec![embed, axis(RATES, 2 * sizes.value_heads())],
        vec![axis(TAP, sizes.taps), axis(ONE, 1), axis(CHANNEL, sizes.channels())],
        vec![axis(VALUE_HEADS, sizes.value_heads())],
        vec![axis(VALUE_HEADS, sizes.value_heads())],
        vec![axis(VALUE_DIM, sizes.value)],
        vec![axis(VALUES, sizes.value_heads() * sizes.value), embed],
    ];
    let drawn = shapes.into_iter().enumerate().map(|(seed, axes)| {
        let dims = dims(&axes);
        (axes, numbers(seed as u64 + 20, &dims))
    });
    drawn.collect()
}

fn layer<'t>(
    t: &[Tensor<'t>],
    segments: Tensor<'t>,
    state: Option<DeltaState<Tensor<'t>>>,
    options: &DeltaOptions,
) -> (Tensor<'t>, DeltaState<Tensor<'t>>) {
    let layer = GatedDelta {
        in_proj_qkvz: Linear::dense(t[1]),
        in_proj_ba: Linear::dense(t[2]),
        conv1d: DepthwiseKernel { kernel: t[3] },
        a_log: t[4],
        dt_bias: t[5],
        norm: RmsNorm { scale: t[6] },
        out_proj: Linear::dense(t[7]),
    };
    layer.forward(t[0], Segments::within(segments, SequenceOrder::AsRead), state, options)
}

/// The output of a layer for rows of documents.
fn layer_output(sizes: DeltaSizes, arguments: &[Argument], segments: &[i32], chunk: usize) -> Vec<f64> {
    let rows = arguments[0].0[..2].to_vec();
    let mut all = arguments.to_vec();
    all.push((rows.clone(), integers(&dims(&rows), segments)));
    run("gated_delta", &all, |_, t| vec![layer(&t, t[8], None, &options(sizes, chunk)).0])[0].to_f64()
}

/// The tokens `range` of the first row of a layer's input.
fn cut(arguments: &[Argument], range: std::ops::Range<usize>) -> Vec<Argument> {
    let values: Vec<f32> =
        arguments[0].1.as_slice::<f32>().unwrap()[range.start * WIDTH..range.end * WIDTH].to_vec();
    let mut cut = arguments.to_vec();
    cut[0] = (
        vec![axis(BATCH, 1), axis(POSITION, range.len()), axis(EMBED, WIDTH)],
        HostArray::from_slice(DType::F32, &[1, range.len(), WIDTH], &values).unwrap(),
    );
    cut
}

#[track_caller]
fn assert_near(what: &str, own: &[f64], expected: &[f64]) {
    let difference: Vec<f64> = own.iter().zip(expected).map(|(a, b)| a - b).collect();
    let error = largest(&difference) / largest(expected);
    assert!(own.len() == expected.len() && error < 1e-5, "{what}: {error:e}");
}

/// Neither the convolution nor the memory crosses the border of documents.
#[test]
fn packed_documents_equal_separate_ones() {
    for sizes in
        [SIZES, DeltaSizes { taps: 1, ..SIZES }, DeltaSizes { key_heads: 1, group: 1, taps: 3, ..SIZES }]
    {
        let arguments = layer_arguments(sizes, 1, 20);
        let segments = [vec![1; 2], vec![2; 9], vec![3; 1], vec![4; 5], vec![0; 3]].concat();
        for chunk in [3, 8, 64] {
            let whole = layer_output(sizes, &arguments, &segments, chunk);
            for range in [0..2, 2..11, 11..12, 12..17] {
                let own = layer_output(sizes, &cut(&arguments, range.clone()), &vec![1; range.len()], chunk);
                assert_near(&format!("{range:?}"), &own, &whole[range.start * WIDTH..range.end * WIDTH]);
            }
        }
    }
}

/// Rows continue after different numbers of tokens, whose padding follows them.
#[test]
fn a_state_continues_each_row() {
    for sizes in [SIZES, DeltaSizes { taps: 1, ..SIZES }, DeltaSizes { taps: 6, ..SIZES }] {
        let (length, total) = (9, 14);
        let arguments = layer_arguments(sizes, 1, total);
        let whole = layer_output(sizes, &arguments, &vec![1; total], 4);
        for before in [0, 1, 2, 5, 9] {
            let mut first = cut(&arguments, 0..length);
            let segments: Vec<i32> = (0..length).map(|place| i32::from(place < before)).collect();
            let rest = total - before;
            first.push((vec![axis(BATCH, 1), axis(POSITION, length)], integers(&[1, length], &segments)));
            first.push(cut(&arguments, before..total).remove(0));
            let made = run("two_calls", &first, |region, t| {
                let options = options(sizes, 4);
                let batch = t[0].axes()[0];
                let zeros = |axes: &[Axis]| region.full(DType::F32, axes, 0.0);
                let state = DeltaState {
                    window: (sizes.taps > 1).then(|| zeros(&sizes.window(batch))),
                    memory: zeros(&sizes.memory(batch)),
                };
                let (_, mut state) = layer(&t[..8], t[8], Some(state), &options);
                // Tokens one at a time, except the last two.
                let mut outputs = Vec::new();
                let steps =
                    (0..rest - 2).map(|place| place..place + 1).chain(std::iter::once(rest - 2..rest));
                for step in steps {
                    let mut own = t[..8].to_vec();
                    own[0] = t[9].slice(POSITION, step.start, step.end);
                    let segments = region.full(DType::I32, &own[0].axes()[..2], 1.0);
                    let (output, next) = layer(&own, segments, Some(state), &options);
                    outputs.push(output);
                    state = next;
                }
                vec![outputs[0].concatenate(&outputs[1..], POSITION)]
            });
            assert_near(&format!("{before} tokens, {sizes:?}"), &made[0].to_f64(), &whole[before * WIDTH..]);
        }
    }
}
