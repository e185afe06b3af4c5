//! What a sandbox may reach, enforced at its TAP; see docs/network.md.
//!
//! Every sandbox has a TAP of its own with one eBPF program on it, and all of them have the same addresses. A frame
//! that the guest sends is either answered by that program (ARP, neighbour discovery), handed to the resolver (port 53
//! of the gateway), sent out of an uplink in the host's name, or dropped and counted: nothing reaches the host's
//! network stack by itself. Frames reach the guest only if they belong to a flow that it began.
//!
//! What must never happen: a guest runs on a TAP that was not verified; a frame passes because a map is full, a
//! program is gone or this process died.

mod clock;
mod compile;
mod datapath;
mod device;
mod error;
mod event;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzz;
mod gateway;
mod isolation;
mod keeper;
mod kfuncs;
mod layout;
mod log;
mod owner;
mod policy;
mod porter;
mod reap;
mod records;
mod renew;
mod resolver;
mod rules;
mod uplink;
mod verify;

pub use model::guest;

pub use error::IsolationError;
pub use event::{Counters, Direction, NetEvent, Protocol, Reason};
pub use isolation::{Exception, Isolation, IsolationConfig, Tap, TapIndex, Uplinks};
pub use log::{EventLog, LogError, Subscriber};
pub use policy::{
    Access, DefaultEgress, NamePattern, Naming, Policy, PolicyError, Rule, Verdict, forbidden,
    is_forbidden,
};
pub use resolver::{Client, FindClient, Hooks, Pin, Resolver, ResolverConfig};

#[cfg(test)]
mod tests;
