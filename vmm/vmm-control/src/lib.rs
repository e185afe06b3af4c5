//! The control socket of `cube-vmm`: its messages, its client, and the files that a client sends.
//!
//! The control socket is a unix stream socket that serves one client and one request at a time. A frame has a fixed
//! header ([`frame`]) and a JSON body. A VMM opens nothing by path: [`files`] opens the files of a VM, and their
//! descriptors accompany the frame (SCM_RIGHTS). [`VmProcess`] starts a VMM whose standard input is the socket; when
//! the client exits for any reason, the VMM reads end-of-file and exits too. [`spawn_detached`] starts a VMM whose
//! socket listens at a path, for owners that reconnect after a restart.

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
