//! Which keys may change when a run is resumed.

use mt_config::{Config, Request};

fn resolved(arguments: &[&str]) -> Config {
    let arguments = arguments.iter().map(|&argument| argument.to_owned()).collect();
    Config::resolve(&Request { arguments, ..Request::default() }).unwrap()
}

#[test]
fn resuming_allows_what_does_not_change_the_run() {
    let saved = resolved(&["steps=10", "per_device_batch_size=4"]);
    let conflicts = |arguments: &[&str], devices: usize| -> Vec<&str> {
        let now = resolved(arguments);
        now.resume_conflicts(devices, &saved, 2).iter().map(|conflict| conflict.key.name).collect()
    };
    let nothing: [&str; 0] = [];
    assert_eq!(conflicts(&["steps=20", "per_device_batch_size=4", "log_period=1"], 2), nothing);
    assert_eq!(
        conflicts(&["steps=10", "per_device_batch_size=8"], 1),
        nothing,
        "the same batch on fewer devices"
    );
    assert_eq!(conflicts(&["per_device_batch_size=4"], 4), ["per_device_batch_size"]);
    let way = ["scan_layers=false", "num_vocab_tiling=4", "remat_policy=minimal"];
    assert_eq!(conflicts(&[&["per_device_batch_size=4"][..], &way].concat(), 2), nothing);
    assert_eq!(conflicts(&["per_device_batch_size=2", "gradient_accumulation_steps=2"], 2), nothing);
    assert_eq!(conflicts(&["per_device_batch_size=1", "gradient_accumulation_steps=8"], 1), nothing);
    assert_eq!(
        conflicts(&["per_device_batch_size=4", "gradient_accumulation_steps=2"], 2),
        ["per_device_batch_size"]
    );
    assert_eq!(
        conflicts(&["per_device_batch_size=4", "head_dim=64", "data_shuffle_seed=1", "hardware=cpu"], 2),
        ["head_dim", "data_shuffle_seed"]
    );
    assert_eq!(conflicts(&["per_device_batch_size=4", "matmul_precision=high"], 2), ["matmul_precision"]);
}

#[test]
fn resuming_compares_batches_that_grow_over_all_devices() {
    let growing = |[full, start, increment]: [u32; 3]| {
        resolved(&[
            "enable_rampup_batch_size=true",
            &format!("per_device_batch_size={full}"),
            &format!("per_device_batch_size_start={start}"),
            &format!("per_device_batch_size_increment={increment}"),
        ])
    };
    let check = |now: [u32; 3], devices: usize, expected: &[(&str, &str, &str)]| {
        let conflicts = growing(now).resume_conflicts(devices, &growing([4, 2, 1]), 8);
        let conflicts: Vec<(&str, &str, &str)> = conflicts
            .iter()
            .map(|conflict| (conflict.key.name, conflict.left.as_str(), conflict.right.as_str()))
            .collect();
        assert_eq!(conflicts, expected, "{now:?} on {devices} devices");
    };
    check([4, 2, 1], 8, &[]);
    check([8, 4, 2], 4, &[]);
    check(
        [8, 2, 1],
        4,
        &[
            ("per_device_batch_size_start", "2.0 on 8 devices", "2.0 on 4 devices"),
            ("per_device_batch_size_increment", "1.0 on 8 devices", "1.0 on 4 devices"),
        ],
    );
    check([8, 4, 4], 4, &[("per_device_batch_size_increment", "1.0 on 8 devices", "4.0 on 4 devices")]);
    check([4, 1, 1], 8, &[("per_device_batch_size_start", "2.0", "1.0")]);
    let parted = |[full, start, increment]: [u32; 3]| {
        let parted = growing([full, start, increment]).with_derived("gradient_accumulation_steps", 2);
        parted.resume_conflicts(8, &growing([4, 2, 2]), 8)
    };
    assert!(parted([2, 1, 1]).is_empty());
    let conflicts = parted([2, 2, 1]);
    assert_eq!(conflicts.len(), 1);
    assert_eq!(
        (conflicts[0].key.name, conflicts[0].right.as_str()),
        ("per_device_batch_size_start", "2.0 with gradient_accumulation_steps=2")
    );
}
