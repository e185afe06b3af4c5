//! Which nodes are tried for a new sandbox, and in which order. Pure: the random number is an argument.

use std::collections::BTreeSet;

use model::Platform;

use crate::{NodeId, TemplateId, View};

/// What a sandbox needs of its node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Needs {
    pub template: TemplateId,
    /// Digest that the replica must have ([`crate::Replica::content`]); `None` accepts any.
    pub content: Option<String>,
    pub memory_mib: u64,
    /// Platform and CPU features of a memory snapshot that is not the node's own, such as that of a moved sandbox.
    /// `None` and empty if the node clones from its own snapshot.
    pub platform: Option<Platform>,
    pub features: BTreeSet<String>,
    /// Nodes that are not to be tried: the one that is drained, those that refused.
    pub except: BTreeSet<NodeId>,
}

/// A node to try.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    pub node: NodeId,
    /// `None` for this node.
    pub address: Option<String>,
}

/// The nodes to try, best first: of three random ones the best, then the second, the third, then the others. A node's
/// pool decides: if it refuses, the caller tries the next. Empty if no node has the template and is ready.
/// `pending` is the number of creates that this node has sent to a node since that node published its load.
#[must_use]
pub fn place(
    view: &View,
    needs: &Needs,
    pending: impl Fn(&NodeId) -> u32,
    random: u64,
) -> Vec<Candidate> {
    let _ = (view, needs, pending, random);
    todo!()
}
