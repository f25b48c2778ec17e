//! Discovery of plugins.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use crate::{Error, OnInstall, Platform, cache_directory, install::Installer, manifest::Purpose};

/// The environment variable that names a plugin's file.
pub const PLUGIN_PATH_VARIABLE: &str = "MAXTEXT_PJRT_PLUGIN_PATH";

/// A plugin on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PluginLocation {
    pub platform: Platform,
    pub path: PathBuf,
    pub origin: PluginOrigin,
}

/// How a plugin was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PluginOrigin {
    /// Named by the caller or by [`PLUGIN_PATH_VARIABLE`].
    Named,
    /// In an installed Python package.
    Python,
    /// In the user's cache directory, where [`crate::install`] puts it.
    Cache,
    /// In the cache directory as well, but only for compiling: it lacks the libraries that programs call.
    Compiler,
}

impl PluginOrigin {
    /// A word for listings.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Named => "named",
            Self::Python => "python",
            Self::Cache => "cache",
            Self::Compiler => "compiler",
        }
    }
}

/// The plugin for `platform`: the file `named`, else the file that the environment names, else one in the installed
/// Python packages, else one in the user's cache.
///
/// # Errors
/// A named file does not exist.
pub fn find_plugin(platform: Platform, named: Option<&Path>) -> Result<Option<PluginLocation>, Error> {
    if let Some(location) = find_named(platform, named)? {
        return Ok(Some(location));
    }
    let python = find_in(platform, &python_folders(), PluginOrigin::Python);
    Ok(python.or_else(|| find_in_cache(platform)))
}

/// As [`find_plugin`], but installs a missing plugin, except for GPUs, whose plugin takes gigabytes.
///
/// # Errors
/// A named file does not exist, the installation fails, or there is no plugin for the GPU.
pub fn find_or_install(
    platform: Platform,
    named: Option<&Path>,
    on_install: OnInstall<'_>,
) -> Result<PluginLocation, Error> {
    if let Some(location) = find_plugin(platform, named)? {
        return Ok(location);
    }
    match platform {
        Platform::Cpu | Platform::Tpu => {
            Installer::for_this_machine()?.install(platform, Purpose::Run, on_install)
        }
        Platform::Gpu => Err(Error::PluginNotFound {
            platform,
            hint: "run `maxtext plugin install gpu` once, or use the CPU with `hardware=cpu`".into(),
        }),
    }
}

/// As [`find_plugin`], but only for compiling; installs the compiler if it is missing. For GPUs the compiler is a small
/// subset of the plugin, in a separate folder that no code uses for running programs.
///
/// # Errors
/// A named file does not exist, or the installation fails.
pub fn find_or_install_compiler(
    platform: Platform,
    named: Option<&Path>,
    on_install: OnInstall<'_>,
) -> Result<PluginLocation, Error> {
    match find_plugin(platform, named)? {
        Some(location) => Ok(location),
        None => Installer::for_this_machine()?.install(platform, Purpose::Compile, on_install),
    }
}

/// The file that [`PLUGIN_PATH_VARIABLE`] names, which replaces everything that [`find_all`] lists.
///
/// # Errors
/// The file does not exist.
pub fn named_plugin() -> Result<Option<PathBuf>, Error> {
    // The file's platform is known only when it is loaded.
    Ok(find_named(Platform::Cpu, None)?.map(|location| location.path))
}

/// Every plugin on this machine that is the default for its platform, and the plugins that can only compile.
pub fn find_all() -> Vec<PluginLocation> {
    let folders = python_folders();
    let mut all = Vec::new();
    for platform in Platform::ALL {
        all.extend(find_in(platform, &folders, PluginOrigin::Python));
        all.extend(find_in_cache(platform));
        if platform == Platform::Gpu {
            all.extend(find_in_folder_of(platform, Purpose::Compile, PluginOrigin::Compiler));
        }
    }
    all
}

fn find_named(platform: Platform, named: Option<&Path>) -> Result<Option<PluginLocation>, Error> {
    let variable = env::var_os(PLUGIN_PATH_VARIABLE).filter(|value| !value.is_empty()).map(PathBuf::from);
    let (path, origin) = match (named, variable) {
        (Some(path), _) => (path.to_owned(), "the configuration"),
        (None, Some(path)) => (path, "`MAXTEXT_PJRT_PLUGIN_PATH`"),
        (None, None) => return Ok(None),
    };
    if !path.is_file() {
        return Err(Error::PluginPath { path, origin });
    }
    Ok(Some(PluginLocation { platform, path, origin: PluginOrigin::Named }))
}

fn find_in(platform: Platform, folders: &[PathBuf], origin: PluginOrigin) -> Option<PluginLocation> {
    let path = folders.iter().map(|folder| folder.join(platform.library())).find(|path| path.is_file())?;
    Some(PluginLocation { platform, path, origin })
}

fn find_in_cache(platform: Platform) -> Option<PluginLocation> {
    find_in_folder_of(platform, Purpose::Run, PluginOrigin::Cache)
}

fn find_in_folder_of(platform: Platform, purpose: Purpose, origin: PluginOrigin) -> Option<PluginLocation> {
    let folder = Installer::new("python3", cache_directory().ok()?).folder(platform, purpose)?;
    find_in(platform, &[folder], origin)
}

/// The folders of installed Python packages: those of the active virtual environment, which is found without running
/// Python, and those that `python3` reports.
fn python_folders() -> Vec<PathBuf> {
    let mut folders = Vec::new();
    if let Some(environment) = env::var_os("VIRTUAL_ENV") {
        let libraries = fs::read_dir(Path::new(&environment).join("lib"));
        let versions =
            libraries.into_iter().flatten().flatten().map(|entry| entry.path().join("site-packages"));
        folders.extend(versions.filter(|path| path.is_dir()));
    }
    const SCRIPT: &str = "import site, sys\n\
        paths = list(getattr(site, 'getsitepackages', list)()) + [site.getusersitepackages()] + sys.path\n\
        print('\\n'.join(path for path in paths if path))";
    if let Ok(output) = Command::new("python3").args(["-c", SCRIPT]).output() {
        let lines = String::from_utf8_lossy(&output.stdout).into_owned();
        folders.extend(lines.lines().map(PathBuf::from));
    }
    folders
}

/// The folder of Python packages in which a CUDA plugin is installed. The plugin finds NVIDIA's libraries there by a
/// search path relative to its own file.
pub(crate) fn packages_of(plugin: &Path) -> Option<&Path> {
    if plugin.ends_with(Platform::Gpu.library()) { plugin.ancestors().nth(3) } else { None }
}
