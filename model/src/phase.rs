//! The readiness ladder. One enum labels the VMM's timeline, tracing spans, histograms and the columns
//! of a report, so that one word means one thing from VM to chart.

use serde::{Deserialize, Serialize};

/// A step between the intended start of a sandbox and its use, in ladder order.
///
/// All stamps are CLOCK_MONOTONIC nanoseconds of the host. A phase that a path does not have (for
/// example [`StartPhase::Confined`] where a sandbox has no network) is absent, never zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StartPhase {
    /// The request was read and found valid.
    Accepted,
    /// `cube-vmm` runs `main`.
    ProcessStarted,
    /// `cube-vmm` has given up its rights.
    Jailed,
    /// Guest memory is mapped into the VMM and registered with KVM.
    MemoryMapped,
    /// Every device has its state and its backend.
    DevicesReady,
    /// The network policy is attached and was read back.
    Confined,
    /// The vCPU may run.
    Resumed,
    /// The agent took the clone's identity and said so.
    AgentReady,
    /// The create call was answered.
    Replied,
    /// The output of a first command came back. "Cold start" without more words is this.
    FirstExec,
    /// The first byte from inside arrived over the sandbox's network path.
    FirstNetworkByte,
}

impl StartPhase {
    /// All phases in ladder order.
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

/// Stamps of one start, in the order in which they were taken.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Timeline(Vec<(StartPhase, u64)>);

impl Timeline {
    /// Adds a stamp; `monotonic_ns` is CLOCK_MONOTONIC of the host in nanoseconds.
    pub fn stamp(&mut self, phase: StartPhase, monotonic_ns: u64) {
        self.0.push((phase, monotonic_ns));
    }

    /// The stamps in the order taken.
    pub fn iter(&self) -> impl Iterator<Item = (StartPhase, u64)> + '_ {
        self.0.iter().copied()
    }

    /// The first stamp of a phase, if it was reached.
    #[must_use]
    pub fn at(&self, phase: StartPhase) -> Option<u64> {
        self.iter().find(|(p, _)| *p == phase).map(|(_, ns)| ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_what_serde_writes() {
        for phase in StartPhase::ALL {
            let json = serde_json::to_string(&phase).unwrap();
            assert_eq!(json, format!("\"{}\"", phase.name()));
        }
    }

    #[test]
    fn the_ladder_is_ordered() {
        assert!(StartPhase::ALL.windows(2).all(|w| w[0] < w[1]));
    }
}
