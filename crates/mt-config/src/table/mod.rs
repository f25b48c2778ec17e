//! The key table, which declares every key once.
//!
//! The YAML reader, the command line, the environment, `config explain` and the reference page accept every key of the
//! table. An effective key must also be a field of a group in `groups`; a test compares the two.

mod attention;
mod checkpoint;
mod data;
mod debug;
mod derived;
mod encoder;
mod experts;
pub(crate) mod features;
mod fine_tuning;
mod inference;
mod kernels;
mod mamba;
mod model;
mod monitoring;
mod multimodal;
mod pipeline;
mod pipelines;
mod placement;
mod policy;
mod preference;
mod quantization;
mod reinforcement;
mod remat;
mod reward;
mod run;
mod training;

use crate::key::Key;
use std::{collections::HashMap, sync::LazyLock};

/// Related keys, under MaxText's name for the group.
#[derive(Clone, Copy, Debug)]
pub struct KeyGroup {
    pub name: &'static str,
    pub title: &'static str,
    /// The name under which newer MaxText nests the group: `rl.num_generations` is `num_generations`.
    pub prefix: Option<&'static str>,
    pub keys: &'static [Key],
}

/// Every group, in the order of the reference page.
pub static GROUPS: &[&[KeyGroup]] = &[
    run::GROUPS,
    model::GROUPS,
    attention::GROUPS,
    mamba::GROUPS,
    encoder::GROUPS,
    kernels::GROUPS,
    remat::GROUPS,
    experts::GROUPS,
    quantization::GROUPS,
    multimodal::GROUPS,
    training::GROUPS,
    fine_tuning::GROUPS,
    reinforcement::GROUPS,
    data::GROUPS,
    pipelines::GROUPS,
    checkpoint::GROUPS,
    placement::GROUPS,
    pipeline::GROUPS,
    inference::GROUPS,
    monitoring::GROUPS,
    debug::GROUPS,
    derived::GROUPS,
];

/// Every group of keys.
pub fn groups() -> impl Iterator<Item = &'static KeyGroup> {
    GROUPS.iter().copied().flatten()
}

/// Every key, in the order of the reference page.
pub fn keys() -> impl Iterator<Item = &'static Key> {
    groups().flat_map(|group| group.keys)
}

/// The key with this name.
pub fn lookup(name: &str) -> Option<&'static Key> {
    static BY_NAME: LazyLock<HashMap<&'static str, &'static Key>> =
        LazyLock::new(|| keys().map(|key| (key.name, key)).collect());
    BY_NAME.get(name).copied()
}

/// The group of a key.
pub fn group_of(key: &Key) -> &'static KeyGroup {
    groups()
        .find(|group| group.keys.iter().any(|candidate| candidate.name == key.name))
        .expect("every key of the table is in a group")
}

/// MaxText's old names of renamed keys. An old name still sets the key.
pub(crate) const RENAMED: &[(&str, &str)] =
    &[("cosine_learning_rate_final_fraction", "learning_rate_final_fraction")];

/// The key that a name sets: its own name, an old one, or one with the prefix of its group.
pub fn canonical(name: &str) -> Option<&'static Key> {
    let current = RENAMED.iter().find(|(old, _)| *old == name).map_or(name, |(_, new)| new);
    lookup(current).or_else(|| {
        let (prefix, rest) = name.split_once('.')?;
        let mut nested = groups().filter(|group| group.prefix == Some(prefix));
        nested.find_map(|group| group.keys.iter().find(|key| key.name == rest))
    })
}

/// Whether this is the prefix of a group.
pub(crate) fn is_prefix(name: &str) -> bool {
    groups().any(|group| group.prefix == Some(name))
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::{
        coerce::coerce,
        key::{Class, Kind},
    };

    #[test]
    fn names_are_unique_and_every_row_is_complete() {
        let mut seen = HashSet::new();
        for key in keys() {
            assert!(seen.insert(key.name), "`{}` is in the table twice", key.name);
            assert!(key.name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_'));
            assert!(
                key.help.ends_with('.') && key.help.len() > 15,
                "`{}` needs a sentence of help",
                key.name
            );
            assert!(!key.acts_on.is_empty(), "`{}` does not say what it acts on", key.name);
        }
    }

    #[test]
    fn defaults_are_values_of_their_kind() {
        for key in keys() {
            for default in [Some(key.default), key.maxtext_default].into_iter().flatten() {
                assert_eq!(coerce(key, &default.value()), Ok(default.value()), "`{}`", key.name);
            }
            assert_ne!(Some(key.default), key.maxtext_default, "`{}` does not differ from MaxText", key.name);
            assert!(!(key.own && key.maxtext_default.is_some()), "`{}`", key.name);
        }
    }

    #[test]
    fn refused_choices_are_choices() {
        for key in keys() {
            for (choice, _) in key.refused_choices {
                match key.kind {
                    Kind::Choice(choices) | Kind::ChoiceList(choices) => {
                        assert!(choices.contains(choice), "`{}={choice}`", key.name)
                    }
                    _ => panic!("`{}` has no choices to refuse", key.name),
                }
            }
        }
    }

    #[test]
    fn what_keys_name_exists() {
        let mut wrong = Vec::new();
        for key in keys() {
            for literal in key.neutral {
                let value = literal.value();
                let is_value = coerce(key, &value) == Ok(value.clone()) && *literal != key.default;
                if !is_value {
                    wrong.push(format!("`{}` at {value}", key.name));
                }
            }
            for (other, values) in key.conditions.into_iter().flatten() {
                let other = lookup(other).unwrap_or_else(|| panic!("`{}` belongs to `{other}`", key.name));
                assert_ne!(other.name, key.name);
                for value in values {
                    assert!(coerce(other, &(*value).into()).is_ok(), "`{}={value}`", other.name);
                }
            }
            if let Class::Derived(from) = key.class {
                assert!(from.iter().all(|name| lookup(name).is_some()), "`{}`", key.name);
            }
        }
        assert!(wrong.is_empty(), "neutral values that are none: {wrong:?}");
    }

    #[test]
    fn nested_names_lead_to_keys() {
        for group in groups() {
            let Some(prefix) = group.prefix else { continue };
            for key in group.keys {
                assert_eq!(canonical(&format!("{prefix}.{}", key.name)).map(|key| key.name), Some(key.name));
            }
        }
        assert!(canonical("rl.steps").is_none());
    }

    #[test]
    fn old_names_lead_to_keys() {
        for (old, new) in RENAMED {
            assert!(lookup(old).is_none());
            assert!(lookup(new).is_some());
        }
    }
}
