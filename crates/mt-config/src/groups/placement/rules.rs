//! The placement rules in force, and checks of their effect on a program.

use std::collections::BTreeSet;

use mt_shape::{LogicalRules, Placement, PlacementNote};

use super::{MESH_AXES, PlacementGroup, did_you_mean};
use crate::{
    error::{ConfigError, Problem},
    groups::{FromValue, ShardMode},
    notice::Notice,
    table,
};

impl PlacementGroup {
    /// The rules, with an empty one for each name of the default rules that a user's list lacks: as in MaxText, nothing
    /// is split along such an axis. A name that the default rules lack as well remains without a rule.
    pub(super) fn rules(&self) -> LogicalRules {
        let mut rules = self.logical_axis_rules.clone();
        for (name, _) in default_rules().0 {
            if !rules.0.iter().any(|(known, _)| *known == name) {
                rules.0.push((name, Vec::new()));
            }
        }
        rules
    }

    /// Checks that the size of every dimension allowed the split that its rule requests.
    fn check_carried_out(&self, placement: &Placement) -> Result<(), ConfigError> {
        let problem = |note: &PlacementNote| {
            Problem::inconsistent(
                format!("`shard_mode` is `explicit` ({}), but {note}", self.shard_mode_origin),
                "change the mesh or the rule so that the size divides the dimension, or use \
                 `shard_mode=auto`, which leaves the dimension whole",
            )
        };
        ConfigError::check((), placement.notes().iter().map(problem).collect())
    }

    /// Checks that all mesh axes and rules have an effect on a program whose arrays have been placed. Returns warnings
    /// and notes.
    ///
    /// # Errors
    /// Nothing is split over a mesh axis that the user requested, or a rule cannot be applied under
    /// `shard_mode=explicit`.
    pub fn check_use(&self, placement: &Placement) -> Result<Vec<Notice>, ConfigError> {
        if self.shard_mode == ShardMode::Explicit {
            self.check_carried_out(placement)?;
        }
        let origin = &self.rules_origin;
        let (mut messages, note) = self.rules_without_effect(placement);
        messages.extend(note);
        messages.extend(self.missing_rules(placement));
        for (axis, size) in placement.idle_mesh_axes() {
            let sizes = [&self.ici, &self.dcn].map(|of| of.sizes.iter().find(|size| size.axis == axis));
            let asked = sizes.into_iter().flatten().find(|size| size.origin.is_given() && size.size != 1);
            let reason = format!("no rule of `logical_axis_rules` ({origin}) splits anything over `{axis}`");
            let rule = format!("add a rule such as `['embed', '{axis}']`");
            match asked {
                Some(asked) => {
                    return Err(Problem::inconsistent(
                        format!("{}, but {reason}", asked.stated()),
                        format!("{rule}, or leave out `{}`", asked.key),
                    )
                    .into());
                }
                None => messages.push(Notice::Warning(format!(
                    "the {size} devices along mesh axis `{axis}` all compute the same: {reason}\n\
                     hint: {rule}, or give the devices to an axis that rules name"
                ))),
            }
        }
        Ok(messages)
    }

    /// Warnings about the user's rules that name unknown axes, and a note about missing rules, for a program whose
    /// weights and caches have been placed.
    pub fn misspelled_rules(&self, placement: &Placement) -> Vec<Notice> {
        let (mut messages, _) = self.rules_without_effect(placement);
        messages.extend(self.missing_rules(placement));
        messages
    }

    /// A note about logical axes of arrays placed so far that the default rules split and the user's rules lack.
    fn missing_rules(&self, placement: &Placement) -> Option<Notice> {
        if !self.rules_origin.is_given() || placement.mesh().num_devices() == 1 {
            return None;
        }
        let usual = default_rules();
        let splits = |name: &str| usual.0.iter().any(|(usual, axes)| usual == name && !axes.is_empty());
        let is_missing = |name: &str| self.logical_axis_rules.0.iter().all(|(own, _)| own != name);
        let used = placement.logical_axes();
        let names = used.iter().map(|axis| axis.name()).filter(|name| splits(name) && is_missing(name));
        let names: Vec<String> = names.map(|name| format!("`{name}`")).collect();
        let example = names.first()?.trim_matches('`');
        Some(Notice::Note(format!(
            "`logical_axis_rules` ({}) has no rule for the logical axes {}, so that nothing is split along them\n\
             hint: a rule without mesh axes, such as `['{example}', []]`, states the same",
            self.rules_origin,
            names.join(", ")
        )))
    }

    /// Warnings about the user's rules that name unknown axes, and a note about rules that no array uses.
    fn rules_without_effect(&self, placement: &Placement) -> (Vec<Notice>, Option<Notice>) {
        let usual = default_rules();
        if !self.rules_origin.is_given() {
            return (Vec::new(), None);
        }
        let own = self.logical_axis_rules.0.iter().filter(|rule| !usual.0.contains(rule));
        let known_axes: BTreeSet<&str> = MESH_AXES
            .iter()
            .map(|(axis, _)| *axis)
            .chain(self.mesh_axes.iter().map(String::as_str))
            .collect();
        let used = placement.logical_axes();
        let known_names: BTreeSet<&str> = usual
            .0
            .iter()
            .map(|(name, _)| name.as_str())
            .chain(used.iter().map(|axis| axis.name()))
            .collect();
        let mut unknown = Vec::new();
        let mut idle = BTreeSet::new();
        for (name, axes) in own {
            let strange = axes.iter().find(|axis| !known_axes.contains(axis.as_str()));
            if let Some(axis) = strange {
                unknown.push(("mesh", axis.as_str(), did_you_mean(axis, &known_axes)));
            }
            // On a single device no array is placed.
            if placement.mesh().num_devices() == 1 || used.iter().any(|axis| axis.name() == name) {
                continue;
            }
            if known_names.contains(name.as_str()) {
                idle.insert(format!("`{name}`"));
            } else {
                unknown.push(("logical", name.as_str(), did_you_mean(name, &known_names)));
            }
        }
        let origin = &self.rules_origin;
        let warning = |(kind, name, hint): (&str, &str, String)| {
            Notice::Warning(format!(
                "`logical_axis_rules` ({origin}) names the {kind} axis `{name}`, which does not exist\nhint: {hint}"
            ))
        };
        let note = (!idle.is_empty()).then(|| {
            let names = idle.into_iter().collect::<Vec<_>>().join(", ");
            Notice::Note(format!(
                "nothing in this program has the logical axes {names} of `logical_axis_rules` ({origin})"
            ))
        });
        (unknown.into_iter().map(warning).collect(), note)
    }
}

/// The default of `logical_axis_rules`.
fn default_rules() -> LogicalRules {
    let key = table::lookup("logical_axis_rules").expect("the key is in the table");
    LogicalRules::from_value(&key.default.value()).expect("the default is of the key's kind")
}
