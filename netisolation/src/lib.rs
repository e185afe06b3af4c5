//! Network isolation of sandboxes, enforced by eBPF programs on their TAPs. `docs/use/network.md` explains the design,
//! `README.md` in this crate lists its parts.
//!
//! Every sandbox has a TAP with one eBPF program on it, and all guests have the same addresses. The program answers a
//! frame from the guest (ARP, neighbour discovery), redirects it to the resolver (port 53 of the gateway) or to the
//! proxy (flows whose name must be checked), sends it out of an uplink with the host's address, or drops and counts it.
//! It passes nothing else to the host's network stack. Frames reach a guest only if they belong to a flow that the
//! guest opened.
//!
//! What must never happen: a guest runs on a TAP that was not verified; a frame passes because a map is full, a program
//! is missing, or this process has died.

mod bpffs;
mod clock;
mod compile;
mod config;
mod datapath;
mod device;
mod enforcement;
mod error;
mod event;
mod flows;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzz;
mod gateway;
mod handed;
mod host;
mod isolation;
mod kfuncs;
mod layout;
mod limits;
mod local;
mod log;
mod maintenance;
mod name_pins;
mod owner;
mod policies;
mod policy;
mod refusals;
mod replenish;
mod reset;
mod resolver;
mod rule_sets;
mod shared;
mod stock;
mod tap;
mod tap_table;
mod uplink;
mod verify;

pub use model::guest;

pub use config::{IsolationConfig, Uplinks};
pub use error::IsolationError;
pub use event::{Counters, Direction, NetEvent, Protocol, Reason};
pub use gateway::ResolverSockets;
pub use handed::HandedFlow;
pub use isolation::Isolation;
pub use local::{Refused, is_of_this_host};
pub use log::{EventLog, LogError, LogFile, Subscriber};
pub use policy::{
    Access, DefaultEgress, Destinations, ForbiddenAddresses, NamePattern, Naming, Policy,
    PolicyError, Rule, RuleAction, canonical,
};
pub use resolver::{Client, FindClient, Hooks, Pin, Resolver, ResolverConfig};
pub use tap::{Tap, TapIndex};

#[cfg(test)]
mod tests;
