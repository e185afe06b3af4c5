//! The phases of a sandbox's start. The same enum labels the VMM's timeline, tracing spans, histograms and the columns
//! of a report.

use serde::{Deserialize, Serialize};

/// A phase between the intended start of a sandbox and its first use, in the order in which they occur.
///
/// All stamps are CLOCK_MONOTONIC of the host in nanoseconds. A phase that a start does not have (for example
/// [`StartPhase::Confined`] for a sandbox without a network) has no stamp. It is never zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StartPhase {
    /// The request was read and validated.
    Accepted,
    /// `cube-vmm` entered `main`.
    ProcessStarted,
    /// `cube-vmm` dropped its privileges and installed its seccomp filter.
    Jailed,
    /// Guest memory is mapped into the VMM and registered with KVM.
    MemoryMapped,
    /// Every device has its state and its backend.
    DevicesReady,
    /// The network policy is attached to the TAP and was read back.
    Confined,
    /// The vCPU may run.
    Resumed,
    /// The agent applied the clone's identity and responded.
    AgentReady,
    /// The create call returned.
    Replied,
    /// The output of a first command arrived. "Cold start" without a qualifier means this phase.
    FirstExec,
    /// The first byte from the guest arrived over the sandbox's network.
    FirstNetworkByte,
}

impl StartPhase {
    /// All phases in order.
    pub const ALL: [Self; 11] = [
        Self::Accepted,
        Self::ProcessStarted,
        Self::Jailed,
        Self::MemoryMapped,
        Self::DevicesReady,
        Self::Confined,
        Self::Resumed,
        Self::AgentReady,
        Self::Replied,
        Self::FirstExec,
        Self::FirstNetworkByte,
    ];

    /// The name used in JSON, metrics and reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Accepted => "accepted",
            Self::ProcessStarted => "process_started",
            Self::Jailed => "jailed",
            Self::MemoryMapped => "memory_mapped",
            Self::DevicesReady => "devices_ready",
            Self::Confined => "confined",
            Self::Resumed => "resumed",
            Self::AgentReady => "agent_ready",
            Self::Replied => "replied",
            Self::FirstExec => "first_exec",
            Self::FirstNetworkByte => "first_network_byte",
        }
    }
}

/// The stamps of one start, in the order in which they were taken.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Timeline(Vec<(StartPhase, u64)>);

impl Timeline {
    /// Adds a stamp. `monotonic_ns` is a reading of [`crate::clock::monotonic_ns`].
    pub fn stamp(&mut self, phase: StartPhase, monotonic_ns: u64) {
        self.0.push((phase, monotonic_ns));
    }

    /// The stamps in the order in which they were taken.
    pub fn iter(&self) -> impl Iterator<Item = (StartPhase, u64)> + '_ {
        self.0.iter().copied()
    }

    /// The first stamp of a phase. `None` if the phase was not reached.
    #[must_use]
    pub fn at(&self, phase: StartPhase) -> Option<u64> {
        self.iter().find(|(p, _)| *p == phase).map(|(_, ns)| ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phase_names_match_their_json() {
        for phase in StartPhase::ALL {
            let json = serde_json::to_string(&phase).unwrap();
            assert_eq!(json, format!("\"{}\"", phase.name()));
        }
    }

    #[test]
    fn phases_are_listed_in_order() {
        assert!(StartPhase::ALL.windows(2).all(|w| w[0] < w[1]));
    }
}
