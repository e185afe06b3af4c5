//! The records that a node keeps in etcd about itself.

use std::collections::{BTreeMap, BTreeSet};

use model::Platform;
use serde::{Deserialize, Serialize};

use crate::{HomeSlot, Incarnation, NodeId, RollSignature, TemplateId};

/// A node that has joined, alive or not: `members/NODE`. The authority writes it for
/// `cube cluster join` and deletes it for `cube node remove`; it has no lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    pub id: NodeId,
    /// Random text from the node's state directory. A second host of the same name has another, and is refused.
    pub identity: String,
    /// The number that ids of this node's sandboxes carry.
    pub slot: HomeSlot,
    /// SHA-256 of the public key (SubjectPublicKeyInfo in DER) in the node's certificates, in hex. A certificate with the
    /// node's name and another key is not the node's.
    pub key: String,
    /// By the cluster's authority. A record without a valid one counts for nothing.
    pub signature: RollSignature,
}

impl Member {
    /// The node's user in etcd: the common name of its certificates. Two hosts that have had one name have different users.
    #[must_use]
    pub fn user(&self) -> String {
        format!("{}.{}", self.id, self.identity)
    }
}

/// What an operator wants of a node: `state/NODE`. Without a record it is `Ready`. It outlives restarts of the node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NodeState {
    #[default]
    Ready,
    /// No new sandboxes; those that it has stay, and are resumed here.
    Cordoned,
    /// No new sandboxes; the end of those that it has is awaited.
    Draining,
    /// As `Draining`, and the sandboxes that it has move to other nodes.
    Moving,
}

/// A live node: `nodes/NODE`, with the lease of its server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    pub id: NodeId,
    /// As in [`Member`].
    pub identity: String,
    /// Host and port where the other nodes reach this one's server.
    pub address: String,
    pub incarnation: Incarnation,
    pub platform: Platform,
    pub cpu: CpuKind,
    /// Version of `cube-api`.
    pub version: String,
}

/// What snapshots depend on in a CPU.
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

/// What a node holds at the moment: `load/NODE`, written at most once a second.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Load {
    /// Memory that sandboxes may still take.
    pub memory_free_mib: u64,
    /// Warm slots by template. A template without any is absent.
    pub warm: BTreeMap<TemplateId, u32>,
    pub running: u32,
    pub paused: u32,
    /// Creates under way or waiting.
    pub creating: u32,
    /// CPUs of the host.
    pub cpus: u32,
}

/// A template that a node can clone from: `replicas/NODE/TEMPLATE`, with the lease of the node's server. It is written
/// after all files are in their place and verified.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Replica {
    /// Digest of the template's portable part (root image, layers, recipe): the same on every node, while the memory
    /// snapshot is each node's own.
    pub content: String,
    /// Bytes on disk.
    pub bytes: u64,
    /// The tag under which it is published, if it is a build that clients have ordered. Absent in records of former
    /// releases.
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

/// Which builds the tags of a template name: `tags/NODE/TEMPLATE`, written by the node that changes the template, with the
/// lease of its server, before its clients get to know it. Without a record, the copies of all nodes count.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tags {
    /// Of two records, the one with the later epoch counts, then that of the first node by name.
    pub epoch: u64,
    /// Builds by tag.
    pub builds: BTreeMap<String, String>,
}

impl Tags {
    /// Of a template that is deleted for good.
    #[must_use]
    pub fn deleted() -> Self {
        Self {
            epoch: u64::MAX,
            builds: BTreeMap::new(),
        }
    }
}
