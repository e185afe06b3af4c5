//! The suites behind `cube-bench verify`: conformance with the official SDKs, clone hazards, isolation of a sandbox's
//! network, confinement of the VMM, restarts of the server, and what sandboxes do in any order of operations.
//!
//! Each suite starts a `cube-api` of its own, or uses an endpoint that already runs, and reports one result for each
//! case. A case that could not be run is never a pass.

// The suites, from one sandbox to the whole server.
pub mod conformance;
pub mod hazards;

pub mod confinement;
pub mod isolation;
pub mod lifecycle;
pub mod restarts;

// What they share.
mod setup;

pub mod proof;
mod remains;
mod sandbox;

pub use sandbox::SandboxError;
pub use setup::{ListError, Setup, VerifyError};
