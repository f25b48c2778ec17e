//! SSA graphs of StableHLO operations: shape rules, verifier, printer.
