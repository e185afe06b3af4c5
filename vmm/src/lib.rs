//! A deliberately small VMM: one process runs one microVM.
//!
//! Invariants: no Rust reference into guest memory exists, and no guest can cause a panic.

pub mod agent;
pub mod confine;
pub mod control;
pub mod devices;
pub mod error;
pub mod extents;
#[doc(hidden)]
pub mod fuzz;
pub mod machine;
pub mod memory;
pub mod platform;
pub mod snapshot;
mod sys;
pub mod watch;
