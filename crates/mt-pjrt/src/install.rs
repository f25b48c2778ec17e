//! Installing plugins from pinned Python wheels into the user's cache.

use std::{
    env, fmt, fs,
    io::{self, Read},
    path::{Path, PathBuf},
    process::Command,
};

use sha2::{Digest, Sha256};

use crate::{
    Error, Platform, PluginLocation, PluginOrigin,
    manifest::{Purpose, Wheel},
};

/// The user's cache directory of this program: `$XDG_CACHE_HOME/maxtext` or `~/.cache/maxtext`.
///
/// # Errors
/// Neither variable is set.
pub fn cache_directory() -> Result<PathBuf, Error> {
    let set = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let base = set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|home| home.join(".cache")));
    Ok(base.ok_or(Error::NoCacheDirectory)?.join("maxtext"))
}

/// The failure to create or write to a directory of the cache. A full disk is a separate error.
fn unwritable(path: &Path, source: io::Error) -> Error {
    match Error::io(path, source) {
        Error::Io { path, source } => {
            let is_set = env::var_os("XDG_CACHE_HOME").is_some_and(|value| !value.is_empty());
            let variable =
                if is_set { "where `XDG_CACHE_HOME` puts it" } else { "`XDG_CACHE_HOME` is not set" };
            Error::CacheUnwritable { path, variable, source }
        }
        other => other,
    }
}

/// An installation that begins. It downloads files, which takes a while.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Installation {
    pub platform: Platform,
    /// The Python packages that hold the plugin.
    pub packages: Vec<&'static str>,
    /// The folder that receives the plugin's files.
    pub folder: PathBuf,
}

impl fmt::Display for Installation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { platform, packages, folder } = self;
        write!(f, "installing the {platform} plugin ({}) into {}", packages.join(", "), folder.display())
    }
}

/// Receives an installation before its download begins.
pub type OnInstall<'a> = &'a mut dyn FnMut(&Installation);

/// Installs the plugin for `platform` into the user's cache, unless it is already there.
///
/// # Errors
/// There is no build for this machine, no Python with pip, no network or no disk space, or a file has the wrong
/// checksum.
pub fn install(platform: Platform, on_install: OnInstall<'_>) -> Result<PluginLocation, Error> {
    Installer::for_this_machine()?.install(platform, Purpose::Run, on_install)
}

/// The inputs of an installation.
pub(crate) struct Installer {
    python: String,
    cache: PathBuf,
    os: String,
    architecture: String,
}

impl Installer {
    pub(crate) fn for_this_machine() -> Result<Self, Error> {
        Ok(Self::new("python3", cache_directory()?))
    }

    pub(crate) fn new(python: &str, cache: PathBuf) -> Self {
        Self {
            python: python.into(),
            cache,
            os: env::consts::OS.into(),
            architecture: env::consts::ARCH.into(),
        }
    }

    /// The folder with the unpacked files for `platform`: one folder for each set of pinned files.
    pub(crate) fn folder(&self, platform: Platform, purpose: Purpose) -> Option<PathBuf> {
        Some(self.folder_of(platform, &platform.wheels(purpose, &self.os, &self.architecture)?))
    }

    fn folder_of(&self, platform: Platform, wheels: &[Wheel]) -> PathBuf {
        let mut hasher = Sha256::new();
        wheels.iter().for_each(|wheel| hasher.update(wheel.sha256));
        let digest = hexadecimal(&hasher.finalize());
        self.cache.join("plugins").join(format!("{platform}-{}", &digest[..16]))
    }

    pub(crate) fn install(
        &self,
        platform: Platform,
        purpose: Purpose,
        on_install: OnInstall<'_>,
    ) -> Result<PluginLocation, Error> {
        let Some(wheels) = platform.wheels(purpose, &self.os, &self.architecture) else {
            let (os, architecture) = (self.os.clone(), self.architecture.clone());
            return Err(Error::UnsupportedHost { platform, os, architecture });
        };
        self.install_wheels(platform, &wheels, on_install)
    }

    fn install_wheels(
        &self,
        platform: Platform,
        wheels: &[Wheel],
        on_install: OnInstall<'_>,
    ) -> Result<PluginLocation, Error> {
        let folder = self.folder_of(platform, wheels);
        let location =
            PluginLocation { platform, path: folder.join(platform.library()), origin: PluginOrigin::Cache };
        let plugins = self.cache.join("plugins");
        let unwritable = |source| unwritable(&plugins, source);
        fs::create_dir_all(&plugins).map_err(unwritable)?;
        // Several processes may start at once; the others wait here and then find the folder.
        let lock_path = plugins.join("lock");
        let lock = fs::File::create(&lock_path).map_err(unwritable)?;
        lock.lock().map_err(|source| Error::io(&lock_path, source))?;
        if location.path.is_file() {
            return Ok(location);
        }
        let packages = wheels.iter().map(Wheel::package).collect();
        on_install(&Installation { platform, packages, folder: folder.clone() });

        // Leftovers of an interrupted installation are useless.
        let temporary = plugins.join(format!("{platform}-incomplete"));
        remove_folder(&temporary)?;
        let installed = self.fill(platform, wheels, &temporary, &folder);
        // A failure leaves no files, least of all on a full disk. The failure itself is reported.
        let removed = remove_folder(&temporary);
        installed.and(removed)?;
        Ok(location)
    }

    /// Downloads and unpacks into `temporary`, and renames the result to `folder`.
    fn fill(
        &self,
        platform: Platform,
        wheels: &[Wheel],
        temporary: &Path,
        folder: &Path,
    ) -> Result<(), Error> {
        let unpacked = temporary.join("unpacked");
        fs::create_dir_all(&unpacked).map_err(|source| Error::io(&unpacked, source))?;
        for wheel in wheels {
            let path = self.download(platform, wheel, temporary)?;
            verify(wheel, &path)?;
            unpack(wheel, &path, &unpacked)?;
            fs::remove_file(&path).map_err(|source| Error::io(&path, source))?;
        }
        if !unpacked.join(platform.library()).is_file() {
            let detail = format!("it has no `{}`", platform.library());
            return Err(Error::Wheel { file: wheels[0].file.into(), detail });
        }
        remove_folder(folder)?;
        fs::rename(&unpacked, folder).map_err(|source| Error::io(folder, source))
    }

    fn download(&self, platform: Platform, wheel: &Wheel, into: &Path) -> Result<PathBuf, Error> {
        let mut command = Command::new(&self.python);
        command.args(["-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet"]);
        command.args(["--disable-pip-version-check", "--progress-bar", "off", "-d"]).arg(into);
        command.args(wheel.pip_arguments());
        let output = match command.output() {
            Ok(output) => output,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(Error::PythonMissing { platform, python: self.python.clone() });
            }
            Err(source) => return Err(Error::io(&self.python, source)),
        };
        let path = into.join(wheel.file);
        if output.status.success() && path.is_file() {
            return Ok(path);
        }
        Err(self.pip_error(platform, wheel, &String::from_utf8_lossy(&output.stderr), into))
    }

    /// Distinguishes pip's failures by their messages.
    fn pip_error(&self, platform: Platform, wheel: &Wheel, said: &str, into: &Path) -> Error {
        const UNREACHABLE: [&str; 8] = [
            "NewConnectionError",
            "Temporary failure in name resolution",
            "Name or service not known",
            "Network is unreachable",
            "Failed to establish a new connection",
            "ConnectTimeoutError",
            "ReadTimeoutError",
            "ProxyError",
        ];
        let file = wheel.file.to_owned();
        if said.contains("No module named pip") {
            return Error::PipMissing { platform, python: self.python.clone() };
        }
        if said.contains("No space left on device") || said.contains("Disk quota exceeded") {
            return Error::DiskFull { path: into.to_owned() };
        }
        if UNREACHABLE.iter().any(|text| said.contains(text)) {
            return Error::Network { file, cache: self.cache.clone() };
        }
        let lines: Vec<&str> = said.lines().filter(|line| !line.trim().is_empty()).collect();
        let detail = match lines[..] {
            [] => "it wrote no such file".to_owned(),
            _ => lines[lines.len().saturating_sub(3)..].join("; "),
        };
        Error::Pip { file, detail }
    }
}

fn verify(wheel: &Wheel, path: &Path) -> Result<(), Error> {
    let io_error = |source| Error::io(path, source);
    let mut file = fs::File::open(path).map_err(io_error)?;
    let mut hasher = Sha256::new();
    let mut chunk = vec![0; 1 << 20];
    loop {
        let count = file.read(&mut chunk).map_err(io_error)?;
        if count == 0 {
            break;
        }
        hasher.update(&chunk[..count]);
    }
    let actual = hexadecimal(&hasher.finalize());
    if actual != wheel.sha256 {
        let (file, expected) = (wheel.file.into(), wheel.sha256.into());
        return Err(Error::Checksum { file, expected, actual });
    }
    Ok(())
}

fn unpack(wheel: &Wheel, path: &Path, into: &Path) -> Result<(), Error> {
    let wheel_error = |error: zip::result::ZipError| match error {
        zip::result::ZipError::Io(source) => Error::io(into, source),
        other => Error::Wheel { file: wheel.file.into(), detail: other.to_string() },
    };
    let file = fs::File::open(path).map_err(|source| Error::io(path, source))?;
    let mut archive = zip::ZipArchive::new(io::BufReader::new(file)).map_err(wheel_error)?;
    archive.extract(into).map_err(wheel_error)
}

fn remove_folder(path: &Path) -> Result<(), Error> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(Error::io(path, error)),
        _ => Ok(()),
    }
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use std::{cell::Cell, io::Write, os::unix::fs::PermissionsExt};

    use super::*;

    /// A fake Python that runs `script` in a shell; the folder into which pip downloads is `$folder`.
    fn installer(directory: &Path, script: &str) -> Installer {
        let python = directory.join("python");
        let find_folder = "while [ $# -gt 0 ]; do [ \"$1\" = -d ] && folder=$2; shift; done";
        fs::write(&python, format!("#!/bin/sh\n{find_folder}\n{script}\n")).unwrap();
        fs::set_permissions(&python, fs::Permissions::from_mode(0o755)).unwrap();
        Installer::new(python.to_str().unwrap(), directory.join("cache"))
    }

    const FILE: &str = "xla_cpu_pjrt-0.0.1-py3-none-manylinux_2_27_x86_64.whl";

    fn check_failure(script: &str, expected: &str) {
        let directory = tempfile::tempdir().unwrap();
        let installer = installer(directory.path(), script);
        let wheel = Wheel { file: FILE, sha256: "0123" };
        let error = installer.install_wheels(Platform::Cpu, &[wheel], &mut |_| {}).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        assert!(error.contains("hint: ") || error.contains("pip cannot"), "{error}");
        assert!(!error.contains("hint: ") || error.contains("\nhint: "), "{error}");
        assert_eq!(
            fs::read_dir(installer.cache.join("plugins")).unwrap().count(),
            1,
            "only the lock is left"
        );
    }

    #[test]
    fn failures_are_told_apart() {
        check_failure("echo 'python3: No module named pip' >&2; exit 1", "has no module `pip`");
        check_failure("echo 'WARNING: NewConnectionError(...)' >&2; exit 1", "the network cannot be reached");
        check_failure("echo 'OSError: [Errno 28] No space left on device' >&2; exit 2", "is full");
        check_failure("echo 'ERROR: something else' >&2; exit 1", "ERROR: something else");
        check_failure("exit 0", "it wrote no such file");
        check_failure(&format!("echo junk > $folder/{FILE}"), "has SHA-256");
    }

    #[test]
    fn missing_python_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let installer = Installer::new("/nowhere/python3", directory.path().into());
        let wheel = Wheel { file: FILE, sha256: "" };
        let error = installer.install_wheels(Platform::Cpu, &[wheel], &mut |_| {}).unwrap_err();
        assert!(matches!(error, Error::PythonMissing { .. }), "{error}");
        assert!(error.is_user_error());
    }

    #[test]
    fn machines_without_a_build_are_told_so() {
        let check = |platform, os: &str, architecture: &str| {
            let directory = tempfile::tempdir().unwrap();
            let mut installer = Installer::new("python3", directory.path().into());
            installer.os = os.into();
            installer.architecture = architecture.into();
            let error = installer.install(platform, Purpose::Run, &mut |_| {}).unwrap_err().to_string();
            assert!(error.contains(&format!("no build for {os} on {architecture}")), "{error}");
        };
        check(Platform::Cpu, "macos", "aarch64");
        check(Platform::Cpu, "windows", "x86_64");
        check(Platform::Cpu, "linux", "riscv64");
        check(Platform::Tpu, "linux", "aarch64");
    }

    #[test]
    fn a_verified_wheel_is_unpacked_once() {
        let directory = tempfile::tempdir().unwrap();
        let source = directory.path().join("source.whl");
        let mut archive = zip::ZipWriter::new(fs::File::create(&source).unwrap());
        archive.start_file(Platform::Cpu.library(), zip::write::SimpleFileOptions::default()).unwrap();
        archive.write_all(b"library").unwrap();
        archive.finish().unwrap();
        let sum = hexadecimal(&Sha256::digest(fs::read(&source).unwrap()));
        let wheel = Wheel { file: FILE, sha256: sum.leak() };
        let script = format!(
            "echo run >> {}/runs; cp {} $folder/{FILE}",
            directory.path().display(),
            source.display()
        );
        let installer = installer(directory.path(), &script);
        let begun = Cell::new(0);
        let mut on_install = |installation: &Installation| {
            assert!(installation.to_string().starts_with("installing the cpu plugin (xla_cpu_pjrt) into "));
            begun.set(begun.get() + 1);
        };
        for _ in 0..2 {
            let location = installer.install_wheels(Platform::Cpu, &[wheel], &mut on_install).unwrap();
            assert_eq!(fs::read(&location.path).unwrap(), b"library");
        }
        assert_eq!(begun.get(), 1, "a plugin that is there is not installed again");
        assert_eq!(fs::read_to_string(directory.path().join("runs")).unwrap(), "run\n");
        assert_eq!(
            fs::read_dir(installer.cache.join("plugins")).unwrap().count(),
            2,
            "the lock and the plugin"
        );
    }
}
