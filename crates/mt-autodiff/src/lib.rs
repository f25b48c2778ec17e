//! Reverse-mode differentiation, IR to IR.
