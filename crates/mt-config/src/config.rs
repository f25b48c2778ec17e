//! The resolved configuration: the value of each key and its origin.

use std::{collections::HashMap, fmt, path::PathBuf, sync::Arc};

use mt_shape::kernels::thresholds;
use serde_json::{Map, Value};

use crate::{
    CompileTopology,
    coerce::value_text,
    derived,
    error::{Problem, alternatives, short},
    groups::{EncoderGroup, Hardware, OptimizerSpace},
    key::{Class, Condition, Key, Kind},
    origin::Origin,
    resolve::{ModelDescription, Request},
    table::{self, features},
};

/// The value of one key.
#[derive(Clone, PartialEq)]
pub struct Entry {
    pub key: &'static Key,
    pub value: Value,
    pub origin: Origin,
}

impl Entry {
    /// Whether the value differs from the default. Derived keys never count as changed.
    pub fn is_changed(&self) -> bool {
        !is_derived(self.key) && self.value != self.key.default.value()
    }

    /// Whether the user requests the value. A default counts only if it was set by hand, since a file may merely repeat
    /// it.
    pub fn is_asked_for(&self) -> bool {
        self.is_changed() || self.origin.is_by_hand()
    }

    /// The key with its value and origin, as messages name it.
    pub(crate) fn stated(&self) -> String {
        format!("`{}` is `{}` ({})", self.key.name, short(&self.shown()), self.origin)
    }

    /// The value for display: secrets are hidden.
    pub fn shown(&self) -> String {
        match value_text(&self.value) {
            _ if self.key.secret && self.is_changed() => "(hidden)".to_owned(),
            empty if empty.is_empty() => "''".to_owned(),
            text => text,
        }
    }

    /// As [`Self::shown`], for comparison with another value of the key: long lists of placement rules without those of
    /// the names that have the same rules in both.
    fn shown_beside(&self, other: &Self) -> String {
        let (Kind::AxisRules, Value::Array(own), Value::Array(others)) =
            (self.key.kind, &self.value, &other.value)
        else {
            return self.shown();
        };
        let of = |rules: &[Value], name: &Value| -> Vec<Value> {
            rules.iter().filter(|rule| rule[0] == *name).cloned().collect()
        };
        let differing = own.iter().filter(|rule| of(own, &rule[0]) != of(others, &rule[0]));
        value_text(&differing.cloned().collect())
    }
}

/// A key whose value differs between two configurations.
#[derive(Clone, Debug, PartialEq)]
pub struct Difference {
    pub key: &'static Key,
    pub left: String,
    pub right: String,
}

impl Difference {
    /// Whether a run of one configuration may be resumed with the other, as far as this key is concerned.
    pub fn may_change_on_resume(&self) -> bool {
        self.key.may_change_on_resume
    }
}

/// The value of every key, fixed once all layers are merged.
#[derive(Clone)]
pub struct Config {
    pub(crate) entries: HashMap<&'static str, Entry>,
    pub(crate) quick_start: bool,
    pub(crate) notes: Vec<String>,
    /// The given file, if `maxtext` wrote it as a resolved configuration.
    pub(crate) resolved_file: Option<Arc<PathBuf>>,
    /// The form of the weights that the optimizer updates, fixed when the configuration is resolved.
    pub(crate) space: OptimizerSpace,
    /// The request from which the configuration was resolved.
    pub(crate) request: Arc<Request>,
    /// The description of a published model that is the teacher.
    pub(crate) teacher_description: Option<Arc<ModelDescription>>,
}

/// Shows only values that differ from the defaults, and no secrets.
impl fmt::Debug for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let changed = self.entries().filter(|entry| entry.is_changed());
        f.debug_map().entries(changed.map(|entry| (entry.key.name, entry.shown()))).finish()
    }
}

impl Config {
    /// Every key at its default.
    pub fn defaults() -> Self {
        let entries = table::keys()
            .map(|key| (key.name, Entry { key, value: key.default.value(), origin: Origin::Default }))
            .collect();
        Self {
            entries,
            quick_start: false,
            notes: Vec::new(),
            resolved_file: None,
            space: OptimizerSpace::MaxText,
            request: Arc::default(),
            teacher_description: None,
        }
    }

    /// The entries in table order.
    pub fn entries(&self) -> impl Iterator<Item = &Entry> {
        table::keys().map(|key| &self.entries[key.name])
    }

    /// The entry of the key `name`.
    ///
    /// # Panics
    /// The table has no such key.
    pub fn entry(&self, name: &str) -> &Entry {
        self.entries.get(name).unwrap_or_else(|| panic!("`{name}` is not in the key table"))
    }

    /// A key with its value and origin, as messages name it.
    pub(crate) fn stated(&self, name: &str) -> String {
        self.entry(name).stated()
    }

    /// Whether this is the embedded quick start.
    pub fn is_quick_start(&self) -> bool {
        self.quick_start
    }

    /// The number of devices, if the keys determine it. They do so only for CPUs; other hardware reports it at run
    /// time.
    pub fn known_devices(&self) -> Option<usize> {
        let number = self.entry("num_cpu_devices");
        let is_cpu = match self.entry("hardware").value.as_str() {
            Some("cpu") => true,
            Some("auto") => number.is_asked_for(),
            _ => false,
        };
        is_cpu.then(|| number.value.as_u64())?.and_then(|number| usize::try_from(number).ok())
    }

    /// Notes for the user about a valid configuration: keys without effect, values that a model replaced.
    pub fn notes(&self) -> Vec<String> {
        let asking = self.entries().filter(|entry| self.is_noted(entry));
        let without_effect = asking.filter_map(|entry| {
            let reason = match entry.key.class {
                Class::NoEffectHere(reason) => format!("here: {reason}"),
                Class::Refused(_) | Class::Effective if !self.matters(entry) => {
                    format!("without {}", alternatives(&entry.key.condition_texts()))
                }
                Class::Effective if self.is_of_this_machine(entry) => {
                    format!("beside `compile_topology={}`", value_text(&self.entry("compile_topology").value))
                }
                Class::Effective => format!("here: {}", self.without_effect(entry.key.name)?),
                _ => return None,
            };
            Some(format!("`{}` ({}) has no effect {reason}", entry.key.name, entry.origin))
        });
        self.notes.iter().cloned().chain(without_effect).collect()
    }

    /// Notes in addition to [`Config::notes`] that depend on the hardware.
    pub fn notes_on(&self, hardware: Hardware) -> Vec<String> {
        match hardware {
            Hardware::Cpu => [self.notes_on_search("CPUs"), self.notes_on_cpus()].concat(),
            Hardware::Gpu => self.notes_on_search("GPUs"),
            Hardware::Auto | Hardware::Tpu => Vec::new(),
        }
    }

    fn notes_on_search(&self, devices: &str) -> Vec<String> {
        let search = self.entry("indexer_use_approx_top_k");
        let is_noted = self.is_noted(search) && self.matters(search);
        let note = is_noted.then(|| {
            format!(
                "`{}` ({}) has no effect on {devices}: the search is exact",
                search.key.name, search.origin
            )
        });
        note.into_iter().collect()
    }

    fn notes_on_cpus(&self) -> Vec<String> {
        let named = |entry: &Entry| format!("`{}` ({})", entry.key.name, entry.origin);
        let embedding = Some(self.entry("use_iota_embed")).filter(|entry| self.is_noted(entry));
        let of_embedding = embedding.map(|entry| {
            format!(
                "{} has no effect on CPUs: embeddings are gathered, which gives the same numbers without the product's \
                 operations",
                named(entry)
            )
        });
        let calls_kernels =
            self.entry("cpu_kernels").value == true && self.entry("num_cpu_devices").value == 1;
        let blocks: Vec<String> = self
            .entries()
            .filter(|entry| calls_kernels && sets_blocks(entry) && self.is_noted(entry))
            .filter(|entry| self.matters(entry) && self.without_effect(entry.key.name).is_none())
            .map(named)
            .collect();
        let of_blocks = (!blocks.is_empty()).then(|| {
            format!(
                "XLA compiles attention because of {}; on CPUs the kernel that would compute it, usually faster, has \
                 blocks of its own",
                blocks.join(", ")
            )
        });
        of_embedding.into_iter().chain(of_blocks).collect()
    }

    /// Whether notes mention an entry. They mention only values that the user chose: the user cannot change the file of
    /// a model or preset, and variables of other programs are not meant for this one.
    fn is_noted(&self, entry: &Entry) -> bool {
        let is_ours = match &entry.origin {
            // The notes were printed when the file was written.
            Origin::File { path, .. } => self.resolved_file.as_ref() != Some(path),
            other => other.is_given() && !other.is_of_other_programs(),
        };
        let is_idle = || {
            let can_matter = matches!(entry.key.class, Class::Effective | Class::Refused(_));
            can_matter && entry.is_changed() && entry.origin.is_by_hand() && !self.matters(entry)
        };
        is_ours && (entry.key.asks(&entry.value) || is_idle())
    }

    /// `compile_topology`, if it is set.
    pub(crate) fn absent_hardware(&self) -> Option<&str> {
        self.entry("compile_topology").value.as_str().filter(|name| !name.is_empty())
    }

    /// Whether an entry describes this machine while `compile_topology` names another.
    fn is_of_this_machine(&self, entry: &Entry) -> bool {
        let Some(name) = self.absent_hardware() else { return false };
        match entry.key.name {
            "num_cpu_devices" => true,
            "hardware" => CompileTopology::find(name)
                .is_ok_and(|slice| value_text(&entry.value) != slice.chip.hardware.name()),
            _ => false,
        }
    }

    /// Why other keys leave this key, otherwise effective, without effect.
    fn without_effect(&self, key: &str) -> Option<&'static str> {
        let is_gated = self.entry("mlp_activations").value.as_array().is_some_and(|gates| gates.len() > 1);
        match (key, is_gated) {
            ("mlpwi", true) => {
                Some("feed-forward layers have a gate, so their tensors are `mlpwi_0` and `mlpwi_1`")
            }
            ("mlpwi_0" | "mlpwi_1", false) => {
                Some("feed-forward layers have no gate, so their tensor is `mlpwi`")
            }
            ("max_prefill_predict_length", _) if EncoderGroup::is_in(self) => {
                Some("prompts of this family are sources, whose length `max_source_length` limits")
            }
            ("cast_logits_to_fp32", _)
                if self.entry("dtype").value == "float32"
                    || self.entry("logits_dot_in_fp32").value == true =>
            {
                Some("the output head computes logits in float32 already")
            }
            _ if sets_blocks(self.entry(key)) => self.why_dense(),
            _ => None,
        }
    }

    /// Why attention is dense, so that it has no blocks.
    fn why_dense(&self) -> Option<&'static str> {
        let length = self.entry("max_target_length").value.as_u64();
        match self.entry("attention").value.as_str() {
            Some("dot_product") => Some("`attention=dot_product` has no blocks"),
            Some("autoselected") if length < Some(thresholds::FEWEST_IN_BLOCKS as u64) => {
                Some("attention in sequences this short has no blocks, unless `attention=flash` is set")
            }
            _ => None,
        }
    }

    /// Whether an entry has an effect, judging by the key's conditions.
    pub(crate) fn matters(&self, entry: &Entry) -> bool {
        let holds = |(other, values): &Condition| {
            let other = self.entry(other);
            if values.is_empty() {
                other.key.asks(&other.value)
            } else {
                // One of the items of a list suffices.
                let items = other.value.as_array().map_or(std::slice::from_ref(&other.value), Vec::as_slice);
                values.iter().any(|value| items.iter().any(|item| value_text(item) == *value))
            }
        };
        let mut conditions = entry.key.conditions.iter().flatten().peekable();
        conditions.peek().is_none() || conditions.any(holds)
    }

    /// Whether to report that an entry's feature is not built. If the model's family is not built, that is reported
    /// instead of the features that the model's file requests.
    pub(crate) fn is_news(&self, entry: &Entry) -> bool {
        let family = self.entry("decoder_block");
        let family_is_missing = family.key.missing_feature(&family.value).is_some();
        let of_model = matches!(entry.origin, Origin::Model { .. }) && entry.key.name != family.key.name;
        !(family_is_missing && of_model)
    }

    /// The requested features that are not built.
    pub fn missing_features(&self) -> Vec<Problem> {
        // A refused default matters only to commands that read the key; their groups report it.
        let mut missing = Vec::new();
        let is_request = |entry: &&Entry| {
            self.matters(entry) && self.is_news(entry) && !entry.origin.is_of_other_programs()
        };
        for entry in self.entries().filter(is_request) {
            let feature = entry.key.missing_feature(&entry.value).filter(|_| entry.is_changed());
            if let Some(feature) = feature.or_else(|| self.unlike_family(entry)) {
                report(&mut missing, not_built(entry, feature));
            }
        }
        missing
    }

    /// The missing feature, if an entry requests blocks that differ from those of its family.
    fn unlike_family(&self, entry: &Entry) -> Option<&'static str> {
        let family = self.entry("decoder_block");
        let is_family = |block: &&str| family.value == **block;
        let done = entry.key.done_by?.iter().any(is_family);
        if entry.key.chosen_in.iter().any(is_family) {
            return None;
        }
        let is_built = family.key.missing_feature(&family.value).is_none();
        (is_built && entry.is_asked_for() && entry.origin.is_given() && entry.value != done)
            .then_some(features::BLOCKS_UNLIKE_THEIR_FAMILYS)
    }

    /// The same configuration, with this name for the run if it has none.
    pub fn with_run_name(self, name: &str) -> Self {
        if self.entry("run_name").value == "" { self.with_derived("run_name", name) } else { self }
    }

    /// The same configuration, with a value that follows from the files that a command loads.
    ///
    /// # Panics
    /// The table has no such key.
    pub fn with_derived(mut self, name: &str, value: impl Into<Value>) -> Self {
        let entry = self.entries.get_mut(name).unwrap_or_else(|| panic!("`{name}` is not in the key table"));
        (entry.value, entry.origin) = (value.into(), Origin::Derived);
        self.derive();
        // A run that is named only now may have a record of its own.
        self.space = OptimizerSpace::of(&self);
        self
    }

    /// Computes the values that follow from other keys.
    pub(crate) fn derive(&mut self) {
        for (name, value) in derived::values(self) {
            let entry = self.entries.get_mut(name).expect("every key has an entry");
            (entry.value, entry.origin) = (value, Origin::Derived);
        }
    }

    /// The keys whose values differ, in table order. Secrets are never saved, so they are not compared.
    pub fn differences(&self, other: &Self) -> Vec<Difference> {
        self.entries()
            .zip(other.entries())
            .filter(|(left, right)| left.value != right.value && !left.key.secret && !is_derived(left.key))
            .map(|(left, right)| {
                let [of_left, of_right] = [left.shown_beside(right), right.shown_beside(left)];
                Difference { key: left.key, left: of_left, right: of_right }
            })
            .collect()
    }

    /// The differences that prevent a run of `saved` from being resumed with this configuration.
    ///
    /// The number of devices and of micro-batches may change as long as the global batch size stays the same. Batch
    /// sizes are therefore compared over all devices and micro-batches.
    pub fn resume_conflicts(
        &self,
        num_devices: usize,
        saved: &Self,
        saved_num_devices: usize,
    ) -> Vec<Difference> {
        const ACCUMULATION: &str = "gradient_accumulation_steps";
        // An empty list of files and none are the same.
        let asks = |key: &Key| [self, saved].iter().any(|config| key.asks(&config.entry(key.name).value));
        let acts = |key: &Key| !matches!(key.class, Class::NoEffectHere(_)) && asks(key);
        let is_own = |key: &Key| acts(key) && !key.may_change_on_resume && key.name != ACCUMULATION;
        let mut conflicts: Vec<Difference> =
            saved.differences(self).into_iter().filter(|difference| is_own(difference.key)).collect();
        let accumulation = |config: &Self| config.entry(ACCUMULATION).value.as_f64().unwrap_or(1.0);
        let same_accumulation = accumulation(self) == accumulation(saved);
        let mut sizes = vec!["per_device_batch_size"];
        if [self, saved].iter().all(|config| config.entry("enable_rampup_batch_size").value == true) {
            sizes.extend(["per_device_batch_size_start", "per_device_batch_size_increment"]);
        }
        for name in sizes {
            let batch = |config: &Self, devices: usize| {
                config.entry(name).value.as_f64().unwrap_or_default() * devices as f64 * accumulation(config)
            };
            let is_same = (batch(self, num_devices) - batch(saved, saved_num_devices)).abs() < 1e-6;
            if is_same {
                conflicts.retain(|conflict| conflict.key.name != name);
                continue;
            }
            let shown = |config: &Self, devices: usize| {
                let mut shown = config.entry(name).shown();
                if num_devices != saved_num_devices {
                    shown.push_str(&format!(" on {devices} devices"));
                }
                if !same_accumulation {
                    shown.push_str(&format!(" with {ACCUMULATION}={}", accumulation(config)));
                }
                shown
            };
            let (left, right) = (shown(saved, saved_num_devices), shown(self, num_devices));
            match conflicts.iter_mut().find(|conflict| conflict.key.name == name) {
                Some(conflict) => (conflict.left, conflict.right) = (left, right),
                None => conflicts.push(Difference { key: self.entry(name).key, left, right }),
            }
        }
        conflicts
    }

    /// The configuration as one JSON object from key to value. Values of secrets are hidden.
    pub fn to_json(&self, only_changed: bool) -> Map<String, Value> {
        self.entries()
            .filter(|entry| !only_changed || entry.is_changed())
            .map(|entry| {
                let value = if entry.key.secret && entry.is_changed() {
                    entry.shown().into()
                } else {
                    entry.value.clone()
                };
                (entry.key.name.to_owned(), value)
            })
            .collect()
    }

    /// The configuration as a YAML file that resolves to the same values even if later versions change defaults, models
    /// or presets. Secrets are left out.
    pub fn to_yaml(&self) -> String {
        let mut text = String::from(
            "# A resolved configuration. Given to `maxtext train` it reproduces the run.\nresolved: true\n",
        );
        for group in table::groups() {
            text.push_str(&format!("\n# {}\n", group.title));
            for key in group.keys {
                let entry = &self.entries[key.name];
                if !key.secret && !is_derived(key) && !crate::resolve::is_about_layers(key) {
                    // JSON is YAML: lists stay on one line, and strings that look like numbers stay strings.
                    text.push_str(&format!("{}: {}\n", key.name, yaml_text(&entry.value)));
                }
            }
        }
        text
    }
}

pub(crate) fn is_derived(key: &Key) -> bool {
    matches!(key.class, Class::Derived(_))
}

/// The value as YAML on one line: JSON with the characters escaped that YAML counts as unprintable.
pub fn yaml_text(value: &Value) -> String {
    let json = value.to_string();
    let mut text = String::with_capacity(json.len());
    for character in json.chars() {
        match character {
            ' '..='~'
            | '\u{a0}'..='\u{d7ff}'
            | '\u{e000}'..='\u{fefe}'
            | '\u{ff00}'..='\u{fffd}'
            | '\u{10000}'.. => {
                text.push(character);
            }
            // Such characters occur only in strings, where the escape has the same meaning in JSON and YAML.
            other => text.push_str(&format!("\\u{:04x}", u32::from(other))),
        }
    }
    text
}

/// Adds a problem. A missing feature is reported once, with all keys that request it.
pub(crate) fn report(problems: &mut Vec<Problem>, problem: Problem) {
    if let Problem::NotBuilt { key, feature, .. } = &problem {
        let same = problems.iter_mut().find_map(|known| match known {
            Problem::NotBuilt { key, feature: known, also, .. } if known == feature => Some((*key, also)),
            _ => None,
        });
        if let Some((first, also)) = same {
            if first != *key && !also.contains(key) {
                also.push(key);
            }
            return;
        }
    }
    problems.push(problem);
}

/// The problem of an entry that requests a missing feature.
pub(crate) fn not_built(entry: &Entry, feature: &'static str) -> Problem {
    let available = match (entry.key.class, entry.key.kind) {
        (_, Kind::Bool) if entry.key.done_by.is_some() => {
            vec![value_text(&Value::from(entry.value != true))]
        }
        (Class::Refused(_), _) => vec![value_text(&entry.key.default.value())],
        (_, Kind::Choice(choices)) => choices
            .iter()
            .filter(|choice| entry.key.missing_feature(&Value::from(**choice)).is_none())
            .map(|choice| (*choice).to_owned())
            .collect(),
        _ => Vec::new(),
    };
    Problem::NotBuilt {
        key: entry.key.name,
        value: short(&entry.shown()),
        origin: entry.origin.clone(),
        feature,
        available,
        also: Vec::new(),
    }
}

/// Whether an entry's key, if it acts at all, sets blocks of attention.
fn sets_blocks(entry: &Entry) -> bool {
    let name = entry.key.name;
    let is_size = name.strip_prefix("local_").unwrap_or(name).starts_with("sa_block_");
    is_size && matches!(entry.key.class, Class::Effective)
}
