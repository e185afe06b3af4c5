//! The owner of sandboxes: templates, warm slots, leases, deadlines, pause, resume, snapshot, fork and limits.
//!
//! One task, the driver, owns every slot; [`Pool`] is a handle that sends it requests. The pool starts a `cube-vmm`
//! process for each slot and uses its control socket. It never links the VMM, so a VMM that crashes affects nothing
//! else. Every slot has a directory below the state directory, named by its id, with its record, sockets and logs. The
//! record is replaced atomically at each step: after SIGKILL of this process the next [`Pool::open`] finds every VM,
//! adopts those that run and removes the rest.
//!
//! ```text
//!            ┌──────── one template in huge pages, mapped privately ────────┐
//!  stock     [warm] [warm] [warm] [fill]      low ─ high: how many are kept │
//!               │ lease: resume, POST /init                                 │
//!  leased    [running] [running] [cold] ◄── no warm slot: a VM is made ─────┘
//!               │ pause  ▲ resume             │ fork: a diff, restored n times
//!  on disk   [pause/]  [pause/]               └► [running] [running] …
//! ```
//! A slot serves one lease: its id *is* the sandbox's id. A used slot never returns to the stock.
//!
//! A warm slot is clean: its VM is paused; no other VM has its id, machine id or random pool; it has run only the
//! template's programs and the warm-up; its agent is open, but only the pool has had its sockets; and its record says
//! that it has no owner, so that it ends with this process.

// Requests, and the task that they reach.
mod answer;
mod message;

mod change;
mod config;
mod handle;
mod open;
mod sandbox;
mod state;
mod stats;

mod catalog;
mod driver;

// Decisions, without I/O.
mod slot;

mod claim;
mod lifetime;
mod policy;

// What the driver's jobs do to a slot's VM.
mod work;

mod cgroup;
mod host;
mod network;
mod vm;

// The state directory, and a start with what is in it.
mod leftovers;
mod record;
mod recover;
mod shared;

mod clock;
mod state_dir;
mod version;

mod error;

#[cfg(test)]
mod explore;

pub use change::{Change, ChangeKind, Ended, Recovered};
pub use claim::{BaseKind, Claim, GivesBase, Hold, PauseNeeds};
pub use config::{Ids, MissingLimits, PoolConfig, SandboxLimits, WarmMarks};
pub use error::PoolError;
pub use handle::Pool;
pub use library::{
    durable,
    error::is_full,
    info::{DiskSpec, MAX_DISK, TemplateDefaults, TemplateInfo, TemplateKind},
    rebuilt::RebuildState,
    vmms::VmmId,
};
pub use lifetime::{Lifetime, OnTimeout, UnixMs};
pub use sandbox::{
    Connected, CreateSpec, Init, LifeEvent, MAX_NOTE, OnClose, Priority, Sandbox, TimeoutChange,
    Usage,
};
pub use slot::{Refusal, Wake};
pub use state::{PauseMode, SandboxState};
pub use state_dir::{SCRATCH, StateLock};
pub use stats::{Installed, PoolStats, StockStats, VmmUse};
pub use template::{Recipe, Work};
