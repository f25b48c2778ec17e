//! Interoperability with Orbax.
