//! Test environment for measuring and verifying: programs and templates, a `cube-api` or a cluster, network
//! namespaces, run directories, and the API of a server.
//!
//! The libraries `harness` and `verify` use this crate but not each other. None of the three crates links the VMM, the
//! pool or the API server. They start `cube-vmm` and `cube-api` as processes.

pub mod api;
pub mod artifacts;
pub mod cluster;
pub mod exit;
pub mod junit;
pub mod leftovers;
pub mod options;
pub mod server;
pub mod world;

pub use client::endpoint;
