//! Operators' changes to a cluster, as transactions on a list of its keys. Pure.

use crate::{
    Applicant, HomeSlot, Incarnation, Member, MemberSigner, NodeId, NodeState, Owned, Owner,
    OwnerChange, OwnerError, Refusal,
    keys::{self, Founded, Key, NodeRecord},
    store::{Entry, Txn, When, Write},
};
use model::SandboxId;

/// Why a change is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Denied {
    /// etcd has no cluster, or one of another format.
    NoCluster {
        format: Option<u32>,
    },
    /// A cluster already exists.
    Founded,
    NameTaken,
    NotMember,
    NodeLives,
    Full(usize),
}

/// A transaction that creates the member, or the existing member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Admission {
    Make(Txn, Member),
    Is(Member),
}

/// The keys that the functions below need.
#[derive(Debug, Default)]
pub(crate) struct Keys {
    format: Option<u32>,
    members: Vec<(Member, u64)>,
    live: Vec<(NodeId, Incarnation)>,
}

impl Keys {
    pub(crate) fn read(entries: &[Entry]) -> Self {
        let mut keys = Self::default();
        for entry in entries {
            match Key::parse(&entry.key) {
                Some(Key::Cluster) => {
                    let founded = keys::decode::<Founded>(&entry.value);
                    keys.format = founded.map(|founded| founded.format);
                }
                Some(Key::Member(_)) => {
                    let member = keys::decode(&entry.value);
                    keys.members
                        .extend(member.map(|member| (member, entry.revision)));
                }
                Some(Key::Node(_)) => {
                    let record = keys::decode::<NodeRecord>(&entry.value);
                    let node = record.map(|record| (record.node.id, record.node.incarnation));
                    keys.live.extend(node);
                }
                _ => {}
            }
        }
        keys
    }

    pub(crate) fn check(&self) -> Result<(), Denied> {
        match self.format {
            Some(Founded::FORMAT) => Ok(()),
            format => Err(Denied::NoCluster { format }),
        }
    }

    /// The members with a valid signature of the authority.
    pub(crate) fn signed(&self, signer: &MemberSigner) -> Vec<Member> {
        let verifier = signer.verifier();
        let members = self.members.iter().map(|(member, _)| member);
        let signed = members.filter(|member| verifier.is_signed(member));
        signed.cloned().collect()
    }

    fn member(&self, node: &NodeId) -> Option<&(Member, u64)> {
        self.members.iter().find(|(member, _)| member.id == *node)
    }

    /// Founds a cluster with its first member.
    pub(crate) fn found(
        &self,
        applicant: &Applicant,
        signer: &MemberSigner,
    ) -> Result<(Txn, Member), Denied> {
        if self.format.is_some() || !self.members.is_empty() {
            return Err(Denied::Founded);
        }
        let slot = HomeSlot::new(0).ok_or(Denied::Full(0))?;
        let (mut txn, member) = make(signer.member(applicant, slot));
        txn.when.push(When::Absent(Key::Cluster));
        let format = Founded::FORMAT;
        txn.then
            .push(put(Key::Cluster, keys::encode(&Founded { format })));
        Ok((txn, member))
    }

    pub(crate) fn admit(
        &self,
        applicant: &Applicant,
        signer: &MemberSigner,
    ) -> Result<Admission, Denied> {
        self.check()?;
        let is_same = |member: &Member| {
            member.identity == applicant.identity
                && member.key == applicant.key
                && signer.verifier().is_signed(member)
        };
        match self.member(&applicant.id) {
            Some((member, _)) if is_same(member) => return Ok(Admission::Is(member.clone())),
            Some(_) => return Err(Denied::NameTaken),
            None => {}
        }
        let is_free = |slot: &HomeSlot| self.members.iter().all(|(member, _)| member.slot != *slot);
        let slot = (0..HomeSlot::COUNT).filter_map(HomeSlot::new).find(is_free);
        let slot = slot.ok_or(Denied::Full(self.members.len()))?;
        let (txn, member) = make(signer.member(applicant, slot));
        Ok(Admission::Make(txn, member))
    }

    /// Removes a member whose node is down.
    pub(crate) fn remove(&self, node: &NodeId) -> Result<Txn, Denied> {
        self.check()?;
        let (member, revision) = self.member(node).ok_or(Denied::NotMember)?;
        if self.live.iter().any(|(live, _)| live == node) {
            return Err(Denied::NodeLives);
        }
        let key = Key::Member(node.clone());
        Ok(Txn {
            when: vec![
                When::Revision(key.clone(), *revision),
                When::Absent(Key::Node(node.clone())),
            ],
            then: vec![
                Write::Delete(key),
                Write::Delete(Key::Slot(member.slot)),
                Write::Delete(Key::State(node.clone())),
            ],
        })
    }

    pub(crate) fn set_state(&self, node: &NodeId, state: NodeState) -> Result<Txn, Denied> {
        self.check()?;
        let (_, revision) = self.member(node).ok_or(Denied::NotMember)?;
        Ok(Txn {
            when: vec![When::Revision(Key::Member(node.clone()), *revision)],
            then: vec![put(Key::State(node.clone()), keys::encode(&state))],
        })
    }
}

fn make(member: Member) -> (Txn, Member) {
    let (own, taken) = (Key::Member(member.id.clone()), Key::Slot(member.slot));
    let txn = Txn {
        when: vec![When::Absent(own.clone()), When::Absent(taken.clone())],
        then: vec![
            put(own, keys::encode(&member)),
            put(taken, keys::encode(&member.id)),
        ],
    };
    (txn, member)
}

fn put(key: Key, value: Vec<u8>) -> Write {
    let lease = None;
    Write::Put { key, value, lease }
}

/// The compare-and-swap of an owner record, and the record that it writes.
pub(crate) fn owner_txn(
    this: &NodeId,
    id: &SandboxId,
    expected: Option<&Owned>,
    change: &OwnerChange,
) -> Result<(Txn, Option<Owner>), Refusal> {
    let now = expected.map(|expected| &expected.owner);
    let key = Key::Owner(id.clone());
    let same = match expected {
        None => When::Absent(key.clone()),
        Some(expected) => When::Revision(key.clone(), expected.revision),
    };
    let mut when = vec![same];
    let next = match change.apply(this, now, true) {
        // The owner has not agreed, so it must have no live record at the time of the write.
        Err(Refusal::OwnerLives(owner)) => {
            when.push(When::Absent(Key::Node(owner)));
            change.apply(this, now, false)?
        }
        next => next?,
    };
    let write = match &next {
        Some(owner) => put(key, keys::encode(owner)),
        None => Write::Delete(key),
    };
    let then = vec![write];
    Ok((Txn { when, then }, next))
}

/// Parses the record in an entry.
pub(crate) fn owned(entry: Option<&Entry>) -> Result<Option<Owned>, OwnerError> {
    let Some(entry) = entry else {
        return Ok(None);
    };
    let owner = keys::decode(&entry.value).ok_or(OwnerError::Unreadable)?;
    let revision = entry.revision;
    Ok(Some(Owned { owner, revision }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::roll::{self, tests::applicant};

    fn node(name: &str) -> NodeId {
        name.parse().unwrap()
    }

    fn entries(txn: &Txn) -> Vec<Entry> {
        let entry = |write: &Write| match write {
            Write::Put { key, value, .. } => Entry {
                key: key.to_string(),
                value: value.clone(),
                revision: 1,
            },
            Write::Delete(key) => panic!("deletes {key}"),
        };
        txn.then.iter().map(entry).collect()
    }

    #[test]
    fn members_get_slots_of_their_own_and_a_name_is_one_hosts() {
        let signer = roll::tests::signer();
        let (txn, first) = Keys::default()
            .found(&applicant("a", "x"), &signer)
            .unwrap();
        let mut all = entries(&txn);
        assert_eq!(
            Keys::read(&all).found(&applicant("b", "y"), &signer),
            Err(Denied::Founded)
        );
        let again = Keys::read(&all)
            .admit(&applicant("a", "x"), &signer)
            .unwrap();
        assert_eq!(again, Admission::Is(first.clone()));
        let other = Keys::read(&all).admit(&applicant("a", "y"), &signer);
        assert_eq!(other, Err(Denied::NameTaken));
        let Ok(Admission::Make(txn, second)) =
            Keys::read(&all).admit(&applicant("b", "y"), &signer)
        else {
            panic!("not admitted");
        };
        assert_ne!(first.slot, second.slot);
        all.extend(entries(&txn));
        assert_eq!(Keys::read(&all).signed(&signer), [first.clone(), second]);
        assert_eq!(Keys::read(&all).signed(&roll::tests::signer()), []);
        let removal = Keys::read(&all).remove(&node("a")).unwrap();
        assert!(removal.then.contains(&Write::Delete(Key::Slot(first.slot))));
        let unknown = Keys::read(&all).set_state(&node("c"), NodeState::Ready);
        assert_eq!(unknown, Err(Denied::NotMember));
    }

    #[test]
    fn a_change_of_an_owner_is_compared_with_what_it_was_made_from() {
        let (a, id) = (node("a"), SandboxId::from_random([7; 19]));
        let key = || Key::Owner(id.clone());
        let (first, owner) = owner_txn(&a, &id, None, &OwnerChange::Share).unwrap();
        assert_eq!(first.when, [When::Absent(key())]);
        let revision = 5;
        let owned = Owned {
            owner: owner.unwrap(),
            revision,
        };
        let (start, _) = owner_txn(&a, &id, Some(&owned), &OwnerChange::Start).unwrap();
        assert_eq!(start.when, [When::Revision(key(), revision)]);
        // If a node's owner has not agreed, the owner must also be unreachable.
        let (take, _) = owner_txn(&node("b"), &id, Some(&owned), &OwnerChange::Take).unwrap();
        let away = When::Absent(Key::Node(a));
        assert_eq!(take.when, [When::Revision(key(), revision), away]);
    }

    #[test]
    fn a_cluster_of_another_format_is_refused() {
        let key = Key::Cluster.to_string();
        let value = br#"{"format":1}"#.to_vec();
        let former = [Entry {
            key,
            value,
            revision: 1,
        }];
        let format = Some(1);
        let denied = Keys::read(&former).admit(&applicant("a", "x"), &roll::tests::signer());
        assert_eq!(denied, Err(Denied::NoCluster { format }));
    }
}
