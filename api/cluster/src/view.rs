//! The cluster as one node sees it.

use std::{cmp::Reverse, collections::BTreeMap, sync::Arc};

use model::SandboxId;

use crate::{
    HomeKey, HomeSlot, Load, Member, Node, NodeId, NodeState, Owned, Replica, Tagged, Tags,
    TemplateId,
};

/// An immutable snapshot. Its parts are shared with the snapshots before it, so that an update copies only the part
/// that has changed.
#[derive(Clone, Debug, Default)]
pub struct View {
    /// Revision of etcd that this view includes; 0 before the first list, and always for a server without a cluster.
    pub revision: u64,
    pub this: Option<NodeId>,
    /// Everyone who has joined.
    pub members: Arc<BTreeMap<NodeId, Member>>,
    /// The live ones.
    pub nodes: Arc<BTreeMap<NodeId, Node>>,
    /// Absent: ready.
    pub states: Arc<BTreeMap<NodeId, NodeState>>,
    pub loads: Arc<BTreeMap<NodeId, Load>>,
    pub tags: Arc<BTreeMap<TemplateId, BTreeMap<NodeId, Tags>>>,
    pub replicas: Arc<BTreeMap<TemplateId, BTreeMap<NodeId, Replica>>>,
    pub owners: Arc<BTreeMap<SandboxId, Owned>>,
}

/// Where a sandbox is served, by its id alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Route {
    /// Here, if anywhere.
    Here,
    /// At this live node, if anywhere.
    Node { node: NodeId, address: String },
    /// At this member, which is not alive now: lost if it ran, unless the node returns with the same incarnation.
    Away { node: NodeId },
    /// No node made this id, or the node has been removed.
    Unknown,
}

/// A change that operators want in logs and metrics, or that a node has to act on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClusterEvent {
    /// A node is alive that was not.
    Joined(NodeId),
    /// A node's lease has ended. The sandboxes that ran there are lost unless it returns with the same incarnation.
    Away { node: NodeId },
    /// A node has returned after a reboot: sandboxes that ran there have ended.
    Rebooted(NodeId),
    /// A sandbox has a new owner.
    Moved { sandbox: SandboxId, owner: Owned },
    /// This node holds a sandbox that etcd gives to another one, with a later epoch: end or discard it here.
    Superseded { sandbox: SandboxId, by: Owned },
    /// This node holds a paused sandbox whose record etcd has lost, or has in an older form. If its files are here and
    /// their stamp permits it, reassert the record ([`crate::OwnerChange::Reassert`]); else discard the sandbox: another
    /// node has taken it and ended it since. Repeated until one of them is done.
    Forgotten { sandbox: SandboxId },
    /// etcd has not answered for half a lease.
    Detached,
    /// etcd answers again.
    Attached,
    /// etcd is older than before: it was restored from a backup.
    HistoryLost { had: u64, found: u64 },
}

impl View {
    #[must_use]
    pub fn state(&self, node: &NodeId) -> NodeState {
        self.states.get(node).copied().unwrap_or_default()
    }

    /// Where `id` is served: at the node of its owner record, else at its home.
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

    /// Whether a build that `node` has under a tag must not be used, because another node, which changes the template, has
    /// another build under this tag, or none.
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
