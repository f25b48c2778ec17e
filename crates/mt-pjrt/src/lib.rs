//! Safe wrapper over the PJRT C API, and discovery and installation of its plugins.
//!
//! Phase: run (and compile, which PJRT also does). A [`Plugin`] is a shared library, and a [`Client`] is a plugin
//! running on devices. [`Buffer`]s and [`Executable`]s belong to a client and keep it alive, so nothing can be used
//! after its client is destroyed. `mt-runtime` adds sharding, caching and checks; `mt-cli` prepares the environment and
//! installs plugins.
//!
//! The `unsafe` code of the workspace is here and in `mt-kernels`. Programs call [`prepare_environment`] first in
//! `main`.

mod allocator;
mod buffer;
mod client;
mod compiled;
mod discover;
mod environment;
mod error;
mod event;
mod executable;
mod install;
mod manifest;
mod memory;
mod options;
mod platform;
mod plugin;
mod profiler;
mod stacks;
mod sys;
mod topology;

pub use allocator::release_free_memory;
pub use buffer::{Buffer, PendingHostArray};
pub use client::{Client, ClientOptions, Device, DeviceMemoryStats, Memory};
pub use compiled::{CompiledProgram, MemoryUse};
pub use discover::{
    PLUGIN_PATH_VARIABLE, PluginLocation, PluginOrigin, find_all, find_or_install, find_or_install_compiler,
    find_plugin, named_plugin,
};
pub use environment::{ScheduleDumpError, dump_schedules, prepare_environment};
pub use error::{Error, ErrorCode, PjrtError};
pub use event::Event;
pub use executable::{Argument, Executable, Execution};
pub use install::{Installation, OnInstall, cache_directory, install};
pub use memory::prefer_large_pages;
pub use options::CompileOptions;
pub use platform::Platform;
pub use plugin::{NamedValue, Plugin};
pub use profiler::Profile;
pub use stacks::{ThreadStack, thread_stacks};
pub use topology::{Topology, TopologyDevice};
