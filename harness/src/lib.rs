//! `cube-bench`: runs scenarios against microVMs, measures them from outside, judges gates and reports.
//!
//! ```text
//! scenario ─► plan ─► run (target, memory, noise) ─► events ─► record
//!                                                        └──► stats::fold ─► gate ─► report
//! ```
//! Left of the events things happen; right of them everything is a pure function of recorded data, so
//! `cube-bench report` does the same work on old runs. This crate links neither VMM, pool nor API: it
//! measures through the doors that a customer has.

pub mod ab;
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
pub mod random;
pub mod record;
pub mod report;
pub mod run;
pub mod scenario;
pub mod session;
pub mod stats;
pub mod target;
