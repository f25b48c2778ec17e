//! Inference engine.
