//! The machine: one VM, its devices and its control socket, owned by one thread. Between runs of the vCPU the thread
//! serves ready descriptors. While the guest is idle it waits for them.
//!
//! ```text
//!          boot ───────────────► Running ◄──resume── Paused ◄── restore
//! Empty ──┤                        │  └────pause──────►│
//!          restore ─► Paused       └──guest ends──► Exited
//! ```
//! The process exits when a client sends `Shutdown`. With a connected control socket, it also exits when the client
//! closes the socket, in every state; with a listening socket, when the guest ends (see [`crate::control`]).

mod build;
mod event_loop;
mod requests;
mod save;
mod vm;

pub use event_loop::Machine;
