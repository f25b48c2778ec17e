//! Records of runs whose processes end, fail or are killed.

use std::{
    sync::{Arc, Mutex},
    time::Instant,
};

use super::super::timeline::{Activity, system_clock, tests::FakeClock};
use super::*;
use crate::{Event as Reported, metrics::Metrics};

/// An observer that no event reaches.
fn silent() -> Observer {
    Arc::new(|event| panic!("{event:?}"))
}

fn open(path: &Path, timeline: &Timeline) -> Record {
    Record::open(INTERVAL, path, timeline, &silent()).unwrap()
}

/// A process of a run: starts, restores, does steps of 10 seconds with a second's wait for data each, and ends or is
/// killed. Lines are written as time passes.
fn process(path: &Path, clock: &FakeClock, steps: std::ops::Range<u64>, ends: bool) -> GoodputSummary {
    let timeline = Timeline::start(clock.clock());
    let mut record = open(path, &timeline);
    let pass = |record: &mut Record, activity: Activity, seconds: u64| {
        timeline.begin(activity);
        for _ in 0..seconds {
            clock.advance(1.0);
            record.write_if_due();
        }
    };
    pass(&mut record, Activity::Startup, 5);
    pass(&mut record, Activity::Restore, 15);
    timeline.begin(Activity::Step);
    record.append_spent(Event::Loop { first_step: steps.start });
    for step in steps {
        pass(&mut record, Activity::DataWait, 1);
        pass(&mut record, Activity::Step, 4);
        pass(&mut record, Activity::Metrics, 6);
        record.end_step(step);
        record.write_if_due();
        timeline.begin(Activity::Step);
    }
    if ends {
        timeline.begin(Activity::Checkpoint);
        clock.advance(2.0);
        record.write_complete();
        record.append_spent(Event::End);
    }
    record.summary().unwrap()
}

#[track_caller]
fn check(summary: &GoodputSummary, seconds: f64, productive: f64, badput: &[(&str, f64)]) {
    assert!((summary.seconds - seconds).abs() < 1e-6, "{summary:?}");
    assert!((summary.goodput * seconds - productive).abs() < 1e-6, "{summary:?}");
    for (name, share) in &summary.badput {
        let expected = badput.iter().find(|(of, _)| of == name).map_or(0.0, |(_, seconds)| *seconds);
        assert!((share * seconds - expected).abs() < 1e-6, "{name}: {summary:?}");
    }
}

/// The sums of the lines that a killed process left.
fn left(path: &Path) -> GoodputSummary {
    Ledger::read(path).unwrap().summary(&Spent::default())
}

#[test]
fn time_adds_up_over_processes() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("metrics/goodput.jsonl");
    let clock = FakeClock::default();
    clock.advance(1000.0);
    // Ten steps, of which the state after the sixth was the last to be saved. All are written: steps are longer than
    // the interval.
    let first = process(&path, &clock, 0..10, false);
    check(&first, 130.0, 100.0, &[("startup", 5.0), ("restore", 15.0), ("data_wait", 10.0)]);
    clock.advance(50.0);
    let unwritten = 130.0 - left(&path).seconds;
    assert!((0.0..=5.0).contains(&unwritten), "{unwritten}");
    let second = process(&path, &clock, 6..12, true);
    let badput = [
        ("startup", 10.0),
        ("restore", 30.0),
        ("data_wait", 16.0),
        ("checkpoint", 2.0),
        ("lost_work", 40.0 - unwritten),
        ("idle", 50.0 + unwritten),
    ];
    check(&second, 268.0, 120.0, &badput);
    let mut metrics = Metrics::default();
    second.write_to(&mut metrics);
    assert_eq!(metrics.get("goodput"), Some(second.goodput));
    assert!((metrics.get("badput/lost_work").unwrap() - (40.0 - unwritten) / 268.0).abs() < 1e-9);
    let total: f64 = metrics.iter().map(|(_, share)| share).sum();
    assert!((total - 1.0).abs() < 1e-9, "{metrics:?}");
}

#[test]
fn a_killed_process_leaves_what_it_did_by_name() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("goodput.jsonl");
    let clock = FakeClock::default();
    let timeline = Timeline::start(clock.clock());
    clock.advance(3.0);
    let mut record = open(&path, &timeline);
    for activity in [Activity::DataPreparation, Activity::Compile] {
        timeline.begin(activity);
        for _ in 0..40 {
            clock.advance(0.5);
            record.write_if_due();
        }
    }
    // It is killed while it compiles. The next one is killed in its first step.
    check(&left(&path), 43.0, 0.0, &[("startup", 3.0), ("data_preparation", 20.0), ("compile", 20.0)]);
    clock.advance(7.0);
    let timeline = Timeline::start(clock.clock());
    let mut record = open(&path, &timeline);
    timeline.begin(Activity::Step);
    record.append_spent(Event::Loop { first_step: 0 });
    clock.advance(10.0);
    record.write_if_due();
    check(
        &left(&path),
        60.0,
        10.0,
        &[("startup", 3.0), ("data_preparation", 20.0), ("compile", 20.0), ("idle", 7.0)],
    );
    let record = open(&path, &Timeline::start(clock.clock()));
    let badput =
        [("startup", 3.0), ("data_preparation", 20.0), ("compile", 20.0), ("idle", 7.0), ("lost_work", 10.0)];
    check(&record.summary().unwrap(), 60.0, 0.0, &badput);
}

#[test]
fn the_file_grows_with_time() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("goodput.jsonl");
    let clock = FakeClock::default();
    let timeline = Timeline::start(clock.clock());
    let mut record = open(&path, &timeline);
    timeline.begin(Activity::Step);
    record.append_spent(Event::Loop { first_step: 0 });
    let lines = || fs::read_to_string(&path).unwrap().lines().count();
    for step in 0..1000 {
        clock.advance(0.01);
        record.end_step(step);
        record.write_if_due();
    }
    // Ten seconds: two lines beside those of the start and the loop.
    assert_eq!(lines(), 4);
    // A checkpoint after step 1009 makes a line of its own. The process is killed some steps later.
    for step in 1000..1010 {
        clock.advance(0.01);
        record.end_step(step);
    }
    record.write_complete();
    for step in 1010..2000 {
        clock.advance(0.01);
        record.end_step(step);
        record.write_if_due();
    }
    let known = left(&path).seconds;
    assert!(20.0 - known < 5.0 && lines() < 9, "{known} s in {} lines", lines());

    // The next process repeats exactly the steps after the checkpoint.
    let mut record = open(&path, &timeline);
    record.append_spent(Event::Loop { first_step: 1010 });
    let resumed = left(&path);
    assert!((resumed.goodput * resumed.seconds - 10.1).abs() < 1e-6, "{resumed:?}");
    // Steps within a line count as equally long.
    record.append_spent(Event::Loop { first_step: 250 });
    let resumed = left(&path);
    assert!((resumed.goodput * resumed.seconds - 2.5).abs() < 0.02, "{resumed:?}");
}

#[test]
fn a_thread_writes_while_the_main_thread_does_not() {
    let directory = tempfile::tempdir().unwrap();
    let [path, copy] = ["goodput.jsonl", "copy.jsonl"].map(|name| directory.path().join(name));
    let timeline = Timeline::start(system_clock());
    let goodput = Goodput::open_every(Duration::from_millis(5), &path, &timeline, &silent()).unwrap();
    timeline.begin(Activity::Compile);
    let start = Instant::now();
    let compiled = loop {
        // A kill would leave these lines.
        fs::copy(&path, &copy).unwrap();
        let summary = left(&copy);
        let (_, share) = summary.badput.iter().find(|(name, _)| *name == "compile").unwrap();
        if *share > 0.0 {
            break share * summary.seconds;
        }
        assert!(start.elapsed() < Duration::from_secs(60), "{summary:?}");
        thread::sleep(Duration::from_millis(5));
    };
    assert!(compiled <= start.elapsed().as_secs_f64(), "{compiled}");
    // A process that fails ends its record.
    drop(goodput);
    let text = fs::read_to_string(&path).unwrap();
    assert!(text.lines().last().unwrap().contains(r#""event":"end""#), "{text}");
}

#[test]
fn a_failure_is_reported_once_and_ends_the_record() {
    let notices: Arc<Mutex<Vec<String>>> = Arc::default();
    let log = notices.clone();
    let observer: Observer = Arc::new(move |event| {
        let Reported::Notice(notice) = event else { panic!("{event:?}") };
        log.lock().unwrap().push(notice.to_string());
    });
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("goodput.jsonl");
    let timeline = Timeline::start(FakeClock::default().clock());
    let mut record = Record::open(INTERVAL, &path, &timeline, &observer).unwrap();
    // A file that is open for reading alone refuses what is written.
    record.file = Some(File::open(&path).unwrap());
    record.append_spent(Event::Time);
    record.append_spent(Event::Time);
    assert_eq!(record.summary(), None);
    let notices = notices.lock().unwrap();
    let [notice] = &notices[..] else { panic!("{notices:?}") };
    assert!(notice.contains("goodput is no longer recorded: cannot write"), "{notice}");
}

#[test]
fn a_torn_line_is_cut_off_and_other_text_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("goodput.jsonl");
    let clock = FakeClock::default();
    process(&path, &clock, 0..2, true);
    let whole = fs::read_to_string(&path).unwrap();
    assert!(whole.contains(r#"{"event":"time","time":5.0,"seconds":{"startup":5.0}}"#), "{whole}");
    let last = whole.trim_end().rfind('\n').unwrap() + 1;
    for torn in last..whole.len() {
        fs::write(&path, &whole[..torn]).unwrap();
        Ledger::read(&path).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), whole[..last]);
    }
    fs::write(&path, format!("{whole}notes\n")).unwrap();
    let error = Record::open(INTERVAL, &path, &Timeline::start(clock.clock()), &silent()).err().unwrap();
    let expected = whole.lines().count() + 1;
    assert!(matches!(error, TrainError::NotGoodput { line, .. } if line == expected), "{error}");
    assert!(error.is_user_error());
}
