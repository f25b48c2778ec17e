//! Python with third-party packages, for tests.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

/// Orbax and the packages it is tested with.
pub const ORBAX: &[&str] =
    &["orbax-checkpoint==0.12.8", "tensorstore==0.1.86", "jax==0.10.2", "numpy==2.4.6"];

/// Runs a script of `tests/interop` of the crate under test with these packages, and returns its output.
pub fn python(packages: &[&str], script: &str, arguments: &[&Path]) -> String {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/interop").join(script);
    let mut command = Command::new(interpreter(packages));
    run(command.arg(script).args(arguments).env("JAX_PLATFORMS", "cpu"))
}

/// Python with the pinned packages, in an environment named after the first one. The environment is created once; tests
/// that start together wait for it.
fn interpreter(packages: &[&str]) -> PathBuf {
    let root = std::env::temp_dir().join("maxtext-interop");
    std::fs::create_dir_all(&root).unwrap();
    let environment = root.join(packages[0].replace("==", "-"));
    let lock = std::fs::File::create(environment.with_extension("lock")).unwrap();
    lock.lock().unwrap();
    let python = environment.join("bin/python");
    let complete = environment.join("complete");
    let wanted = packages.join("\n");
    if std::fs::read_to_string(&complete).ok().as_deref() != Some(&wanted) {
        run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&environment));
        run(Command::new(&python).args(["-m", "pip", "install", "--quiet"]).args(packages));
        std::fs::write(complete, wanted).unwrap();
    }
    python
}

fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?}\n{stdout}\n{stderr}");
    stdout.into_owned()
}
