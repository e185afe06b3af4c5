//! The mode of a scenario: whether it measures sandboxes of its target alone, or compares them, forks them, or starts
//! them elsewhere. A scenario has one mode, so modes that exclude each other cannot be combined.

mod config;
mod earlier;

use model::WorkingSetPrefault;
use serde::{Deserialize, Serialize};

use super::{EventSpec, ExecSpec, MixSpec, ParentStep, Scenario, TargetSpec};
use crate::trace::Trace;

pub(super) use config::ModeConfig;
pub(super) use earlier::{convert_recorded, converted};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// Sandboxes of the target.
    Single,
    /// Sandboxes of the target, interleaved with comparison rounds.
    Beside(BesideSpec),
    /// Sandboxes of the target, interleaved with those of other systems.
    Systems(Vec<PeerSpec>),
    /// Forks of a parent sandbox, which these steps prepare in each round.
    Forks(Vec<ParentStep>),
    /// Sandboxes from several templates, chosen at random by the seed.
    Mix(Vec<MixSpec>),
    /// Recorded arrivals, templates and lifetimes.
    Trace(TraceSpec),
    /// Sandboxes of a cluster that the run starts.
    Cluster(ClusterSpec),
}

/// Subject of the comparison rounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BesideSpec {
    /// Clones as in [`super::TargetKind::VmmDirect`].
    VmmDirect {
        /// `None` uses the setting of the target.
        prefault: Option<WorkingSetPrefault>,
    },
    /// Processes of the host, which run the first command and the turns.
    HostProcess,
}

/// Another system of a comparison.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PeerSpec {
    /// Name in reports, unique in the scenario.
    pub name: String,
    pub target: TargetSpec,
    /// First command of each sandbox.
    pub exec: ExecSpec,
    /// If not empty, the system is the scenario's cluster, reached through these nodes.
    #[serde(default)]
    pub by: Vec<String>,
}

/// Arrivals of a trace, which replace random ones.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceSpec {
    pub trace: Trace,
    /// Templates of this scenario, in the order of those of the trace; empty for only the template of the target.
    pub templates: Vec<MixSpec>,
}

/// A cluster on this host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClusterSpec {
    /// Number of nodes, which are named a, b and so on.
    pub nodes: u8,
    /// Nodes that receive requests, in turn; empty for all, or for all but the last with an event.
    pub by: Vec<String>,
    /// Nodes that take no new sandboxes and forward all creates.
    pub closed: Vec<String>,
    /// Event at the last node during each round of the target.
    pub event: Option<EventSpec>,
    /// Other systems that the same run measures, interleaved with the cluster.
    pub peers: Vec<PeerSpec>,
}

impl Mode {
    /// Name in scenario files.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Single => "single",
            Self::Beside(_) => "beside",
            Self::Systems(_) => "systems",
            Self::Forks(_) => "forks",
            Self::Mix(_) => "mix",
            Self::Trace(_) => "trace",
            Self::Cluster(_) => "cluster",
        }
    }

    /// The mode of a run that measures the same target without comparison rounds, other systems and arrivals of a
    /// trace.
    #[must_use]
    pub fn target_only(&self) -> Self {
        match self {
            Self::Single | Self::Beside(_) | Self::Systems(_) => Self::Single,
            Self::Trace(spec) if spec.templates.is_empty() => Self::Single,
            Self::Trace(TraceSpec { templates, .. }) | Self::Mix(templates) => {
                Self::Mix(templates.clone())
            }
            Self::Forks(_) => self.clone(),
            Self::Cluster(cluster) => Self::Cluster(ClusterSpec {
                peers: Vec::new(),
                ..cluster.clone()
            }),
        }
    }

    /// The other systems of a comparison; `None` if the mode compares no systems.
    pub fn peers_mut(&mut self) -> Option<&mut Vec<PeerSpec>> {
        match self {
            Self::Systems(peers) | Self::Cluster(ClusterSpec { peers, .. }) => Some(peers),
            Self::Single | Self::Beside(_) | Self::Forks(_) | Self::Mix(_) | Self::Trace(_) => None,
        }
    }
}

impl Scenario {
    /// Subject of the comparison rounds, if the scenario has any.
    #[must_use]
    pub fn beside(&self) -> Option<BesideSpec> {
        match self.mode {
            Mode::Beside(beside) => Some(beside),
            _ => None,
        }
    }

    /// Other systems that the same run measures.
    #[must_use]
    pub fn peers(&self) -> &[PeerSpec] {
        match &self.mode {
            Mode::Systems(peers) | Mode::Cluster(ClusterSpec { peers, .. }) => peers,
            _ => &[],
        }
    }

    /// Templates from which sandboxes are created; empty for only the template of the target.
    #[must_use]
    pub fn templates(&self) -> &[MixSpec] {
        match &self.mode {
            Mode::Mix(templates) | Mode::Trace(TraceSpec { templates, .. }) => templates,
            _ => &[],
        }
    }

    /// The recorded arrivals, if the scenario replays them.
    #[must_use]
    pub fn trace(&self) -> Option<&Trace> {
        match &self.mode {
            Mode::Trace(spec) => Some(&spec.trace),
            _ => None,
        }
    }

    /// The cluster that the run starts, if it is the target.
    #[must_use]
    pub fn cluster(&self) -> Option<&ClusterSpec> {
        match &self.mode {
            Mode::Cluster(cluster) => Some(cluster),
            _ => None,
        }
    }

    /// Event at a node of the cluster in each round of the target, if any.
    #[must_use]
    pub fn event(&self) -> Option<EventSpec> {
        self.cluster()?.event
    }
}
