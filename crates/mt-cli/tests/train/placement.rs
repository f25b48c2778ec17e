//! Virtual devices.

use crate::support::{Outcome, Sandbox, outcome};

/// Dimensions that eight devices divide, and ten steps of eight rows.
const KEYS: [&str; 4] = ["vocab_size=264", "steps=10", "eval_interval=-1", "debug_sharding=true"];

/// The bytes that one device holds of each parameter.
fn bytes_on_a_device(outcome: &Outcome) -> Vec<(String, u64)> {
    let table = outcome.errors.lines().skip_while(|line| !line.starts_with("parameter ")).skip(1);
    let rows = table.take_while(|line| !line.starts_with("state on one device"));
    let rows = rows.map(|line| {
        let (name, bytes) = (line.split(' ').next(), line.rsplit(' ').next());
        (name.unwrap().to_owned(), bytes.unwrap().parse().unwrap())
    });
    rows.collect()
}

#[test]
fn eight_devices_train_as_one() {
    let sandbox = Sandbox::new();
    let one = sandbox.train("one", &[&KEYS[..], &["per_device_batch_size=8"]].concat()).succeeded();
    let one_device = bytes_on_a_device(&one);
    assert_eq!(one_device.len(), 12, "{}", one.errors);
    let expected = sandbox.metrics("one").losses();

    let split: [&[&str]; 2] =
        [&["ici_fsdp_parallelism=8"], &["ici_fsdp_parallelism=4", "ici_tensor_parallelism=2"]];
    for (index, mesh) in split.into_iter().enumerate() {
        let run = format!("eight{index}");
        let keys = [&KEYS[..], &["per_device_batch_size=1"], mesh].concat();
        // One of the two ways to ask for eight devices.
        let eight = match index {
            0 => sandbox.train(&run, &[&keys[..], &["num_cpu_devices=8"]].concat()),
            _ => outcome(
                sandbox.command(&run, &keys).env("XLA_FLAGS", "--xla_force_host_platform_device_count=8"),
            ),
        }
        .succeeded();
        for (step, (loss, expected)) in sandbox.metrics(&run).losses().iter().zip(&expected).enumerate() {
            assert!(
                (loss - expected).abs() <= 1e-5 * expected,
                "{mesh:?}, step {step}: {loss}, not {expected}"
            );
        }
        for ((name, bytes), (_, whole)) in bytes_on_a_device(&eight).iter().zip(&one_device) {
            // Vectors of norms have no axis that `fsdp` splits.
            let parts = match (name.ends_with("scale"), index) {
                (true, 0) => 1,
                (true, _) => 2,
                (false, _) => 8,
            };
            assert_eq!(bytes * parts, *whole, "{name} on {mesh:?}");
        }
    }
    assert_eq!(sandbox.metrics("eight0").losses().len(), 10);

    // Another number of devices may go on as long as the batch stays the same.
    let keys = ["vocab_size=264", "eval_interval=-1", "steps=12"];
    sandbox
        .train("eight0", &[&keys[..], &["num_cpu_devices=2", "ici_fsdp_parallelism=8"]].concat())
        .refused(&["`ici_fsdp_parallelism=8`", "which is 2"]);
    let two = ["per_device_batch_size=4", "num_cpu_devices=2"];
    sandbox.train("eight0", &[&keys[..], &two].concat()).succeeded();
    sandbox.train("one", &[&keys[..], &["per_device_batch_size=8"]].concat()).succeeded();
    let (one, two) = (sandbox.metrics("one").losses(), sandbox.metrics("eight0").losses());
    assert_eq!(two.len(), 12);
    assert!((one[11] - two[11]).abs() <= 1e-5 * one[11], "{one:?} {two:?}");
    sandbox
        .train("eight0", &["vocab_size=264", "eval_interval=-1", "steps=14", "per_device_batch_size=1"])
        .refused(&["`per_device_batch_size`"]);
}
