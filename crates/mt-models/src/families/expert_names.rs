//! The forms in which files hold the weights of experts.

use std::path::Path;

use mt_checkpoint::{WeightsDirectory, WeightsOptions};
use mt_config::{Config, DecoderBlock, ModelGroup, PlacementGroup, Request};
use mt_nn::{axes, experts::Scores};
use mt_runtime::{Array, testing};
use mt_shape::{DType, HostArray, Placement, axis};

use super::{
    Along, Family, FusedOrder, HuggingFaceFamily, Layout, MaxTextLayers, TensorName, describe, llama, names,
};
use crate::{
    ForwardPass, Storage,
    decoder::{Decoder, LayerNames, LayerRun},
    hugging_face::{Weights, write_weights},
    storage::state::converted,
};

const fn name(role: &'static str, name: &'static str, stacked: usize, layout: Layout) -> TensorName {
    TensorName { stacked, ..TensorName::new(role, name, layout) }
}

const GATE: TensorName =
    name("experts.gate.kernel", "model.layers.{layer}.gate.weight", 0, Layout::Transposed(1));

/// A tensor for each expert, as in Mixtral's files.
const OF_EACH: &[TensorName] = &[
    name("experts.wi_0", "model.layers.{layer}.experts.{expert}.w1.weight", 0, Layout::Transposed(1)),
    name("experts.wi_0_bias", "model.layers.{layer}.experts.{expert}.w1.bias", 0, Layout::Same(0)),
    name("experts.wi_1", "model.layers.{layer}.experts.{expert}.w3.weight", 0, Layout::Transposed(1)),
    name("experts.wi_1_bias", "model.layers.{layer}.experts.{expert}.w3.bias", 0, Layout::Same(0)),
    name("experts.wo", "model.layers.{layer}.experts.{expert}.w2.weight", 0, Layout::Transposed(1)),
    name("experts.wo_bias", "model.layers.{layer}.experts.{expert}.w2.bias", 0, Layout::Same(0)),
    GATE,
];

const ALTERNATING: FusedOrder = FusedOrder::Alternating(0);
const GATE_UP: &str = "model.layers.{layer}.experts.gate_up_proj";
const GATE_UP_BIAS: &str = "model.layers.{layer}.experts.gate_up_proj_bias";
const DOWN: &str = "model.layers.{layer}.experts.down_proj";
const DOWN_BIAS: &str = "model.layers.{layer}.experts.down_proj_bias";

/// One tensor for all experts of a layer, with alternating columns of both projections, as in gpt-oss.
const TOGETHER: &[TensorName] = &[
    name("experts.wi_0", GATE_UP, 1, Layout::Same(1)).fused(Along::Columns, 0, ALTERNATING),
    name("experts.wi_0_bias", GATE_UP_BIAS, 1, Layout::Same(0)).fused(Along::Columns, 0, ALTERNATING),
    name("experts.wi_1", GATE_UP, 1, Layout::Same(1)).fused(Along::Columns, 1, ALTERNATING),
    name("experts.wi_1_bias", GATE_UP_BIAS, 1, Layout::Same(0)).fused(Along::Columns, 1, ALTERNATING),
    name("experts.wo", DOWN, 1, Layout::Same(1)),
    name("experts.wo_bias", DOWN_BIAS, 1, Layout::Same(0)),
    GATE,
];

/// As `TOGETHER`, but transposed, with the rows of both projections concatenated.
const TRANSPOSED: &[TensorName] = &[
    name("experts.wi_0", GATE_UP, 1, Layout::Transposed(1)).fused(Along::Rows, 0, FusedOrder::Concatenated),
    name("experts.wi_0_bias", GATE_UP_BIAS, 1, Layout::Same(0)).fused(
        Along::Columns,
        0,
        FusedOrder::Concatenated,
    ),
    name("experts.wi_1", GATE_UP, 1, Layout::Transposed(1)).fused(Along::Rows, 1, FusedOrder::Concatenated),
    name("experts.wi_1_bias", GATE_UP_BIAS, 1, Layout::Same(0)).fused(
        Along::Columns,
        1,
        FusedOrder::Concatenated,
    ),
    name("experts.wo", DOWN, 1, Layout::Transposed(1)),
    name("experts.wo_bias", DOWN_BIAS, 1, Layout::Same(0)),
    GATE,
];

macro_rules! family {
    ($names:ident) => {{
        static FAMILY: Family = Family {
            blocks: &[DecoderBlock::Llama2],
            describe: describe::decoder,
            maxtext_names: llama::MAXTEXT_NAMES,
            maxtext_layers: MaxTextLayers::Plain,
            folds_query_scale: false,
            hugging_face: Some(HuggingFaceFamily {
                tensors: &[names::MODEL, names::ATTENTION, names::MLP, names::NORMS_BEFORE, $names],
                ..llama::HUGGING_FACE
            }),
        };
        &FAMILY
    }};
}

const NUM_EXPERTS: usize = 3;
const EMBED: usize = 16;
const WIDTH: usize = 20;

fn config(arguments: &[&str]) -> Config {
    let small = [
        "decoder_block=llama2",
        "base_emb_dim=16",
        "base_num_query_heads=2",
        "base_num_kv_heads=1",
        "head_dim=8",
        "base_mlp_dim=24",
        "vocab_size=32",
        "weight_dtype=float32",
        "base_num_decoder_layers=4",
    ];
    let arguments = small.iter().chain(arguments).map(|argument| (*argument).to_owned()).collect();
    Config::resolve(&Request { arguments, ..Request::default() }).unwrap()
}

/// A dense layer, followed by three layers with experts.
fn decoder(family: &'static Family, scan_layers: bool) -> Decoder {
    let group = ModelGroup::from_config(&config(&[])).unwrap();
    let mut config = describe::decoder(&group).unwrap();
    let mut experts = describe::experts(&group, Scores::Softmax).unwrap();
    experts.routed.router.experts = axis(axes::EXPERT, NUM_EXPERTS);
    experts.width = axis(axes::MLP, WIDTH);
    experts.bias = true;
    for layer in &mut config.layers[1..] {
        layer.feed_forward = Some(experts.clone().into());
    }
    let run = |name, stored, first| LayerRun {
        name: std::borrow::Cow::Borrowed(name),
        first,
        cycle: 1,
        stored: LayerNames::named(stored, first),
    };
    config.runs = vec![run("dense", "dense_layers", 0), run("moe", "moe_layers", 1)];
    config.scan_layers = scan_layers;
    Decoder::new(config, family)
}

/// The value of an element of a parameter. All values are distinct.
fn value(role: &str, layer: usize, index: usize) -> f32 {
    let of_role = role.bytes().fold(7_u32, |hash, byte| hash.wrapping_mul(31).wrapping_add(byte.into()));
    (of_role % 97) as f32 * 1e4 + layer as f32 * 1e3 + index as f32
}

/// Parameters whose values follow from role, layer and index within the layer.
fn parameters(decoder: &Decoder) -> Vec<HostArray> {
    let segments = decoder.config().segments();
    let specs = decoder.parameters();
    let made = specs.iter().map(|(path, spec)| {
        let parameter = crate::decoder::Parameter::of(&segments, path, spec);
        let layers = match parameter.layers() {
            layers if layers.is_empty() => vec![0],
            layers => layers,
        };
        let of_layer = spec.num_elements() / layers.len();
        let values = layers.iter().flat_map(|layer| {
            let role = parameter.role.clone();
            (0..of_layer).map(move |index| value(&role, *layer, index))
        });
        HostArray::from_slice(DType::F32, &spec.dims(), &values.collect::<Vec<f32>>()).unwrap()
    });
    made.collect()
}

fn write(decoder: &Decoder, directory: &Path) {
    let placement = Placement::single();
    let arrays: Vec<Array> = decoder
        .parameters()
        .iter()
        .zip(parameters(decoder))
        .map(|((_, spec), array)| {
            let sharding = placement.sharding(&spec.logical_axes, &spec.dims());
            Array::from_host(testing::cpu(1), &array, &sharding).unwrap()
        })
        .collect();
    write_weights(decoder, &arrays, DType::F32, directory, WeightsOptions::default()).unwrap();
}

/// Checks that parameters read from files equal those written, on one device and on several, in two types.
fn check_read(decoder: &Decoder, directory: &Path) {
    let placed = config(&["ici_fsdp_parallelism=2", "ici_tensor_parallelism=2"]);
    let placements =
        [(1, Placement::single()), (4, PlacementGroup::from_config(&placed).unwrap().placement(4).unwrap())];
    for (num_devices, placement) in placements {
        for dtype in [DType::F32, DType::BF16] {
            let weights = Weights::open(decoder, directory).unwrap();
            let loaded = weights.load(testing::cpu(num_devices), &placement, decoder, Some(dtype)).unwrap();
            for ((array, expected), (path, _)) in
                loaded.iter().zip(parameters(decoder)).zip(decoder.parameters())
            {
                assert!(array.to_host().unwrap() == converted(expected, dtype), "{path} of {num_devices}");
            }
        }
    }
}

/// Writes and reads weights with scanned and unrolled layers, and checks elements of the files.
fn check(family: &'static Family, expected: &[(&str, &[usize], usize, f32)]) {
    let folder = tempfile::tempdir().unwrap();
    let (scanned, unrolled) = (folder.path().join("scanned"), folder.path().join("unrolled"));
    let decoders = [decoder(family, true), decoder(family, false)];
    for (decoder, directory) in decoders.iter().zip([&scanned, &unrolled]) {
        write(decoder, directory);
        let weights = WeightsDirectory::open(directory).unwrap();
        for (name, dims, element, value) in expected {
            let tensor = weights.read(name).unwrap();
            assert_eq!(tensor.dims(), *dims, "{name}");
            assert_eq!(tensor.as_slice::<f32>().unwrap()[*element], *value, "{name}");
        }
    }
    let bytes = |directory: &Path| std::fs::read(directory.join("model.safetensors")).unwrap();
    assert!(bytes(&scanned) == bytes(&unrolled));
    for decoder in &decoders {
        check_read(decoder, &scanned);
    }
}

/// The value of an element of the matrix from `EMBED` to `WIDTH` in layer 2, expert 1.
fn projection(role: &str, from: usize, to: usize) -> f32 {
    value(role, 2, (EMBED + from) * WIDTH + to)
}

#[test]
fn each_expert_may_have_tensors() {
    let down = value("experts.wo", 2, (WIDTH + 11) * EMBED + 5);
    check(
        family!(OF_EACH),
        &[
            (
                "model.layers.2.experts.1.w1.weight",
                &[WIDTH, EMBED],
                7 * EMBED + 3,
                projection("experts.wi_0", 3, 7),
            ),
            (
                "model.layers.2.experts.1.w3.weight",
                &[WIDTH, EMBED],
                7 * EMBED + 3,
                projection("experts.wi_1", 3, 7),
            ),
            ("model.layers.2.experts.1.w3.bias", &[WIDTH], 4, value("experts.wi_1_bias", 2, WIDTH + 4)),
            ("model.layers.2.experts.1.w2.weight", &[EMBED, WIDTH], 5 * WIDTH + 11, down),
        ],
    );
}

#[test]
fn experts_of_a_layer_may_share_a_tensor_with_alternating_columns() {
    let row = (EMBED + 3) * 2 * WIDTH;
    check(
        family!(TOGETHER),
        &[
            (
                "model.layers.2.experts.gate_up_proj",
                &[NUM_EXPERTS, EMBED, 2 * WIDTH],
                row + 14,
                projection("experts.wi_0", 3, 7),
            ),
            (
                "model.layers.2.experts.gate_up_proj",
                &[NUM_EXPERTS, EMBED, 2 * WIDTH],
                row + 15,
                projection("experts.wi_1", 3, 7),
            ),
            (
                "model.layers.3.experts.gate_up_proj_bias",
                &[NUM_EXPERTS, 2 * WIDTH],
                2 * WIDTH + 9,
                value("experts.wi_1_bias", 3, WIDTH + 4),
            ),
            (
                "model.layers.1.experts.down_proj",
                &[NUM_EXPERTS, WIDTH, EMBED],
                33,
                value("experts.wo", 1, 33),
            ),
        ],
    );
}

#[test]
fn experts_of_a_layer_may_share_a_tensor_with_concatenated_rows() {
    let dims: &[usize] = &[NUM_EXPERTS, 2 * WIDTH, EMBED];
    let row = |of: usize| ((2 + of) * WIDTH + 7) * EMBED + 3;
    check(
        family!(TRANSPOSED),
        &[
            ("model.layers.2.experts.gate_up_proj", dims, row(0), projection("experts.wi_0", 3, 7)),
            ("model.layers.2.experts.gate_up_proj", dims, row(1), projection("experts.wi_1", 3, 7)),
            (
                "model.layers.2.experts.gate_up_proj_bias",
                &[NUM_EXPERTS, 2 * WIDTH],
                3 * WIDTH + 4,
                value("experts.wi_1_bias", 2, WIDTH + 4),
            ),
        ],
    );
}

#[test]
fn every_run_has_names_of_its_own_in_maxtext_checkpoints() {
    let check = |scan_layers: bool, expected: &[&str]| {
        let keys = decoder(family!(OF_EACH), scan_layers).storage().into_iter().map(|stored| stored.key);
        let of_layers =
            keys.filter(|key| key[0] == "decoder" && key.ends_with(&["query".into(), "kernel".into()]));
        let layers: Vec<String> = of_layers.map(|key| key[1].clone()).collect();
        assert_eq!(layers, expected);
    };
    check(true, &["dense_layers", "moe_layers"]);
    check(false, &["dense_layers_0", "moe_layers_0", "moe_layers_1", "moe_layers_2"]);
}
