//! Records in etcd that describe a node.

use std::collections::{BTreeMap, BTreeSet};

use model::Platform;
use serde::{Deserialize, Serialize};

use crate::{HomeSlot, Incarnation, NodeId, RollSignature, TemplateId};

/// A node that has joined, alive or not: `members/NODE`. The authority writes it for `cube cluster join` and deletes it
/// for `cube node remove`. It has no lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    pub id: NodeId,
    /// Random text from the node's state directory. A second host of the same name has a different one and is refused.
    pub identity: String,
    /// The slot number in the ids of this node's sandboxes.
    pub slot: HomeSlot,
    /// SHA-256 of the public key (SubjectPublicKeyInfo in DER) in the node's certificates, in hex. A certificate with
    /// the node's name but another key is not accepted as the node's.
    pub key: String,
    /// Signature of the cluster's authority. Records without a valid one are ignored.
    pub signature: RollSignature,
}

impl Member {
    /// The node's user in etcd, which is the common name of its certificates. Two hosts that have used the same name
    /// have different users.
    #[must_use]
    pub fn user(&self) -> String {
        format!("{}.{}", self.id, self.identity)
    }
}

/// The state that an operator has set for a node: `state/NODE`. Without a record it is `Ready`. Survives restarts of
/// the node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NodeState {
    #[default]
    Ready,
    /// No new sandboxes. Existing ones stay and are resumed here.
    Cordoned,
    /// No new sandboxes. Waits until the existing ones have ended.
    Draining,
    /// Like `Draining`, and existing sandboxes move to other nodes.
    Moving,
}

/// A live node: `nodes/NODE`, with its server's lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    pub id: NodeId,
    /// See [`Member::identity`].
    pub identity: String,
    /// Host and port on which other nodes reach this node's server.
    pub address: String,
    pub incarnation: Incarnation,
    pub platform: Platform,
    pub cpu: CpuKind,
    /// Version of `cube-api`.
    pub version: String,
}

/// CPU properties that snapshots depend on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuKind {
    /// `vendor_id` of /proc/cpuinfo.
    pub vendor: String,
    pub family: u32,
    pub model: u32,
    /// `model name` of /proc/cpuinfo, for people.
    pub name: String,
    /// `flags` of /proc/cpuinfo.
    pub features: BTreeSet<String>,
}

/// A node's current load: `load/NODE`, written at most once a second.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Load {
    /// Memory still available to sandboxes.
    pub memory_free_mib: u64,
    /// Warm slots by template. A template without any is absent.
    pub warm: BTreeMap<TemplateId, u32>,
    pub running: u32,
    pub paused: u32,
    /// Creates in progress or waiting.
    pub creating: u32,
    /// CPUs of the host.
    pub cpus: u32,
}

/// A template that a node can clone from: `replicas/NODE/TEMPLATE`, with the lease of the node's server. Written after
/// all files are in place and verified.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Replica {
    /// Digest of the template's portable part (root image, layers, recipe). It is the same on every node, while each
    /// node has its own memory snapshot.
    pub content: String,
    /// Bytes on disk.
    pub bytes: u64,
    /// The tag under which it is published, if it is a client's build. Absent in records of older releases.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tagged: Option<Tagged>,
}

/// A build under one of its template's tags.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tagged {
    pub template: TemplateId,
    pub tag: String,
    pub build: String,
}

/// The builds that a template's tags refer to: `tags/NODE/TEMPLATE`. Written by the node that changes the template,
/// with its server's lease, before the node's clients see the change. Without a record, the copies on all nodes count
/// as current.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tags {
    /// Of two records, the one with the later epoch wins, then the one of the first node by name.
    pub epoch: u64,
    /// Builds by tag.
    pub builds: BTreeMap<String, String>,
}

impl Tags {
    /// The tags of a permanently deleted template.
    #[must_use]
    pub fn deleted() -> Self {
        Self {
            epoch: u64::MAX,
            builds: BTreeMap::new(),
        }
    }
}
