//! Objectives on corrupted texts: their losses in a program of their own, and batches that are the same after resuming and
//! in each evaluation.

use std::sync::Arc;

use mt_data::{
    Batch, BatchSource, CorruptedHeldOut, CorruptedSource, Corruption, DatasetOptions, HeldOut, Position,
    Source, Targets, Tokenizer, TrainIterator,
};
use mt_ir::Target;
use mt_nn::SequenceOrder;
use mt_runtime::testing;
use mt_shape::{DType, HostArray};
use mt_trace::{ProgramOptions, Tensor, program};

use super::{published::published, training::Setup};
use crate::{gradients::ModelTensors, objective::BatchTensors};

/// One batch, again and again.
#[derive(Clone)]
pub struct Same(pub Batch);

impl BatchSource for Same {
    fn next_batch(&mut self) -> mt_data::Result<Option<Batch>> {
        Ok(Some(self.0.clone()))
    }

    fn set_batch_rows(&mut self, _rows: usize) -> mt_data::Result<()> {
        Ok(())
    }

    fn position(&self) -> Position {
        Position::Null
    }

    fn seek(&mut self, _position: &Position) -> mt_data::Result<()> {
        Ok(())
    }
}

impl HeldOut for Same {
    fn batches(&self) -> mt_data::Result<Box<dyn Iterator<Item = mt_data::Result<Batch>>>> {
        Ok(Box::new([Ok(self.0.clone())].into_iter()))
    }
}

/// The loss of a batch of `rows` rows, its weight, and the gradients of the parameters with these published names.
/// `array` gives the batch's arrays by name.
pub fn loss_and_gradients(
    setup: &Setup,
    rows: usize,
    parameters: impl IntoIterator<Item = HostArray>,
    array: impl Fn(&str) -> HostArray,
    wanted: &[&str],
) -> Vec<HostArray> {
    let rule = setup.programs().loss;
    let (specs, declared) = (setup.model.parameters(), rule.objective.arrays(rows));
    let options =
        ProgramOptions { precision: setup.model.precision(), ..ProgramOptions::new("loss", Target::CPU) };
    let program = program(&options, |inputs| {
        let input =
            |name: &str, dtype, axes: &[_]| inputs.input(name, dtype, axes, &vec![None; axes.len()], false);
        let trained: Vec<Tensor<'_>> =
            specs.iter().map(|(path, spec)| input(&path.to_string(), spec.dtype, &spec.axes)).collect();
        let arrays: Vec<Tensor<'_>> =
            declared.iter().map(|array| input(array.name, array.dtype, &array.axes)).collect();
        // A program has no inputs that it does not read, as positions in models without them.
        let reads_all = arrays.iter().map(|array| array.sum_all().cast(DType::F32) * 0.0);
        let reads_all = reads_all.reduce(|sum, zero| sum + zero).unwrap();
        let batch = BatchTensors::new(declared.iter().map(|array| array.name), arrays, SequenceOrder::AsRead);
        let models = ModelTensors { trained, frozen: Vec::new() };
        let step = inputs.region().full(DType::I32, &[], 0.0);
        let made = rule.loss_and_gradients(&specs, &models, &batch, inputs.region().key(0), step);
        let gradients = wanted.iter().map(|wanted| {
            let index = specs.iter().position(|(path, spec)| published(path, spec) == *wanted).unwrap();
            made.gradients[index]
        });
        [made.loss + reads_all, made.weights]
            .into_iter()
            .chain(gradients)
            .map(|value| inputs.replicated("result", value.cast(DType::F32)))
            .collect()
    })
    .unwrap();
    let inputs = parameters.into_iter().chain(declared.iter().map(|own| array(own.name)));
    testing::run(&program, &inputs.collect::<Vec<_>>()).unwrap()
}

/// Checks that data of corrupted texts of `length` tokens resumes at each position, and refuses a position of other
/// data; that batches are corrupted differently; and that all passes over held-out data are the same. Returns the
/// first batches.
#[track_caller]
pub fn check_data<C: Corruption>(corruption: &C, length: usize) -> Vec<Batch> {
    let documents = (0..30).map(|number| "words of a text ".repeat(number % 5 + 1)).collect();
    let source = Source::Memory { name: "texts".into(), documents };
    let options = DatasetOptions { targets: Targets::All, ..DatasetOptions::training(source, length, 4) };
    let texts = || TrainIterator::open(options.clone(), Some(Arc::new(Tokenizer::bytes()))).unwrap();
    let open = || CorruptedSource::new(texts(), corruption.clone());
    let mut first = open();
    let mut positions = vec![first.position()];
    let batches: Vec<Batch> = (0..6)
        .map(|_| {
            let batch = first.next_batch().unwrap().unwrap();
            positions.push(first.position());
            batch
        })
        .collect();
    for (start, position) in positions[..6].iter().enumerate() {
        let mut resumed = open();
        resumed.seek(position).unwrap();
        for batch in &batches[start..] {
            assert_eq!(resumed.next_batch().unwrap().unwrap(), *batch);
        }
    }
    let error = open().seek(&positions[0]["data"]).unwrap_err();
    assert!(error.to_string().contains(corruption.lost_position()), "{error}");
    let text = Same(texts().next().unwrap().unwrap());
    let mut same = CorruptedSource::new(text.clone(), corruption.clone());
    assert_ne!(same.next_batch().unwrap(), same.next_batch().unwrap());
    let held_out = CorruptedHeldOut::new(Box::new(text), corruption.clone());
    let pass = || held_out.batches().unwrap().map(Result::unwrap).collect::<Vec<_>>();
    assert_eq!(pass(), pass());
    batches
}
