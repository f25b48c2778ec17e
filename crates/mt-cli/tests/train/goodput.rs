//! The record of how a run's time is spent.

use std::{fs, process::Stdio, thread, time::Duration};

use serde_json::Value;

use crate::support::Sandbox;

/// The lines of a run's record.
fn record(sandbox: &Sandbox, run: &str) -> Vec<Value> {
    let text = fs::read_to_string(sandbox.path(&format!("runs/{run}/metrics/goodput.jsonl")));
    // The last line may be half written while the run goes on.
    text.unwrap_or_default().lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

/// The sum of some activities' seconds over lines.
fn seconds(lines: &[Value], activities: &[&str]) -> f64 {
    let of =
        |line: &Value| -> f64 { activities.iter().filter_map(|name| line["seconds"][name].as_f64()).sum() };
    lines.iter().map(of).sum()
}

/// The index of the first line of an event.
fn first(lines: &[Value], event: &str) -> usize {
    lines.iter().position(|line| line["event"] == event).unwrap()
}

#[test]
fn a_killed_run_counts_the_steps_that_it_repeats() {
    let sandbox = Sandbox::new();
    // The state after step 0 is the only one that is saved before the end.
    let keys = ["monitor_goodput=true", "goodput_upload_interval_seconds=0", "checkpoint_period=1000000"];
    let run = |steps: &'static str| sandbox.command("run", &[&keys[..], &[steps]].concat());
    let mut process = run("steps=1000000").stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let is_late = |line: &Value| line["step"].as_u64() > Some(0);
    while sandbox.checkpoints("run").is_empty() || !record(&sandbox, "run").iter().any(is_late) {
        assert!(process.try_wait().unwrap().is_none(), "the run ended");
        thread::sleep(Duration::from_millis(5));
    }
    process.kill().unwrap();
    process.wait().unwrap();
    let before = record(&sandbox, "run");
    assert_eq!(before[0]["event"], "start");
    let begun = first(&before, "loop");
    assert!(seconds(&before[..=begun], &["compile"]) > 0.0, "{before:?}");
    // Lines are written as time passes, and not with each step.
    let num_steps = before.iter().rev().find_map(|line| line["step"].as_u64()).unwrap();
    assert!(before[begun..].len() < 10 + num_steps as usize / 10, "{num_steps} steps: {before:?}");

    let outcome = sandbox.train("run", &[&keys[..], &["steps=20"]].concat()).succeeded();
    let all = record(&sandbox, "run");
    let after = &all[before.len()..];
    assert_eq!(after[0]["event"], "start");
    let begun = first(after, "loop");
    assert_eq!(after[begun]["first_step"], 1);
    assert!(seconds(&after[..=begun], &["restore"]) > 0.0, "{after:?}");
    assert_eq!(all.last().unwrap()["event"], "end");

    let metrics = sandbox.metrics("run");
    let last = metrics.training[&19].as_object().unwrap();
    let shares: f64 =
        last.iter().filter(|(name, _)| name.contains("put")).map(|(_, share)| share.as_f64().unwrap()).sum();
    assert!((shares - 1.0).abs() < 1e-6, "{last:?}");
    let share = |name: &str| last[name].as_f64().unwrap();
    // Checkpoints have lines of their own, so all work after the one of step 0 is lost.
    let saved = before.iter().position(|line| line["step"] == 0).unwrap();
    let lost = seconds(&before[saved + 1..], &["step", "metrics"]);
    let time = |line: &Value| line["time"].as_f64().unwrap();
    let idle = time(&after[0]) - time(before.last().unwrap());
    let found = share("badput/lost_work") / share("badput/idle") * idle;
    assert!((found - lost).abs() < 1e-3 * lost, "{found} s lost, not {lost}: {last:?}");
    assert!(share("goodput") > 0.0);

    let line = outcome.errors.lines().find(|line| line.starts_with("goodput: ")).unwrap();
    assert!(line.contains("lost work") && line.contains("compile"), "{line}");
    let events = fs::read_dir(sandbox.path("runs/run/tensorboard")).unwrap();
    let has_goodput = |path| fs::read(path).unwrap().windows(7).any(|window| window == b"goodput");
    assert!(events.map(|entry| entry.unwrap().path()).any(has_goodput));
}

#[test]
fn a_run_keeps_no_record_unless_it_is_requested() {
    let sandbox = Sandbox::new();
    let outcome = sandbox.train("plain", &["steps=2"]).succeeded();
    assert!(!outcome.errors.contains("goodput"), "{}", outcome.errors);
    assert!(!sandbox.path("runs/plain/metrics/goodput.jsonl").exists());
    let outcome = sandbox.train("recorded", &["steps=2", "enable_goodput_recording=true"]).succeeded();
    assert!(outcome.errors.contains("goodput: "), "{}", outcome.errors);
    assert!(sandbox.metrics("recorded").training[&1].get("goodput").is_none());
}

#[test]
fn a_process_that_fails_before_the_loop_is_recorded() {
    let sandbox = Sandbox::new();
    let keys = ["enable_goodput_recording=true", "steps=4"];
    sandbox.train("run", &[&keys[..], &["steps=2"]].concat()).succeeded();
    let before = record(&sandbox, "run");
    // No checkpoint can be loaded.
    for step in sandbox.checkpoints("run") {
        let root = sandbox.path(&format!("runs/run/checkpoints/{step}"));
        let files = sandbox.checkpoint_files("run", step);
        files.keys().for_each(|path| fs::write(root.join(path), b"").unwrap());
    }
    let outcome = sandbox.train("run", &keys);
    assert_ne!(outcome.status, 0, "{}", outcome.errors);
    let all = record(&sandbox, "run");
    let after = &all[before.len()..];
    assert_eq!((&after[0]["event"], &after.last().unwrap()["event"]), (&"start".into(), &"end".into()));
    assert!(after.iter().all(|line| line["event"] != "loop"), "{after:?}");
    assert!(seconds(after, &["compile"]) > 0.0 && seconds(after, &["startup"]) > 0.0, "{after:?}");
}
