//! Compiled programs in files, with a record of their inputs and their target.
//!
//! A file is a header of lines `name: value`, an empty line, the SHA-256 of the payload, and the plugin's own bytes.

use std::{fs, path::Path};

use mt_ir::Program;
use sha2::{Digest, Sha256};

use crate::{
    CompileSettings, RuntimeError,
    cache::write_atomically,
    fingerprint::{Fingerprint, hexadecimal},
};

const FIRST_LINE: &str = "maxtext compiled program, format 1";

/// The identity of a compiled program. It runs only where all of it is the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Identity(Vec<(&'static str, String)>);

impl Identity {
    /// The identity of a program for devices of a kind. `plugin` is the hash of the plugin's file.
    pub(crate) fn new(
        program: &Program,
        settings: &CompileSettings,
        plugin: &[u8; 32],
        device_kind: &str,
        num_slices: usize,
    ) -> Self {
        let mut text = Fingerprint::default();
        text.add(&program.text);
        let flags: Vec<String> =
            settings.xla_flags.iter().map(|(name, value)| format!("--{name}={value}")).collect();
        let devices: Vec<String> = program.mesh.devices().iter().map(usize::to_string).collect();
        let mut order = Fingerprint::default();
        order.add(devices.join(","));
        Self(vec![
            ("program", program.name.clone()),
            ("device kind", device_kind.to_owned()),
            ("devices", program.mesh.num_devices().to_string()),
            ("slices", num_slices.to_string()),
            ("order of devices", hexadecimal(&order.finish())),
            ("compiler options", flags.join(" ")),
            ("plugin", hexadecimal(plugin)),
            ("program text", hexadecimal(&text.finish())),
        ])
    }

    /// The differences from the wanted program, one per line.
    fn differences(&self, wanted: &Self) -> Vec<String> {
        let short = |value: &str| match value.len() {
            64 => value[..12].to_owned(),
            _ => value.to_owned(),
        };
        let pairs = self.0.iter().zip(&wanted.0).filter(|(own, wanted)| own != wanted);
        pairs
            .map(|((name, own), (_, other))| {
                format!("its {name} is `{}`, that of this run `{}`", short(own), short(other))
            })
            .collect()
    }
}

/// Writes a compiled program.
pub(crate) fn write(path: &Path, identity: &Identity, payload: &[u8]) -> Result<(), RuntimeError> {
    let mut header = format!("{FIRST_LINE}\n");
    for (name, value) in &identity.0 {
        header += &format!("{name}: {value}\n");
    }
    header += "\n";
    let sum: [u8; 32] = Sha256::digest(payload).into();
    write_atomically(path, &[header.as_bytes(), &sum, payload])
        .map_err(|source| RuntimeError::io(path, source))
}

/// Reads a compiled program and checks that it is the wanted one.
pub(crate) fn read(path: &Path, wanted: &Identity) -> Result<Vec<u8>, RuntimeError> {
    let bytes = fs::read(path).map_err(|source| RuntimeError::io(path, source))?;
    let refuse = |reasons: Vec<String>| RuntimeError::CompiledFile { path: path.to_owned(), reasons };
    let damaged = || refuse(vec!["it is no compiled program, or damaged".to_owned()]);
    let end = bytes.windows(2).position(|pair| pair == b"\n\n").ok_or_else(damaged)?;
    let header = std::str::from_utf8(&bytes[..end]).map_err(|_| damaged())?;
    let mut lines = header.lines();
    if lines.next() != Some(FIRST_LINE) {
        return Err(damaged());
    }
    let value = |name: &str| {
        let mut fields = lines.clone().filter_map(|line| line.split_once(": ").or(line.split_once(':')));
        fields.find(|(field, _)| *field == name).map(|(_, value)| value.to_owned())
    };
    let own = wanted.0.iter().map(|(name, _)| Some((*name, value(name)?))).collect::<Option<Vec<_>>>();
    let own = Identity(own.ok_or_else(damaged)?);
    let differences = own.differences(wanted);
    if !differences.is_empty() {
        return Err(refuse(differences));
    }
    let (sum, payload) = bytes[end + 2..].split_at_checked(32).ok_or_else(damaged)?;
    if Sha256::digest(payload)[..] != *sum {
        return Err(damaged());
    }
    Ok(payload.to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_read_for_what_they_were_written_for() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("deep/step");
        let identity = Identity(vec![("program", "train_step".into()), ("compiler options", String::new())]);
        write(&path, &identity, b"payload\n\n").unwrap();
        assert_eq!(read(&path, &identity).unwrap(), b"payload\n\n");
        let reasons = |error: RuntimeError| match error {
            RuntimeError::CompiledFile { reasons, .. } => reasons,
            other => panic!("{other}"),
        };
        let other = Identity(vec![("program", "other".into()), ("compiler options", "--a=b".into())]);
        let said = reasons(read(&path, &other).unwrap_err());
        assert_eq!(
            said,
            [
                "its program is `train_step`, that of this run `other`",
                "its compiler options is ``, that of this run `--a=b`"
            ]
        );
        let mut bytes = fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() = b'x';
        fs::write(&path, bytes).unwrap();
        assert_eq!(reasons(read(&path, &identity).unwrap_err()), ["it is no compiled program, or damaged"]);
        fs::write(&path, b"").unwrap();
        assert_eq!(reasons(read(&path, &identity).unwrap_err()).len(), 1);
    }
}
