//! When a run saves checkpoints, where, and which of them it keeps.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use super::{CheckpointGroup, RunGroup, group};
use crate::{config::Config, error::Problem};

group! {
    /// Kinds of saving, and the checkpoints that are kept.
    pub struct SavingGroup {
        enable_continuous_checkpointing: bool,
        preemption_deadline_seconds: u64,
        stop_on_checkpoint_failure: bool,
        checkpoint_keep_period: Option<u64>,
        checkpoint_keep_best: usize,
        checkpoint_todelete_subdir: Option<String>,
        checkpoint_todelete_full_path: Option<PathBuf>,
        enable_emergency_checkpoint: bool,
        enable_multi_tier_checkpointing: bool,
        local_checkpoint_directory: Option<PathBuf>,
        local_checkpoint_period: u64,
        use_replicator_service: bool,
        replicator_backup_interval_minutes: u64,
        multi_tier_checkpointing_backup_interval_minutes: Option<u64>,
        multi_tier_checkpointing_backup_interval_steps: Option<u64>,
    }
}

/// When the checkpoints in the run's directory are saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SavePeriod {
    /// Each time that this number of steps is done.
    Steps(u64),
    /// When this time has passed since the last one.
    Time(Duration),
    /// As soon as the last one is written.
    Continuous,
}

impl SavingGroup {
    fn check(&self, config: &Config, problems: &mut Vec<Problem>) {
        self.check_aside(config, problems);
        self.check_local(config, problems);
        self.check_replicator(config, problems);
        let stated = |key: &str| config.stated(key);
        let both = |one: &str, other: &str, hint: &str| {
            Problem::inconsistent(
                format!("{} and {}, but only one can hold", stated(one), stated(other)),
                hint,
            )
        };
        if self.enable_continuous_checkpointing && self.enable_multi_tier_checkpointing {
            problems.push(both(
                "enable_continuous_checkpointing",
                "enable_multi_tier_checkpointing",
                "leave out `enable_continuous_checkpointing`",
            ));
        }
        if self.enable_emergency_checkpoint && self.enable_multi_tier_checkpointing {
            problems.push(both(
                "enable_emergency_checkpoint",
                "enable_multi_tier_checkpointing",
                "both save to `local_checkpoint_directory`; leave out one of them",
            ));
        }
        let has_evaluations =
            config.entry("eval_interval").value.as_i64().is_some_and(|interval| interval > 0);
        if self.checkpoint_keep_best > 0 && !has_evaluations {
            problems.push(Problem::inconsistent(
                format!("{}, but the run has no evaluations", stated("checkpoint_keep_best")),
                "set `eval_interval`, or leave out `checkpoint_keep_best`",
            ));
        }
    }

    /// Refuses the service that copies checkpoints in one cloud's product.
    fn check_replicator(&self, config: &Config, problems: &mut Vec<Problem>) {
        let key = if self.replicator_backup_interval_minutes > 0 {
            "replicator_backup_interval_minutes"
        } else {
            "use_replicator_service"
        };
        if self.use_replicator_service {
            problems.push(Problem::inconsistent(
                format!(
                    "{}, but the replicator is a service of Google Kubernetes Engine, not part of this program",
                    config.stated(key)
                ),
                "leave it out; `enable_multi_tier_checkpointing` with \
                 `multi_tier_checkpointing_backup_interval_minutes` saves to both storages without a service",
            ));
        }
    }

    fn check_aside(&self, config: &Config, problems: &mut Vec<Problem>) {
        let Some(name) = &self.checkpoint_todelete_subdir else { return };
        if self.checkpoint_todelete_full_path.is_some() {
            problems.push(Problem::inconsistent(
                format!(
                    "{} and {}, but checkpoints move to one directory",
                    config.stated("checkpoint_todelete_subdir"),
                    config.stated("checkpoint_todelete_full_path")
                ),
                "leave out one of them",
            ));
        }
        let is_plain = !name.starts_with('.')
            && !name.contains('/')
            && !name.chars().all(|character| character.is_ascii_digit())
            && !name.contains(".orbax-checkpoint-tmp");
        if !is_plain {
            problems.push(Problem::inconsistent(
                format!(
                    "{}, which is not the name of a subdirectory",
                    config.stated("checkpoint_todelete_subdir")
                ),
                "use a name such as `old`, or `checkpoint_todelete_full_path`",
            ));
        }
    }

    fn check_local(&self, config: &Config, problems: &mut Vec<Problem>) {
        let kind = if self.enable_multi_tier_checkpointing {
            "enable_multi_tier_checkpointing"
        } else {
            "enable_emergency_checkpoint"
        };
        if !self.enable_emergency_checkpoint && !self.enable_multi_tier_checkpointing {
            return;
        }
        let mut lacks = |key: &str, example: &str| {
            problems.push(Problem::inconsistent(
                format!("{}, but `{key}` is not set", config.stated(kind)),
                format!("set it, such as `{key}={example}`"),
            ));
        };
        if self.local_checkpoint_directory.is_none() {
            lacks("local_checkpoint_directory", "/local");
        }
        if self.local_checkpoint_period == 0 {
            lacks("local_checkpoint_period", "20");
        }
        let has_backups =
            self.multi_tier_checkpointing_backup_interval_minutes.is_some_and(|minutes| minutes > 0)
                || self.multi_tier_checkpointing_backup_interval_steps.is_some();
        if self.enable_multi_tier_checkpointing && !has_backups {
            lacks("multi_tier_checkpointing_backup_interval_minutes", "30");
        }
    }

    /// When the checkpoints in the run's directory are saved.
    pub fn period(&self, checkpoint: &CheckpointGroup) -> SavePeriod {
        let minutes = self.multi_tier_checkpointing_backup_interval_minutes.filter(|minutes| *minutes > 0);
        match (
            self.enable_multi_tier_checkpointing,
            self.multi_tier_checkpointing_backup_interval_steps,
            minutes,
        ) {
            (true, Some(steps), _) => SavePeriod::Steps(steps),
            (true, None, Some(minutes)) => SavePeriod::Time(Duration::from_secs(60 * minutes)),
            _ if self.enable_continuous_checkpointing => SavePeriod::Continuous,
            _ => SavePeriod::Steps(checkpoint.checkpoint_period.max(1)),
        }
    }

    /// The directory of checkpoints on local storage, if the run has any, and the number of steps between them.
    pub fn local(&self, run: &RunGroup) -> Option<(PathBuf, u64)> {
        let is_enabled = self.enable_emergency_checkpoint || self.enable_multi_tier_checkpointing;
        let directory = self.local_checkpoint_directory.as_ref().filter(|_| is_enabled)?;
        Some((directory.join(&run.run_name), self.local_checkpoint_period.max(1)))
    }

    /// The directory to which old checkpoints in `checkpoints` are moved, if they are not deleted.
    pub fn aside(&self, checkpoints: &Path) -> Option<PathBuf> {
        let inside = self.checkpoint_todelete_subdir.as_ref().map(|name| checkpoints.join(name));
        self.checkpoint_todelete_full_path.clone().or(inside)
    }

    /// The time in which a run ends after a signal.
    pub fn deadline(&self) -> Option<Duration> {
        (self.preemption_deadline_seconds > 0).then(|| Duration::from_secs(self.preemption_deadline_seconds))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Request, TrainConfig};

    fn train(arguments: &[&str]) -> TrainConfig {
        let all = ["dataset_type=synthetic", "run_name=run", "checkpoint_period=7"];
        let arguments = all.iter().chain(arguments).map(|argument| (*argument).to_owned()).collect();
        let config = Config::resolve(&Request { arguments, ..Request::default() }).unwrap();
        TrainConfig::from_config(&config).unwrap_or_else(|error| panic!("{error}"))
    }

    #[test]
    fn the_kind_of_saving_decides_its_period() {
        let local = ["local_checkpoint_directory=/local", "local_checkpoint_period=3"];
        let tiers = [&local[..], &["enable_multi_tier_checkpointing=true"]].concat();
        let check = |arguments: &[&str], period: SavePeriod, is_local: bool| {
            let config = train(arguments);
            assert_eq!(config.saving.period(&config.checkpoint), period, "{arguments:?}");
            let expected = is_local.then(|| (PathBuf::from("/local/run"), 3));
            assert_eq!(config.saving.local(&config.run), expected, "{arguments:?}");
        };
        check(&[], SavePeriod::Steps(7), false);
        check(&local, SavePeriod::Steps(7), false);
        check(&["enable_continuous_checkpointing=true"], SavePeriod::Continuous, false);
        let emergency = [&local[..], &["enable_emergency_checkpoint=true"]].concat();
        check(&emergency, SavePeriod::Steps(7), true);
        let minutes = "multi_tier_checkpointing_backup_interval_minutes=2";
        let steps = "multi_tier_checkpointing_backup_interval_steps=50";
        check(&[&tiers[..], &[minutes]].concat(), SavePeriod::Time(Duration::from_secs(120)), true);
        check(&[&tiers[..], &[minutes, steps]].concat(), SavePeriod::Steps(50), true);
    }

    #[test]
    fn old_checkpoints_move_inside_or_anywhere() {
        let aside = |arguments: &[&str]| train(arguments).saving.aside(Path::new("run/checkpoints"));
        assert_eq!(aside(&[]), None);
        assert_eq!(aside(&["checkpoint_todelete_subdir=old"]), Some("run/checkpoints/old".into()));
        assert_eq!(aside(&["checkpoint_todelete_full_path=/aside"]), Some("/aside".into()));
    }
}
