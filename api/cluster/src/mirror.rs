//! The mirror of etcd's keys from which views are built. It starts from a list and applies changes in the order of
//! their revisions. A later list replaces it by computing the difference, so that readers see only actual changes,
//! including deletions.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use model::SandboxId;

use crate::{
    ClusterEvent, Incarnation, Member, MemberVerifier, NodeId, Owned, TemplateId, View,
    keys::{self, Key, NodeRecord},
    store::{Change, Entry},
};

/// The mirror. [`Mirror::view`] is empty until the first list.
#[derive(Debug)]
pub(crate) struct Mirror {
    view: View,
    verifier: MemberVerifier,
    /// Revision of each key that is part of the view.
    revisions: BTreeMap<Key, u64>,
    /// The process that registered this node.
    instance: Option<u64>,
    /// Incarnations of live and former nodes.
    incarnations: BTreeMap<NodeId, Incarnation>,
}

/// The effects of an update.
#[derive(Debug, Default)]
pub(crate) struct Updated {
    pub(crate) events: Vec<ClusterEvent>,
    pub(crate) owners: BTreeSet<SandboxId>,
    pub(crate) changed: bool,
}

impl Mirror {
    pub(crate) fn new(this: NodeId, verifier: MemberVerifier) -> Self {
        Self {
            view: View {
                this: Some(this),
                ..View::default()
            },
            verifier,
            revisions: BTreeMap::new(),
            instance: None,
            incarnations: BTreeMap::new(),
        }
    }

    pub(crate) fn view(&self) -> &View {
        &self.view
    }

    pub(crate) fn revision_of(&self, key: &Key) -> Option<u64> {
        self.revisions.get(key).copied()
    }

    /// The process that has registered this node, if any.
    pub(crate) fn instance(&self) -> Option<u64> {
        self.instance
    }

    /// Replaces everything with the state at `revision`. Keys that are not in `entries` have been deleted.
    pub(crate) fn list(&mut self, revision: u64, entries: Vec<Entry>) -> Updated {
        let mut updated = Updated::default();
        let found: BTreeMap<Key, Entry> = entries
            .into_iter()
            .filter_map(|entry| Some((Key::parse(&entry.key)?, entry)))
            .collect();
        let gone = |key: &&Key| !found.contains_key(*key);
        let gone: Vec<Key> = self.revisions.keys().filter(gone).cloned().collect();
        for key in gone {
            self.remove(&key, &mut updated);
        }
        for (key, entry) in found {
            // Even if the revision is equal: after a restore from a backup, it may belong to another change.
            self.insert(key, &entry, &mut updated);
        }
        self.view.revision = revision;
        updated
    }

    /// Applies the changes that are newer than the view. A watch that started before the last list repeats some.
    pub(crate) fn follow(&mut self, changes: Vec<Change>) -> Updated {
        let mut updated = Updated::default();
        let seen = self.view.revision;
        for change in changes {
            let revision = change.revision();
            if revision <= seen {
                continue;
            }
            match change {
                Change::Put(entry) => {
                    if let Some(key) = Key::parse(&entry.key) {
                        self.insert(key, &entry, &mut updated);
                    }
                }
                Change::Delete { key, .. } => {
                    if let Some(key) = Key::parse(&key) {
                        self.remove(&key, &mut updated);
                    }
                }
            }
            self.view.revision = self.view.revision.max(revision);
        }
        updated
    }

    /// A value that cannot be decoded, or a member without the authority's signature, counts as a deletion.
    fn insert(&mut self, key: Key, entry: &Entry, updated: &mut Updated) {
        let value = entry.value.as_slice();
        let view = &mut self.view;
        let is_decoded = match &key {
            Key::Member(node) => {
                let member = keys::decode(value).filter(|member: &Member| {
                    let is_known = view.members.get(node) == Some(member);
                    member.id == *node && (is_known || self.verifier.is_signed(member))
                });
                put(&mut view.members, node, member)
            }
            Key::State(node) => put(&mut view.states, node, keys::decode(value)),
            Key::Load(node) => put(&mut view.loads, node, keys::decode(value)),
            Key::Node(node) => match keys::decode::<NodeRecord>(value) {
                Some(record) if record.node.id == *node => {
                    self.live(record, updated);
                    true
                }
                _ => false,
            },
            Key::Tags(template, node) => {
                put_at(&mut view.tags, template, node, keys::decode(value))
            }
            Key::Replica(template, node) => {
                put_at(&mut view.replicas, template, node, keys::decode(value))
            }
            Key::Owner(sandbox) => match keys::decode(value) {
                Some(owner) => {
                    let owned = Owned {
                        owner,
                        revision: entry.revision,
                    };
                    self.own(sandbox, owned, updated);
                    true
                }
                None => false,
            },
            Key::Cluster | Key::Slot(_) => true,
        };
        if is_decoded {
            let before = self.revisions.insert(key, entry.revision);
            updated.changed |= before != Some(entry.revision);
        } else {
            self.remove(&key, updated);
        }
    }

    fn live(&mut self, record: NodeRecord, updated: &mut Updated) {
        let NodeRecord { node, instance } = record;
        let id = node.id.clone();
        if self.view.this.as_ref() == Some(&id) {
            self.instance = Some(instance);
        }
        let incarnation = node.incarnation.clone();
        let before = self.incarnations.insert(id.clone(), incarnation.clone());
        let known = self.view.nodes.get(&id);
        if known.is_none() {
            updated.events.push(ClusterEvent::Joined(id.clone()));
        }
        if known != Some(&node) {
            Arc::make_mut(&mut self.view.nodes).insert(id.clone(), node);
        }
        if before.is_some_and(|before| before != incarnation) {
            updated.events.push(ClusterEvent::Rebooted(id));
        }
    }

    fn own(&mut self, sandbox: &SandboxId, owned: Owned, updated: &mut Updated) {
        if self.view.owners.get(sandbox) == Some(&owned) {
            return;
        }
        let owners = Arc::make_mut(&mut self.view.owners);
        let before = owners.insert(sandbox.clone(), owned.clone());
        if before.is_some_and(|before| before.owner.node != owned.owner.node) {
            updated.events.push(ClusterEvent::Moved {
                sandbox: sandbox.clone(),
                owner: owned,
            });
        }
        updated.owners.insert(sandbox.clone());
    }

    fn remove(&mut self, key: &Key, updated: &mut Updated) {
        let view = &mut self.view;
        match key {
            Key::Member(node) => drop(Arc::make_mut(&mut view.members).remove(node)),
            Key::State(node) => drop(Arc::make_mut(&mut view.states).remove(node)),
            Key::Load(node) => drop(Arc::make_mut(&mut view.loads).remove(node)),
            Key::Node(node) => {
                if view.this.as_ref() == Some(node) {
                    self.instance = None;
                }
                if Arc::make_mut(&mut view.nodes).remove(node).is_some() {
                    // The load disappears with the same lease. In key order it has already been deleted.
                    let node = node.clone();
                    updated.events.push(ClusterEvent::Away { node });
                }
            }
            Key::Tags(template, node) => remove_at(&mut view.tags, template, node),
            Key::Replica(template, node) => remove_at(&mut view.replicas, template, node),
            Key::Owner(sandbox) => {
                Arc::make_mut(&mut view.owners).remove(sandbox);
                updated.owners.insert(sandbox.clone());
            }
            Key::Cluster | Key::Slot(_) => {}
        }
        updated.changed |= self.revisions.remove(key).is_some();
    }
}

/// Stores a decoded value. Returns whether there is one.
fn put<V: Clone + PartialEq>(
    map: &mut Arc<BTreeMap<NodeId, V>>,
    node: &NodeId,
    value: Option<V>,
) -> bool {
    match value {
        Some(value) => {
            if map.get(node) != Some(&value) {
                Arc::make_mut(map).insert(node.clone(), value);
            }
            true
        }
        None => false,
    }
}

type ByTemplate<V> = Arc<BTreeMap<TemplateId, BTreeMap<NodeId, V>>>;

/// Like [`put`], for a node's record about a template.
fn put_at<V: Clone + PartialEq>(
    map: &mut ByTemplate<V>,
    template: &TemplateId,
    node: &NodeId,
    value: Option<V>,
) -> bool {
    let Some(value) = value else {
        return false;
    };
    let known = map.get(template).and_then(|nodes| nodes.get(node));
    if known != Some(&value) {
        let of_template = Arc::make_mut(map).entry(template.clone()).or_default();
        of_template.insert(node.clone(), value);
    }
    true
}

fn remove_at<V: Clone>(map: &mut ByTemplate<V>, template: &TemplateId, node: &NodeId) {
    let map = Arc::make_mut(map);
    if let Some(of_template) = map.get_mut(template) {
        of_template.remove(node);
        if of_template.is_empty() {
            map.remove(template);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        HomeSlot, NodeState,
        roll::tests::{applicant, signer},
    };

    fn state(node: &str, state: NodeState, revision: u64) -> Entry {
        Entry {
            key: format!("{}state/{node}", keys::PREFIX),
            value: keys::encode(&state),
            revision,
        }
    }

    fn mirror() -> Mirror {
        Mirror::new("a".parse().unwrap(), signer().verifier())
    }

    fn states(mirror: &Mirror) -> Vec<(&str, NodeState)> {
        let states = mirror.view().states.iter();
        states
            .map(|(node, state)| (node.as_str(), *state))
            .collect()
    }

    #[test]
    fn a_list_removes_what_is_not_in_it_and_old_changes_are_not_repeated() {
        let mut mirror = mirror();
        let first = vec![
            state("a", NodeState::Cordoned, 3),
            state("b", NodeState::Draining, 4),
        ];
        assert!(mirror.list(5, first).changed);
        let second = vec![state("b", NodeState::Cordoned, 8)];
        assert!(mirror.list(9, second.clone()).changed);
        assert_eq!(states(&mirror), [("b", NodeState::Cordoned)]);
        assert!(!mirror.list(9, second).changed);
        // A watch that started at 6. The list already includes the change at 7.
        let repeated = Change::Put(state("b", NodeState::Ready, 7));
        let fresh = Change::Put(state("c", NodeState::Ready, 10));
        mirror.follow(vec![repeated, fresh]);
        assert_eq!(
            states(&mirror),
            [("b", NodeState::Cordoned), ("c", NodeState::Ready)]
        );
        let key = state("c", NodeState::Ready, 0).key;
        mirror.follow(vec![Change::Delete { key, revision: 11 }]);
        assert_eq!((states(&mirror).len(), mirror.view().revision), (1, 11));
    }

    #[test]
    fn a_snapshot_does_not_change_and_shares_what_has_not() {
        let mut mirror = mirror();
        mirror.list(1, vec![state("a", NodeState::Cordoned, 1)]);
        let before = mirror.view().clone();
        mirror.follow(vec![Change::Put(state("a", NodeState::Ready, 2))]);
        assert_eq!(before.state(&"a".parse().unwrap()), NodeState::Cordoned);
        assert!(Arc::ptr_eq(&before.owners, &mirror.view().owners));
    }

    #[test]
    fn a_value_that_cannot_be_read_is_no_value() {
        let mut mirror = mirror();
        mirror.list(1, vec![state("a", NodeState::Cordoned, 1)]);
        let mut entry = state("a", NodeState::Ready, 2);
        entry.value = b"{".to_vec();
        mirror.follow(vec![Change::Put(entry)]);
        assert_eq!(states(&mirror), []);
    }

    #[test]
    fn a_member_that_the_authority_has_not_signed_is_none() {
        let (ours, other) = (signer(), signer());
        let mut mirror = Mirror::new("a".parse().unwrap(), ours.verifier());
        let mut revision = 0;
        let mut write = |key: &str, member: &Member| {
            revision += 1;
            let entry = Entry {
                key: format!("{}members/{key}", keys::PREFIX),
                value: keys::encode(member),
                revision,
            };
            mirror.follow(vec![Change::Put(entry)]);
            mirror.view().members.keys().cloned().collect::<Vec<_>>()
        };
        let slot = HomeSlot::new(1).unwrap();
        let member = ours.member(&applicant("b", "x"), slot);
        assert_eq!(write("b", &member).len(), 1);
        // The record of one member under the name of another.
        assert_eq!(write("c", &member).len(), 1);
        let forged = other.member(&applicant("b", "x"), slot);
        assert_eq!(write("b", &forged), []);
    }
}
