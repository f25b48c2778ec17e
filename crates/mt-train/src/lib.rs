//! Training loop, metrics and tasks.
