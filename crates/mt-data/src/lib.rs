//! Datasets, tokenizers, packing, and resumable iterators.
