//! Models with layers of Gated DeltaNet among those with attention.

use mt_models::Model;
use mt_nn::SequenceOrder;
use safetensors::{Dtype, SafeTensors, tensor::TensorView};

use crate::{
    context,
    directory::Directory,
    equivalence,
    harness::{Batch, model},
};

/// Three value heads for each key head, and chunks that divide no length.
const SMALL: &[&str] = &[
    "gdn_num_key_heads=2",
    "gdn_num_value_heads=6",
    "gdn_key_head_dim=8",
    "gdn_value_head_dim=4",
    "gdn_chunk_size=5",
    "partial_rotary_factor=0.5",
];
const NEXT: &[&str] = &[
    "decoder_block=qwen3_next",
    "inhomogeneous_layer_cycle_interval=2",
    "num_experts=4",
    "num_experts_per_tok=2",
    "shared_experts=1",
    "base_moe_mlp_dim=32",
];
const DENSE: &[&str] = &["decoder_block=qwen3_5", "attention_pattern=linear,global,linear"];
const LINEAR: &[&str] = &["decoder_block=qwen3_5", "attention_pattern=linear"];

fn tiny(family: &[&'static str], others: &[&'static str]) -> Box<dyn Model> {
    model(&[SMALL, family, others].concat())
}

#[test]
fn packed_documents_equal_separate_ones() {
    for family in [NEXT, DENSE, LINEAR] {
        for scan in ["scan_layers=true", "scan_layers=false"] {
            let what = format!("{family:?} {scan}");
            equivalence::check_packed(&what, &*tiny(family, &[scan]), &[3, 11, 1, 9], [27, 256], 1e-4);
        }
    }
}

/// Reference models with several chunks, whose size does not divide the length.
#[test]
fn the_size_of_chunks_changes_nothing() {
    for name in ["qwen3_next_cycle", "qwen3_next_linear_one_layer", "qwen3_5_moe_cycle"] {
        equivalence::check_settings(name, &["gdn_chunk_size=1", "gdn_chunk_size=4", "gdn_chunk_size=8"]);
    }
}

const FSDP: &[&str] = &["ici_fsdp_parallelism=8"];
const THREE: &[&str] = &["ici_fsdp_parallelism=2", "ici_tensor_parallelism=2", "ici_expert_parallelism=2"];
const CONTEXT: &[&str] = &["ici_context_parallelism=4", "ici_fsdp_parallelism=2"];

#[test]
fn eight_devices_equal_one() {
    let rows: [&[usize]; 8] = [&[9, 15], &[24], &[5, 7], &[24], &[24], &[1, 23], &[20], &[24]];
    let batch = Batch::packed(&rows, 24, 256);
    let meshes = [
        (FSDP, SequenceOrder::AsRead),
        (THREE, SequenceOrder::AsRead),
        (CONTEXT, SequenceOrder::Paired { shards: 4 }),
    ];
    for scan in ["scan_layers=true", "scan_layers=false"] {
        context::check_with(&[SMALL, NEXT, &[scan, "remat_policy=full"]].concat(), &meshes, &batch);
    }
}

/// The FLOPs of a step without attention are proportional to the length.
#[test]
fn operations_grow_linearly_with_the_length() {
    let model = tiny(LINEAR, &["gdn_chunk_size=64", "remat_policy=full"]);
    equivalence::check_products_are_linear(&*model);
    // The formula of the model counts these products, without the chunks that the backward pass computes again and
    // without inverses.
    let wide = ["gdn_chunk_size=16", "gdn_key_head_dim=64", "gdn_value_head_dim=64", "remat_policy=none"];
    let model = tiny(LINEAR, &wide);
    equivalence::check_counted_products(&*model);
}

/// The names and shapes of MaxText's checkpoints.
#[test]
fn checkpoints_have_the_names_of_maxtext() {
    let model = tiny(NEXT, &["scan_layers=true", "base_num_decoder_layers=4"]);
    let stored: Vec<(String, Vec<usize>)> = model
        .storage()
        .iter()
        .zip(model.parameters())
        .map(|(stored, (_, spec))| (stored.key.join("-"), stored.stored_dims(&spec.dims())))
        .collect();
    let has = |name: &str, dims: &[usize]| {
        let found = stored.iter().find(|(key, _)| key == name);
        assert_eq!(found.map(|(_, dims)| dims.as_slice()), Some(dims), "{name} of {stored:?}");
    };
    for (name, dims) in [
        ("input_layernorm-scale", &[64, 2][..]),
        ("post_attention_layernorm-scale", &[64, 2]),
        ("attention-in_proj_qkvz-kernel", &[64, 2, 80]),
        ("attention-in_proj_ba-kernel", &[64, 2, 12]),
        ("attention-conv1d-kernel", &[4, 2, 1, 56]),
        ("attention-A_log", &[6, 2]),
        ("attention-dt_bias", &[6, 2]),
        ("attention-norm-rms_norm-scale", &[4, 2]),
        ("attention-out_proj-kernel", &[24, 2, 64]),
        ("mlp-routed_experts-gate-kernel", &[64, 2, 4]),
        ("mlp-routed_experts-wi_0", &[4, 2, 64, 32]),
        ("mlp-routed_experts-wo", &[4, 2, 32, 64]),
        ("mlp-shared_expert-wi_0-kernel", &[64, 2, 32]),
        ("mlp-shared_expert_gate-kernel", &[64, 2, 1]),
    ] {
        has(&format!("decoder-layers-layer_0-{name}"), dims);
    }
    has("decoder-layers-layer_1-attention-attention-query-kernel", &[64, 2, 4, 32]);
    has("decoder-layers-layer_1-attention-attention-key_norm-scale", &[16, 2]);
    let is_kept = |stored: &mt_models::StoredParameter| (stored.scale, stored.offset) == (1.0, 0.0);
    assert!(model.storage().iter().all(is_kept), "scales are stored as they are");
    let unrolled = tiny(NEXT, &["scan_layers=false"]);
    let keys: Vec<String> = unrolled.storage().iter().map(|stored| stored.key.join("-")).collect();
    assert!(keys.contains(&"decoder-layers_0-attention-in_proj_qkvz-kernel".to_owned()), "{keys:?}");
}

/// transformers writes the experts of Qwen3.5 one by one from version 5.24 on.
#[test]
fn experts_may_have_tensors_of_their_own() {
    let directory = Directory::open("qwen3_5_moe_cycle");
    let model = directory.model(&[]);
    let folder = tempfile::tempdir().unwrap();
    let bytes = std::fs::read(directory.path.join("model.safetensors")).unwrap();
    let mut split: Vec<(String, Dtype, Vec<usize>, Vec<u8>)> = Vec::new();
    for (name, view) in SafeTensors::deserialize(&bytes).unwrap().iter() {
        let names: &[&str] = match name.rsplit_once('.') {
            Some((_, "gate_up_proj")) => &["gate_proj", "up_proj"],
            Some((_, "down_proj")) => &["down_proj"],
            _ => &[],
        };
        if names.is_empty() {
            split.push((name.to_owned(), view.dtype(), view.shape().to_vec(), view.data().to_vec()));
            continue;
        }
        let [num_experts, rows, columns] = *view.shape() else { panic!("{name} has matrices of experts") };
        let dims = vec![rows / names.len(), columns];
        let size = view.data().len() / num_experts / names.len();
        for (index, data) in view.data().chunks(size).enumerate() {
            let (expert, own) = (index / names.len(), names[index % names.len()]);
            let own = format!("{}.{expert}.{own}.weight", name.rsplit_once('.').unwrap().0);
            split.push((own, view.dtype(), dims.clone(), data.to_vec()));
        }
    }
    let views = split.iter().map(|(name, dtype, dims, data)| {
        (name.as_str(), TensorView::new(*dtype, dims.clone(), data).unwrap())
    });
    safetensors::serialize_to_file(views, None, &folder.path().join("model.safetensors")).unwrap();
    let other = Directory { name: directory.name.clone(), path: folder.path().to_owned() };
    assert_eq!(other.parameters(&model), directory.parameters(&model));
}
