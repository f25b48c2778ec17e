//! Models with layers of Mamba-2, alone and among those with attention.

use mt_models::{Model, hugging_face::settings_of};
use mt_nn::SequenceOrder;
use serde_json::{Value, json};

use crate::{
    context,
    directory::Directory,
    equivalence,
    harness::{Batch, model},
};

/// Three heads for each group, and chunks that divide no length.
const SMALL: &[&str] = &[
    "mamba_num_heads=6",
    "mamba_num_groups=2",
    "mamba_head_dim=8",
    "mamba_state_dim=5",
    "mamba_chunk_size=5",
];
const ALONE: &[&str] = &["decoder_block=mamba2"];
const HYBRID: &[&str] =
    &["decoder_block=bamba", "attention_pattern=linear,global,linear", "mamba_proj_bias=true"];

fn tiny(family: &[&'static str], others: &[&'static str]) -> Box<dyn Model> {
    model(&[SMALL, family, others].concat())
}

#[test]
fn packed_documents_equal_separate_ones() {
    for family in [ALONE, HYBRID] {
        for others in
            [["scan_layers=true", "mamba_conv_bias=false"], ["scan_layers=false", "mamba_conv_kernel_dim=1"]]
        {
            let what = format!("{family:?} {others:?}");
            equivalence::check_packed(&what, &*tiny(family, &others), &[3, 11, 1, 9], [27, 256], 1e-4);
        }
    }
}

#[test]
fn the_size_of_chunks_changes_nothing() {
    for name in ["mamba2_two_groups", "mamba2_biases_tied_one_layer", "bamba_every_second"] {
        equivalence::check_settings(
            name,
            &["mamba_chunk_size=1", "mamba_chunk_size=4", "mamba_chunk_size=64"],
        );
    }
}

const FSDP: &[&str] = &["ici_fsdp_parallelism=8"];
const TENSOR: &[&str] = &["ici_fsdp_parallelism=4", "ici_tensor_parallelism=2"];
const CONTEXT: &[&str] = &["ici_context_parallelism=4", "ici_fsdp_parallelism=2"];

#[test]
fn eight_devices_equal_one() {
    let rows: [&[usize]; 8] = [&[9, 15], &[24], &[5, 7], &[24], &[24], &[1, 23], &[20], &[24]];
    let batch = Batch::packed(&rows, 24, 256);
    let meshes = [
        (FSDP, SequenceOrder::AsRead),
        (TENSOR, SequenceOrder::AsRead),
        (CONTEXT, SequenceOrder::Paired { shards: 4 }),
    ];
    for family in [ALONE, HYBRID] {
        for scan in ["scan_layers=true", "scan_layers=false"] {
            context::check_with(&[SMALL, family, &[scan, "remat_policy=full"]].concat(), &meshes, &batch);
        }
    }
    // All heads share one group, whose projections no device can split.
    let one_group = [SMALL, ALONE, &["mamba_num_groups=1", "scan_layers=true"]].concat();
    context::check_with(&one_group, &meshes[1..2], &batch);
}

/// The FLOPs of a step are proportional to the length.
#[test]
fn operations_grow_linearly_with_the_length() {
    let model = tiny(ALONE, &["mamba_chunk_size=64", "remat_policy=full"]);
    equivalence::check_products_are_linear(&*model);
    // The formula of the model counts these products, without the chunks that the backward pass computes again and
    // without the pairs that the mask hides.
    let wide = ["mamba_chunk_size=16", "mamba_state_dim=64", "mamba_head_dim=64", "remat_policy=none"];
    let model = tiny(ALONE, &wide);
    equivalence::check_counted_products(&*model);
}

/// The first published files name the embedding in the singular.
#[test]
fn the_earlier_name_of_the_embedding_is_read() {
    let directory = Directory::open("mamba2_two_groups");
    let model = directory.model(&[]);
    let folder = tempfile::tempdir().unwrap();
    let bytes = std::fs::read(directory.path.join("model.safetensors")).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let renamed = tensors.iter().map(|(name, view)| (name.replace("embeddings", "embedding"), view));
    safetensors::serialize_to_file(renamed, None, &folder.path().join("model.safetensors")).unwrap();
    let other = Directory { name: directory.name.clone(), path: folder.path().to_owned() };
    assert_eq!(other.parameters(&model), directory.parameters(&model));
}

/// Published files write the upper bound of time steps as a number that JSON lacks.
#[test]
fn bounds_of_time_steps_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let published =
        std::fs::read_to_string(Directory::open("mamba2_two_groups").path.join("config.json")).unwrap();
    let read = |text: &str| {
        std::fs::write(folder.path().join("config.json"), text).unwrap();
        settings_of(folder.path())
    };
    let whole = read(&published).unwrap();
    let bounds = |text: &str| {
        let mut values: Value = serde_json::from_str(&published).unwrap();
        values["time_step_limit"] = json!("BOUNDS");
        values.to_string().replace("\"BOUNDS\"", text)
    };
    assert_eq!(read(&bounds("[0.0, Infinity]")).unwrap(), whole);
    assert_eq!(read(&bounds("null")).unwrap(), whole);
    for others in ["[0.0, 0.1]", "[0.001, Infinity]", "[-Infinity, Infinity]", "\"[0.0, Infinity]\""] {
        let error = read(&bounds(others)).unwrap_err().to_string();
        assert!(error.contains("`time_step_limit`") && error.contains("bounds of time steps"), "{error}");
    }
}

#[test]
fn contradicting_and_unknown_values_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    for (name, key, value) in [
        ("mamba2_two_groups", "expand", json!(2)),
        ("mamba2_two_groups", "hidden_act", json!("gelu")),
        ("bamba_every_second", "mamba_expand", json!(3)),
        ("bamba_every_second", "attn_layer_indices", json!(["first"])),
    ] {
        let published = std::fs::read_to_string(Directory::open(name).path.join("config.json")).unwrap();
        let mut values: Value = serde_json::from_str(&published).unwrap();
        values[key] = value;
        std::fs::write(folder.path().join("config.json"), values.to_string()).unwrap();
        let error = settings_of(folder.path()).unwrap_err().to_string();
        assert!(error.contains(&format!("`{key}`")), "{error}");
    }
    let published =
        std::fs::read_to_string(Directory::open("bamba_every_second").path.join("config.json")).unwrap();
    let mut values: Value = serde_json::from_str(&published).unwrap();
    values["mamba_d_head"] = json!("auto");
    std::fs::write(folder.path().join("config.json"), values.to_string()).unwrap();
    assert_eq!(settings_of(folder.path()).unwrap().get("mamba_head_dim"), Some(&json!(6)));
}
