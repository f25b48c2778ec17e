//! Compile options and their encoding as `CompileOptionsProto`.

/// Options for compiling a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CompileOptions {
    /// The devices on which the program runs, by index among the client's, in mesh order.
    pub devices: Vec<usize>,
    /// XLA flags for this program alone, without the leading dashes, such as `("xla_dump_to", "/tmp/x")`. An unknown
    /// flag is an error.
    pub xla_flags: Vec<(String, String)>,
}

impl Default for CompileOptions {
    fn default() -> Self {
        Self { devices: vec![0], xla_flags: Vec::new() }
    }
}

impl CompileOptions {
    /// Options for the first `count` devices.
    pub fn on_first(count: usize) -> Self {
        Self { devices: (0..count).collect(), ..Self::default() }
    }

    /// The encoded message, given the identifiers of all devices of the client. One replica is split into as many
    /// partitions as there are devices, by Shardy's partitioner.
    pub(crate) fn encode(&self, device_ids: &[i64]) -> Vec<u8> {
        let num_partitions = self.devices.len() as u64;
        let mut assignment = Message::default();
        assignment.integer(1, 1);
        assignment.integer(2, num_partitions);
        for device in &self.devices {
            let mut computation = Message::default();
            computation.integers(1, &[device_ids[*device] as u64]);
            assignment.message(3, &computation);
        }

        let mut build = Message::default();
        // No default device: the assignment names the devices.
        build.integer(1, -1_i64 as u64);
        build.integer(4, 1);
        build.integer(5, num_partitions);
        build.integer(6, u64::from(num_partitions > 1));
        build.message(9, &assignment);
        build.integer(19, u64::from(num_partitions > 1));

        let mut options = Message::default();
        options.message(3, &build);
        for (name, value) in &self.xla_flags {
            let mut entry = Message::default();
            entry.bytes(1, name.as_bytes());
            entry.message(2, &flag_value(value));
            options.message(7, &entry);
        }
        options.0
    }
}

/// `OptionOverrideProto`. XLA compares the type with that of the flag, so the text is typed here.
fn flag_value(value: &str) -> Message {
    let mut message = Message::default();
    match value {
        "true" => message.integer(2, 1),
        "false" => message.integer(2, 0),
        _ => match (value.parse::<i64>(), value.parse::<f64>()) {
            (Ok(integer), _) => message.integer(3, integer as u64),
            (_, Ok(float)) => message.double(4, float),
            _ => message.bytes(1, value.as_bytes()),
        },
    }
    message
}

/// A protocol buffer under construction.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    fn integer(&mut self, field: u64, value: u64) {
        self.varint(field << 3);
        self.varint(value);
    }

    fn double(&mut self, field: u64, value: f64) {
        self.varint(field << 3 | 1);
        self.0.extend(value.to_le_bytes());
    }

    fn bytes(&mut self, field: u64, bytes: &[u8]) {
        self.varint(field << 3 | 2);
        self.varint(bytes.len() as u64);
        self.0.extend(bytes);
    }

    fn message(&mut self, field: u64, message: &Self) {
        self.bytes(field, &message.0);
    }

    fn integers(&mut self, field: u64, values: &[u64]) {
        let mut packed = Self::default();
        values.iter().for_each(|value| packed.varint(*value));
        self.message(field, &packed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_encoded_as_protocol_buffers() {
        let mut message = Message::default();
        message.integer(1, 300);
        message.integer(2, -1_i64 as u64);
        message.bytes(3, b"ab");
        message.double(4, 1.0);
        message.integers(5, &[1, 128]);
        let expected = [
            &[0x08, 0xac, 0x02][..],
            &[0x10, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01],
            &[0x1a, 2, b'a', b'b'],
            &[0x21, 0, 0, 0, 0, 0, 0, 0xf0, 0x3f],
            &[0x2a, 3, 1, 0x80, 1],
        ];
        assert_eq!(message.0, expected.concat());
    }

    #[test]
    fn flags_have_the_type_that_their_text_suggests() {
        let check = |text: &str, first: u8| assert_eq!(flag_value(text).0[0], first, "{text}");
        check("true", 2 << 3);
        check("7", 3 << 3);
        check("0.5", 4 << 3 | 1);
        check("/tmp/dump", 1 << 3 | 2);
    }
}
