//! A node's view of the cluster.

use std::{cmp::Reverse, collections::BTreeMap, sync::Arc};

use model::SandboxId;

use crate::{
    HomeKey, HomeSlot, Load, Member, Node, NodeId, NodeState, Owned, Replica, Tagged, Tags,
    TemplateId,
};

/// An immutable snapshot. It shares its unchanged parts with earlier snapshots, so that an update copies only what has
/// changed.
#[derive(Clone, Debug, Default)]
pub struct View {
    /// The etcd revision that this view includes. 0 before the first list, and always without a cluster.
    pub revision: u64,
    pub this: Option<NodeId>,
    /// All members.
    pub members: Arc<BTreeMap<NodeId, Member>>,
    /// The live nodes.
    pub nodes: Arc<BTreeMap<NodeId, Node>>,
    /// Absent: `Ready`.
    pub states: Arc<BTreeMap<NodeId, NodeState>>,
    pub loads: Arc<BTreeMap<NodeId, Load>>,
    pub tags: Arc<BTreeMap<TemplateId, BTreeMap<NodeId, Tags>>>,
    pub replicas: Arc<BTreeMap<TemplateId, BTreeMap<NodeId, Replica>>>,
    pub owners: Arc<BTreeMap<SandboxId, Owned>>,
}

/// Where a sandbox is served, according to its id alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Route {
    /// On this node, if anywhere.
    Here,
    /// On this live node, if anywhere.
    Node { node: NodeId, address: String },
    /// On this member, which is currently not alive. Lost if it was running, unless the node returns with the same
    /// incarnation.
    Away { node: NodeId },
    /// No node created this id, or the node has been removed.
    Unknown,
}

/// A change for logs and metrics, or one that a node has to act on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClusterEvent {
    /// A node has become alive.
    Joined(NodeId),
    /// A node's lease has ended. The sandboxes that were running there are lost unless it returns with the same
    /// incarnation.
    Away { node: NodeId },
    /// A node has returned after a reboot. Sandboxes that were running there have ended.
    Rebooted(NodeId),
    /// A sandbox has a new owner.
    Moved { sandbox: SandboxId, owner: Owned },
    /// This node holds a sandbox that etcd assigns to another one with a later epoch: end or discard it here.
    Superseded { sandbox: SandboxId, by: Owned },
    /// This node holds a paused sandbox whose record etcd has lost or has in an older version. If its files are here
    /// and their stamp permits it, reassert the record ([`crate::OwnerChange::Reassert`]). Otherwise discard the
    /// sandbox: another node has taken it, and it has ended since. Repeated until either is done.
    Forgotten { sandbox: SandboxId },
    /// etcd has not responded for half a lease.
    Detached,
    /// etcd responds again.
    Attached,
    /// etcd's data is older than before, because it was restored from a backup.
    HistoryLost { had: u64, found: u64 },
}

impl View {
    #[must_use]
    pub fn state(&self, node: &NodeId) -> NodeState {
        self.states.get(node).copied().unwrap_or_default()
    }

    /// Where `id` is served: on the node in its owner record, or else on its home.
    #[must_use]
    pub fn route(&self, id: &SandboxId, key: &HomeKey) -> Route {
        let node = match self.owners.get(id) {
            Some(owned) => Some(&owned.owner.node),
            None => key.home(id).and_then(|slot| self.at(slot)),
        };
        let Some(node) = node else {
            return Route::Unknown;
        };
        if self.this.as_ref() == Some(node) {
            return Route::Here;
        }
        let node = node.clone();
        match self.nodes.get(&node) {
            Some(live) => Route::Node {
                address: live.address.clone(),
                node,
            },
            None => Route::Away { node },
        }
    }

    /// Whether a build that `node` has under a tag must not be used, because the node that changes the template has
    /// another build, or none, under this tag.
    #[must_use]
    pub fn is_outdated(&self, node: &NodeId, tagged: &Tagged) -> bool {
        let written = self.tags.get(&tagged.template).into_iter().flatten();
        let home = written.max_by_key(|(node, tags)| (tags.epoch, Reverse(*node)));
        home.is_some_and(|(home, tags)| {
            home != node && tags.builds.get(&tagged.tag) != Some(&tagged.build)
        })
    }

    fn at(&self, slot: HomeSlot) -> Option<&NodeId> {
        let mut members = self.members.values();
        members.find(|m| m.slot == slot).map(|member| &member.id)
    }
}
