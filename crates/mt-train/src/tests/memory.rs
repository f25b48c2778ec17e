//! The memory that holds the state between steps.

use mt_ir::{Memory, Program, ProgramValue};
use mt_runtime::Platform;

use super::training::{NUM_ROWS, Setup};

const OFFLOADED: &str = "mhlo.memory_kind = \"pinned_host\"";

fn train_step(arguments: &[&str], platform: Platform) -> Program {
    let setup = Setup::new(arguments, 1);
    setup.programs_for(platform).train_step(NUM_ROWS).unwrap().program
}

/// The names of the arguments or results that are in host memory.
fn on_host(values: &[ProgramValue]) -> Vec<&str> {
    values.iter().filter(|value| value.memory == Memory::Host).map(|value| value.name.as_str()).collect()
}

#[test]
fn what_is_offloaded_is_in_host_memory_between_steps() {
    let (parameters, slots) = ("parameter_memory_host_offload=true", "optimizer_memory_host_offload=true");
    for scan in ["scan_layers=true", "scan_layers=false"] {
        for (keys, prefixes) in [
            (&[][..], &[][..]),
            (&[parameters], &["params."]),
            (&[slots], &["mu.", "nu."]),
            (&[parameters, slots], &["params.", "mu.", "nu."]),
        ] {
            let program = train_step(&[keys, &[scan]].concat(), Platform::Tpu);
            let named = |values: &[ProgramValue]| -> Vec<String> {
                let fits = |name: &&str| prefixes.iter().any(|prefix| name.starts_with(prefix));
                values.iter().map(|value| value.name.as_str()).filter(fits).map(str::to_owned).collect()
            };
            let expected = named(&program.inputs);
            assert_eq!(expected.is_empty(), keys.is_empty());
            assert_eq!(on_host(&program.inputs), expected, "{keys:?}");
            assert_eq!(on_host(&program.outputs), expected, "{keys:?}");
            assert_eq!(program.text.matches(OFFLOADED).count(), 2 * expected.len(), "{keys:?}");
            // Each is moved to the host at the end, and still reuses the memory of its predecessor.
            let moves = program.text.matches("{_xla_buffer_placement = \"pinned_host\"}").count();
            assert_eq!(moves, expected.len(), "{keys:?}");
            let donated = program.inputs.iter().filter(|input| input.donated).count();
            assert_eq!(program.text.matches("tf.aliasing_output").count(), donated, "{keys:?}");
        }
    }
}

/// Weights of scanned layers are moved inside the loops, one layer at a time.
#[test]
fn a_layers_weights_are_brought_when_it_is_computed() {
    let program = train_step(&["parameter_memory_host_offload=true", "scan_layers=true"], Platform::Tpu);
    let moves = program.text.lines().filter(|line| line.contains("{_xla_buffer_placement = \"device\"}"));
    // Operations in loops are indented further.
    let (outside, inside): (Vec<&str>, Vec<&str>) = moves.partition(|line| !line.starts_with("      "));
    let of_layers = program.inputs.iter().filter(|input| input.name.starts_with("params.layers.")).count();
    let parameters = program.inputs.iter().filter(|input| input.name.starts_with("params.")).count();
    assert!(of_layers > 0 && inside.len() >= 2 * (of_layers - 2), "{} of {of_layers}", inside.len());
    // The update moves all parameters; the model moves those outside of layers.
    assert_eq!(outside.len(), parameters + (parameters - of_layers));
}

#[test]
fn a_cpu_has_one_memory() {
    let keys = ["parameter_memory_host_offload=true", "optimizer_memory_host_offload=true"];
    let plain = train_step(&[], Platform::Cpu);
    assert_eq!(train_step(&keys, Platform::Cpu).text, plain.text);
}

/// XLA would assign every result of a barrier with host arguments to the host, and refuse the program.
#[test]
fn weights_on_the_host_pass_no_barrier() {
    let program = train_step(&["parameter_memory_host_offload=true", "scan_layers=false"], Platform::Tpu);
    // Arguments are numbered in order, parameters first.
    let on_host = on_host(&program.inputs).len();
    let barriers = program.text.lines().filter(|line| line.contains("\"stablehlo.optimization_barrier\""));
    let mut count = 0;
    for line in barriers {
        let operands = line.split_once("barrier\"(").unwrap().1.split_once(')').unwrap().0;
        let mut numbers =
            operands.split(", ").map(|operand| operand.trim_start_matches('%').parse::<usize>().unwrap());
        assert!(numbers.all(|number| number >= on_host), "{line}");
        count += 1;
    }
    assert!(count > 0);
}
