//! Times a product whose rows choose among adapters, in three forms, as a ratio to the product without adapters.
//!
//! `cargo run --release -p mt-nn --example row_adapters` prints the processor time in milliseconds. Grouped products read the
//! arrays of the chosen adapters once. A gather copies them for each row. Products with all adapters at once mask those that
//! a row did not choose. `weight/rows.rs` uses grouped products.

mod common;

use mt_ir::Target;
use mt_nn::{
    ADAPTER, Adapter, DENSE, Initializer, LORA_RANK, ParamSpec, Weight,
    axes::{BATCH, EMBED, MLP, POSITION},
};
use mt_runtime::{CompileSettings, Executable, Platform, target_of, testing::cpu};
use mt_shape::{AdapterChoices, Attached, Axis, DType, Tree, axis, logical};
use mt_trace::{ProgramOptions, Tensor, program};

const RANK: usize = 16;
const REPEATS: usize = 40;
/// Several products in a call, as layers have them, so that the cost of a call does not count.
const PRODUCTS: usize = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Plain,
    Grouped,
    Gathered,
    Together,
}

#[derive(Clone, Copy)]
struct Sizes {
    rows: usize,
    tokens: usize,
    input: usize,
    output: usize,
    adapters: usize,
}

fn main() {
    let target = target_of(Platform::Cpu, true, false).expect("the environment names features that exist");
    for (rows, tokens) in [(8, 1), (1, 1), (1, 256), (4, 64)] {
        for (input, output) in [(1024, 1024), (1024, 4096)] {
            for adapters in [4, 32] {
                let sizes = Sizes { rows, tokens, input, output, adapters };
                // Three quarters of the rows have adapters.
                let mixed: Vec<i32> = (0..rows)
                    .map(|row| if 4 * row < 3 * rows { (row * 4 / rows + 1) as i32 } else { 0 })
                    .collect();
                let plain = milliseconds(target, Form::Plain, sizes, &mixed);
                let of = |form| {
                    let time = milliseconds(target, form, sizes, &mixed);
                    let base = milliseconds(target, form, sizes, &vec![0; rows]);
                    format!(
                        "{form:?} {time:.2} ({:.2}), without chosen ones {:.2}",
                        time / plain,
                        base / plain
                    )
                };
                println!(
                    "{rows} rows of {tokens}, {input} to {output}, {adapters} adapters: plain {plain:.2}; {}; {}; {}",
                    of(Form::Grouped),
                    of(Form::Gathered),
                    of(Form::Together)
                );
            }
        }
    }
}

/// The processor time of a call, the minimum over several ones.
fn milliseconds(target: Target, form: Form, sizes: Sizes, choices: &[i32]) -> f64 {
    let step = compiled(target, form, sizes);
    common::milliseconds(&step, REPEATS, |array| {
        bytemuck::cast_slice_mut(array.bytes_mut()).copy_from_slice(choices);
    })
}

fn compiled(target: Target, form: Form, sizes: Sizes) -> Executable {
    let Sizes { rows, tokens, input, output, adapters } = sizes;
    let [batch, position, embed] = [axis(BATCH, rows), axis(POSITION, tokens), axis(EMBED, input)];
    let program = program(&ProgramOptions::new("row_adapters", target), |inputs| {
        let declare = |name: String, axes: &[Axis], dtype: DType| {
            inputs.input(&name, dtype, axes, &vec![None; axes.len()], false)
        };
        let x = declare("x".to_owned(), &[batch, position, embed], DType::F32);
        let choices = declare("choices".to_owned(), &[batch], DType::I32);
        let axes = [batch, axis(ADAPTER, adapters)];
        let numbers = inputs.region().iota(DType::I32, axes[1]).broadcast(&axes) + 1.0;
        let is_chosen = numbers.equals(choices);
        let counts = is_chosen.cast(DType::I32).sum(&[BATCH]);
        let products = (0..PRODUCTS).map(|number| {
            let dense = [(embed, logical::EMBED), (axis(MLP, output), logical::MLP)];
            let adapter = Adapter {
                rank: RANK,
                scale: 1.0,
                has_magnitude: false,
                dropout: 0.0,
                choices: Some(adapters),
            };
            let spec = ParamSpec::new(dense, Initializer::Zeros);
            let specs = Weight::declare_adapted(&DENSE, spec, 1, adapter);
            let arrays: Vec<Tensor<'_>> = specs
                .leaves()
                .into_iter()
                .map(|(path, spec)| declare(format!("{path}.{number}"), &spec.axes, DType::F32))
                .collect();
            let [weight, a, b] = [0, 1, 2].map(|index| arrays[index]);
            let plain = weight.dot(x, &[EMBED]);
            let product = match form {
                Form::Plain => plain,
                Form::Grouped => {
                    let mut weight = specs.with_leaves(arrays.iter().copied());
                    weight.attach(|_| Attached::Rows(AdapterChoices { choices, counts }));
                    weight.dot(x, &[EMBED])
                }
                Form::Gathered => {
                    let [a, b] = [a, b].map(|array| with_zeros(array).take(ADAPTER, choices));
                    plain + x.contract(a, &[EMBED]).contract(b, &[LORA_RANK])
                }
                Form::Together => {
                    let low = a.dot(x, &[EMBED]);
                    let masked = low * is_chosen.cast(DType::F32).broadcast(&low.axes());
                    plain + b.dot(masked, &[ADAPTER, LORA_RANK])
                }
            };
            inputs.replicated("product", product)
        });
        products.collect()
    })
    .expect("the products can be traced");
    cpu(1).compile(&program, &CompileSettings::default()).expect("the program compiles")
}

/// The arrays of adapters behind those of no adapter.
fn with_zeros<'t>(array: Tensor<'t>) -> Tensor<'t> {
    let mut axes = array.axes().to_vec();
    axes[0] = axis(ADAPTER, 1);
    array.region().full(DType::F32, &axes, 0.0).concatenate(&[array], ADAPTER)
}
