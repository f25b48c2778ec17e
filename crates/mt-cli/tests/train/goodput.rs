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

/// The seconds of the steps of some lines.
fn productive(lines: &[Value], range: impl Fn(u64) -> bool) -> f64 {
    let in_range = |line: &&Value| line["step"].as_u64().is_some_and(&range);
    let seconds = |line: &Value| {
        ["step", "metrics"].iter().filter_map(|name| line["seconds"][name].as_f64()).sum::<f64>()
    };
    lines.iter().filter(in_range).map(seconds).sum()
}

#[test]
fn a_killed_run_counts_the_steps_that_it_repeats() {
    let sandbox = Sandbox::new();
    // The state after step 0 is the only one that is saved before the end.
    let keys = ["monitor_goodput=true", "goodput_upload_interval_seconds=0", "checkpoint_period=1000000"];
    let run = |steps: &'static str| sandbox.command("run", &[&keys[..], &[steps]].concat());
    let mut process = run("steps=1000000").stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    while sandbox.checkpoints("run").is_empty() || record(&sandbox, "run").len() < 20 {
        assert!(process.try_wait().unwrap().is_none(), "the run ended");
        thread::sleep(Duration::from_millis(5));
    }
    process.kill().unwrap();
    process.wait().unwrap();
    let first = record(&sandbox, "run");
    assert_eq!((&first[0]["event"], &first[1]["event"]), (&"start".into(), &"loop".into()));
    assert!(first[1]["seconds"]["compile"].as_f64().unwrap() > 0.0, "{}", first[1]);

    let outcome = sandbox.train("run", &[&keys[..], &["steps=20"]].concat()).succeeded();
    let all = record(&sandbox, "run");
    let second = &all[first.len()..];
    assert_eq!((&second[0]["event"], &second[1]["first_step"]), (&"start".into(), &1.into()));
    assert!(second[1]["seconds"]["restore"].as_f64().unwrap() > 0.0, "{}", second[1]);
    assert_eq!(all.last().unwrap()["event"], "end");

    // The last step's metrics are read after its turn of the loop.
    let time = |line: &Value| line["time"].as_f64().unwrap();
    let metrics = sandbox.metrics("run");
    let last = metrics.training[&19].as_object().unwrap();
    let shares: f64 =
        last.iter().filter(|(name, _)| name.contains("put")).map(|(_, share)| share.as_f64().unwrap()).sum();
    assert!((shares - 1.0).abs() < 1e-6, "{last:?}");
    let known = second.iter().rfind(|line| line["step"] == 19).unwrap();
    let seconds = time(known) - time(&all[0]);
    let check = |name: &str, expected: f64| {
        let found = last[name].as_f64().unwrap() * seconds;
        assert!((found - expected).abs() < 1e-3, "{name}: {found}, not {expected}");
    };
    check("badput/lost_work", productive(&first, |step| step >= 1));
    check("badput/idle", time(&second[0]) - time(first.last().unwrap()));
    assert!(last["goodput"].as_f64().unwrap() > 0.0);

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
