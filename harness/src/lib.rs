//! The library behind `cube-bench`: runs scenarios against microVMs, measures them from outside, evaluates gates and
//! writes reports.
//!
//! ```text
//! scenario ─► plan ─► run (target, memory, noise) ─► events ─► record
//!                                                        └──► summary::fold ─► gate ─► report
//! ```
//! Events separate the two halves. Code before them has effects on the host. Code after them is a pure function of
//! recorded data, so `cube-bench report` computes the same report again from an old run. This crate does not link the
//! VMM, the pool or the API: it measures them through their external interfaces.

pub mod ab;
pub mod account;
pub mod claims;
pub mod clock;
pub mod compare;
pub mod event;
pub mod exchange;
pub mod gate;
mod guest;
pub mod host;
mod live;
pub mod memory;
pub mod noise;
pub mod plan;
pub mod record;
pub mod report;
pub mod run;
pub mod saturate;
pub mod scenario;
pub mod session;
pub mod summary;
pub mod target;
pub mod trace;
pub mod work;
