//! The suites of `cube-verify`, which `cube-bench verify` executes: conformance with the official SDKs, clone hazards, isolation of a
//! sandbox's network, confinement of the VMM, restarts of the server, and the behaviour of sandboxes under any
//! order of operations.
//!
//! Each suite starts its own `cube-api` or uses a running endpoint, and reports one result for each case. A case
//! that could not be run is never a pass.

// The suites, from one sandbox to the whole server.
pub mod conformance;
pub mod hazards;

pub mod confinement;
pub mod isolation;
pub mod lifecycle;
pub mod restarts;

// What they share.
mod setup;

mod process;
mod remains;
pub mod report;
mod sandbox;

pub use sandbox::SandboxError;
pub use setup::{ListError, Setup, VerifyError, key_from_environment};
