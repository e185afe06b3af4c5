//! Comparing two recorded runs.
