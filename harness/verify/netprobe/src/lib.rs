//! Attempts of a guest to get around its network isolation, and their results.
//!
//! The program `cube-netprobe` runs in a sandbox. It takes an [`Order`] as its only argument, carries out all probes of
//! the order in parallel, one thread each, and prints one [`Finding`] per line. It is the attacker of the isolation
//! prover and may send any frame that the network card accepts. The prover does not rely on the findings alone: it also
//! observes at the other end what has passed.

pub mod dns;
pub mod frame;
pub mod link;
pub mod offload;
mod order;
mod sys;

pub use order::{
    Action, Finding, Frame, Order, Outcome, Over, Probe, Query, RecordKind, Service, Transport,
};
