//! Parameters at the checkpoint boundary: MaxText's names, shapes, logical axes and placement.

use mt_models::{StoredParameter, moment_scale};
use mt_shape::{DType, HostArray};

use crate::harness::{f32_array, model, numbers, placement};

/// MaxText's `llama2` of width 64 with 3 layers: key, shape, logical axes, and the mesh axes of each dimension on a
/// mesh of fsdp 4 × tensor 2.
type Fact = (&'static str, &'static [usize], &'static [&'static str], &'static str);

const OUTSIDE_LAYERS: &[Fact] = &[
    ("decoder/decoder_norm/scale", &[64], &["norm"], "(tensor)"),
    ("decoder/logits_dense/kernel", &[64, 256], &["embed_vocab", "vocab"], "(fsdp, tensor)"),
    ("token_embedder/embedding", &[256, 64], &["vocab", "embed_vocab"], "(tensor, fsdp)"),
];

const SCANNED: &[Fact] = &[
    ("mlp/wi_0/kernel", &[64, 3, 128], &["embed", "layers", "mlp"], "(fsdp, -, tensor)"),
    ("mlp/wi_1/kernel", &[64, 3, 128], &["embed", "layers", "mlp"], "(fsdp, -, tensor)"),
    ("mlp/wo/kernel", &[128, 3, 64], &["mlp", "layers", "embed"], "(tensor, -, fsdp)"),
    ("post_self_attention_layer_norm/scale", &[64, 3], &["norm", "layers"], "(tensor, -)"),
    ("pre_self_attention_layer_norm/scale", &[64, 3], &["norm", "layers"], "(tensor, -)"),
    (
        "self_attention/key/kernel",
        &[64, 3, 2, 16],
        &["embed", "layers", "kv_heads", "kv_head_dim"],
        "(fsdp, -, tensor, -)",
    ),
    (
        "self_attention/out/kernel",
        &[4, 3, 16, 64],
        &["heads", "layers", "kv", "embed"],
        "(tensor, -, -, fsdp)",
    ),
    (
        "self_attention/query/kernel",
        &[64, 3, 4, 16],
        &["embed", "layers", "q_heads", "kv"],
        "(fsdp, -, tensor, -)",
    ),
    (
        "self_attention/value/kernel",
        &[64, 3, 2, 16],
        &["embed", "layers", "kv_heads", "kv_head_dim"],
        "(fsdp, -, tensor, -)",
    ),
];

const UNSCANNED: &[Fact] = &[
    ("mlp/wi_0/kernel", &[64, 128], &["embed", "mlp"], "(fsdp, tensor)"),
    ("mlp/wi_1/kernel", &[64, 128], &["embed", "mlp"], "(fsdp, tensor)"),
    ("mlp/wo/kernel", &[128, 64], &["mlp", "embed"], "(tensor, fsdp)"),
    ("post_self_attention_layer_norm/scale", &[64], &["norm"], "(tensor)"),
    ("pre_self_attention_layer_norm/scale", &[64], &["norm"], "(tensor)"),
    ("self_attention/key/kernel", &[64, 2, 16], &["embed", "kv_heads", "kv_head_dim"], "(fsdp, tensor, -)"),
    ("self_attention/out/kernel", &[4, 16, 64], &["heads", "kv", "embed"], "(tensor, -, fsdp)"),
    ("self_attention/query/kernel", &[64, 4, 16], &["embed", "q_heads", "kv"], "(fsdp, tensor, -)"),
    ("self_attention/value/kernel", &[64, 2, 16], &["embed", "kv_heads", "kv_head_dim"], "(fsdp, tensor, -)"),
];

/// Moves what belongs to the leading axis in memory to where the file has it.
fn stored_order<T: Clone>(stored: &StoredParameter, items: &[T]) -> Vec<T> {
    let places = vec![0..1; items.len()];
    let order: Vec<usize> = (0..items.len()).collect();
    assert_eq!(stored.stored_ranges(&places).len(), items.len());
    stored.stored_dims(&order).into_iter().map(|index| items[index].clone()).collect()
}

#[track_caller]
fn check(scan: &str, in_layers: &[Fact], prefixes: &[&str]) {
    let model = model(&[scan, "base_num_decoder_layers=3"]);
    let placement = placement(&["ici_fsdp_parallelism=4", "ici_tensor_parallelism=2"], 8);
    let mut actual = Vec::new();
    for ((path, spec), stored) in model.parameters().iter().zip(model.storage()) {
        let sharding = placement.sharding(&spec.logical_axes, &spec.dims());
        let axes = stored_order(&stored, &sharding.spec.0);
        let logical: Vec<String> =
            stored_order(&stored, &spec.logical_axes).iter().map(|name| name.unwrap().to_owned()).collect();
        let stored_spec = mt_shape::PartitionSpec(axes).to_string();
        actual.push((stored.key.join("/"), stored.stored_dims(&spec.dims()), logical, stored_spec));
        assert_eq!(spec.dtype, DType::F32, "{path}");
    }
    let in_layers = prefixes.iter().flat_map(|prefix| {
        in_layers.iter().map(move |fact| (format!("decoder/{prefix}/{}", fact.0), fact.1, fact.2, fact.3))
    });
    let outside = OUTSIDE_LAYERS.iter().map(|fact| (fact.0.to_owned(), fact.1, fact.2, fact.3));
    let mut expected: Vec<_> = outside
        .chain(in_layers)
        .map(|(key, dims, logical, spec)| {
            (
                key,
                dims.to_vec(),
                logical.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>(),
                spec.to_owned(),
            )
        })
        .collect();
    actual.sort();
    expected.sort();
    assert_eq!(actual, expected);
    assert_eq!(placement.notes(), [], "everything divides");
}

#[test]
fn scanned_parameters_are_stored_as_maxtext_stores_them() {
    check("scan_layers=true", SCANNED, &["layers"]);
}

#[test]
fn unrolled_parameters_are_stored_as_maxtext_stores_them() {
    check("scan_layers=false", UNSCANNED, &["layers_0", "layers_1", "layers_2"]);
}

#[test]
fn a_tied_output_and_a_layer_without_gate_have_fewer_parameters() {
    let keys = |arguments: &[&str]| -> Vec<String> {
        model(arguments).storage().iter().map(|stored| stored.key.join("/")).collect()
    };
    let all = keys(&[]);
    let tied = keys(&["logits_via_embedding=true"]);
    assert_eq!(all.len(), tied.len() + 1);
    assert!(!tied.contains(&"decoder/logits_dense/kernel".to_owned()));
    let ungated = keys(&["mlp_activations=gelu"]);
    assert!(!ungated.contains(&"decoder/layers/mlp/wi_1/kernel".to_owned()));
    assert!(ungated.contains(&"decoder/layers/mlp/wi_0/kernel".to_owned()));
}

#[test]
fn stored_values_come_back() {
    for arguments in
        [&["scan_layers=true"][..], &["scan_layers=false"], &["param_scan_axis=0"], &["head_dim=24"]]
    {
        let model = model(arguments);
        for ((path, spec), stored) in model.parameters().iter().zip(model.storage()) {
            let array = f32_array(&spec.dims(), &numbers(1, spec.num_elements()));
            let written = stored.to_stored(&array, stored.affine());
            assert_eq!(written.dims(), stored.stored_dims(array.dims()), "{path}");
            let read = stored.from_stored(&written, stored.affine());
            if stored.is_exact() {
                assert_eq!(read, array, "{path}");
            }
            for (read, value) in read.to_f64().iter().zip(array.to_f64()) {
                assert!((read - value).abs() <= 1e-7 * value.abs(), "{path}");
            }
        }
    }
}

#[test]
fn queries_hold_the_scale_of_attention_and_their_moments_its_inverse() {
    let model = model(&["scan_layers=true", "base_num_decoder_layers=3"]);
    let query = model.storage().into_iter().find(|stored| stored.key.contains(&"query".to_owned())).unwrap();
    assert_eq!(query.scale, 0.25, "heads of width 16");
    assert!(query.is_exact());
    assert_eq!(moment_scale(query.scale, 1), 4.0);
    assert_eq!(moment_scale(query.scale, 2), 16.0);
    let others = model.storage().into_iter().filter(|stored| !stored.key.contains(&"query".to_owned()));
    assert!(others.into_iter().all(|stored| stored.scale == 1.0));
    // Layer 1 of the stack is at index 1 of the second dimension of the file.
    let dims = [3, 64, 4, 16];
    let array = f32_array(&dims, &numbers(2, dims.iter().product()));
    let written = query.to_stored(&array, query.affine());
    let at = |array: &HostArray, index: [usize; 4]| {
        array.to_f64()[index.iter().zip(array.dims()).fold(0, |flat, (i, dim)| flat * dim + i)]
    };
    assert_eq!(at(&written, [7, 1, 2, 3]), at(&array, [1, 7, 2, 3]) * 0.25);
    // A part on a device is stored where it is in the whole.
    assert_eq!(query.stored_ranges(&[0..3, 16..32, 0..2, 0..16]), [16..32, 0..3, 0..2, 0..16]);
}
