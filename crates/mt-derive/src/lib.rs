//! Derive macro for module trees.
