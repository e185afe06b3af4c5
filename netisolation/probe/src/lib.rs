//! What a guest tries against its network, and what came of it.
//!
//! The program `cube-netprobe` is put into a sandbox and given an [`Order`] as its one argument. It carries out all
//! probes at the same time, each on a thread of its own, and prints one [`Finding`] a line. It is the attacker of the
//! isolation prover: it may send any frame that the card takes. What it says is not believed: whether something
//! passed is judged by the other end as well.

pub mod dns;
pub mod frame;
pub mod link;
pub mod offload;
mod order;
mod sys;

pub use order::{
    Action, Finding, Frame, Order, Outcome, Over, Probe, Query, RecordKind, Service, Transport,
};
