//! The table: every key, once.
//!
//! A key that is added here is known to the YAML reader, the command line, the environment, `config explain` and
//! the reference page. An effective key must also be a field of a group in `groups`; a test compares the
//! two.

mod checkpoint;
mod data;
mod debug;
mod inference;
mod model;
mod placement;
mod run;
mod training;

use std::{collections::HashMap, sync::LazyLock};

use crate::key::Key;

/// Keys that belong together, under MaxText's name for the group.
#[derive(Clone, Copy, Debug)]
pub struct KeyGroup {
    pub name: &'static str,
    pub title: &'static str,
    pub keys: &'static [Key],
}

/// Every group, in the order of the reference page.
pub static GROUPS: &[&[KeyGroup]] = &[
    run::GROUPS,
    model::GROUPS,
    training::GROUPS,
    data::GROUPS,
    checkpoint::GROUPS,
    placement::GROUPS,
    inference::GROUPS,
    debug::GROUPS,
];

/// Every group of keys.
pub fn groups() -> impl Iterator<Item = &'static KeyGroup> {
    GROUPS.iter().copied().flatten()
}

/// Every key, in the order of the reference page.
pub fn keys() -> impl Iterator<Item = &'static Key> {
    groups().flat_map(|group| group.keys)
}

/// The key of this name.
pub fn lookup(name: &str) -> Option<&'static Key> {
    static BY_NAME: LazyLock<HashMap<&'static str, &'static Key>> =
        LazyLock::new(|| keys().map(|key| (key.name, key)).collect());
    BY_NAME.get(name).copied()
}

/// The group a key belongs to.
pub fn group_of(key: &Key) -> &'static KeyGroup {
    groups()
        .find(|group| group.keys.iter().any(|candidate| candidate.name == key.name))
        .expect("every key of the table is in a group")
}

/// MaxText's names that became other keys. The old name still sets the key.
pub(crate) const RENAMED: &[(&str, &str)] =
    &[("cosine_learning_rate_final_fraction", "learning_rate_final_fraction")];

/// The key that a name sets, old names included.
pub fn canonical(name: &str) -> Option<&'static Key> {
    let current = RENAMED.iter().find(|(old, _)| *old == name).map_or(name, |(_, new)| new);
    lookup(current)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::{coerce::coerce, key::Kind};

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
                    Kind::Choice(choices) => assert!(choices.contains(choice), "`{}={choice}`", key.name),
                    _ => panic!("`{}` has no choices to refuse", key.name),
                }
            }
        }
    }

    #[test]
    fn old_names_lead_to_keys() {
        for (old, new) in RENAMED {
            assert!(lookup(old).is_none());
            assert!(lookup(new).is_some());
        }
    }
}
