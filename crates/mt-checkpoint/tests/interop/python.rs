//! Python with third-party packages, for tests.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

/// A virtual environment with pinned packages, named after the first one. It also sees the packages of `base`.
pub struct Environment {
    pub packages: &'static [&'static str],
    pub base: Option<&'static Environment>,
}

/// Orbax and the packages it is tested with.
pub const ORBAX: Environment = Environment {
    packages: &["orbax-checkpoint==0.12.8", "tensorstore==0.1.86", "jax==0.10.2", "numpy==2.4.6"],
    base: None,
};

/// Runs a script of `tests/interop` of the crate under test in an environment, and returns its output.
pub fn python(environment: &Environment, script: &str, arguments: &[&Path]) -> String {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/interop").join(script);
    let mut command = Command::new(environment.create().join("bin/python"));
    run(command.arg(script).args(arguments).env("JAX_PLATFORMS", "cpu"))
}

impl Environment {
    /// The environment's directory. It is created once; tests that start together wait for it.
    pub fn create(&self) -> PathBuf {
        let base = self.base.map(Self::create);
        let root = std::env::temp_dir().join("maxtext-interop");
        std::fs::create_dir_all(&root).unwrap();
        let directory = root.join(self.packages[0].replace("==", "-"));
        let lock = std::fs::File::create(directory.with_extension("lock")).unwrap();
        lock.lock().unwrap();
        let complete = directory.join("complete");
        let wanted = self.base.into_iter().chain([self]).map(|part| part.packages.join("\n"));
        let wanted = wanted.collect::<Vec<_>>().join("\n\n");
        if std::fs::read_to_string(&complete).ok().as_deref() != Some(&wanted) {
            run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&directory));
            if let Some(base) = base {
                let line = site_packages(&base).into_os_string().into_string().unwrap();
                std::fs::write(site_packages(&directory).join("base.pth"), line).unwrap();
            }
            // Archives of several gigabytes are not kept a second time.
            run(Command::new(directory.join("bin/python"))
                .args(["-m", "pip", "install", "--quiet", "--no-cache-dir"])
                .args(self.packages));
            std::fs::write(complete, wanted).unwrap();
        }
        directory
    }
}

/// Where an environment keeps packages.
fn site_packages(environment: &Path) -> PathBuf {
    let mut versions = std::fs::read_dir(environment.join("lib")).unwrap();
    versions.next().unwrap().unwrap().path().join("site-packages")
}

fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?}\n{stdout}\n{stderr}");
    stdout.into_owned()
}
