//! A deliberately small VMM: one process runs one microVM.
//!
//! What must never happen: a Rust reference into guest memory, or a panic that a guest can cause.

pub mod devices;
pub mod watch;
