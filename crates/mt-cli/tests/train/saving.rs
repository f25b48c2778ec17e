//! Kinds of saving: which checkpoints are kept, and where they are.

use std::{
    fs,
    io::{BufRead, BufReader},
    path::Path,
    process::{Child, Command},
};

use crate::support::{Sandbox, outcome};

fn steps_in(directory: &Path) -> Vec<u64> {
    let Ok(entries) = fs::read_dir(directory) else { return Vec::new() };
    let names = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let mut steps: Vec<u64> = names.collect();
    steps.sort_unstable();
    steps
}

#[track_caller]
fn check_whole(sandbox: &Sandbox, path: &str) {
    let verified = outcome(
        Command::new(env!("CARGO_BIN_EXE_maxtext"))
            .args(["checkpoint", "verify", path])
            .current_dir(sandbox.path("")),
    );
    assert!(verified.succeeded().output.contains("is whole"));
}

#[test]
fn old_checkpoints_move_aside() {
    let sandbox = Sandbox::new();
    let keys = ["steps=18", "max_num_checkpoints_to_keep=2", "eval_interval=-1"];
    sandbox.train("inside", &[&keys[..], &["checkpoint_todelete_subdir=old"]].concat()).succeeded();
    assert_eq!(sandbox.checkpoints("inside"), [15, 17]);
    assert_eq!(steps_in(&sandbox.path("runs/inside/checkpoints/old")), [0, 5, 10]);
    check_whole(&sandbox, "runs/inside/checkpoints/old/5");
    // Neither a resumed run nor commands take the directory for checkpoints of the run.
    let more = [&keys[1..], &["checkpoint_todelete_subdir=old", "steps=25"]].concat();
    let resumed = sandbox.train("inside", &more).succeeded();
    assert!(resumed.output.contains("completed step: 18,"), "{}", resumed.output);
    assert_eq!(steps_in(&sandbox.path("runs/inside/checkpoints/old")), [0, 5, 10, 15, 17]);

    sandbox.train("away", &[&keys[..], &["checkpoint_todelete_full_path=aside"]].concat()).succeeded();
    assert_eq!(
        (sandbox.checkpoints("away"), steps_in(&sandbox.path("aside"))),
        (vec![15, 17], vec![0, 5, 10])
    );
    check_whole(&sandbox, "aside/10");

    let both = ["checkpoint_todelete_subdir=old", "checkpoint_todelete_full_path=aside"];
    let refused = |further: &[&str], expected: &[&str]| {
        sandbox.train("refused", &[&keys[..], further].concat()).refused(expected);
    };
    refused(&both, &["checkpoints move to one directory"]);
    for name in ["12", "a/b", ".old"] {
        refused(&[&format!("checkpoint_todelete_subdir={name}")], &["not the name of a subdirectory"]);
    }
}

#[test]
fn checkpoints_are_kept_by_interval_and_evaluation() {
    let sandbox = Sandbox::new();
    let keys = ["steps=18", "max_num_checkpoints_to_keep=1"];
    sandbox.train("interval", &[&keys[..], &["checkpoint_keep_period=10"]].concat()).succeeded();
    assert_eq!(sandbox.checkpoints("interval"), [0, 10, 17]);

    // The learning rate is so high that later evaluations are worse than the best.
    let best = ["checkpoint_keep_best=2", "eval_interval=3", "learning_rate=0.1", "checkpoint_period=1000"];
    sandbox.train("best", &[&keys[..], &best[..]].concat()).succeeded();
    let evaluations = sandbox.metrics("best").evaluation;
    let losses = sandbox.metrics("best").evaluation_losses();
    let mut ordered: Vec<(f64, u64)> =
        losses.into_iter().zip(evaluations.keys().copied()).filter(|(_, step)| *step > 0).collect();
    ordered.sort_by(|one, other| one.0.total_cmp(&other.0));
    let mut expected: Vec<u64> = ordered.iter().take(2).map(|(_, step)| step - 1).collect();
    expected.push(17);
    expected.sort_unstable();
    expected.dedup();
    assert_eq!(sandbox.checkpoints("best"), expected, "{ordered:?}");

    let without = [&keys[..], &["checkpoint_keep_best=2", "eval_interval=-1"]].concat();
    sandbox.train("without", &without).refused(&["the run has no evaluations", "`eval_interval`"]);
}

#[test]
fn continuous_checkpoints_follow_each_other() {
    let sandbox = Sandbox::new();
    let keys = ["checkpoint_period=1000", "enable_continuous_checkpointing=true"];
    sandbox.train("whole", &["dropout_rate=0.1"]).succeeded();
    let mut process =
        sandbox.command("killed", &[&keys[..], &["dropout_rate=0.1"]].concat()).spawn().unwrap();
    kill_after(&mut process, 30);
    let saved = sandbox.checkpoints("killed");
    assert!(saved.len() > 2 && *saved.last().unwrap() > 1, "{saved:?}");
    sandbox.train("killed", &[&keys[..], &["dropout_rate=0.1"]].concat()).succeeded();
    sandbox.assert_same_run("whole", "killed");
}

/// Kills a run with SIGKILL once a step is done.
fn kill_after(process: &mut Child, step: u64) {
    let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
    let line = format!("completed step: {step},");
    assert!(lines.any(|found| found.unwrap().starts_with(&line)));
    process.kill().unwrap();
    process.wait().unwrap();
}

#[test]
fn runs_continue_from_the_newest_of_local_and_persistent_checkpoints() {
    let sandbox = Sandbox::new();
    let keys = [
        "dropout_rate=0.1",
        "checkpoint_period=20",
        "enable_emergency_checkpoint=true",
        "local_checkpoint_directory=local",
        "local_checkpoint_period=3",
    ];
    sandbox.train("whole", &keys).succeeded();
    let persistent = sandbox.checkpoints("whole");
    assert_eq!(persistent, [0, 20, 40, 59]);
    let local = |run: &str| steps_in(&sandbox.path(&format!("local/{run}/checkpoints")));
    // A checkpoint that is due while another one is written follows when that one is complete.
    let newest = *local("whole").last().unwrap();
    assert!(local("whole").len() <= 2 && (21..59).contains(&newest), "{:?}", local("whole"));

    let start = || sandbox.command("killed", &keys).spawn().unwrap();
    kill_after(&mut start(), 35);
    let newest = *local("killed").last().unwrap();
    assert!(newest > 20, "{newest}");
    // A local checkpoint that is damaged is set aside.
    let mut process = start();
    kill_after(&mut process, 38);
    let damaged = *local("killed").last().unwrap();
    let file = sandbox.path(&format!("local/killed/checkpoints/{damaged}/commit_success.txt"));
    fs::write(&file, "x").unwrap();
    let mut process = start();
    kill_after(&mut process, 45);
    assert!(sandbox.path(&format!("local/killed/checkpoints/{damaged}.damaged")).is_dir());
    // Lost local storage leaves the persistent checkpoints.
    fs::remove_dir_all(sandbox.path("local/killed")).unwrap();
    let resumed = sandbox.train("killed", &keys).succeeded();
    assert!(resumed.output.contains("completed step: 41,"), "{}", resumed.errors);
    sandbox.assert_same_run("whole", "killed");

    // Local checkpoints of a run whose directory is gone are not taken for those of a new one.
    fs::remove_dir_all(sandbox.path("runs/whole")).unwrap();
    sandbox
        .train("whole", &keys)
        .failed(2, &["holds checkpoints of another run", "local_checkpoint_directory"]);
}

#[test]
fn local_checkpoints_need_a_directory_and_a_period() {
    let sandbox = Sandbox::new();
    let refused = |keys: &[&str], expected: &[&str]| {
        sandbox.train("refused", keys).refused(expected);
    };
    refused(
        &["enable_emergency_checkpoint=true"],
        &["`local_checkpoint_directory` is not set", "`local_checkpoint_period` is not set"],
    );
    let local = ["local_checkpoint_directory=local", "local_checkpoint_period=3"];
    let tiers = "enable_multi_tier_checkpointing=true";
    refused(
        &[&local[..], &[tiers]].concat(),
        &["`multi_tier_checkpointing_backup_interval_minutes` is not set"],
    );
    let minutes = "multi_tier_checkpointing_backup_interval_minutes=30";
    refused(
        &[&local[..], &[tiers, minutes, "enable_emergency_checkpoint=true"]].concat(),
        &["but only one can hold"],
    );
    refused(&["use_replicator_service=true"], &["`use_replicator_service`", "Google Kubernetes Engine"]);
    // Copies to persistent storage have an interval of their own.
    let steps = "multi_tier_checkpointing_backup_interval_steps=10";
    sandbox
        .train("tiers", &[&local[..], &[tiers, steps, "steps=25", "checkpoint_period=1"]].concat())
        .succeeded();
    assert_eq!(sandbox.checkpoints("tiers"), [0, 10, 20, 24]);
}

#[test]
fn schedulers_signals_stop_runs_within_their_deadline() {
    let sandbox = Sandbox::new();
    let keys = ["dropout_rate=0.1", "preemption_deadline_seconds=60"];
    sandbox.train("whole", &keys).succeeded();
    for (signal, status) in [("USR1", 138), ("USR2", 140)] {
        let mut process = sandbox.command(signal, &keys).spawn().unwrap();
        let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
        assert!(lines.by_ref().any(|line| line.unwrap().starts_with("completed step: 7,")));
        let kill = format!("kill -{signal} {}", process.id());
        assert!(Command::new("sh").args(["-c", &kill]).status().unwrap().success());
        lines.for_each(drop);
        let output = process.wait_with_output().unwrap();
        let errors = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(status), "{errors}");
        assert!(*sandbox.checkpoints(signal).last().unwrap() >= 7);
        sandbox.train(signal, &keys).succeeded();
        sandbox.assert_same_run("whole", signal);
    }
}
