//! The last known state of the other nodes: figures, sandboxes, keys, and a digest of their secrets. A create is
//! recorded only on its own node, so this state is the only source for reports about an unreachable node.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use cluster::NodeId;
use envd::Timestamp;
use model::{SandboxId, clock::unix_ms};
use rest::{LostSandbox, Node, NodeStatus, SandboxState};
use serde::{Deserialize, Serialize};

use super::{Peers, question};
use crate::{
    auth::{Authenticator, KeyRecord},
    secrets::Secrets,
};
use tasks::boxed;

/// Polling interval of each node.
const LOOK: Duration = Duration::from_secs(2);
/// Maximum number of lost sandboxes logged individually.
const LOGGED: usize = 100;

/// The keys of each node.
type Keys = BTreeMap<NodeId, Vec<KeyRecord>>;

/// A node's report about itself.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PeerState {
    pub node: Node,
    pub sandboxes: Vec<LostSandbox>,
    pub keys: Vec<KeyRecord>,
    /// Absent if the node's release keeps its secrets to itself.
    #[serde(default)]
    pub secrets: Option<String>,
}

/// The last known state of a node.
#[derive(Clone, Debug)]
pub struct Seen {
    pub state: Arc<PeerState>,
    pub at_unix_ms: u64,
    /// Whether the loss of the node has been reported.
    reported: bool,
}

/// All other nodes seen since the start.
#[derive(Clone, Debug, Default)]
pub struct Roster(Arc<Mutex<BTreeMap<NodeId, Seen>>>);

impl Roster {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<NodeId, Seen>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[must_use]
    pub fn get(&self, node: &NodeId) -> Option<Seen> {
        self.lock().get(node).cloned()
    }

    fn enter(&self, node: NodeId, state: PeerState) {
        let seen = Seen {
            state: Arc::new(state),
            at_unix_ms: unix_ms(),
            reported: false,
        };
        self.lock().insert(node, seen);
    }

    /// The last known state of a sandbox, and the time of the report.
    #[must_use]
    pub fn last(&self, node: &NodeId, id: &SandboxId) -> Option<(&'static str, Timestamp)> {
        let seen = self.get(node)?;
        let mut sandboxes = seen.state.sandboxes.iter();
        let found = sandboxes.find(|s| s.sandbox_id == id.as_str())?;
        let state = match found.state {
            SandboxState::Running => "running",
            SandboxState::Paused => "paused",
        };
        Some((state, Timestamp::from_unix_ms(seen.at_unix_ms)))
    }

    /// The last known state of a node, with its sandboxes if it is unreachable.
    #[must_use]
    pub fn node(&self, node: &NodeId, is_there: bool) -> Option<Node> {
        let seen = self.get(node)?;
        let mut shown = seen.state.node.clone();
        if !is_there {
            shown.status = NodeStatus::Unhealthy;
            shown.status_changed_at = Timestamp::from_unix_ms(seen.at_unix_ms);
            let at = Timestamp::from_unix_ms(seen.at_unix_ms);
            shown.lost = seen.state.sandboxes.clone();
            for sandbox in &mut shown.lost {
                sandbox.seen_at = at;
            }
        }
        Some(shown)
    }

    /// The keys of each node seen so far.
    fn keys(&self) -> Keys {
        let nodes = self.lock();
        let keys = nodes
            .iter()
            .map(|(node, seen)| (node.clone(), seen.state.keys.clone()));
        keys.collect()
    }

    fn retain(&self, is_member: impl Fn(&NodeId) -> bool) {
        self.lock().retain(|node, _| is_member(node));
    }

    /// Returns the sandboxes of an unreachable node, once.
    fn report(&self, node: &NodeId) -> Option<Vec<LostSandbox>> {
        let mut nodes = self.lock();
        let seen = nodes.get_mut(node)?;
        if seen.reported {
            return None;
        }
        seen.reported = true;
        Some(seen.state.sandboxes.clone())
    }
}

/// Polls all nodes; never returns. Accepts the other nodes' API keys here and merges their secrets.
pub(crate) async fn watch(peers: Peers, authenticator: Arc<Authenticator>, secrets: Secrets) {
    let all = |keys: &Keys| keys.values().flatten().cloned().collect();
    let mut kept = load_keys(&peers);
    authenticator.replace_others(all(&kept));
    let mut pulls = tokio::task::JoinSet::new();
    loop {
        let others = look(&peers, &secrets).await;
        let view = peers.cluster().view();
        // Until the first contact with etcd, the members are unknown and do not include this node.
        let is_known = view.members.contains_key(peers.this());
        let is_member = |node: &NodeId| !is_known || view.members.contains_key(node);
        let keys = accepted(&kept, peers.roster().keys(), is_member);
        if keys != kept {
            authenticator.replace_others(all(&keys));
            store_keys(&peers, &keys);
            kept = keys;
        }
        // Runs concurrently with the next polls, so that revoking a key does not wait for secrets.
        while pulls.try_join_next().is_some() {}
        if pulls.is_empty() && !others.is_empty() {
            pulls.spawn(boxed(pull(peers.clone(), secrets.clone(), others)));
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// The keys to accept: the current keys of nodes that responded, and the last known keys of members that did not.
fn accepted(kept: &Keys, seen: Keys, is_member: impl Fn(&NodeId) -> bool) -> Keys {
    let mut keys = kept.clone();
    keys.extend(seen);
    keys.retain(|node, _| is_member(node));
    keys
}

/// Merges the secrets of these nodes, one node at a time.
async fn pull(peers: Peers, secrets: Secrets, nodes: Vec<NodeId>) {
    for node in nodes {
        if let Err(why) = peers.pull_secrets(&node, &secrets).await {
            tracing::warn!(%node, why, "cannot merge the secrets of another node");
        }
    }
}

/// Polls all nodes once and returns those whose secrets differ.
async fn look(peers: &Peers, secrets: &Secrets) -> Vec<NodeId> {
    let own = secrets.digest();
    let mut differ = Vec::new();
    let mut asked = tokio::task::JoinSet::new();
    for node in peers.others() {
        let peers = peers.clone();
        asked.spawn(boxed(async move {
            let question = question("GET", "/cluster/state", Vec::new());
            (peers.ask::<PeerState>(&node, question).await, node)
        }));
    }
    while let Some(done) = asked.join_next().await {
        match done {
            Ok((Ok(state), node)) => {
                if state.secrets.as_ref().is_some_and(|digest| *digest != own) {
                    differ.push(node.clone());
                }
                peers.roster().enter(node, state);
            }
            Ok((Err(why), node)) => {
                tracing::debug!(%node, why = %model::chain(&why), "cannot poll another node");
            }
            Err(_) => {}
        }
    }
    let view = peers.cluster().view();
    peers
        .roster()
        .retain(|node| view.members.contains_key(node));
    for node in view.members.keys() {
        if node != peers.this()
            && !view.nodes.contains_key(node)
            && let Some(lost) = peers.roster().report(node)
        {
            tracing::error!(%node, sandboxes = lost.len(), "a node is unreachable: its running sandboxes are lost unless it returns");
            for sandbox in lost.iter().take(LOGGED) {
                let state = sandbox.state;
                tracing::warn!(%node, sandbox = sandbox.sandbox_id, ?state, "lost");
            }
        }
    }
    differ
}

const KEYS: &str = "peer-keys.json";

/// Loads the last known keys of other nodes, so that a node that starts while others are unreachable accepts their
/// keys.
fn load_keys(peers: &Peers) -> Keys {
    let text = peers.dir().read(KEYS);
    let keys = text.ok().and_then(|text| serde_json::from_str(&text).ok());
    keys.unwrap_or_default()
}

fn store_keys(peers: &Peers, keys: &Keys) {
    let written = serde_json::to_vec(keys).map(|bytes| peers.dir().write(KEYS, &bytes));
    if let Ok(Err(why)) = written {
        tracing::warn!(why = %model::chain(&why), "cannot store the API keys of other nodes");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(all: &[(&str, &[&str])]) -> Keys {
        let record = |id: &&str| KeyRecord {
            names_secrets: true,
            id: (*id).to_owned(),
            name: String::new(),
            sha256: (*id).to_owned(),
            scopes: Vec::new(),
            created_unix_s: 0,
            revoked_unix_s: None,
        };
        let entry = |(node, ids): &(&str, &[&str])| {
            let records = ids.iter().map(record).collect();
            (node.parse().unwrap(), records)
        };
        all.iter().map(entry).collect()
    }

    #[test]
    fn keys_are_those_of_each_node_as_it_was_last_seen() {
        let kept = keys(&[("b", &["one", "two"]), ("c", &["three"]), ("d", &["four"])]);
        // Node b has no keys left, c is unreachable, d was removed.
        let seen = keys(&[("b", &[])]);
        let found = accepted(&kept, seen, |node| node.as_str() != "d");
        assert_eq!(found, keys(&[("b", &[]), ("c", &["three"])]));
        assert_eq!(accepted(&kept, Keys::new(), |_| true), kept);
    }
}
