//! The E2B-compatible server. The control plane (create, list, kill, …) and the data plane (requests to sandboxes)
//! share the same addresses.
//!
//! ```text
//! listen (TLS, HTTP/1.1 and 2) ─► dispatch ─┬─► control routes ─► registry ─► pool
//!                                           ├─► proxy ─► registry.route ─► vsock of the sandbox
//!                                           └─► forward ─► another process, after a handover
//! ```

pub mod auth;
pub mod builds;
pub mod control;
pub mod egress;
pub mod events;
pub mod handover;
pub mod listen;
pub mod network;
pub mod node;
pub mod peers;
pub mod proxy;
pub mod registry;
pub mod secrets;
pub mod serve;
pub mod shield;
pub mod systemd;
pub mod telemetry;
pub mod tls;
pub mod traces;

mod agent;
mod blocking;
mod hex;
#[cfg(test)]
mod namespace;
mod shell;
mod webhook;
