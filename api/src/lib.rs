//! The E2B-compatible server. The control plane (create, list, kill, …) and the data plane (requests to sandboxes)
//! share the same addresses.
//!
//! ```text
//! listen (TLS, HTTP/1.1 and 2) ─► dispatch ─┬─► control routes ─► registry ─► pool
//!                                           ├─► proxy ─► registry.route ─► vsock of the sandbox
//!                                           └─► forward ─► another process, after a handover
//! ```

// The server process: start, stop and reload.
pub mod serve;

pub mod handover;
pub mod shield;
pub mod systemd;

// The path of a request, starting at its connection.
pub mod listen;
pub mod tls;

pub mod auth;
pub mod control;
pub mod proxy;
pub mod registry;
pub mod rules;

// Services for sandboxes, other than the pool.
pub mod egress;
pub mod network;
pub mod secrets;

pub mod events;
mod webhook;

// The other nodes of a cluster.
pub mod node;
pub mod peers;

// Metrics and traces for operators.
pub mod telemetry;
pub mod traces;

mod agent;
mod json;
#[cfg(test)]
mod namespace;
mod tcp;
mod uuid;
