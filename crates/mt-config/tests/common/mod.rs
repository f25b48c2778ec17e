//! Snapshot tables of inputs and their outcomes, one file each. `UPDATE_SNAPSHOTS=1` rewrites them.

use std::{fmt::Write as _, fs, path::Path};

use mt_config::{Config, ConfigError, DecodeConfig, Request, TrainConfig};
use mt_shape::DeviceAttributes;

/// Compares a table with its file, or rewrites the file.
#[track_caller]
pub fn check_table(name: &str, actual: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(name);
    let expected = fs::read_to_string(&path).unwrap();
    if std::env::var_os("UPDATE_SNAPSHOTS").is_some() {
        fs::write(&path, actual).unwrap();
        return;
    }
    let mut differences = String::new();
    for (number, (expected, actual)) in expected.lines().zip(actual.lines()).enumerate() {
        if expected != actual {
            writeln!(differences, "line {}:\n- {expected}\n+ {actual}", number + 1).unwrap();
        }
    }
    assert!(
        expected == actual,
        "{name} is out of date; look at the differences, and write it with UPDATE_SNAPSHOTS=1\n{differences}"
    );
}

/// The words of a command line, split as a shell does.
pub fn words(line: &str) -> Vec<String> {
    let (mut words, mut word, mut quote, mut begun) = (Vec::new(), String::new(), None, false);
    for character in line.chars() {
        match (character, quote) {
            (' ', None) if begun => {
                words.push(std::mem::take(&mut word));
                begun = false;
            }
            (' ', None) => {}
            ('\'' | '"', None) => (quote, begun) = (Some(character), true),
            (_, Some(open)) if character == open => quote = None,
            (_, _) => {
                word.push(character);
                begun = true;
            }
        }
    }
    words.extend(begun.then_some(word));
    words
}

/// Resolves and checks a request as `maxtext config check` does for `command`.
pub fn check(command: &str, request: Request) -> Result<Config, ConfigError> {
    let config = Config::resolve(&if command == "train" { request.with_quick_start() } else { request })?;
    match command {
        "train" => {
            let train = TrainConfig::from_config(&config)?;
            if let Some(devices) = config.known_devices() {
                train.check_devices(train.placement.topology(devices, &DeviceAttributes::default())?)?;
            }
        }
        "decode" => drop(DecodeConfig::from_config(&config)?),
        other => panic!("no command `{other}`"),
    }
    Ok(config)
}
