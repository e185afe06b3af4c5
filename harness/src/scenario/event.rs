//! Events that hit a node of a cluster during each round of the target.

use std::time::Duration;

use model::Bytes;
use serde::{Deserialize, Serialize};

/// Maximum number of sandboxes on the node when the event begins.
const MAX_SANDBOXES: u32 = 1000;

/// An event that hits the last node. Requests go to the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventSpec {
    pub kind: EventKind,
    /// Delay from the base of the round's arrivals.
    pub after: Duration,
    /// Running sandboxes of the node.
    pub running: u32,
    /// Paused sandboxes of the node.
    pub paused: u32,
    /// Memory that each of these sandboxes has written.
    pub written: Bytes,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EventKind {
    /// Simulates a power loss of the node. It returns after the other nodes have reported the loss.
    KillNode,
    /// The node's sandboxes move to other nodes.
    DrainNode,
}

impl EventKind {
    /// Name in scenarios and reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::KillNode => "kill-node",
            Self::DrainNode => "drain-node",
        }
    }
}

/// A duration that clients see during an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EventTime {
    /// From the death of the node until another one shows it as `unhealthy`.
    Unhealthy,
    /// From the death of the node until a request for one of its sandboxes returns the loss and the last known
    /// state.
    ReportedLost,
    /// From the start of the node's server until another node shows it as `ready`.
    ReadyAgain,
    /// From the drain request until the node has no sandboxes.
    Empty,
    /// For each running sandbox, the longest time between two responses to a client that keeps running commands.
    Gap,
}

impl EventTime {
    pub const ALL: [Self; 5] = [
        Self::Unhealthy,
        Self::ReportedLost,
        Self::ReadyAgain,
        Self::Empty,
        Self::Gap,
    ];

    /// Name in metrics, JSON and reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Unhealthy => "unhealthy",
            Self::ReportedLost => "reported_lost",
            Self::ReadyAgain => "ready_again",
            Self::Empty => "empty",
            Self::Gap => "gap",
        }
    }

    /// The kind of event that has this duration.
    #[must_use]
    pub fn kind(self) -> EventKind {
        match self {
            Self::Unhealthy | Self::ReportedLost | Self::ReadyAgain => EventKind::KillNode,
            Self::Empty | Self::Gap => EventKind::DrainNode,
        }
    }
}

/// A count taken during a drain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EventCount {
    /// Sandboxes that lost their memory.
    Lost,
    /// Failed commands. Clients repeat them.
    FailedCommands,
    /// Bytes that other nodes received.
    MovedBytes,
}

impl EventCount {
    pub const ALL: [Self; 3] = [Self::Lost, Self::FailedCommands, Self::MovedBytes];

    /// Name in metrics, JSON and reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Lost => "lost",
            Self::FailedCommands => "failed_commands",
            Self::MovedBytes => "moved_bytes",
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct EventConfig {
    kind: EventKind,
    #[serde(default = "one_second")]
    after: String,
    #[serde(default = "super::lives::one")]
    running: u32,
    #[serde(default)]
    paused: u32,
    #[serde(default)]
    written: String,
}

fn one_second() -> String {
    "1s".to_owned()
}

impl EventConfig {
    pub(super) fn check(&self) -> Result<EventSpec, String> {
        if self.kind == EventKind::KillNode && self.paused > 0 {
            return Err(format!(
                "mode.event.paused is {}, but only sandboxes that run can be lost: set mode.event.running",
                self.paused
            ));
        }
        for (key, value, least) in [("running", self.running, 1), ("paused", self.paused, 0)] {
            if !(least..=MAX_SANDBOXES).contains(&value) {
                return Err(format!(
                    "mode.event.{key} is {value}, it must lie between {least} and {MAX_SANDBOXES}"
                ));
            }
        }
        let written = match self.written.as_str() {
            "" => Ok(Bytes(0)),
            text => text.parse(),
        };
        Ok(EventSpec {
            kind: self.kind,
            after: super::config::duration("mode.event.after", &self.after)?,
            running: self.running,
            paused: self.paused,
            written: written.map_err(|e| format!("mode.event.written: {e}"))?,
        })
    }
}
