//! Building blocks that measuring and verifying share: finding programs and templates, starting a `cube-api`, network
//! namespaces, a client of the API, and run directories.
//!
//! The libraries `harness` and `verify` use this crate and not each other. None of the three links the VMM, the pool or
//! the API server; they start these programs.

pub mod api;
pub mod artifacts;
pub mod endpoint;
pub mod exit;
pub mod leftovers;
pub mod server;
pub mod world;
pub mod xml;
