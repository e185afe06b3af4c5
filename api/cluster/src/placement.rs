//! Placement: which nodes are tried for a new sandbox, and in which order. Pure: the random number is an argument.

use std::{cmp::Reverse, collections::BTreeSet};

use model::Platform;

use crate::{Load, Node, NodeId, NodeState, TemplateId, View};

/// Number of nodes whose loads are compared. Two or three random ones spread creates almost as well as comparing all,
/// and nodes with the same view do not all choose the same one.
const COMPARED: usize = 3;

/// Requirements of a sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Needs {
    pub template: TemplateId,
    /// Required digest of the replica ([`crate::Replica::content`]). `None` accepts any.
    pub content: Option<String>,
    pub memory_mib: u64,
    /// Platform and CPU features of a foreign memory snapshot, such as a moved sandbox's. `None` and empty if the node
    /// clones from its own snapshot.
    pub platform: Option<Platform>,
    pub features: BTreeSet<String>,
    /// Nodes to skip, such as a draining node or nodes that have refused.
    pub except: BTreeSet<NodeId>,
}

/// A node to try.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    pub node: NodeId,
    /// `None` for this node.
    pub address: Option<String>,
}

/// The nodes to try, best first: three random ones in order of their score, then the others. A node's pool decides: if
/// it refuses, the caller tries the next. Empty if no node has the template and is ready. `pending` is the number of
/// creates that this node has sent to a node since that node published its load.
#[must_use]
pub fn place(
    view: &View,
    needs: &Needs,
    pending: impl Fn(&NodeId) -> u32,
    random: u64,
) -> Vec<Candidate> {
    let mut eligible: Vec<&Node> = view
        .nodes
        .values()
        .filter(|node| is_eligible(view, node, needs))
        .collect();
    let sampled = sample(&mut eligible, view.this.as_ref(), random);
    let (first, rest) = eligible.split_at_mut(sampled);
    for part in [first, rest] {
        part.sort_by_key(|node| Reverse(score(view, node, needs, pending(&node.id))));
    }
    let candidate = |node: &&Node| Candidate {
        node: node.id.clone(),
        address: (view.this.as_ref() != Some(&node.id)).then(|| node.address.clone()),
    };
    eligible.iter().map(candidate).collect()
}

fn is_eligible(view: &View, node: &Node, needs: &Needs) -> bool {
    let replicas = view.replicas.get(&needs.template);
    let replica = replicas.and_then(|replicas| replicas.get(&node.id));
    let has_template = replica.is_some_and(|replica| {
        let wanted = needs.content.as_ref();
        let tagged = replica.tagged.as_ref();
        wanted.is_none_or(|content| *content == replica.content)
            && !tagged.is_some_and(|tagged| view.is_outdated(&node.id, tagged))
    });
    let can_restore = needs.platform.is_none_or(|kind| kind == node.platform)
        && needs.features.is_subset(&node.cpu.features);
    has_template
        && can_restore
        && view.state(&node.id) == NodeState::Ready
        && !needs.except.contains(&node.id)
}

/// Moves the nodes to compare to the front: this node if it is eligible, because a local create is not forwarded, and
/// random others. Returns their number.
fn sample(eligible: &mut [&Node], this: Option<&NodeId>, random: u64) -> usize {
    let count = eligible.len().min(COMPARED);
    let mut from = 0;
    if let Some(at) = eligible.iter().position(|node| Some(&node.id) == this) {
        eligible.swap(0, at);
        from = 1;
    }
    let mut state = random;
    for at in from..count {
        let left = u64::try_from(eligible.len() - at).unwrap_or(1);
        let pick = usize::try_from(next_random(&mut state) % left).unwrap_or(0);
        eligible.swap(at, at + pick);
    }
    count
}

/// SplitMix64 (Steele, Lea, Flood 2014).
pub(crate) fn next_random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Compared field by field; the greater is tried first.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Score {
    fits: bool,
    is_warm: bool,
    /// Creates in progress per hundred CPUs.
    busy: Reverse<u64>,
    /// Free memory as doublings of the sandbox's memory. A difference below a factor of two does not justify
    /// forwarding.
    room: u32,
    is_here: bool,
}

fn score(view: &View, node: &Node, needs: &Needs, pending: u32) -> Score {
    let unknown = Load::default();
    let load = view.loads.get(&node.id).unwrap_or(&unknown);
    let memory = needs.memory_mib.max(1);
    let taken = memory.saturating_mul(u64::from(pending));
    let free = load.memory_free_mib.saturating_sub(taken);
    let warm = load.warm.get(&needs.template).copied().unwrap_or(0);
    let creating = u64::from(load.creating) + u64::from(pending);
    Score {
        fits: free >= memory,
        is_warm: warm > pending,
        busy: Reverse(creating * 100 / u64::from(load.cpus.max(1))),
        room: (free / memory).checked_ilog2().map_or(0, |room| room + 1),
        is_here: view.this.as_ref() == Some(&node.id),
    }
}

#[cfg(test)]
mod tests;
