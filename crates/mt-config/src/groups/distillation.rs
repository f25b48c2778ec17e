//! Distillation: the teacher, and the weights of the terms of the loss.

use std::{collections::HashSet, path::PathBuf};

use serde_json::{Map, Value};

use super::{
    BroughtTokenizer, CheckpointGroup, DecoderBlock, ModelGroup, TrainingObjective,
    choices::{FeatureLoss, WeightSchedule},
    group, tokenizer_directory,
};
use crate::{
    config::{Config, not_built, report},
    error::Problem,
    key::Key,
    table,
    teacher::TEACHER,
};

group! {
    /// The loss of a distillation.
    pub struct DistillationGroup {
        teacher_overrides: Map<String, Value>,
        offline_data_dir: Option<PathBuf>,
        distill_alpha: f64,
        distill_alpha_end: Option<f64>,
        distill_alpha_schedule: WeightSchedule,
        distill_temperature: f64,
        distill_temperature_end: Option<f64>,
        distill_temperature_schedule: WeightSchedule,
        distill_jsd_beta: Option<f64>,
        distill_weights_copy_map: Map<String, Value>,
        student_params_to_update: Option<Vec<String>>,
        distill_student_weights_share_map: Map<String, Value>,
        learn_to_init_mode: bool,
        lti_use_general_linear_map: bool,
        attn_module_name: Option<String>,
        lti_layer_indices: Option<Vec<usize>>,
        distill_student_answers: f64,
        distill_answer_temperature: f64,
        distill_answer_tokens: usize,
        distill_beta: f64,
        distill_beta_end: Option<f64>,
        distill_beta_schedule: WeightSchedule,
        distill_feature_loss_type: FeatureLoss,
        distill_layer_indices: Option<Vec<usize>>,
        distill_teacher_layer_indices: Option<Vec<usize>>,
    }
    besides {
        teacher: Option<Box<Teacher>> = Teacher::read,
    }
}

/// The model whose outputs the student learns.
#[derive(Clone, Debug, PartialEq)]
pub struct Teacher {
    pub model: ModelGroup,
    /// The path of its weights. It is checked to be named.
    pub path: Option<PathBuf>,
    /// The tokenizer that accompanies the weights.
    pub tokenizer: Option<BroughtTokenizer>,
}

impl Teacher {
    /// The teacher of a configuration, if it has one. Problems of the teacher's own configuration are reported as such.
    fn read(config: &Config, problems: &mut Vec<Problem>) -> Option<Option<Box<Self>>> {
        let mut report = |of_teacher: Vec<Problem>| {
            problems.extend(of_teacher.into_iter().map(|problem| Problem::OfTeacher(Box::new(problem))));
        };
        let teacher = match config.teacher() {
            Ok(Some(teacher)) => teacher,
            Ok(None) => return Some(None),
            Err(error) => {
                report(error.into_problems());
                return Some(None);
            }
        };
        // Both share keys, whose problems are reported once.
        report(teacher_only(config));
        let known: HashSet<String> = config.missing_features().iter().map(ToString::to_string).collect();
        let mut of_teacher = teacher.missing_features();
        of_teacher.retain(|problem| !known.contains(&problem.to_string()));
        let model = ModelGroup::read(&teacher, &mut of_teacher);
        let checkpoint = CheckpointGroup::read(&teacher, &mut of_teacher);
        report(of_teacher);
        let (Some(model), Some(checkpoint)) = (model, checkpoint) else { return Some(None) };
        let path = checkpoint.parameters_path().map(Into::into);
        Some(Some(Box::new(Self { model, path, tokenizer: checkpoint.brought_tokenizer() })))
    }
}

/// The subjects of keys that neither describe nor load a model. The teacher shares their values with its student.
const NOT_OF_MODELS: &[&str] = &[
    "data",
    "data and decoding",
    "decoding",
    "distillation",
    "evaluation",
    "export",
    "logging",
    "loss",
    "metrics",
    "monitoring",
    "optimizer",
    "preference optimization",
    "profiling",
    "reinforcement learning",
    "run directory",
    "sampling",
    "server",
    "tokenizer",
    "training log",
    "training loop",
];

/// Reports keys of `teacher_overrides` that have no effect on a teacher.
fn teacher_only(config: &Config) -> Vec<Problem> {
    let given = config.entry(TEACHER).value.as_object().into_iter().flatten();
    let keys = given.filter_map(|(name, _)| table::canonical(name));
    let idle = keys.filter(|key| NOT_OF_MODELS.contains(&key.acts_on));
    let problem = |key: &'static Key| {
        Problem::inconsistent(
            format!(
                "`{}` neither describes nor loads a model, so that it has no effect on a teacher",
                key.name
            ),
            format!("leave out `teacher_overrides.{0}`, or set `{0}` itself, for both models", key.name),
        )
    };
    idle.map(problem).collect()
}

/// A value of a run and its change from the first step to the last.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Annealed {
    pub first: f64,
    pub last: f64,
    pub schedule: WeightSchedule,
}

impl Annealed {
    fn new(first: f64, last: Option<f64>, schedule: WeightSchedule) -> Self {
        match (last, schedule) {
            (None, _) | (_, WeightSchedule::Constant) => {
                Self { first, last: first, schedule: WeightSchedule::Constant }
            }
            (Some(last), schedule) => Self { first, last, schedule },
        }
    }
}

impl DecoderBlock {
    /// Whether the layers of the family have a mixer, such as attention.
    fn has_mixers(self) -> bool {
        !matches!(self, Self::Simple | Self::SimpleMlp)
    }
}

impl DistillationGroup {
    /// The weight of the loss against the teacher.
    pub fn alpha(&self) -> Annealed {
        Annealed::new(self.distill_alpha, self.distill_alpha_end, self.distill_alpha_schedule)
    }

    /// The divisor of logits.
    pub fn temperature(&self) -> Annealed {
        let (last, schedule) = (self.distill_temperature_end, self.distill_temperature_schedule);
        Annealed::new(self.distill_temperature, last, schedule)
    }

    /// The weight of the loss of features.
    pub fn beta(&self) -> Annealed {
        Annealed::new(self.distill_beta, self.distill_beta_end, self.distill_beta_schedule)
    }

    /// The layers whose features are compared, as pairs of a student's and a teacher's layer; `num_layers` are the
    /// student's.
    pub fn layers(&self, num_layers: usize) -> Vec<(usize, usize)> {
        let named = |layers: &Option<Vec<usize>>| layers.clone().filter(|layers| !layers.is_empty());
        let own = named(&self.distill_layer_indices).unwrap_or_else(|| (0..num_layers).collect());
        let of_teacher = named(&self.distill_teacher_layer_indices).unwrap_or_else(|| own.clone());
        own.into_iter().zip(of_teacher).collect()
    }

    /// Whether the run learns from a teacher.
    pub fn is_on(&self) -> bool {
        self.offline_data_dir.is_some() || !self.teacher_overrides.is_empty()
    }

    /// The tokenizer of the rows whose logits are stored.
    pub(super) fn stored_tokenizer(&self) -> Option<BroughtTokenizer> {
        let directory = tokenizer_directory(self.offline_data_dir.as_deref()?);
        directory.is_dir().then_some(BroughtTokenizer::OfRun(directory))
    }

    /// The key that makes the run a distillation.
    fn key(&self) -> &'static str {
        if self.offline_data_dir.is_some() { "offline_data_dir" } else { TEACHER }
    }

    fn check(&self, config: &Config, problems: &mut Vec<Problem>) {
        if !self.is_on() {
            return;
        }
        self.check_values(config, problems);
        self.check_teacher(config, problems);
        self.check_answers(config, problems);
        self.check_weights_of_student(config, problems);
        let Annealed { first, last, .. } = self.beta();
        if self.offline_data_dir.is_some() && (first != 0.0 || last != 0.0) {
            problems.push(Problem::inconsistent(
                format!(
                    "{}, but {}, which holds logits and no features",
                    config.stated("distill_beta"),
                    config.stated("offline_data_dir")
                ),
                "leave out `distill_beta`, or name a teacher that runs with `teacher_overrides`",
            ));
        }
        let (value, stated) = (|key: &str| &config.entry(key).value, |key: &str| config.stated(key));
        let indexer = config.entry("indexer_sparse_training");
        if indexer.key.asks(&indexer.value) {
            report(problems, not_built(indexer, "this key with distillation"));
        }
        let others = [
            ("use_dpo", *value("use_dpo") == true),
            ("use_reward", *value("use_reward") == true),
            ("training_objective", *value("training_objective") != TrainingObjective::CausalLm.name()),
        ];
        for (other, _) in others.into_iter().filter(|(_, is_set)| *is_set) {
            problems.push(Problem::inconsistent(
                format!("{} and {}, but a run has one objective", stated(self.key()), stated(other)),
                format!("leave out `{}` or `{other}`", self.key()),
            ));
        }
    }

    /// Reports contradictions about the student's first weights and those that it trains.
    fn check_weights_of_student(&self, config: &Config, problems: &mut Vec<Problem>) {
        let given = self.student_params_to_update.iter().flatten();
        let given: Vec<Value> = given.map(|pattern| pattern.as_str().into()).collect();
        let mask = &config.entry("trainable_parameters_mask").value;
        if !given.is_empty() && *mask != Value::Array(given) {
            problems.push(Problem::inconsistent(
                format!(
                    "{}, but {}",
                    config.stated("student_params_to_update"),
                    config.stated("trainable_parameters_mask")
                ),
                "leave out one of them: both name the parameters to train",
            ));
        }
        let changing = [
            ("distill_weights_copy_map", !self.distill_weights_copy_map.is_empty()),
            ("distill_student_weights_share_map", !self.distill_student_weights_share_map.is_empty()),
            ("learn_to_init_mode", self.learn_to_init_mode),
        ];
        let with_adapters = config.entry("enable_lora").value == true;
        for (key, _) in changing.into_iter().filter(|(_, is_set)| *is_set && with_adapters) {
            problems.push(Problem::inconsistent(
                format!(
                    "{}, but {}, so that checkpoints would not hold these weights",
                    config.stated(key),
                    config.stated("enable_lora")
                ),
                format!("leave out `{key}` or `lora.enable_lora`"),
            ));
        }
        self.check_learned_maps(config, problems);
    }

    /// Reports keys that do not suit learned maps.
    fn check_learned_maps(&self, config: &Config, problems: &mut Vec<Problem>) {
        if !self.learn_to_init_mode {
            return;
        }
        let mut add = |other: &str, reason: &str, hint: String| {
            let (mode, other) = (config.stated("learn_to_init_mode"), config.stated(other));
            problems.push(Problem::inconsistent(format!("{mode}, but {other}: {reason}"), hint));
        };
        if self.offline_data_dir.is_some() {
            let hint = "name a teacher that runs: `teacher_overrides.load_parameters_path=…`, without `offline_data_dir`";
            add(
                "offline_data_dir",
                "maps need the weights of a teacher, and stored logits have none",
                hint.into(),
            );
        }
        if config.entry("use_qk_clip").value == true {
            let hint = "leave out `use_qk_clip` until the student has weights of its own";
            add("use_qk_clip", "weights that maps compute cannot be scaled", hint.into());
        }
        if self.lti_layer_indices.is_some() && config.entry("scan_layers").value == true {
            let hint = "use `scan_layers=false`, or leave out `lti_layer_indices`";
            add(
                "lti_layer_indices",
                "scanned layers have one array, which is mapped as a whole",
                hint.into(),
            );
        }
    }

    /// Reports keys that do not suit a student's own answers.
    fn check_answers(&self, config: &Config, problems: &mut Vec<Problem>) {
        if self.distill_student_answers == 0.0 {
            return;
        }
        let needed = [
            ("use_sft", true.into(), "prompts are the beginnings of conversations"),
            (
                "sft_train_on_completion_only",
                true.into(),
                "the student learns from its answers, not from prompts",
            ),
            ("packing", false.into(), "each row has one prompt"),
            ("distill_alpha", 1.0.into(), "the cross-entropy of a student's own answers teaches nothing"),
            (
                "distill_alpha_end",
                Value::Null,
                "the cross-entropy of a student's own answers teaches nothing",
            ),
            ("offline_data_dir", Value::Null, "stored logits are those of other answers"),
        ];
        let is_other = |(key, value, _): &(&str, Value, &str)| {
            let entry = config.entry(key);
            match value.is_null() {
                true => entry.key.asks(&entry.value),
                false => entry.value != *value && entry.value.as_f64() != value.as_f64().or(Some(f64::NAN)),
            }
        };
        for (key, value, reason) in needed.into_iter().filter(is_other) {
            let hint = match value.is_null() {
                true => format!("leave out `{key}` or `distill_student_answers`"),
                false => format!("use `{key}={value}`, or leave out `distill_student_answers`"),
            };
            problems.push(Problem::inconsistent(
                format!("{}, but {}: {reason}", config.stated("distill_student_answers"), config.stated(key)),
                hint,
            ));
        }
    }

    fn check_values(&self, config: &Config, problems: &mut Vec<Problem>) {
        for key in ["distill_alpha", "distill_alpha_end"] {
            if config.entry(key).value.as_f64().is_some_and(|alpha| alpha > 1.0) {
                problems.push(Problem::inconsistent(
                    format!(
                        "{}, so that the weight of the loss against the data would be below 0",
                        config.stated(key)
                    ),
                    "use a share from 0 to 1",
                ));
            }
        }
        for key in ["distill_temperature", "distill_temperature_end"] {
            if config.entry(key).value.as_f64() == Some(0.0) {
                problems.push(Problem::inconsistent(
                    format!("{}, but logits are divided by it", config.stated(key)),
                    "use a number above 0, such as 1",
                ));
            }
        }
        for value in ["distill_alpha", "distill_temperature", "distill_beta"] {
            let [end, schedule] = ["end", "schedule"].map(|part| format!("{value}_{part}"));
            let is_constant = config.entry(&schedule).value == WeightSchedule::Constant.name();
            match (is_constant, config.entry(&end).value.is_null()) {
                (true, false) => problems.push(Problem::inconsistent(
                    format!("{}, but {}", config.stated(&end), config.stated(&schedule)),
                    format!("use `{schedule}=linear` or `{schedule}=cosine`, or leave out `{end}`"),
                )),
                (false, true) => problems.push(Problem::inconsistent(
                    format!("{}, but {}", config.stated(&schedule), config.stated(&end)),
                    format!("state the last value with `{end}`"),
                )),
                _ => {}
            }
        }
    }

    fn check_teacher(&self, config: &Config, problems: &mut Vec<Problem>) {
        let Some(teacher) = &self.teacher else { return };
        let (own, other) = (config.entry("vocab_size").value.as_u64(), teacher.model.vocab_size);
        if own.is_some_and(|own| own != other as u64) {
            problems.push(Problem::inconsistent(
                format!(
                    "{}, but the teacher has a vocabulary of {other}, and the student learns the teacher's \
                     probability of each token",
                    config.stated("vocab_size")
                ),
                format!(
                    "use `vocab_size={other}` and the teacher's tokenizer, or a teacher of the student's vocabulary"
                ),
            ));
        }
        if teacher.model.decoder_block.has_encoder() {
            problems.push(Problem::inconsistent(
                format!(
                    "{}, but its model has an encoder, which needs sources that a student's batches do not have",
                    config.stated("teacher_overrides")
                ),
                "name a model without an encoder as teacher",
            ));
        }
        if teacher.model.use_reward {
            problems.push(Problem::inconsistent(
                format!(
                    "{}, but its model is a reward model, which has no logits",
                    config.stated("teacher_overrides")
                ),
                "name a language model as teacher",
            ));
        }
    }

    /// Reports features of a teacher and its student that cannot be compared.
    pub(super) fn check_features(&self, student: &ModelGroup, config: &Config, problems: &mut Vec<Problem>) {
        let Annealed { first, last, .. } = self.beta();
        let Some(teacher) = self.teacher.as_ref().filter(|_| first != 0.0 || last != 0.0) else { return };
        let stated = |key: &str| config.stated(key);
        let (own, other) = (student.emb_dim(), teacher.model.emb_dim());
        if own != other {
            problems.push(Problem::inconsistent(
                format!(
                    "{}, but features of {own} dimensions cannot be compared with the teacher's of {other}",
                    stated("distill_beta")
                ),
                format!("use `base_emb_dim={other}`, or leave out `distill_beta`"),
            ));
        }
        let families = [student.decoder_block, teacher.model.decoder_block];
        if let Some(family) = families.into_iter().find(|family| !family.has_mixers()) {
            problems.push(Problem::inconsistent(
                format!(
                    "{}, but layers of `{}` have no attention to compare",
                    stated("distill_beta"),
                    family.name()
                ),
                "leave out `distill_beta`",
            ));
        }
        let sizes = [&self.distill_layer_indices, &self.distill_teacher_layer_indices]
            .map(|layers| layers.as_ref().map_or(0, Vec::len));
        if sizes[1] > 0 && sizes[0] != sizes[1] {
            problems.push(Problem::inconsistent(
                format!(
                    "{}, but {}",
                    stated("distill_layer_indices"),
                    stated("distill_teacher_layer_indices")
                ),
                "name as many layers of the teacher as of the student",
            ));
            return;
        }
        let layers = [student.num_decoder_layers(), teacher.model.num_decoder_layers()];
        let pairs = self.layers(layers[0]);
        let named = [pairs.iter().map(|pair| pair.0).max(), pairs.iter().map(|pair| pair.1).max()];
        for ((whose, largest), count) in ["student", "teacher"].into_iter().zip(named).zip(layers) {
            let Some(layer) = largest.filter(|layer| *layer >= count) else { continue };
            problems.push(Problem::inconsistent(
                format!(
                    "{} and {} compare layer {layer} of the {whose}, which has {count} layers",
                    stated("distill_layer_indices"),
                    stated("distill_teacher_layer_indices")
                ),
                "name layers that both models have, such as `distill_layer_indices=[0,1] \
                 distill_teacher_layer_indices=[0,3]`",
            ));
        }
    }

    /// Reports a teacher without weights.
    pub(super) fn check_weights(&self, config: &Config, problems: &mut Vec<Problem>) {
        if self.teacher.as_ref().is_some_and(|teacher| teacher.path.is_none()) {
            problems.push(Problem::inconsistent(
                format!("{}, which names no weights of the teacher", config.stated("teacher_overrides")),
                "name a run, a checkpoint or a published model: `teacher_overrides.load_parameters_path=…`",
            ));
        }
    }
}
