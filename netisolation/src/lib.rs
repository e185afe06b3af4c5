//! Network isolation of sandboxes, enforced by eBPF programs on their TAPs. `docs/use/network.md` explains the design.
//!
//! Every sandbox has a TAP with one eBPF program on it, and all guests have the same addresses. The program replies to
//! a frame from the guest (ARP, neighbour discovery), redirects it to the resolver (port 53 of the gateway) or to the
//! proxy (flows whose name must be checked), sends it out of an uplink with the host's address, or drops and counts it.
//! No other frame reaches the host's network stack. Frames reach a guest only if they belong to a flow that the guest
//! opened.
//!
//! ```text
//! isolation     the handle, the owner of all TAPs, and their threads
//! policy        what one sandbox may reach; pure
//! enforcement   a policy as entries of the maps, and what the kernel has of it
//! datapath      the eBPF programs and their maps in the kernel; the resolver's device
//! taps          the devices: made, reset between two sandboxes, in stock
//! events        refused traffic: its events, counters and log
//! resolver      DNS for guests; it pins the addresses that it answers
//! ```
//!
//! What must never happen: a guest runs on a TAP that was not verified; a frame passes because a map is full, a program
//! is missing, or this process has died.

mod isolation;
mod policy;

mod enforcement;

mod datapath;
mod taps;

mod events;
mod resolver;

mod config;
mod error;
mod handed;

#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzz;

pub use model::guest;
pub use ranges::{
    Access, Destinations, ForbiddenAddresses, Protocol, Refused, canonical, is_of_this_host,
};

pub use config::{IsolationConfig, MAX_TAPS, Uplinks};
pub use datapath::gateway::ResolverSockets;
pub use error::IsolationError;
pub use events::event::{Counters, Direction, NetEvent, Reason};
pub use events::log::{EventLog, follow, open_log};
pub use handed::HandedFlow;
pub use isolation::Isolation;
pub use policy::{DefaultEgress, NamePattern, Naming, Policy, PolicyError, Rule, RuleAction};
pub use resolver::{Client, FindClient, Hooks, Pin, Resolver, ResolverConfig};
pub use taps::tap::{Tap, TapIndex};

#[cfg(test)]
mod tests;
