//! The configuration of a distillation's teacher, and the keys that only the student takes.

use std::path::PathBuf;

use serde_json::{Map, Value};

use crate::{
    coerce::coerce,
    config::Config,
    error::ConfigError,
    groups::{expand_home, run_directory_of, saved_config_path},
    resolve::{ModelDescription, Request},
    table,
    yaml::Setting,
};

/// The keys that only the student takes.
pub(crate) const STUDENT: &str = "student_overrides";
/// The keys that only the teacher takes.
pub(crate) const TEACHER: &str = "teacher_overrides";

/// The keys that name weights.
const WEIGHTS: [&str; 4] =
    ["load_parameters_path", "hf_model_path", "load_full_state_path", "lora.lora_restore_path"];

/// The keys about computation that a teacher shares with its student although its files may state them, too.
const SHARED: [&str; 4] = ["max_target_length", "dtype", "attention", "matmul_precision"];

/// The settings that `student_overrides` holds after all `settings`, lowest layer first. Mistakes in the mapping itself are
/// reported where layers are merged.
pub(crate) fn of_student<'a>(settings: impl Iterator<Item = &'a Setting>) -> Vec<Setting> {
    let key = table::lookup(STUDENT).expect("the key is in the table");
    let mut held: Vec<Setting> = Vec::new();
    for setting in settings {
        let nested = setting.name.strip_prefix(STUDENT).and_then(|rest| rest.strip_prefix('.'));
        let given: Vec<(String, Value)> = match nested {
            Some(name) => vec![(name.to_owned(), setting.value.clone())],
            None if setting.name == STUDENT => {
                held.clear();
                match coerce(key, &setting.value) {
                    Ok(Value::Object(mapping)) => mapping.into_iter().collect(),
                    _ => Vec::new(),
                }
            }
            None => continue,
        };
        for (name, value) in given {
            held.retain(|other| other.name != name);
            held.push(Setting { name, value, origin: setting.origin.clone() });
        }
    }
    held
}

impl Config {
    /// The keys of the teacher, if the run has a teacher model.
    fn of_teacher(&self) -> Option<&Map<String, Value>> {
        let is_offline = self.entry("offline_data_dir").value.as_str().is_some_and(|path| !path.is_empty());
        let given = self.entry(TEACHER).value.as_object();
        given.filter(|given| !given.is_empty() && !is_offline)
    }

    /// The checkpoint or published model from which the teacher is loaded, if it is named.
    pub fn teacher_weights(&self) -> Option<PathBuf> {
        let given = self.of_teacher()?;
        let named = WEIGHTS[..2].iter().find_map(|key| given.get(*key)?.as_str());
        named.filter(|path| !path.is_empty()).map(expand_home)
    }

    /// The same configuration, with the description of the published model that is the teacher.
    pub fn describing_teacher(mut self, description: ModelDescription) -> Self {
        self.teacher_description = Some(description.into());
        self
    }

    /// The notes on the teacher's configuration that are not those of its student.
    pub fn teacher_notes(&self) -> Vec<String> {
        let Ok(Some(teacher)) = self.teacher() else { return Vec::new() };
        let own = self.notes();
        let of_teacher = teacher.notes().into_iter().filter(|note| !own.contains(note));
        of_teacher.map(|note| format!("in the configuration of the teacher, {note}")).collect()
    }

    /// The configuration of the teacher, if the run has one. A teacher that is a run or a published model describes itself,
    /// and `teacher_overrides` alone changes that description. Any other teacher takes all keys that the student takes but
    /// for `student_overrides`, as in MaxText.
    ///
    /// # Errors
    /// As [`Config::resolve`].
    pub fn teacher(&self) -> Result<Option<Self>, ConfigError> {
        let Some(overrides) = self.of_teacher() else { return Ok(None) };
        let run = self.teacher_weights().as_deref().and_then(run_directory_of);
        let description = self.teacher_description.as_deref().cloned();
        let mut request = match (&run, &description) {
            (Some(run), _) => Request::default().over_saved(saved_config_path(run)),
            (None, Some(_)) => Request::default(),
            (None, None) => Request {
                arguments: self.request.arguments.clone(),
                environment: self.request.environment.clone(),
                saved: self.request.saved.clone(),
                command: self.request.command,
                model_of_run: self.request.model_of_run.clone(),
                ..Request::default()
            },
        };
        let is_described = run.is_some() || description.is_some();
        request.description = description.filter(|_| run.is_none());
        // The student's weights are not the teacher's, even if the environment names them.
        request.environment.retain(|(variable, _)| {
            let name = variable.strip_prefix("M_").map(str::to_lowercase);
            let key = name.and_then(|name| table::canonical(&name));
            key.is_none_or(|key| {
                let is_own = |name: &str| table::canonical(name).is_some_and(|own| own.name == key.name);
                !WEIGHTS.iter().any(|name| is_own(name)) && !overrides.keys().any(|name| is_own(name))
            })
        });
        request.arguments.push(format!("{STUDENT}={{}}"));
        let cleared = WEIGHTS.iter().map(|key| ((*key).to_owned(), Value::from("")));
        let shared = SHARED.iter().filter(|_| is_described);
        let shared = shared.map(|key| ((*key).to_owned(), self.entry(key).value.clone()));
        let key = |name: &str| table::canonical(name).map(|key| key.name);
        let is_given = |name: &str| overrides.keys().any(|given| key(given) == key(name));
        request.overrides = cleared.chain(shared).filter(|(name, _)| !is_given(name)).collect();
        request.overrides.extend(overrides.clone());
        Self::resolve(&request).map(Some)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolved(arguments: &[&str], environment: &[(&str, &str)]) -> Config {
        let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        let request = Request {
            arguments: arguments.iter().map(|argument| (*argument).to_owned()).collect(),
            environment: environment.iter().map(owned).collect(),
            ..Request::default()
        };
        Config::resolve(&request).unwrap()
    }

    #[test]
    fn weights_of_the_environment_are_the_students() {
        let keys = ["dataset_type=synthetic", "teacher_overrides.load_parameters_path=large"];
        let environment =
            [("M_LOAD_PARAMETERS_PATH", "small"), ("M_BASE_EMB_DIM", "128"), ("M_BASE_MLP_DIM", "256")];
        let config = resolved(&[&keys[..], &["teacher_overrides.base_mlp_dim=512"]].concat(), &environment);
        let teacher = config.teacher().unwrap().unwrap();
        let of = |config: &Config, key: &str| config.entry(key).value.clone();
        assert_eq!(of(&config, "load_parameters_path"), "small");
        assert_eq!(of(&teacher, "load_parameters_path"), "large");
        assert_eq!((of(&teacher, "base_emb_dim"), of(&teacher, "base_mlp_dim")), (128.into(), 512.into()));
    }

    #[test]
    fn values_keep_their_types() {
        let check = |arguments: &[&str], key: &str, expected: Value| {
            let arguments =
                [&["dataset_type=synthetic", "teacher_overrides.load_parameters_path=large"], arguments];
            let teacher = resolved(&arguments.concat(), &[]).teacher().unwrap().unwrap();
            assert_eq!(teacher.entry(key).value, expected, "{arguments:?}");
        };
        check(&["teacher_overrides.load_parameters_path=007"], "load_parameters_path", "007".into());
        check(&["teacher_overrides={load_parameters_path: '1e3'}"], "load_parameters_path", "1e3".into());
        check(&["teacher_overrides.base_emb_dim=64"], "base_emb_dim", 64.into());
        check(
            &["teacher_overrides.normalization_layer_epsilon=1e-5"],
            "normalization_layer_epsilon",
            1e-5.into(),
        );
        check(&["teacher_overrides.dtype=float32", "dtype=bfloat16"], "dtype", "float32".into());
    }

    #[test]
    fn notes_on_the_teacher_are_its_own() {
        let keys = ["dataset_type=synthetic", "teacher_overrides.load_parameters_path=large"];
        assert_eq!(resolved(&keys, &[]).teacher_notes(), Vec::<String>::new());
        let noted = resolved(&[&keys[..], &["teacher_overrides.sa_block_q=64"]].concat(), &[]);
        let notes = noted.teacher_notes();
        assert!(
            notes.iter().all(|note| note.starts_with("in the configuration of the teacher, `")),
            "{notes:?}"
        );
    }
}
