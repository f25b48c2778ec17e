//! Safe wrapper over the PJRT C API, and discovery of its plugins.
