//! The key table: every configuration key, its layers, origins and errors.
