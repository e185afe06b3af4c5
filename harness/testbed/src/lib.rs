//! Code that measuring and verifying share: finding programs and templates, starting a `cube-api` or a cluster of them,
//! network namespaces, a client of the API, run directories, seeded random numbers, percentiles, plots, and exit codes.
//!
//! The libraries `harness` and `verify` use this crate but not each other. None of the three crates links the VMM, the
//! pool or the API server. They start `cube-vmm` and `cube-api` as processes.

pub mod api;
pub mod artifacts;
pub mod chart;
pub mod cluster;
pub mod exit;
pub mod leftovers;
pub mod quantile;
pub mod random;
pub mod server;
pub mod world;
pub mod xml;

pub use api_client::endpoint;
