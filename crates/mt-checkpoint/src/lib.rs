//! Orbax checkpoints on disk.
