//! A deliberately small VMM: one process runs one microVM.
//!
//! What must never happen: a Rust reference into guest memory, or a panic that a guest can cause.

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
