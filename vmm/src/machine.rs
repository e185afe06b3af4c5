//! The owner of everything in this process: one VM, its devices, its control socket. One thread: between
//! two runs of the vCPU it serves whatever became ready, and while the guest is idle it waits here.
//!
//! ```text
//!          boot ───────────────► Running ◄──resume── Paused ◄── restore
//! Empty ──┤                        │  └────pause──────►│
//!          restore ─► Paused       └──guest ends──► Exited
//! ```
//! With a connected control socket the process ends when that is closed, whatever the state: nobody is left
//! to ask for it. With a listening one it ends when the guest does, or is told to (see `control`).

mod build;
mod event_loop;
mod requests;
mod save;
mod vm;

pub use event_loop::Machine;
