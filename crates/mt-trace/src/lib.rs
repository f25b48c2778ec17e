//! Tensor handles over named axes that trace into the IR.
