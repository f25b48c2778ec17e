//! Distillation: a student learns the outputs of a teacher.

mod annealed;
mod features;
mod teaching;

use std::{path::Path, sync::Arc};

use mt_config::{DistillationGroup, Teacher, TrainConfig};
use mt_data::{
    StoredLogits, StudentAnswers,
    arrays::{TARGETS, TARGETS_SEGMENTATION},
};
use mt_models::LayerOutput;
use mt_nn::{
    Divergence, TokenLoss,
    axes::{BATCH, POSITION},
    token_weights,
};
use mt_shape::DType;
use mt_trace::Tensor;

use super::{
    BatchArray, BatchTensors, BoundModel, DataRequest, FrozenModel, FrozenSource, Loss, Models, NamedTensors,
    Objective, RunData, SideOutputs,
    next_token::{text_arrays, text_tokens, token_sums, token_terms},
};
use crate::{TrainError, metrics::names};

pub use annealed::OverSteps;
pub use features::Features;
pub use teaching::Teaching;

pub(crate) use teaching::TOP;

use teaching::of_stored_tokens;

/// The cross-entropy of tokens, the divergence from a teacher's distributions and the distance of features,
/// `(1 − α) CE + α D + β F`, each a mean over the tokens of a batch with a loss. The cross-entropy includes the z-loss.
pub struct Distillation {
    /// Positions per row.
    pub length: usize,
    pub vocab_size: usize,
    pub z_loss_multiplier: f64,
    pub teacher: Teaching,
    pub alpha: OverSteps,
    /// The divisor of the logits of both models.
    pub temperature: OverSteps,
    pub divergence: Divergence,
    /// Whether the divergence is multiplied by the squared temperature, by which its gradients shrink.
    pub restores_scale: bool,
    pub features: Option<Features>,
    pub student_answers: Option<StudentAnswers>,
}

/// The values of one step.
struct Step<'t> {
    alpha: Tensor<'t>,
    temperature: Tensor<'t>,
    /// The weight of the loss of features, if there is one.
    beta: Option<Tensor<'t>>,
}

/// Sums over the tokens of a micro-batch.
struct Sums<'t> {
    student: TokenLoss<'t>,
    /// The cross-entropy of a teacher that runs.
    teacher: Option<Tensor<'t>>,
    divergence: Tensor<'t>,
    /// The distance of features, if it is requested.
    features: Option<Tensor<'t>>,
    side: SideOutputs<'t>,
}

impl Distillation {
    /// The objective of a configuration whose teacher runs.
    ///
    /// # Errors
    /// The teacher's configuration describes no valid model.
    pub(crate) fn of_model(settings: &TrainConfig, teacher: &Teacher) -> Result<Self, TrainError> {
        let path = teacher.path.clone().expect("the configuration was checked to name the teacher's weights");
        let model = Arc::from(mt_models::build(&teacher.model)?);
        let source = FrozenSource::Loaded { model, path };
        Ok(Self::of_config(settings, Teaching::Model(FrozenModel { name: "teacher", source })))
    }

    /// The objective of a configuration with stored logits.
    ///
    /// # Errors
    /// The directory holds none.
    pub(crate) fn of_stored(settings: &TrainConfig, directory: &Path) -> Result<Self, TrainError> {
        let shape = StoredLogits::open(directory)?.shape();
        Ok(Self::of_config(settings, Teaching::Stored { directory: directory.to_owned(), shape }))
    }

    fn of_config(settings: &TrainConfig, teacher: Teaching) -> Self {
        let group: &DistillationGroup = &settings.distillation;
        let steps = settings.run.steps;
        let features = Features {
            distance: group.distill_feature_loss_type,
            layers: group.layers(settings.model.num_decoder_layers()),
            weight: OverSteps { value: group.beta(), steps },
        };
        let divergence = match group.distill_jsd_beta {
            Some(beta) => Divergence::JensenShannon { beta },
            None => Divergence::Forward,
        };
        Self {
            length: settings.data.max_target_length,
            vocab_size: settings.model.vocab_size,
            z_loss_multiplier: settings.objective.z_loss_multiplier,
            teacher,
            alpha: OverSteps { value: group.alpha(), steps },
            temperature: OverSteps { value: group.temperature(), steps },
            divergence,
            restores_scale: group.distill_jsd_beta.is_none(),
            features: Some(features).filter(|features| !features.weight.is_zero()),
            student_answers: (group.distill_student_answers > 0.0).then_some(StudentAnswers {
                share: group.distill_student_answers,
                temperature: group.distill_answer_temperature,
                max_tokens: group.distill_answer_tokens,
                seed: settings.data.data_shuffle_seed,
            }),
        }
    }

    fn at<'t>(&self, step: Tensor<'t>) -> Step<'t> {
        Step {
            alpha: self.alpha.at(step),
            temperature: self.temperature.at(step),
            beta: self.features.as_ref().map(|features| features.weight.at(step)),
        }
    }

    fn sums<'t>(
        &self,
        models: &Models<'_, 't>,
        batch: &BatchTensors<'t>,
        temperature: Tensor<'t>,
        features: Option<&Features>,
    ) -> Sums<'t> {
        let (targets, segmentation) = (batch.of(TARGETS), batch.of(TARGETS_SEGMENTATION));
        let further = features.map(|_| LayerOutput::Projection);
        let (states, own_layers) = models.trained.hidden_and(text_tokens(batch), further);
        let logits = models.trained.logits(states.hidden);
        let loss = |model: &BoundModel<'_, 't>, logits, z_loss_multiplier| {
            model.loss_of_logits(logits, targets, segmentation, z_loss_multiplier)
        };
        let sum = |each: Tensor<'t>| (each * token_weights(segmentation)).sum(&[BATCH, POSITION]);
        let student = loss(&models.trained, logits, self.z_loss_multiplier);
        let divergence = |[teacher, student]: [Tensor<'t>; 2]| {
            sum(self.divergence.of_tokens(teacher, student, temperature))
        };
        let Some(teacher) = models.frozen.first() else {
            let divergence = divergence(of_stored_tokens(batch, logits));
            return Sums { student, teacher: None, divergence, features: None, side: states.side };
        };
        let (teacher_states, layers) = teacher.hidden_and(text_tokens(batch), further);
        let of_teacher = teacher.logits(teacher_states.hidden).stop_gradient();
        Sums {
            student,
            teacher: Some(loss(teacher, of_teacher, 0.0).total),
            divergence: divergence([of_teacher, logits]),
            features: features.map(|features| sum(features.of_tokens(&layers, &own_layers))),
            side: states.side,
        }
    }
}

impl Objective for Distillation {
    fn name(&self) -> &'static str {
        "distillation"
    }

    fn arrays(&self, rows: usize) -> Vec<BatchArray> {
        [self.evaluation_arrays(rows), self.teacher.arrays(rows, self.vocab_size)].concat()
    }

    fn evaluation_arrays(&self, rows: usize) -> Vec<BatchArray> {
        text_arrays(rows, self.length, self.vocab_size)
    }

    fn sequences(&self, rows: usize) -> [usize; 2] {
        [rows, self.length]
    }

    fn data(&self, request: &DataRequest<'_>) -> Result<RunData, TrainError> {
        match &self.teacher {
            Teaching::Model(_) => request.text(),
            Teaching::Stored { directory, .. } => request.stored_logits(directory),
        }
    }

    fn frozen(&self) -> Vec<FrozenModel> {
        match &self.teacher {
            Teaching::Model(teacher) => vec![teacher.clone()],
            Teaching::Stored { .. } => Vec::new(),
        }
    }

    fn student_answers(&self) -> Option<StudentAnswers> {
        self.student_answers
    }

    /// Evaluations report the cross-entropy.
    fn is_cross_entropy(&self) -> bool {
        true
    }

    fn weights<'t>(&self, batch: &BatchTensors<'t>) -> Vec<Tensor<'t>> {
        vec![token_weights(batch.of(TARGETS_SEGMENTATION)).sum(&[BATCH, POSITION])]
    }

    fn loss<'t>(
        &self,
        models: &Models<'_, 't>,
        batch: &BatchTensors<'t>,
        divisors: &[Tensor<'t>],
        step: Tensor<'t>,
    ) -> Loss<'t> {
        let Step { alpha, temperature, beta } = self.at(step);
        let Sums { student, teacher, divergence, features, side } =
            self.sums(models, batch, temperature, self.features.as_ref());
        let divisor = divisors[0];
        let mut terms = token_terms(&student, divisor);
        let cross_entropy = terms[0].1;
        let divergence = divergence / divisor;
        let soft = if self.restores_scale { divergence * temperature.square() } else { divergence };
        let mut share = student.total / divisor * (-alpha + 1.0) + soft * alpha;
        // Shares of micro-batches add up to the value.
        let part = student.weights / divisor;
        terms.extend([
            (names::SOFT_LOSS.into(), soft),
            (names::HARD_LOSS.into(), cross_entropy),
            (names::TEACHER_DIVERGENCE.into(), divergence),
            (names::DISTILLATION_ALPHA.into(), alpha * part),
            (names::DISTILLATION_TEMPERATURE.into(), temperature * part),
        ]);
        terms.extend(teacher.map(|teacher| (names::TEACHER_LOSS.into(), teacher / divisor)));
        if let (Some(features), Some(beta)) = (features, beta) {
            let distance = features / divisor;
            share = share + distance * beta;
            terms.push((names::FEATURE_LOSS.into(), distance));
            terms.push((names::DISTILLATION_BETA.into(), beta * part));
        }
        Loss { share, terms, side }
    }

    /// The cross-entropy, and the divergence from a teacher that runs at the temperature 1 whatever the schedule.
    fn evaluate<'t>(&self, models: &Models<'_, 't>, batch: &BatchTensors<'t>) -> NamedTensors<'t> {
        if models.frozen.is_empty() {
            let states = models.trained.hidden(text_tokens(batch));
            let (targets, segmentation) = (batch.of(TARGETS), batch.of(TARGETS_SEGMENTATION));
            let student =
                models.trained.token_loss(states.hidden, targets, segmentation, self.z_loss_multiplier);
            return token_sums(&student).into_iter().chain(states.side.evaluated(student.weights)).collect();
        }
        let one = batch.of(TARGETS).region().full(DType::F32, &[], 1.0);
        let Sums { student, teacher, divergence, side, .. } = self.sums(models, batch, one, None);
        let mut sums = token_sums(&student);
        let total = |name: &str| format!("{}{name}", names::EVALUATION_TOTAL).into();
        sums.extend(teacher.map(|teacher| (total("teacher_loss"), teacher)));
        sums.push((total("kl_div"), divergence));
        sums.extend(side.evaluated(student.weights));
        sums
    }
}
