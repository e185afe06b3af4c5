//! The control socket of `cube-vmm`: one unix stream socket, one client, one request at a time.
//!
//! A frame is a fixed header ([`frame`]) and a JSON body. A VMM opens nothing by path: [`files`] opens what a VM
//! needs, and the descriptors travel beside the frame (SCM_RIGHTS). [`VmProcess`] starts a VMM whose standard input is the socket: when the client
//! dies, however it dies, the VMM reads end-of-file and exits, so nothing is left behind. [`spawn_detached`]
//! starts one whose socket listens at a path, for owners that come back for it after their own death.

mod connect;
mod draft;
pub mod files;
pub mod frame;
mod identity;
mod message;
mod process;
pub mod template;

pub use connect::connect;
pub use identity::fresh_identity;
pub use message::{
    Call, Failure, FailureKind, LostFrames, Reply, Request, SnapshotContent, VmPhase, VmStats,
};
pub use process::{ControlClient, ControlError, VmProcess, VmUser, spawn_detached};
