//! The E2B-compatible server. The control plane (create, list, kill, …) and the data plane (requests to sandboxes)
//! share the same addresses.
//!
//! ```text
//! listen (TLS, HTTP/1.1 and 2) ─► dispatch ─┬─► control routes ─► registry ─► pool
//!                                           ├─► proxy ─► registry.route ─► vsock of the sandbox
//!                                           └─► forward ─► another process, after a handover
//! ```

// The process: start, stop, and the change to a new one.
pub mod serve;

pub mod handover;
pub mod shield;
pub mod systemd;

// The way of a request, from its connection.
pub mod listen;
pub mod tls;

pub mod auth;
pub mod control;
pub mod proxy;
pub mod registry;

// What sandboxes use besides the pool.
pub mod builds;
pub mod egress;
pub mod network;
pub mod secrets;

pub mod events;
mod webhook;

// The other nodes of a cluster.
pub mod node;
pub mod peers;

// What operators see.
pub mod telemetry;
pub mod traces;

mod agent;
mod blocking;
#[cfg(test)]
mod namespace;
mod shell;
mod uuid;
