//! The library behind `cube-bench`: runs scenarios against microVMs, measures them from outside, evaluates gates and
//! writes reports.
//!
//! ```text
//! scenario ─► plan ─► run (target, memory, noise) ─► events ─► record
//!                                                        └──► summary::fold ─► gate ─► report
//! ```
//! Events separate the two halves. Code before them has effects on the host. Code after them is a pure function of
//! recorded data, so `cube-bench report` can recompute the same report from an old run. This crate does not link
//! the VMM, the pool or the API: it measures them through their external interfaces.

// A scenario, and when it starts which clone.
pub mod scenario;

pub mod plan;
pub mod trace;
pub mod work;

// A run, up to its events.
pub mod session;

pub mod run;
pub mod target;

pub mod clock;
pub mod exchange;
mod guest;
mod live;

pub mod account;
pub mod host;
pub mod memory;
pub mod noise;

// The events, and what follows from them.
pub mod event;
pub mod record;
pub mod summary;

pub mod gate;
pub mod report;

// Records for others.
pub mod check;
pub mod pack;

// Several runs.
pub mod ab;
pub mod compare;
pub mod quick;
pub mod saturate;

pub mod claims;
