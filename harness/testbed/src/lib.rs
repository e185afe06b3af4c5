//! What measuring and verifying both need: the programs and templates of a run, a `cube-api` of the run's own, network
//! namespaces, connections to an API, and the directories of runs.
//!
//! `harness` and `verify` use this crate and do not use each other. Like them it links neither the VMM, the pool nor the
//! API: it starts their programs.

pub mod api;
pub mod artifacts;
pub mod endpoint;
pub mod exit;
pub mod leftovers;
pub mod server;
pub mod world;
pub mod xml;
