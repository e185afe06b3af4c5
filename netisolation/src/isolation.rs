//! The handle: TAPs with programs on them.

use std::{net::IpAddr, os::fd::OwnedFd, path::PathBuf, sync::mpsc::Receiver};

use ipnet::IpNet;
use model::SandboxId;
use serde::{Deserialize, Serialize};

use crate::{Access, Counters, NetEvent, Policy};

/// How isolation is set up on a host.
#[derive(Clone, Debug)]
pub struct IsolationConfig {
    /// Name of this installation: in the names of its TAPs' pins and of nobody else's. Lower-case letters and
    /// digits; derived from the state directory.
    pub instance: String,
    /// Directory in a bpffs (`/sys/fs/bpf/cube`): where programs and maps outlive this process.
    pub pins: PathBuf,
    /// Where packets may leave the host.
    pub uplinks: Uplinks,
    /// What the operator opens of the ranges that are denied to all.
    pub exceptions: Vec<Exception>,
    /// Where our resolver asks by default; empty: what /etc/resolv.conf says.
    pub dns_servers: Vec<std::net::SocketAddr>,
    /// TAPs kept ready.
    pub stock: u32,
    /// TAPs at most.
    pub max_taps: u32,
    /// Flows of one sandbox at a time, at most.
    pub max_flows: u32,
}

/// Interfaces by which packets may leave.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Uplinks {
    /// Those of the default routes, looked up at the start.
    DefaultRoutes,
    /// These.
    Named(Vec<String>),
}

/// What an operator opens of a range that is denied to all. A sandbox's policy has to allow it besides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exception {
    /// Which addresses.
    pub block: IpNet,
    /// Which services; empty: all.
    pub access: Vec<Access>,
}

/// Number of a TAP: 1 to `max_taps`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct TapIndex(pub u32);

/// A TAP that a VMM can be given. The device goes when the last descriptor of it is closed.
#[derive(Debug)]
pub struct Tap {
    /// See [`TapIndex`].
    pub index: TapIndex,
    /// Open, with IFF_VNET_HDR as the VMM wants it.
    pub fd: OwnedFd,
}

/// Why the network of a sandbox is not as it has to be.
#[derive(Debug, thiserror::Error)]
pub enum IsolationError {
    /// The host cannot do it.
    #[error("network isolation is not possible here: {what}; {cure}")]
    Unsuitable {
        /// What is missing.
        what: String,
        /// What to do.
        cure: String,
    },
    /// Read back, and it is not what was written.
    #[error("TAP {index:?} is not as its policy wants it: {what}")]
    Mismatch {
        /// Which.
        index: TapIndex,
        /// The difference.
        what: String,
    },
    /// No such TAP.
    #[error("there is no TAP {0:?}")]
    Unknown(TapIndex),
    /// All are taken.
    #[error("all {0} TAPs are taken")]
    Exhausted(u32),
    /// A system call.
    #[error("cannot {what}")]
    System {
        /// What was tried.
        what: String,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
}

/// A cloneable handle; calls may come from any thread and take microseconds to a millisecond.
#[derive(Clone, Debug)]
pub struct Isolation {}

impl Isolation {
    /// Loads the programs, or takes over those of a predecessor with the same layout; removes what dead
    /// predecessors left. TAPs whose VMM lives are kept until [`Isolation::adopt`] or [`Isolation::release`].
    ///
    /// # Errors
    /// See [`IsolationError`].
    pub fn open(config: &IsolationConfig) -> Result<(Self, Receiver<NetEvent>), IsolationError> {
        let _ = config;
        todo!()
    }

    /// A TAP that denies everything, verified: for a VM that waits.
    ///
    /// # Errors
    /// See [`IsolationError`].
    pub fn take(&self) -> Result<Tap, IsolationError> {
        todo!()
    }

    /// Takes back a TAP of a VM that outlived the predecessor, with the policy that it had.
    ///
    /// # Errors
    /// See [`IsolationError`]. The VM has to end then.
    pub fn adopt(
        &self,
        index: TapIndex,
        sandbox: &SandboxId,
        policy: &Policy,
    ) -> Result<(), IsolationError> {
        let _ = (index, sandbox, policy);
        todo!()
    }

    /// Makes the TAP this sandbox's, with this policy from the next packet on, and verifies it.
    ///
    /// # Errors
    /// See [`IsolationError`]. Nothing passes then.
    pub fn confine(
        &self,
        index: TapIndex,
        sandbox: &SandboxId,
        policy: &Policy,
    ) -> Result<(), IsolationError> {
        let _ = (index, sandbox, policy);
        todo!()
    }

    /// Replaces the policy at once; open connections to what is denied now are cut.
    ///
    /// # Errors
    /// See [`IsolationError`]. The old policy holds then.
    pub fn update(&self, index: TapIndex, policy: &Policy) -> Result<(), IsolationError> {
        let _ = (index, policy);
        todo!()
    }

    /// Reads back programs, links and maps and compares them with the policy.
    ///
    /// # Errors
    /// See [`IsolationError`].
    pub fn verify(&self, index: TapIndex) -> Result<(), IsolationError> {
        let _ = index;
        todo!()
    }

    /// Removes everything of a TAP. Of one that is not there: nothing.
    pub fn release(&self, index: TapIndex) {
        let _ = index;
    }

    /// What passed and what did not.
    ///
    /// # Errors
    /// See [`IsolationError`].
    pub fn counters(&self, index: TapIndex) -> Result<Counters, IsolationError> {
        let _ = index;
        todo!()
    }

    /// Lets the sandbox reach an address that was answered for a name, until `ttl` after now and while flows to it
    /// are open. The resolver's.
    ///
    /// # Errors
    /// See [`IsolationError`]; too many addresses for one sandbox.
    pub fn pin(
        &self,
        index: TapIndex,
        address: IpAddr,
        name: &str,
        ttl: std::time::Duration,
    ) -> Result<(), IsolationError> {
        let _ = (index, address, name, ttl);
        todo!()
    }
}
