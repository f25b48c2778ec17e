//! Safe wrapper over the PJRT C API, and discovery and installation of its plugins.
//!
//! Phase: run (and compile, which PJRT does too). A [`Plugin`] is a shared library; a [`Client`] is that plugin at
//! work; [`Buffer`]s and [`Executable`]s belong to a client and keep it alive, so that nothing can be used after it
//! is destroyed. `mt-runtime` is the only user: it adds sharding, caching and checks.
//!
//! Together with `mt-kernels` this is where the workspace's `unsafe` code is. Programs call
//! [`prepare_environment`] first thing in `main`.

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
pub use environment::prepare_environment;
pub use error::{Error, ErrorCode, PjrtError};
pub use event::Event;
pub use executable::{Argument, Executable, Execution};
pub use install::{cache_directory, install};
pub use memory::prefer_large_pages;
pub use options::CompileOptions;
pub use platform::Platform;
pub use plugin::{NamedValue, Plugin};
pub use topology::{Topology, TopologyDevice};
