//! A deliberately small VMM: one process runs one microVM.
//!
//! Invariants: no Rust reference into guest memory exists, and no guest can cause a panic.
//!
//! ```text
//! machine    the thread that owns everything: the requests of its client (control), readiness (watch)
//! platform   how guest code is initialized, run, interrupted and saved
//! devices    the virtio devices of a guest, and its memory
//! snapshot   templates on disk, their diffs (extents), and the identity of a clone (agent)
//! confine    the privileges that the process drops before it reads its first request
//! ```

pub mod machine;

pub mod control;
pub mod watch;

pub mod platform;

pub mod devices;
pub mod memory;

pub mod snapshot;

pub mod agent;
pub mod extents;

pub mod confine;

pub mod error;
#[doc(hidden)]
pub mod fuzz;
mod sys;
