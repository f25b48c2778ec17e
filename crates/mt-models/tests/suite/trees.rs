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

/// MaxText's `gemma3` of width 64 with 8 layers.
const GEMMA3_OUTSIDE_LAYERS: &[Fact] = &[
    ("decoder/decoder_norm/scale", &[64], &["norm"], "(tensor)"),
    ("token_embedder/embedding", &[256, 64], &["vocab", "embed_vocab"], "(tensor, fsdp)"),
];

/// Of each layer of its cycle.
const GEMMA3_SCANNED: &[Fact] = &[
    ("mlp/wi_0/kernel", &[64, 1, 128], &["embed", "layers", "mlp"], "(fsdp, -, tensor)"),
    ("mlp/wi_1/kernel", &[64, 1, 128], &["embed", "layers", "mlp"], "(fsdp, -, tensor)"),
    ("mlp/wo/kernel", &[128, 1, 64], &["mlp", "layers", "embed"], "(tensor, -, fsdp)"),
    ("post_ffw_norm/scale", &[64, 1], &["norm", "layers"], "(tensor, -)"),
    ("post_self_attention_norm/scale", &[64, 1], &["norm", "layers"], "(tensor, -)"),
    ("pre_ffw_norm/scale", &[64, 1], &["norm", "layers"], "(tensor, -)"),
    ("pre_self_attention_norm/scale", &[64, 1], &["norm", "layers"], "(tensor, -)"),
    (
        "self_attention/key/kernel",
        &[64, 1, 2, 16],
        &["embed", "layers", "kv_heads", "kv_head_dim"],
        "(fsdp, -, tensor, -)",
    ),
    ("self_attention/key_norm/scale", &[16, 1], &["norm", "layers"], "(tensor, -)"),
    (
        "self_attention/out/kernel",
        &[4, 1, 16, 64],
        &["heads", "layers", "kv", "embed"],
        "(tensor, -, -, fsdp)",
    ),
    (
        "self_attention/query/kernel",
        &[64, 1, 4, 16],
        &["embed", "layers", "q_heads", "kv"],
        "(fsdp, -, tensor, -)",
    ),
    ("self_attention/query_norm/scale", &[16, 1], &["norm", "layers"], "(tensor, -)"),
    (
        "self_attention/value/kernel",
        &[64, 1, 2, 16],
        &["embed", "layers", "kv_heads", "kv_head_dim"],
        "(fsdp, -, tensor, -)",
    ),
];

/// Of each layer that is not scanned.
const GEMMA3_UNSCANNED: &[Fact] = &[
    ("mlp/wi_0/kernel", &[64, 128], &["embed", "mlp"], "(fsdp, tensor)"),
    ("mlp/wi_1/kernel", &[64, 128], &["embed", "mlp"], "(fsdp, tensor)"),
    ("mlp/wo/kernel", &[128, 64], &["mlp", "embed"], "(tensor, fsdp)"),
    ("post_ffw_norm/scale", &[64], &["norm"], "(tensor)"),
    ("post_self_attention_norm/scale", &[64], &["norm"], "(tensor)"),
    ("pre_ffw_norm/scale", &[64], &["norm"], "(tensor)"),
    ("pre_self_attention_norm/scale", &[64], &["norm"], "(tensor)"),
    ("self_attention/key/kernel", &[64, 2, 16], &["embed", "kv_heads", "kv_head_dim"], "(fsdp, tensor, -)"),
    ("self_attention/key_norm/scale", &[16], &["norm"], "(tensor)"),
    ("self_attention/out/kernel", &[4, 16, 64], &["heads", "kv", "embed"], "(tensor, -, fsdp)"),
    ("self_attention/query/kernel", &[64, 4, 16], &["embed", "q_heads", "kv"], "(fsdp, tensor, -)"),
    ("self_attention/query_norm/scale", &[16], &["norm"], "(tensor)"),
    ("self_attention/value/kernel", &[64, 2, 16], &["embed", "kv_heads", "kv_head_dim"], "(fsdp, tensor, -)"),
];

/// Moves what belongs to the leading axis in memory to where the file has it.
fn stored_order<T: Clone>(stored: &StoredParameter, items: &[T]) -> Vec<T> {
    let places = vec![0..1; items.len()];
    let order: Vec<usize> = (0..items.len()).collect();
    assert_eq!(stored.stored_ranges(&places).len(), items.len());
    stored.stored_dims(&order).into_iter().map(|index| items[index].clone()).collect()
}

/// Compares a model's parameters with facts: those outside of layers, and those in the layers of each prefix.
#[track_caller]
fn check(arguments: &[&str], outside: &[Fact], layers: &[(&[Fact], &[&str])]) {
    let model = model(arguments);
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
    let in_layers = layers.iter().flat_map(|(facts, prefixes)| {
        prefixes.iter().flat_map(|prefix| {
            facts.iter().map(move |fact| (format!("decoder/{prefix}/{}", fact.0), fact.1, fact.2, fact.3))
        })
    });
    let outside = outside.iter().map(|fact| (fact.0.to_owned(), fact.1, fact.2, fact.3));
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
    check(&["scan_layers=true", "base_num_decoder_layers=3"], OUTSIDE_LAYERS, &[(SCANNED, &["layers"])]);
}

#[test]
fn unrolled_parameters_are_stored_as_maxtext_stores_them() {
    check(
        &["scan_layers=false", "base_num_decoder_layers=3"],
        OUTSIDE_LAYERS,
        &[(UNSCANNED, &["layers_0", "layers_1", "layers_2"])],
    );
}

#[test]
fn cycles_of_layers_are_stored_as_maxtext_stores_them() {
    let arguments = [
        "decoder_block=gemma3",
        "sliding_window_size=8",
        "base_num_decoder_layers=8",
        "logits_via_embedding=true",
    ];
    check(
        &[&arguments[..], &["scan_layers=true"]].concat(),
        GEMMA3_OUTSIDE_LAYERS,
        &[
            (
                GEMMA3_SCANNED,
                &[
                    "layers/layers_0",
                    "layers/layers_1",
                    "layers/layers_2",
                    "layers/layers_3",
                    "layers/layers_4",
                    "layers/layers_5",
                ],
            ),
            (GEMMA3_UNSCANNED, &["layers_remainder/layers_0", "layers_remainder/layers_1"]),
        ],
    );
    check(
        &[&arguments[..], &["scan_layers=false"]].concat(),
        GEMMA3_OUTSIDE_LAYERS,
        &[(
            GEMMA3_UNSCANNED,
            &["layers_0", "layers_1", "layers_2", "layers_3", "layers_4", "layers_5", "layers_6", "layers_7"],
        )],
    );
}

const PROJECTIONS: &[&str] = &["mlp/wi_0/kernel", "mlp/wi_1/kernel", "mlp/wo/kernel"];

/// Keys below `params` of models with two layers, or one pair of them, that are not scanned.
#[track_caller]
fn check_keys(arguments: &[&str], outside: &[&str], layers: &[&str], in_layer: &[&str]) {
    let in_layers =
        layers.iter().flat_map(|layer| in_layer.iter().map(move |key| format!("decoder/{layer}/{key}")));
    let mut expected: Vec<String> = outside.iter().map(|key| (*key).to_owned()).chain(in_layers).collect();
    let mut actual: Vec<String> =
        model(arguments).storage().iter().map(|stored| stored.key.join("/")).collect();
    expected.sort();
    actual.sort();
    assert_eq!(actual, expected, "{arguments:?}");
}

#[test]
fn families_have_maxtexts_names() {
    let tied = &["token_embedder/embedding", "decoder/decoder_norm/scale"];
    let untied = &["token_embedder/embedding", "decoder/decoder_norm/scale", "decoder/logits_dense/kernel"];
    let of = |module: &str, parts: &[&str]| -> Vec<String> {
        parts.iter().map(|part| format!("{module}/{part}")).collect()
    };
    let attention = ["query/kernel", "key/kernel", "value/kernel", "out/kernel"];
    let normed = [&attention[..], &["query_norm/scale", "key_norm/scale"]].concat();
    let gemma2: Vec<String> = ["local", "global"]
        .iter()
        .flat_map(|kind| {
            let norms =
                ["pre_self_attention_norm", "post_self_attention_norm", "pre_ffw_norm", "post_ffw_norm"];
            let norms = norms.map(|norm| format!("{norm}_{kind}/scale"));
            let attention = of(&format!("self_attention_{kind}"), &attention);
            let mlp = of(&format!("mlp_{kind}"), &["wi_0/kernel", "wi_1/kernel", "wo/kernel"]);
            norms.into_iter().chain(attention).chain(mlp).collect::<Vec<_>>()
        })
        .collect();
    let qwen3 = [
        of("self_attention", &normed),
        ["pre_self_attention_layer_norm/scale", "post_self_attention_layer_norm/scale"]
            .map(str::to_owned)
            .into(),
        PROJECTIONS.iter().map(|key| (*key).to_owned()).collect(),
    ]
    .concat();
    let olmo3 = [
        of("attention", &normed),
        ["post_self_attention_layer_norm/scale", "post_mlp_layer_norm/scale"].map(str::to_owned).into(),
        PROJECTIONS.iter().map(|key| (*key).to_owned()).collect(),
    ]
    .concat();
    for (block, tied_key, outside, cycle, in_layer) in [
        ("decoder_block=gemma2", "logits_via_embedding=true", &tied[..], 1, &gemma2),
        ("decoder_block=qwen3", "logits_via_embedding=false", untied, 1, &qwen3),
        ("decoder_block=olmo3", "logits_via_embedding=false", untied, 4, &olmo3),
    ] {
        let in_layer: Vec<&str> = in_layer.iter().map(String::as_str).collect();
        let keys = [block, tied_key, "sliding_window_size=8", "base_num_decoder_layers=4"];
        let unscanned = ["layers_0", "layers_1", "layers_2", "layers_3"];
        check_keys(&[&keys[..], &["scan_layers=false"]].concat(), outside, &unscanned, &in_layer);
        let scanned: Vec<String> = unscanned.iter().map(|layer| format!("layers/{layer}")).collect();
        let scanned: Vec<&str> = scanned.iter().map(String::as_str).collect();
        let scanned = if cycle == 1 { &["layers"][..] } else { &scanned };
        check_keys(&[&keys[..], &["scan_layers=true"]].concat(), outside, scanned, &in_layer);
    }
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
