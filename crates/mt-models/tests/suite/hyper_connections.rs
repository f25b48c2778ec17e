//! Models with several residual streams.

use mt_models::Model;

use crate::{
    context, decode, equivalence,
    harness::{Batch, SMALL_DEEPSEEK, logits, model, parameters},
};

const UNBALANCED: &[&str] = &["load_balance_loss_weight=0"];
const SINKHORN: &[&str] = &["mhc_expansion_rate=3", "sinkhorn_iterations=4"];
const LITE: &[&str] = &["mhc_expansion_rate=2", "enable_mhc_lite=true"];

fn tiny(streams: &[&'static str], others: &[&'static str]) -> Box<dyn Model> {
    model(&[SMALL_DEEPSEEK, UNBALANCED, streams, others].concat())
}

#[test]
fn scanning_and_recomputing_change_nothing() {
    let ways: &[&[&str]] = &[
        &["scan_layers=true", "remat_policy=full"],
        &["scan_layers=false", "remat_policy=minimal"],
        &["scan_layers=false", "remat_policy=none"],
    ];
    for streams in [SINKHORN, LITE] {
        equivalence::check(
            &[SMALL_DEEPSEEK, UNBALANCED, streams].concat(),
            ways,
            &Batch::packed(&[&[13], &[4, 9]], 13, 256),
            1e-5,
        );
    }
}

#[test]
fn decoding_equals_the_whole() {
    for (streams, scan) in [(SINKHORN, "scan_layers=true"), (LITE, "scan_layers=false")] {
        let model = tiny(streams, &[scan]);
        let parameters = parameters(&*model);
        let batch = Batch::whole(2, 15, 256);
        let whole = logits(&*model, &parameters, &batch);
        decode::check_pieces(&format!("{streams:?}"), &*model, &parameters, &batch.arrays[0], &whole);
    }
}

#[test]
fn packed_documents_equal_separate_ones() {
    equivalence::check_packed("four streams", &*tiny(SINKHORN, &[]), &[5, 1, 8], [15, 256], 1e-5);
}

#[test]
fn eight_devices_equal_one() {
    let rows: [&[usize]; 8] = [&[9, 7], &[16], &[5, 7], &[16], &[16], &[1, 15], &[12], &[16]];
    let batch = Batch::packed(&rows, 16, 256);
    let meshes: &[&[&str]] = &[
        &["ici_fsdp_parallelism=8"],
        &["ici_fsdp_parallelism=2", "ici_tensor_parallelism=2", "ici_expert_parallelism=2"],
    ];
    let meshes: Vec<_> = meshes.iter().map(|mesh| (*mesh, mt_nn::SequenceOrder::AsRead)).collect();
    for scan in ["scan_layers=true", "scan_layers=false"] {
        context::check_with(
            &[SMALL_DEEPSEEK, UNBALANCED, SINKHORN, &[scan, "remat_policy=full"]].concat(),
            &meshes,
            &batch,
        );
    }
}

/// The names and shapes of MaxText's checkpoints.
#[test]
fn checkpoints_have_the_names_of_maxtext() {
    let stored = |model: &dyn Model| -> Vec<(String, Vec<usize>)> {
        let parameters = model.parameters();
        let all = model.storage().into_iter().zip(parameters);
        all.map(|(stored, (_, spec))| (stored.key.join("-"), stored.stored_dims(&spec.dims()))).collect()
    };
    let check = |model: &dyn Model, names: &[(&str, &[usize])]| {
        let all = stored(model);
        for (name, dims) in names {
            let found = all.iter().find(|(key, _)| key == &format!("decoder-{name}"));
            assert_eq!(found.map(|(_, dims)| dims.as_slice()), Some(*dims), "{name} of {all:?}");
        }
    };
    check(
        &*tiny(SINKHORN, &["scan_layers=false"]),
        &[
            ("dense_layers_0-mhc_attention-mhc_norm-scale", &[48]),
            ("dense_layers_0-mhc_attention-pre_alpha", &[48, 3]),
            ("dense_layers_0-mhc_attention-post_alpha", &[48, 3]),
            ("dense_layers_0-mhc_attention-res_alpha", &[48, 9]),
            ("dense_layers_0-mhc_attention-res_beta", &[3, 3]),
            ("moe_layers_1-mhc_mlp-pre_beta", &[3]),
            ("moe_layers_1-mhc_mlp-res_alpha_scale", &[1]),
        ],
    );
    check(
        &*tiny(LITE, &["scan_layers=true"]),
        &[
            ("moe_layers-mhc_mlp-mhc_norm-scale", &[32, 2]),
            ("moe_layers-mhc_mlp-res_alpha", &[32, 2, 2]),
            ("moe_layers-mhc_mlp-res_beta", &[2, 2]),
        ],
    );
}
