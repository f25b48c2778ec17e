//! `XSpace`: the form of profiles that XProf and TensorBoard read.
//!
//! The messages are the subset of `xplane.proto` that this crate writes, or reads from plugins' profiles.

use std::collections::HashMap;

/// The plane of the host's threads, whichever tracer writes it.
pub(crate) const HOST_PLANE: &str = "/host:CPU";

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct XSpace {
    #[prost(message, repeated, tag = "1")]
    pub planes: Vec<XPlane>,
    #[prost(string, repeated, tag = "2")]
    pub errors: Vec<String>,
    #[prost(string, repeated, tag = "3")]
    pub warnings: Vec<String>,
    #[prost(string, repeated, tag = "4")]
    pub hostnames: Vec<String>,
}

/// A device, or the host.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct XPlane {
    #[prost(int64, tag = "1")]
    pub id: i64,
    #[prost(string, tag = "2")]
    pub name: String,
    #[prost(message, repeated, tag = "3")]
    pub lines: Vec<XLine>,
    #[prost(map = "int64, message", tag = "4")]
    pub event_metadata: HashMap<i64, XEventMetadata>,
    #[prost(map = "int64, message", tag = "5")]
    pub stat_metadata: HashMap<i64, XStatMetadata>,
    #[prost(message, repeated, tag = "6")]
    pub stats: Vec<XStat>,
}

/// A thread, or a stream of a device.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct XLine {
    #[prost(int64, tag = "1")]
    pub id: i64,
    #[prost(string, tag = "2")]
    pub name: String,
    /// Since the begin of the profile in files, and since the Unix epoch in tracers' records.
    #[prost(int64, tag = "3")]
    pub timestamp_ns: i64,
    #[prost(message, repeated, tag = "4")]
    pub events: Vec<XEvent>,
    #[prost(int64, tag = "9")]
    pub duration_ps: i64,
    #[prost(int64, tag = "10")]
    pub display_id: i64,
    #[prost(string, tag = "11")]
    pub display_name: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct XEvent {
    #[prost(int64, tag = "1")]
    pub metadata_id: i64,
    #[prost(oneof = "EventData", tags = "2, 5")]
    pub data: Option<EventData>,
    #[prost(int64, tag = "3")]
    pub duration_ps: i64,
    #[prost(message, repeated, tag = "4")]
    pub stats: Vec<XStat>,
}

#[derive(Clone, Copy, PartialEq, prost::Oneof)]
pub(crate) enum EventData {
    /// Since the line's timestamp.
    #[prost(int64, tag = "2")]
    OffsetPs(i64),
    /// The number of events that one event stands for.
    #[prost(int64, tag = "5")]
    NumOccurrences(i64),
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct XStat {
    #[prost(int64, tag = "1")]
    pub metadata_id: i64,
    #[prost(oneof = "StatValue", tags = "2, 3, 4, 5, 6, 7")]
    pub value: Option<StatValue>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
pub(crate) enum StatValue {
    #[prost(double, tag = "2")]
    Double(f64),
    #[prost(uint64, tag = "3")]
    Unsigned(u64),
    #[prost(int64, tag = "4")]
    Signed(i64),
    #[prost(string, tag = "5")]
    Text(String),
    #[prost(bytes = "vec", tag = "6")]
    Bytes(Vec<u8>),
    /// A stat's metadata, whose name is the value.
    #[prost(uint64, tag = "7")]
    Reference(u64),
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct XEventMetadata {
    #[prost(int64, tag = "1")]
    pub id: i64,
    #[prost(string, tag = "2")]
    pub name: String,
    #[prost(bytes = "vec", tag = "3")]
    pub metadata: Vec<u8>,
    #[prost(string, tag = "4")]
    pub display_name: String,
    #[prost(message, repeated, tag = "5")]
    pub stats: Vec<XStat>,
    #[prost(int64, repeated, tag = "6")]
    pub child_id: Vec<i64>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct XStatMetadata {
    #[prost(int64, tag = "1")]
    pub id: i64,
    #[prost(string, tag = "2")]
    pub name: String,
    #[prost(string, tag = "3")]
    pub description: String,
}

impl XPlane {
    /// Returns the number of the metadata of events of this name, and adds the metadata if the name is new.
    pub fn event_id(&mut self, name: &str) -> i64 {
        if let Some((id, _)) = self.event_metadata.iter().find(|(_, metadata)| metadata.name == name) {
            return *id;
        }
        let id = self.event_metadata.keys().max().map_or(1, |last| last + 1);
        let metadata = XEventMetadata { id, name: name.to_owned(), ..XEventMetadata::default() };
        self.event_metadata.insert(id, metadata);
        id
    }

    /// As [`XPlane::event_id`], of stats.
    pub fn stat_id(&mut self, name: &str) -> i64 {
        if let Some((id, _)) = self.stat_metadata.iter().find(|(_, metadata)| metadata.name == name) {
            return *id;
        }
        let id = self.stat_metadata.keys().max().map_or(1, |last| last + 1);
        let metadata = XStatMetadata { id, name: name.to_owned(), ..XStatMetadata::default() };
        self.stat_metadata.insert(id, metadata);
        id
    }

    /// The name under which an event is shown.
    pub fn event_name(&self, event: &XEvent) -> &str {
        let metadata = self.event_metadata.get(&event.metadata_id);
        metadata
            .map_or("", |known| if known.display_name.is_empty() { &known.name } else { &known.display_name })
    }
}
