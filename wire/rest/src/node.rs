//! Nodes: the hosts of a cluster, or the host of a single server.

use serde::{Deserialize, Serialize};

use super::SandboxState;
use envd::Timestamp;

/// Kinds of work that a node accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NodeStatus {
    /// New sandboxes.
    Ready,
    /// No new sandboxes; the node is to be shut down once its sandboxes have ended.
    Draining,
    /// Known but not seen yet. Cannot be set.
    Connecting,
    /// The node does not respond, or its etcd lease has ended. Cannot be set.
    Unhealthy,
    /// No new sandboxes for now (cordoned).
    Standby,
}

impl NodeStatus {
    /// Name in responses.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Ready => "ready",
            Self::Draining => "draining",
            Self::Connecting => "connecting",
            Self::Unhealthy => "unhealthy",
            Self::Standby => "standby",
        }
    }
}

/// Body of `POST /nodes/{id}`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeStatusChange {
    #[serde(rename = "clusterID", default, skip_serializing_if = "Option::is_none")]
    pub cluster_id: Option<String>,
    pub status: NodeStatus,
    /// Extension to E2B's API, with `draining`: the node's sandboxes move to other nodes.
    #[serde(rename = "move", default, skip_serializing_if = "std::ops::Not::not")]
    pub moves: bool,
}

/// A sandbox that currently cannot move to another node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StuckSandbox {
    #[serde(rename = "sandboxID")]
    pub sandbox_id: String,
    pub reason: String,
}

/// An element of the response to `GET /nodes`, and the response to `GET /nodes/{id}`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Node {
    pub version: String,
    /// `unknown` if the program was built without it.
    pub commit: String,
    pub id: String,
    /// Changes with each start of the server.
    #[serde(rename = "serviceInstanceID")]
    pub service_instance_id: String,
    #[serde(rename = "clusterID")]
    pub cluster_id: String,
    pub machine_info: MachineInfo,
    pub status: NodeStatus,
    /// When the status was last set.
    pub status_changed_at: Timestamp,
    /// Running sandboxes.
    pub sandbox_count: u32,
    pub metrics: NodeMetrics,
    /// Count since the start of the server.
    pub create_successes: u64,
    /// Count since the start of the server.
    pub create_fails: u64,
    /// Creates in progress.
    pub sandbox_starting_count: u32,
    /// Extension to E2B's API: sandboxes on disk. They stay when the node is drained.
    #[serde(default)]
    pub paused_count: u32,
    /// Extension to E2B's API: queued and running builds.
    #[serde(default)]
    pub build_count: u32,
    /// Extension to E2B's API: the latest deadline of the running sandboxes. Absent: none runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_end_at: Option<Timestamp>,
    /// Extension to E2B's API: sandboxes that the node had when it was last seen. Empty unless the node is
    /// `unhealthy`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lost: Vec<LostSandbox>,
    /// Extension to E2B's API: sandboxes that stay on a draining node, with the reason.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stuck: Vec<StuckSandbox>,
}

/// A sandbox of an unreachable node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LostSandbox {
    #[serde(rename = "sandboxID")]
    pub sandbox_id: String,
    #[serde(rename = "templateID")]
    pub template_id: String,
    /// The last state seen by another node.
    pub state: SandboxState,
    pub started_at: Timestamp,
    /// When it was last seen.
    pub seen_at: Timestamp,
}

/// Metrics measured on the node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeMetrics {
    /// vCPUs of the running sandboxes.
    #[serde(rename = "allocatedCPU")]
    pub allocated_cpu: u32,
    /// Use of all CPUs of the host during the last few seconds.
    pub cpu_percent: u32,
    pub cpu_count: u32,
    /// Memory sizes of the running sandboxes' guests, which may use less.
    pub allocated_memory_bytes: u64,
    /// Used memory of the host, excluding memory that the kernel can reclaim.
    pub memory_used_bytes: u64,
    pub memory_total_bytes: u64,
    pub huge_pages_total: u64,
    pub huge_pages_used: u64,
    pub huge_pages_reserved: u64,
    pub huge_page_size_bytes: u64,
    /// The file systems of the state directory and of the sandboxes' layers.
    pub disks: Vec<DiskMetrics>,
}

/// A file system.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DiskMetrics {
    pub mount_point: String,
    pub device: String,
    pub filesystem_type: String,
    pub used_bytes: u64,
    pub total_bytes: u64,
}

/// Processor name from `/proc/cpuinfo`. Empty: unknown.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MachineInfo {
    pub cpu_family: String,
    pub cpu_model: String,
    pub cpu_model_name: String,
    pub cpu_architecture: String,
}
