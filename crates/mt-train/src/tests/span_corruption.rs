//! Span corruption: the loss of transformers for the same batch, and the same losses however a model is run, placed and
//! resumed.

use std::{fmt::Write as _, path::Path, sync::Arc};

use mt_data::{
    Batch, BatchSource, CorruptedHeldOut, CorruptedSource, DatasetOptions, HeldOut, Source, SpanCorruption,
    Targets, Tokenizer, TrainIterator,
    arrays::{
        INPUTS, INPUTS_POSITION, INPUTS_SEGMENTATION, SOURCE, SOURCE_SEGMENTATION, TARGETS,
        TARGETS_SEGMENTATION,
    },
};
use mt_ir::Target;
use mt_models::hugging_face::Weights;
use mt_nn::SequenceOrder;
use mt_runtime::testing;
use mt_shape::{DType, HostArray, Placement};
use mt_testing::Golden;
use mt_trace::{ProgramOptions, Tensor, program};

use super::{
    block_diffusion::Same,
    placement::wrong_numbers,
    training::{Setup, on_one_device, train},
};
use crate::{
    gradients::ModelTensors,
    objective::{BatchTensors, of_config},
};

const ENCODER_DECODER: &[&str] = &[
    "decoder_block=t5",
    "training_objective=span_corruption",
    "max_source_length=24",
    "base_num_encoder_layers=3",
    "mlp_activations=gelu,linear",
    "relative_attention_num_buckets=8",
    "relative_attention_max_distance=20",
];

#[test]
fn losses_are_those_of_transformers() {
    let published: &[&str] = &[
        "decoder_block=t5",
        "training_objective=span_corruption",
        "base_emb_dim=20",
        "base_num_query_heads=3",
        "base_num_kv_heads=3",
        "head_dim=7",
        "base_mlp_dim=28",
        "base_num_encoder_layers=3",
        "base_num_decoder_layers=2",
        "relative_attention_num_buckets=8",
        "relative_attention_max_distance=12",
        "mlp_activations=relu",
        "vocab_size=61",
        "logits_via_embedding=true",
        "normalize_embedding_logits=true",
        "normalization_layer_epsilon=1e-6",
        "max_source_length=13",
        "max_target_length=7",
    ];
    let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/../mt-models");
    let golden = Golden::open(manifest, "families/t5_relu_tied/golden.safetensors");
    let setup = Setup::new(published, 1);
    let weights =
        Weights::open(&*setup.model, &Path::new(manifest).join("tests/goldens/families/t5_relu_tied"))
            .unwrap();
    let placement = Placement::single();
    let loaded = weights.load(testing::cpu(1), &placement, &*setup.model, Some(DType::F32)).unwrap();
    let parameters = loaded.iter().map(|array| array.to_host().unwrap());
    let rule = setup.programs().loss;
    let (specs, declared) = (setup.model.parameters(), rule.objective.arrays(3));
    let options = ProgramOptions::new("span_corruption", Target::CPU);
    let program = program(&options, |inputs| {
        let input =
            |name: &str, dtype, axes: &[_]| inputs.input(name, dtype, axes, &vec![None; axes.len()], false);
        let trained: Vec<Tensor<'_>> =
            specs.iter().map(|(path, spec)| input(&path.to_string(), spec.dtype, &spec.axes)).collect();
        let arrays: Vec<Tensor<'_>> =
            declared.iter().map(|array| input(array.name, array.dtype, &array.axes)).collect();
        let unread = arrays[1].sum_all().cast(DType::F32) * 0.0;
        let batch = BatchTensors::new(declared.iter().map(|array| array.name), arrays, SequenceOrder::AsRead);
        let models = ModelTensors { trained, frozen: Vec::new() };
        let step = inputs.region().full(DType::I32, &[], 0.0);
        let made = rule.loss_and_gradients(&specs, &models, &batch, inputs.region().key(0), step);
        [made.loss + unread, made.weights]
            .map(|value| inputs.replicated("result", value.cast(DType::F32)))
            .into()
    })
    .unwrap();
    let whole = |count: usize, value: &dyn Fn(usize) -> i32| {
        let values: Vec<i32> = (0..3 * count).map(|place| value(place % count)).collect();
        HostArray::from_slice(DType::I32, &[3, count], &values).unwrap()
    };
    let array = |name: &str| match name {
        INPUTS => golden.array("tokens"),
        TARGETS => golden.array("targets"),
        SOURCE => golden.array("source"),
        SOURCE_SEGMENTATION => golden.array("source_segmentation"),
        INPUTS_POSITION => whole(7, &|place| place as i32),
        INPUTS_SEGMENTATION | TARGETS_SEGMENTATION => whole(7, &|_| 1),
        other => panic!("`{other}`"),
    };
    let inputs: Vec<HostArray> = parameters.chain(declared.iter().map(|own| array(own.name))).collect();
    let made = testing::run(&program, &inputs).unwrap();
    let (loss, expected) = (made[0].to_f64()[0], golden.array("loss").to_f64()[0]);
    assert!((loss - expected).abs() <= 1e-5 * expected, "{loss}, not {expected}");
    assert_eq!(made[1].to_f64(), [21.0]);
}

#[test]
fn micro_batches_recomputation_tiles_and_placement_change_nothing() {
    let expected = on_one_device(ENCODER_DECODER);
    let mut report = String::new();
    for (way, num_devices) in [
        (&["gradient_accumulation_steps=4", "remat_policy=full", "num_vocab_tiling=2"][..], 1),
        (&["ici_fsdp_parallelism=8"], 8),
        (&["ici_fsdp_parallelism=4", "ici_tensor_parallelism=2"], 8),
        (&["ici_context_parallelism=4", "ici_fsdp_parallelism=2"], 8),
        (&["ici_context_parallelism=4", "ici_fsdp_parallelism=2", "context_parallel_load_balance=false"], 8),
        (&["ici_sequence_parallelism=2", "ici_context_parallelism=2", "ici_tensor_parallelism=2"], 8),
        (&["ici_tensor_sequence_parallelism=2", "ici_fsdp_parallelism=4"], 8),
    ] {
        let trained = train(ENCODER_DECODER, way, num_devices);
        let problems = wrong_numbers(&trained, &expected);
        if !problems.is_empty() {
            let _ = writeln!(report, "{way:?}:\n{problems}");
        }
    }
    assert!(report.is_empty(), "\n{report}");
}

#[test]
fn spans_are_the_same_after_resuming_and_in_each_evaluation() {
    let settings = Setup::new(ENCODER_DECODER, 1).settings;
    let objective = of_config(&settings).unwrap();
    assert_eq!(objective.name(), "span corruption");
    let sizes = mt_data::SpanSizes { density: 0.3, mean_length: 2.0, source: 24, target: 40 };
    let corruption = SpanCorruption { sizes, first_sentinel: 300, eos: Some(299), start: 0, seed: 3 };
    let documents = (0..30).map(|number| "words of a text ".repeat(number % 5 + 1)).collect();
    let source = Source::Memory { name: "texts".into(), documents };
    let length = sizes.text_length().unwrap();
    let options = DatasetOptions { targets: Targets::All, ..DatasetOptions::training(source, length, 4) };
    let open = || {
        let data = TrainIterator::open(options.clone(), Some(Arc::new(Tokenizer::bytes()))).unwrap();
        CorruptedSource::new(data, corruption)
    };
    let mut first = open();
    let mut positions = vec![first.position()];
    let batches: Vec<Batch> = (0..6)
        .map(|_| {
            let batch = first.next_batch().unwrap().unwrap();
            positions.push(first.position());
            batch
        })
        .collect();
    let declared: Vec<(&str, Vec<usize>)> =
        objective.arrays(4).iter().map(|array| (array.name, array.dims())).collect();
    for batch in &batches {
        for (name, dims) in &declared {
            assert_eq!(batch.array(name).unwrap().dims(), dims, "{name}");
        }
        assert!(batch.num_targets() > 0);
    }
    for (start, position) in positions[..6].iter().enumerate() {
        let mut resumed = open();
        resumed.seek(position).unwrap();
        for batch in &batches[start..] {
            assert_eq!(resumed.next_batch().unwrap().unwrap(), *batch);
        }
    }
    let error = open().seek(&positions[0]["data"]).unwrap_err();
    assert!(error.to_string().contains("does not count the batches whose spans"), "{error}");
    let text = TrainIterator::open(options.clone(), Some(Arc::new(Tokenizer::bytes()))).unwrap().next();
    let text = text.unwrap().unwrap();
    let mut same = CorruptedSource::new(Same(text.clone()), corruption);
    assert_ne!(same.next_batch().unwrap(), same.next_batch().unwrap());
    let held_out = CorruptedHeldOut::new(Box::new(Same(text)), corruption);
    let pass = || held_out.batches().unwrap().map(Result::unwrap).collect::<Vec<_>>();
    assert_eq!(pass(), pass());
}
