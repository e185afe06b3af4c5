//! Keys and values in etcd. All keys share one prefix. Values are JSON, in which unknown fields are ignored, so that
//! nodes of two releases can share a cluster.

use std::fmt;

use model::SandboxId;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{HomeSlot, Node, NodeId, TemplateId};

pub(crate) const PREFIX: &str = "/cube/v1/";
/// Longer values are ignored. A node's record with a thousand CPU features has 12 KiB.
pub(crate) const MAX_VALUE: usize = 64 << 10;

/// Keys of a node's own records contain its name as a prefix, so that etcd can refuse the prefix to other nodes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Key {
    /// A [`Founded`]. Present in every cluster.
    Cluster,
    Member(NodeId),
    /// The member in this slot. Lets a transaction refuse a second one.
    Slot(HomeSlot),
    State(NodeId),
    Node(NodeId),
    Load(NodeId),
    Tags(TemplateId, NodeId),
    Replica(TemplateId, NodeId),
    Owner(SandboxId),
}

/// The record of a cluster's founding.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Founded {
    pub(crate) format: u32,
}

impl Founded {
    /// In format 1, members had no keys and signatures.
    pub(crate) const FORMAT: u32 = 2;
}

/// A live node and the process that registered it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct NodeRecord {
    pub(crate) node: Node,
    /// Random number of the process. A successor on the same host overwrites the registration of its predecessor, which
    /// then yields.
    pub(crate) instance: u64,
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cluster => write!(f, "{PREFIX}cluster"),
            Self::Member(node) => write!(f, "{PREFIX}members/{node}"),
            Self::Slot(slot) => write!(f, "{PREFIX}slots/{}", slot.number()),
            Self::State(node) => write!(f, "{PREFIX}state/{node}"),
            Self::Node(node) => write!(f, "{PREFIX}nodes/{node}"),
            Self::Load(node) => write!(f, "{PREFIX}load/{node}"),
            Self::Tags(template, node) => write!(f, "{PREFIX}tags/{node}/{template}"),
            Self::Replica(template, node) => write!(f, "{PREFIX}replicas/{node}/{template}"),
            Self::Owner(sandbox) => write!(f, "{PREFIX}owner/{sandbox}"),
        }
    }
}

impl Key {
    /// `None` for a key of a later release, or of another program.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let text = text.strip_prefix(PREFIX)?;
        if text == "cluster" {
            return Some(Self::Cluster);
        }
        let (kind, rest) = text.split_once('/')?;
        match kind {
            "members" => Some(Self::Member(rest.parse().ok()?)),
            "slots" => Some(Self::Slot(HomeSlot::new(rest.parse().ok()?)?)),
            "state" => Some(Self::State(rest.parse().ok()?)),
            "nodes" => Some(Self::Node(rest.parse().ok()?)),
            "load" => Some(Self::Load(rest.parse().ok()?)),
            "tags" => {
                let (node, template) = rest.split_once('/')?;
                Some(Self::Tags(template.parse().ok()?, node.parse().ok()?))
            }
            "replicas" => {
                let (node, template) = rest.split_once('/')?;
                Some(Self::Replica(template.parse().ok()?, node.parse().ok()?))
            }
            "owner" => Some(Self::Owner(rest.parse().ok()?)),
            _ => None,
        }
    }
}

pub(crate) fn encode<T: Serialize>(value: &T) -> Vec<u8> {
    serde_json::to_vec(value).unwrap_or_default()
}

pub(crate) fn decode<T: DeserializeOwned>(value: &[u8]) -> Option<T> {
    if value.len() > MAX_VALUE {
        return None;
    }
    serde_json::from_slice(value).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_parse_back_and_others_are_ignored() {
        let node: NodeId = "n1".parse().unwrap();
        let keys = [
            Key::Cluster,
            Key::Member(node.clone()),
            Key::Slot(HomeSlot::new(7).unwrap()),
            Key::State(node.clone()),
            Key::Node(node.clone()),
            Key::Load(node.clone()),
            Key::Tags("0a".parse().unwrap(), node.clone()),
            Key::Replica("base:1".parse().unwrap(), node),
            Key::Owner(SandboxId::from_random([3; 19])),
        ];
        for key in keys {
            assert_eq!(Key::parse(&key.to_string()), Some(key));
        }
        for other in [
            "/cube/v1/nodes/N",
            "/cube/v1/new/a",
            "/cube/v2/cluster",
            "",
            "/cube/v1/slots/1296",
        ] {
            assert_eq!(Key::parse(other), None, "{other}");
        }
        assert_eq!(decode::<Founded>(&vec![b' '; MAX_VALUE + 1]), None);
        let newer = br#"{"format":2,"later":true}"#;
        assert_eq!(decode::<Founded>(newer).unwrap().format, Founded::FORMAT);
    }
}
