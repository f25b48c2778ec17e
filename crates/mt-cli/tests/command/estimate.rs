//! `maxtext estimate`.

use serde_json::Value;

use crate::{check_output, check_wrong, maxtext};

fn estimate(arguments: &[&str]) -> Value {
    let all: Vec<&str> = ["estimate", "--json"].iter().chain(arguments).copied().collect();
    let outcome = maxtext(&all);
    assert_eq!(outcome.status, 0, "{}", outcome.errors);
    serde_json::from_str(&outcome.output).unwrap()
}

const LLAMA2_7B: [&str; 3] = ["model_name=llama2-7b", "max_target_length=2048", "per_device_batch_size=1"];

/// The sizes of the compiled step's arguments in MaxText for the same keys.
#[test]
fn state_is_that_of_the_placement() {
    for (topology, expected) in [("v5e-256", 315_973_120_u64), ("v5p-128", 1_263_574_528)] {
        let found = estimate(&[&LLAMA2_7B[..], &[&format!("compile_topology={topology}")]].concat());
        let memory = &found["device_memory"];
        let bytes: u64 =
            ["parameters", "optimizer", "batch"].iter().map(|kind| memory[kind].as_u64().unwrap()).sum();
        assert!(bytes.abs_diff(expected) < expected / 100, "{topology}: {bytes} instead of {expected}");
        assert_eq!(found["verdict"], "fits");
    }
}

#[test]
fn numbers_follow_from_shapes() {
    let found =
        estimate(&[&LLAMA2_7B[..], &["compile_topology=v5e-4", "compile_topology_num_slices=2"]].concat());
    assert_eq!((found["num_devices"].as_u64(), found["num_slices"].as_u64()), (Some(8), Some(2)));
    assert_eq!(found["mesh"], serde_json::json!({ "data": 2, "fsdp": 4 }));
    assert_eq!(found["parameters"]["total"], 6_738_415_616_u64);
    assert_eq!(found["parameters"]["embedding"], 32_000 * 4096);
    assert_eq!(found["tokens_per_step"], 8 * 2048);
    // 6 FLOPs per token and weight without embeddings, and for each layer 12 times the width and half of all pairs of
    // positions.
    let weights = 6_738_415_616_u64 - 32_000 * 4096;
    let per_row = 6 * weights * 2048 + 32 * 12 * 4096 * 2048 * 2048 / 2;
    assert_eq!(found["flops_per_step"]["formula"], (8 * per_row) as f64);
    let chinchilla = &found["training"]["chinchilla"];
    assert_eq!(chinchilla["tokens"], 20.0 * 6_738_415_616.0);
    let time = &chinchilla["times"][0];
    // 6 FLOPs per active parameter, for 20 tokens per parameter.
    let seconds = 6.0 * weights as f64 * 20.0 * 6_738_415_616.0 / (8.0 * 197e12 * 0.4);
    assert!((time["seconds"].as_f64().unwrap() / seconds - 1.0).abs() < 1e-9, "{time}");
    // The state alone exceeds the memory of the chips.
    assert_eq!(found["verdict"], "does not fit");
    let advice = found["advice"].to_string();
    assert!(advice.contains("more devices") && advice.contains("along `data`"), "{advice}");
}

#[test]
fn what_is_kept_or_offloaded_shows() {
    let with = |keys: &[&str]| {
        let found = estimate(&[&LLAMA2_7B[..], &["compile_topology=v5e-256"], keys].concat());
        let bytes = |value: &Value| value.as_u64().unwrap();
        (bytes(&found["device_memory"]["activations"]), bytes(&found["host_memory"]))
    };
    let inputs = 32 * 2048 * 4096 * 2;
    assert_eq!(with(&["remat_policy=full"]), (inputs, 0));
    // Queries, keys and values have the width and the number of the input.
    assert_eq!(with(&["remat_policy=save_qkv_proj"]), (4 * inputs, 0));
    assert_eq!(with(&["remat_policy=qkv_proj_offloaded"]), (inputs, 3 * inputs));
}

#[test]
fn estimates_are_read_by_people() {
    check_output(
        &["estimate"],
        &["the quick start on 1 device", "name the hardware", "20 tokens per parameter"],
    );
    check_output(
        &["estimate", "model_name=llama2-70b", "compile_topology=v5e-16", "--mfu", "45"],
        &[
            "llama2-70b on v5e-16: 16 chips (v5e), fsdp=16",
            "does not fit",
            "what helps",
            "at 45% of the chips'",
        ],
    );
}

#[test]
fn impossible_requests_are_refused() {
    check_wrong(&["estimate", "compile_topology=v5x-128"], &["no hardware named `v5x-128`", "`v5p-128`"]);
    for name in ["h100:16", "h100:3", "v5e:9999999999x9999999999", "v5p:64x64x64"] {
        check_wrong(
            &["estimate", &format!("compile_topology={name}")],
            &[&format!("no hardware named `{name}` (command line)"), "the nearest are"],
        );
    }
    check_wrong(
        &["estimate", "model_name=llama2-7b", "compile_topology=v5e-16", "ici_fsdp_parallelism=32"],
        &["`ici_fsdp_parallelism=32`", "16"],
    );
    check_wrong(&["estimate", "attention=paged"], &["paged attention outside of serving is not built yet"]);
    check_wrong(&["estimate", "--mfu", "0"], &["--mfu"]);
    check_wrong(&["estimate", "steps=3", "--mfu", "120"], &["`--mfu` is `120`", "percent"]);
    check_wrong(&["train", "compile_topology=v5e-4"], &["`compile_topology` is `v5e-4`", "estimate"]);
}
