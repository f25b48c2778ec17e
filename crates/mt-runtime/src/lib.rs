//! Compiles IR, caches executables, and holds placed arrays.
