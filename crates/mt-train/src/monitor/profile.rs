//! Profiles of some of a run's steps.
//!
//! A profile holds the activities of the main thread, and the records of the plugin's profiler about devices and its own
//! threads, if the plugin has one. Two files hold it, in the directory where TensorBoard looks for profiles: one for XProf
//! and one for Perfetto.

use std::{
    fs::{self, File},
    io::{self, BufWriter},
    ops::Range,
    path::{Path, PathBuf},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use flate2::{Compression, write::GzEncoder};
use mt_config::MonitorGroup;
use mt_runtime::{Profile, Runtime, RuntimeError};
use prost::Message as _;

use super::{
    timeline::{Span, Timeline},
    trace,
    xplane::{EventData, HOST_PLANE, StatValue, XEvent, XLine, XPlane, XSpace, XStat},
};
use crate::{TrainError, metrics::host_name};

/// The number of the main thread's line. Tracers number lines by the system's threads, whose numbers are smaller.
const MAIN_LINE: i64 = 1 << 24;

/// Takes the profiles of a run.
pub(crate) struct Profiler {
    /// TensorBoard's directory.
    directory: PathBuf,
    /// The steps of the next profile, or of the present one.
    steps: Range<u64>,
    /// The number of steps from the start of one profile to the next.
    period: Option<u64>,
    present: Option<Present>,
    /// The first and the last step of each profile.
    edges: Vec<u64>,
}

/// A profile that is being recorded.
struct Present {
    /// When it began, on the timeline.
    began: Duration,
    /// When it began, by the system's clock, which tracers read. The clock may have been set since the timeline started.
    began_by_system: Duration,
    devices: Option<Profile>,
}

impl Profiler {
    /// The profiler of a run whose loop begins with `first_step`, if it is to be profiled.
    pub fn new(group: &MonitorGroup, first_step: u64, directory: PathBuf) -> Option<Self> {
        let begin = first_step + group.skip_first_n_steps_for_profiler;
        group.is_profiled().then(|| Self {
            directory,
            steps: begin..begin + group.profiler_steps,
            period: group.profile_period(),
            present: None,
            edges: Vec::new(),
        })
    }

    /// Whether a profile begins or ends with a step, whose time is unlike that of others.
    pub fn is_edge(&self, step: u64) -> bool {
        self.edges.contains(&step)
    }

    /// Whether a profile begins with this step.
    pub fn begins_with(&self, step: u64) -> bool {
        self.present.is_none() && step == self.steps.start
    }

    /// Whether a profile ends with this step.
    pub fn ends_with(&self, step: u64) -> bool {
        self.present.is_some() && step + 1 >= self.steps.end
    }

    /// Begins a profile.
    ///
    /// # Errors
    /// The plugin's profiler fails.
    pub fn begin(&mut self, runtime: &Runtime, timeline: &Timeline) -> Result<(), TrainError> {
        let began = timeline.now();
        let began_by_system = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let devices = runtime.start_profile()?;
        timeline.record();
        self.present = Some(Present { began, began_by_system, devices });
        self.edges.extend([self.steps.start, self.steps.end - 1]);
        Ok(())
    }

    /// Ends the present profile and writes it. Returns its directory.
    ///
    /// # Errors
    /// The plugin's profiler fails, or a file cannot be written.
    pub fn end(&mut self, timeline: &Timeline) -> Result<Option<PathBuf>, TrainError> {
        let Some(Present { began, began_by_system, devices }) = self.present.take() else { return Ok(None) };
        let spans = timeline.take_spans();
        let mut space = match devices.map(Profile::finish).transpose().map_err(RuntimeError::from)? {
            Some(bytes) => XSpace::decode(bytes.as_slice()).map_err(TrainError::Profile)?,
            None => XSpace::default(),
        };
        let host = host_name();
        make_relative(&mut space, began_by_system);
        add_spans(&mut space, &spans, began);
        if !space.hostnames.contains(&host) {
            space.hostnames.push(host.clone());
        }
        let name = format!("{:010}-step-{:06}", began.as_secs(), self.steps.start);
        let directory = self.directory.join("plugins").join("profile").join(name);
        write(&space, &directory, &host)?;
        if let Some(period) = self.period {
            self.steps = self.steps.start + period..self.steps.end + period;
        }
        Ok(Some(directory))
    }

    /// Whether no step was profiled.
    pub fn is_empty(&self) -> bool {
        self.edges.is_empty()
    }
}

/// Adds the activities of the main thread to the plane of the host. Times count from the begin of the profile.
fn add_spans(space: &mut XSpace, spans: &[Span], began: Duration) {
    let Some(begin) = spans.first().map(|span| span.begin) else { return };
    let index = space.planes.iter().position(|plane| plane.name == HOST_PLANE).unwrap_or_else(|| {
        space.planes.insert(0, XPlane { name: HOST_PLANE.to_owned(), ..XPlane::default() });
        0
    });
    let plane = &mut space.planes[index];
    let step_id = plane.stat_id("step_num");
    let picoseconds = |time: Duration| i64::try_from(time.as_nanos() * 1000).unwrap_or(i64::MAX);
    let event = |plane: &mut XPlane, span: &Span| XEvent {
        metadata_id: plane.event_id(span.activity.name()),
        data: Some(EventData::OffsetPs(picoseconds(span.begin - begin))),
        duration_ps: picoseconds(span.end - span.begin),
        stats: span
            .step
            .map(|step| XStat { metadata_id: step_id, value: Some(StatValue::Signed(step as i64)) })
            .into_iter()
            .collect(),
    };
    let events = spans.iter().map(|span| event(plane, span)).collect();
    let timestamp_ns = nanoseconds(begin.saturating_sub(began));
    let name = "training loop".to_owned();
    plane.lines.insert(0, XLine { id: MAIN_LINE, name, timestamp_ns, events, ..XLine::default() });
}

/// Counts the times of tracers from the begin of the profile, as XProf expects, where they count from the Unix epoch.
fn make_relative(space: &mut XSpace, began_by_system: Duration) {
    let began = nanoseconds(began_by_system);
    for line in space.planes.iter_mut().flat_map(|plane| &mut plane.lines) {
        // Profiles take hours at most and the epoch is decades ago, so half of that time tells both ways of counting
        // apart, even if the clock was set back during the profile.
        if line.timestamp_ns > began / 2 {
            line.timestamp_ns = (line.timestamp_ns - began).max(0);
        }
    }
}

fn nanoseconds(time: Duration) -> i64 {
    i64::try_from(time.as_nanos()).unwrap_or(i64::MAX)
}

/// Writes a profile for XProf and for Perfetto.
fn write(space: &XSpace, directory: &Path, host: &str) -> Result<(), TrainError> {
    fs::create_dir_all(directory).map_err(TrainError::io("create", directory))?;
    let path = directory.join(format!("{host}.xplane.pb"));
    fs::write(&path, space.encode_to_vec()).map_err(TrainError::io("write", &path))?;
    let path = directory.join(format!("{host}.trace.json.gz"));
    let write = || -> io::Result<()> {
        let mut output = GzEncoder::new(BufWriter::new(File::create(&path)?), Compression::fast());
        trace::write(space, &mut output)?;
        output.finish()?.into_inner().map_err(io::IntoInnerError::into_error)?;
        Ok(())
    };
    write().map_err(TrainError::io("write", &path))
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use flate2::read::GzDecoder;
    use serde_json::Value;

    use super::*;
    use crate::monitor::timeline::Activity;

    #[test]
    fn a_profile_holds_the_activities_of_the_main_thread() {
        let at = |milliseconds: u64| Duration::from_millis(1_000_000 + milliseconds);
        let span = |activity, begin, end| Span { activity, step: Some(3), begin: at(begin), end: at(end) };
        let spans =
            [span(Activity::DataWait, 0, 2), span(Activity::Step, 2, 7), span(Activity::DataWait, 7, 8)];
        let device = XPlane { name: "/device:GPU:0".to_owned(), ..XPlane::default() };
        let mut space = XSpace { planes: vec![device], ..XSpace::default() };
        add_spans(&mut space, &spans, at(0));
        let directory = tempfile::tempdir().unwrap();
        write(&space, directory.path(), "host").unwrap();

        let bytes = fs::read(directory.path().join("host.xplane.pb")).unwrap();
        let read = XSpace::decode(bytes.as_slice()).unwrap();
        assert_eq!(read, space);
        let [host, _] = &read.planes[..] else { panic!("{read:?}") };
        assert_eq!((host.name.as_str(), host.event_metadata.len()), ("/host:CPU", 2));

        let mut text = String::new();
        let file = File::open(directory.path().join("host.trace.json.gz")).unwrap();
        GzDecoder::new(file).read_to_string(&mut text).unwrap();
        let trace: Value = serde_json::from_str(&text).unwrap();
        let events: Vec<_> =
            trace["traceEvents"].as_array().unwrap().iter().filter(|event| event["ph"] == "X").collect();
        let of = |event: &Value| {
            (event["name"].clone(), event["ts"].as_f64().unwrap(), event["dur"].as_f64().unwrap())
        };
        assert_eq!(of(events[1]), ("step".into(), 2000.0, 5000.0));
        assert_eq!((events.len(), &events[1]["args"]["step_num"]), (3, &3.into()));
    }

    #[test]
    fn times_count_from_the_begin_of_the_profile() {
        // The timeline began when the system's clock showed another time.
        let epoch = Duration::from_secs(1_800_000_000);
        for set_by in [0, -3600, 3600_i64] {
            let began_by_system = Duration::from_secs(1_800_000_000_u64.checked_add_signed(set_by).unwrap());
            let at = |seconds: i64| nanoseconds(began_by_system) + seconds * 1_000_000_000;
            // The last two tracers count from the begin themselves, and from before a clock that is then set back.
            let lines = [at(0), at(2), 5_000_000_000, at(-30)];
            let lines = lines.map(|timestamp_ns| XLine { timestamp_ns, ..XLine::default() }).into();
            let device = XPlane { name: "/device:GPU:0".to_owned(), lines, ..XPlane::default() };
            let mut space = XSpace { planes: vec![device], ..XSpace::default() };
            make_relative(&mut space, began_by_system);
            let begin = epoch + Duration::from_secs(1);
            let span =
                Span { activity: Activity::Step, step: None, begin, end: begin + Duration::from_secs(1) };
            add_spans(&mut space, &[span], epoch);
            let times = |plane: &XPlane| -> Vec<i64> {
                plane.lines.iter().map(|line| line.timestamp_ns / 1_000_000_000).collect()
            };
            let [host, device] = &space.planes[..] else { panic!("{space:?}") };
            assert_eq!((times(host), times(device)), (vec![1], vec![0, 2, 5, 0]), "set by {set_by} s");
        }
    }

    #[test]
    fn profiles_come_after_the_skipped_steps_and_once_a_period() {
        let mut profiler = Profiler {
            directory: PathBuf::new(),
            steps: 11..13,
            period: Some(10),
            present: None,
            edges: Vec::new(),
        };
        assert!(!profiler.begins_with(10) && profiler.begins_with(11) && !profiler.ends_with(12));
        let none = Duration::ZERO;
        profiler.present = Some(Present { began: none, began_by_system: none, devices: None });
        assert!(!profiler.begins_with(11) && !profiler.ends_with(11) && profiler.ends_with(12));
    }
}
