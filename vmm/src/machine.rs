//! The machine: one VM, its devices and its control socket, owned by one thread. Between two runs of the vCPU the
//! thread serves whatever is ready; while the guest is idle it waits for readiness.
//!
//! ```text
//!          boot ───────────────► Running ◄──resume── Paused ◄── restore
//! Empty ──┤                        │  └────pause──────►│
//!          restore ─► Paused       └──guest ends──► Exited
//! ```
//! With a connected control socket, the process exits when the client closes the socket, in every state. With a
//! listening one, it exits when the guest ends or a client sends `Shutdown` (see [`crate::control`]).

mod build;
mod event_loop;
mod requests;
mod save;
mod vm;

pub use event_loop::Machine;
