//! Sparse attention with an indexer: its loss against `goldens/indexer.py`, and properties that hold for any weights.

use std::sync::Arc;

use mt_models::{Forward, ForwardPass, decoder::Decoder};
use mt_shape::{DType, HostArray, Placement};
use mt_trace::program;

use crate::{
    directory::Directory,
    harness::{
        self, Batch, Parameters, cross_entropy, declare, declare_batch, decoder, f32_array,
        from_hugging_face, gradients, largest_error, logits, options, parameters, relative_error,
    },
};

/// The stage of the indexer's training.
const WARM_UP: &str = "indexer_sparse_training=false";
const SPARSE: &str = "indexer_sparse_training=true";
const WEIGHT: f64 = 0.7;
const WEIGHTED: &str = "indexer_loss_scaling_factor=0.7";

/// The sizes of `deepseek32_groups` with other lengths and sparseness.
const TINY: &[&str] = &[
    "decoder_block=deepseek",
    "attention_type=mla",
    "base_emb_dim=20",
    "base_num_query_heads=3",
    "base_num_kv_heads=3",
    "q_lora_rank=7",
    "kv_lora_rank=6",
    "qk_nope_head_dim=5",
    "qk_rope_head_dim=4",
    "v_head_dim=6",
    "num_experts=3",
    "num_experts_per_tok=2",
    "base_moe_mlp_dim=10",
    "base_mlp_dim=14",
    "vocab_size=40",
    "use_indexer=true",
    "indexer_n_heads=7",
    "indexer_head_dim=9",
];

struct Differentiated {
    auxiliary: f64,
    logits: HostArray,
    gradients: Vec<HostArray>,
}

/// The auxiliary losses and the gradients of their sum, with the cross-entropy if `with_tokens` is set.
fn differentiate(
    model: &Decoder,
    parameters: &[HostArray],
    batch: &Batch,
    with_tokens: bool,
) -> Differentiated {
    let specs = model.parameters();
    let program = program(&options("indexer", Arc::new(Placement::single())), |inputs| {
        let parameters = declare(inputs, "params", &specs, false);
        let (tokens, [targets, segmentation]) = declare_batch(inputs, batch.rows, batch.length);
        let unused = cross_entropy_of_nothing(targets, segmentation);
        let (_, [auxiliary, logits], gradients) =
            inputs.region().value_and_grad(&Parameters(parameters), |_, parameters| {
                let made = model.hidden(&parameters.0, tokens, Forward::default());
                let [("learning/indexer_loss", auxiliary)] = made.auxiliary_losses[..] else {
                    panic!("the indexer has a loss")
                };
                let logits = model.head(&parameters.0, made.hidden);
                let total = match with_tokens {
                    true => auxiliary + cross_entropy(logits, targets, segmentation),
                    false => auxiliary,
                };
                (total, [auxiliary, logits])
            });
        let mut outputs = vec![
            inputs.replicated("auxiliary", auxiliary + unused),
            inputs.replicated("logits", logits.cast(DType::F32)),
        ];
        outputs.extend(gradients.0.iter().map(|gradient| inputs.replicated("gradient", *gradient)));
        outputs
    })
    .unwrap();
    let mut made = harness::run(&program, &[parameters, &batch.arrays].concat());
    let gradients = made.split_off(2);
    Differentiated { auxiliary: made[0].to_f64()[0], logits: made.remove(1), gradients }
}

/// Keeps the arguments in use, so that one list of arrays fits every program.
fn cross_entropy_of_nothing<'t>(
    targets: mt_trace::Tensor<'t>,
    segmentation: mt_trace::Tensor<'t>,
) -> mt_trace::Tensor<'t> {
    (targets + segmentation).sum_all().cast(DType::F32) * 0.0
}

#[test]
fn losses_match() {
    let directory = Directory::open("deepseek32_groups");
    let golden = directory.values("indexer");
    for (stage, name) in [(SPARSE, "sparse"), (WARM_UP, "warm_up")] {
        for way in [
            ["scan_layers=true", "remat_policy=full", "attention=dot_product"],
            ["scan_layers=false", "remat_policy=none", "attention=flash"],
        ] {
            let model = directory.model(&[&[stage, WEIGHTED], &way[..]].concat());
            let made = differentiate(&model, &directory.parameters(&model), &directory.batch(), false);
            let expected = golden.array(&format!("{name}.loss")).to_f64()[0] * WEIGHT;
            let error = (made.auxiliary - expected).abs() / expected;
            assert!(error <= 1e-5, "{name} {way:?}: {} is not {expected}", made.auxiliary);
            let expected = from_hugging_face(&model, &|tensor| {
                let dims = mt_models::hugging_face::file_tensors(&model)
                    .unwrap()
                    .into_iter()
                    .find(|file| file.name == tensor)
                    .unwrap()
                    .dims;
                match tensor.contains(".indexer.") {
                    true => golden.array(&format!("{name}.{tensor}")),
                    // No gradient leaves the indexer.
                    false => HostArray::zeros(DType::F32, &dims),
                }
            });
            for (((path, _), actual), expected) in
                model.parameters().iter().zip(&made.gradients).zip(&expected)
            {
                let actual = actual.to_f64();
                let expected: Vec<f64> = expected.to_f64().iter().map(|value| value * WEIGHT).collect();
                if !path.to_string().contains("indexer") {
                    assert!(actual.iter().all(|value| *value == 0.0), "{name} {way:?}: `{path}` is trained");
                    continue;
                }
                let error = relative_error(&actual, &expected);
                assert!(error <= 1e-4, "{name} {way:?}: gradient of `{path}` differs by {error:e}");
            }
        }
    }
}

#[test]
fn choosing_all_keys_is_plain_attention() {
    let (rows, length) = (2, 19);
    let batch = Batch::packed(&[&[11, 6], &[19]], length, 40);
    assert_eq!(batch.rows, rows);
    for way in ["attention=dot_product", "attention=flash"] {
        let keys = [TINY, &["scan_layers=false", way]].concat();
        let plain = decoder(&[&keys[..], &["use_indexer=false"]].concat());
        let plain = gradients(&plain, &parameters(&plain), &batch);
        for topk in ["indexer_topk=19", "indexer_topk=1000"] {
            let sparse = decoder(&[&keys[..], &[topk]].concat());
            let made = gradients(&sparse, &parameters(&sparse), &batch);
            assert_eq!(made.logits.to_f64(), plain.logits.to_f64(), "{way} {topk}");
            let names = sparse.parameters();
            let own = names
                .iter()
                .zip(&made.gradients)
                .filter(|((path, _), _)| !path.to_string().contains("indexer"));
            let own: Vec<_> = own.map(|(_, gradient)| gradient.to_f64()).collect();
            let expected: Vec<_> = plain.gradients.iter().map(HostArray::to_f64).collect();
            assert!(own == expected, "{way} {topk}: gradients differ");
        }
    }
}

/// Long rows are processed in blocks of queries, whose last one is not full.
#[test]
fn blocks_of_queries_change_nothing() {
    let batch = Batch::packed(&[&[90, 170], &[301]], 301, 40);
    for stage in [WARM_UP, SPARSE] {
        let of = |way: &[&str]| {
            let keys =
                [TINY, &[stage, WEIGHTED, "indexer_topk=17", "base_num_decoder_layers=1"], way].concat();
            let model = decoder(&keys);
            let made = differentiate(&model, &parameters(&model), &batch, true);
            (model, made)
        };
        let (model, whole) = of(&["attention=dot_product"]);
        for way in [
            &["attention=flash", "remat_policy=none"][..],
            &["attention=flash", "remat_policy=full"],
            &["attention=flash", "remat_policy=custom", "indexer_cutoff_threshold=device"],
        ] {
            let (_, blocks) = of(way);
            let error = (blocks.auxiliary - whole.auxiliary).abs() / whole.auxiliary;
            assert!(error <= 1e-5, "{stage} {way:?}: {} is not {}", blocks.auxiliary, whole.auxiliary);
            let error = largest_error(&blocks.logits.to_f64(), &whole.logits.to_f64());
            assert!(error <= 1e-4, "{stage} {way:?}: logits differ by {error:e}");
            for (((path, _), actual), expected) in
                model.parameters().iter().zip(&blocks.gradients).zip(&whole.gradients)
            {
                let error = relative_error(&actual.to_f64(), &expected.to_f64());
                assert!(error <= 1e-4, "{stage} {way:?}: gradient of `{path}` differs by {error:e}");
            }
        }
    }
}

/// Packed documents have the logits and losses that they have alone.
#[test]
fn documents_choose_their_own_keys() {
    let sizes = [13, 4, 9];
    let packed = Batch::packed(&[&sizes[..]], 30, 40);
    for stage in [WARM_UP, SPARSE] {
        let model = decoder(&[TINY, &[stage, WEIGHTED, "indexer_topk=3"]].concat());
        let parameters = parameters(&model);
        let together = differentiate(&model, &parameters, &packed, false);
        let (mut start, mut sum) = (0, 0.0);
        for size in sizes {
            let mut alone = Batch::whole(1, size, 40);
            for (own, all) in alone.arrays.iter_mut().zip(&packed.arrays) {
                let values: Vec<i32> = all.as_slice::<i32>().unwrap()[start..start + size].to_vec();
                *own = HostArray::from_slice(DType::I32, &[1, size], &values).unwrap();
            }
            let made = differentiate(&model, &parameters, &alone, false);
            sum += made.auxiliary * size as f64;
            let of_document = &together.logits.to_f64()[start * 40..(start + size) * 40];
            let error = largest_error(of_document, &made.logits.to_f64());
            assert!(error <= 1e-4, "{stage}: logits of {size} tokens differ by {error:e}");
            start += size;
        }
        // Padding has no divergence.
        let expected = sum / 30.0;
        let error = (together.auxiliary - expected).abs() / expected;
        assert!(error <= 1e-5, "{stage}: {} is not {expected}", together.auxiliary);
    }
}

/// If all keys have the same score, queries attend to the earliest ones, or to all of them.
#[test]
fn ties_go_to_the_earliest_keys() {
    let (length, topk) = (14, 4);
    let keys = [TINY, &["scan_layers=false", "base_num_decoder_layers=1", "indexer_topk=4"]].concat();
    let logits_of = |own: &[&str], changed: Option<usize>| {
        let model = decoder(&[&keys[..], own].concat());
        let mut values = parameters(&model);
        for ((path, spec), value) in model.parameters().iter().zip(&mut values) {
            if path.to_string().contains("weights_proj") {
                *value = f32_array(&spec.dims(), &vec![0.0; spec.num_elements()]);
            }
        }
        let mut batch = Batch::whole(1, length, 40);
        if let Some(place) = changed {
            let mut tokens = batch.arrays[0].as_slice::<i32>().unwrap().to_vec();
            tokens[place] = (tokens[place] + 1) % 40;
            batch.arrays[0] = HostArray::from_slice(DType::I32, &[1, length], &tokens).unwrap();
        }
        logits(&model, &values, &batch).to_f64()
    };
    let usual = logits_of(&[], None);
    for changed in 0..length {
        let made = logits_of(&[], Some(changed));
        for place in changed + 1..length {
            let of = |logits: &[f64]| logits[place * 40..(place + 1) * 40].to_vec();
            assert_eq!(of(&made) != of(&usual), changed < topk, "token {changed} seen from {place}");
        }
    }
    let all = logits_of(&["indexer_mask_exact_topk=false"], None);
    assert_eq!(all, logits_of(&["use_indexer=false"], None));
}

/// The names of MaxText's checkpoints, scanned and not.
#[test]
fn parameters_have_names_of_maxtext() {
    use mt_models::Storage;

    let own = ["k_norm/bias", "k_norm/scale", "weights_proj/kernel", "wk/kernel", "wq_b/kernel"];
    for (scan, layers) in [
        ("scan_layers=true", &["dense_layers", "moe_layers"][..]),
        ("scan_layers=false", &["dense_layers_0", "moe_layers_0"]),
    ] {
        let keys = [TINY, &[scan, "first_num_dense_layers=1"]].concat();
        let model = decoder(&keys);
        let mut made: Vec<String> = model.storage().iter().map(|stored| stored.key.join("/")).collect();
        made.retain(|key| key.contains("indexer"));
        made.sort();
        let of_layer =
            |layer: &&str| own.map(|name| format!("decoder/{layer}/self_attention/indexer/{name}"));
        assert_eq!(made, layers.iter().flat_map(of_layer).collect::<Vec<_>>());
    }
}

#[test]
fn chosen_pairs_and_scores_count_as_operations() {
    use mt_models::Description;

    let flops = |keys: &[&str], length| {
        let model = decoder(&[TINY, &["base_num_decoder_layers=1"], keys].concat());
        let count = model.flops();
        count.training_step(1, length) - 6.0 * (count.weights_per_token * length) as f64
    };
    // A head has 9 dimensions of keys and 6 of values, and the indexer 7 heads of 9 dimensions and a weight.
    let (width, index) = (3.0 * 15.0, 7.0 * 10.0);
    let plain = |length: f64| 6.0 * width * length * length / 2.0;
    let scores = |length: f64| 6.0 * index * length * length / 2.0;
    assert_eq!(flops(&["use_indexer=false"], 100), plain(100.0));
    assert_eq!(flops(&["indexer_topk=100"], 100), plain(100.0));
    let chosen = 6.0 * width * 20.0 * (100.0 - 10.0);
    assert_eq!(flops(&["indexer_topk=20"], 100), chosen + scores(100.0));
    let keys = ["indexer_topk=20", WEIGHTED, WARM_UP];
    assert_eq!(flops(&keys, 100), plain(100.0) + scores(100.0));
    assert_eq!(flops(&keys, 10), plain(10.0) + scores(10.0));
}
