//! Profiles in the form of Chrome's trace events, which Perfetto reads.

use std::io::{self, Write};

use serde_json::{Value, json};

use super::xplane::{EventData, StatValue, XLine, XPlane, XSpace};

/// Writes a profile: a process for each plane, a thread for each line.
pub(crate) fn write(space: &XSpace, output: &mut impl Write) -> io::Result<()> {
    let begin = space.planes.iter().flat_map(|plane| &plane.lines).filter(|line| !line.events.is_empty());
    let begin = begin.map(|line| line.timestamp_ns).min().unwrap_or(0);
    write!(output, "{{\"displayTimeUnit\":\"ns\",\"traceEvents\":[")?;
    let mut separator = "";
    let mut event = |event: Value| -> io::Result<()> {
        write!(output, "{separator}\n{event}")?;
        separator = ",";
        Ok(())
    };
    for (process, plane) in space.planes.iter().enumerate() {
        let process = process + 1;
        event(json!({ "ph": "M", "pid": process, "name": "process_name", "args": { "name": plane.name } }))?;
        for (thread, line) in plane.lines.iter().enumerate() {
            let thread = thread + 1;
            let name = if line.display_name.is_empty() { &line.name } else { &line.display_name };
            event(
                json!({ "ph": "M", "pid": process, "tid": thread, "name": "thread_name", "args": { "name": name } }),
            )?;
            for described in events(plane, line, begin) {
                let Described { name, begin_us, duration_us, arguments } = described;
                event(json!({
                    "ph": "X", "pid": process, "tid": thread, "name": name, "ts": begin_us, "dur": duration_us,
                    "args": arguments,
                }))?;
            }
        }
    }
    write!(output, "\n]}}\n")
}

struct Described<'a> {
    name: &'a str,
    begin_us: f64,
    duration_us: f64,
    arguments: Value,
}

/// The events of a line, with times since `begin` in nanoseconds.
fn events<'a>(plane: &'a XPlane, line: &'a XLine, begin: i64) -> impl Iterator<Item = Described<'a>> {
    line.events.iter().filter_map(move |event| {
        let offset = match event.data {
            Some(EventData::OffsetPs(offset)) => offset,
            // Protocol buffers leave out zeros.
            None => 0,
            // It has no time of its own.
            Some(EventData::NumOccurrences(_)) => return None,
        };
        let stats = event.stats.iter().filter_map(|stat| {
            let name = &plane.stat_metadata.get(&stat.metadata_id)?.name;
            let value = match stat.value.as_ref()? {
                StatValue::Double(value) => json!(value),
                StatValue::Unsigned(value) => json!(value),
                StatValue::Signed(value) => json!(value),
                StatValue::Text(value) => json!(value),
                StatValue::Bytes(_) => return None,
                StatValue::Reference(id) => json!(plane.stat_metadata.get(&i64::try_from(*id).ok()?)?.name),
            };
            Some((name.clone(), value))
        });
        Some(Described {
            name: plane.event_name(event),
            begin_us: (line.timestamp_ns - begin) as f64 / 1e3 + offset as f64 / 1e6,
            duration_us: event.duration_ps as f64 / 1e6,
            arguments: Value::Object(stats.collect()),
        })
    })
}
