//! This node's record in `nodes/`, and the values written under it: load, replicas and tags.

use crate::{
    keys::{self, Key, NodeRecord},
    store::{Answer, Fault, LeaseId, Request, Txn, When, Write},
};

use super::{Asked, Engine, Kind, Lease};

/// Maximum number of writes in one transaction. etcd accepts 128.
const MAX_WRITES: usize = 64;

/// Registration state of this node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    Registered,
    /// No list, lease or response yet.
    Pending,
    /// No member has this name and identity.
    NotMember,
    /// Another boot or another host has this node's name and a lease.
    NameTaken,
    /// A later process on this host has taken over.
    Replaced,
}

impl Engine {
    pub(crate) fn standing(&self) -> Standing {
        if self.registered.is_some() {
            return Standing::Registered;
        }
        if self.listed_at.is_none() {
            return Standing::Pending;
        }
        self.obstacle().unwrap_or(Standing::Pending)
    }

    /// Why the view forbids a registration.
    fn obstacle(&self) -> Option<Standing> {
        let view = self.mirror.view();
        let id = &self.this.id;
        let member = view.members.get(id);
        if member.is_none_or(|member| member.identity != self.this.identity) {
            return Some(Standing::NotMember);
        }
        let found = view.nodes.get(id)?;
        if self.mirror.instance() == Some(self.instance) {
            return None;
        }
        let is_same_boot =
            found.identity == self.this.identity && found.incarnation == self.this.incarnation;
        match (is_same_boot, self.ever_registered) {
            (false, _) => Some(Standing::NameTaken),
            (true, true) => Some(Standing::Replaced),
            // Registered by the predecessor of this process. Its sandboxes now belong to this one.
            (true, false) => None,
        }
    }

    pub(super) fn keep_registered(&mut self, now: u64) {
        let writing = |asked: &Asked| matches!(asked, Asked::Register { .. } | Asked::Write(_));
        let Some(Lease { id: lease, .. }) = self.lease else {
            return;
        };
        let is_listed = self.listed_at.is_some() && !self.list_wanted;
        if self.registered.is_some()
            || !is_listed
            || !self.may(now, Kind::Write, writing)
            || self.obstacle().is_some()
        {
            return;
        }
        let key = Key::Node(self.this.id.clone());
        let member = Key::Member(self.this.id.clone());
        let Some(admitted) = self.mirror.revision_of(&member) else {
            return;
        };
        let same = match self.mirror.revision_of(&key) {
            None => When::Absent(key.clone()),
            Some(revision) => When::Revision(key.clone(), revision),
        };
        let record = NodeRecord {
            node: self.this.clone(),
            instance: self.instance,
        };
        let txn = Txn {
            when: vec![same, When::Revision(member, admitted)],
            then: vec![Write::Put {
                key,
                value: keys::encode(&record),
                lease: Some(lease),
            }],
        };
        self.ask(Asked::Register { lease }, Request::Txn(txn));
    }

    pub(super) fn register_answered(
        &mut self,
        now: u64,
        lease: LeaseId,
        answer: Result<Answer, Fault>,
    ) {
        match answer {
            Ok(Answer::Txn {
                revision,
                succeeded: true,
            }) => {
                if self.lease.is_some_and(|held| held.id == lease) {
                    self.registered = Some(revision);
                    self.ever_registered = true;
                    self.written.clear();
                    self.load_at = None;
                }
            }
            Ok(Answer::Txn {
                succeeded: false, ..
            }) => {
                self.list_wanted = true;
                self.later(now, Kind::Write);
            }
            Err(Fault::NoLease) => self.lease_lost(),
            _ => {
                // The record may exist, with a revision that only etcd has.
                self.list_wanted = true;
                self.later(now, Kind::Write);
            }
        }
    }

    /// Detects that the record has been deleted or replaced.
    pub(super) fn check_registration(&mut self) {
        let Some(registered) = self.registered else {
            return;
        };
        let found = self.mirror.revision_of(&Key::Node(self.this.id.clone()));
        if self.mirror.view().revision >= registered && found != Some(registered) {
            self.registered = None;
        }
    }

    /// Forgets values that etcd no longer has in the written revision: they were lost with a part of etcd's history, or
    /// an earlier request of this node arrived late.
    pub(super) fn check_written(&mut self) {
        let mirror = &self.mirror;
        let known = mirror.view().revision;
        self.written.retain(|key, (value, written)| {
            let found = mirror.revision_of(key) == Some(*written);
            *written > known || (value.is_some() && found)
        });
    }

    pub(super) fn keep_written(&mut self, now: u64) {
        let writing = |asked: &Asked| matches!(asked, Asked::Register { .. } | Asked::Write(_));
        let (Some(registered), Some(lease)) = (self.registered, self.lease) else {
            return;
        };
        if !self.may(now, Kind::Write, writing) {
            return;
        }
        let writes = self.missing_writes(now);
        if writes.is_empty() {
            return;
        }
        let load = Key::Load(self.this.id.clone());
        if writes.iter().any(|(key, _)| *key == load) {
            self.load_at = Some(now);
        }
        let write = |(key, value): &(Key, Option<Vec<u8>>)| match value {
            Some(value) => Write::Put {
                key: key.clone(),
                value: value.clone(),
                lease: Some(lease.id),
            },
            None => Write::Delete(key.clone()),
        };
        let own = When::Revision(Key::Node(self.this.id.clone()), registered);
        // A request that arrives late must not bring a previous build back.
        let tags = writes.iter().map(|(key, _)| key);
        let tags = tags.filter(|key| matches!(key, Key::Tags(..)));
        let same = tags.map(|key| self.unchanged(key));
        let txn = Txn {
            when: [own].into_iter().chain(same).collect(),
            then: writes.iter().map(write).collect(),
        };
        self.ask(Asked::Write(writes), Request::Txn(txn));
    }

    /// The condition that a key is unchanged since this node last saw or wrote it.
    fn unchanged(&self, key: &Key) -> When {
        let seen = self.mirror.revision_of(key);
        let last = match self.written.get(key) {
            Some((None, written)) if *written >= self.mirror.view().revision => None,
            Some((Some(_), written)) => Some(seen.unwrap_or(0).max(*written)),
            Some((None, _)) | None => seen,
        };
        match last {
            Some(revision) => When::Revision(key.clone(), revision),
            None => When::Absent(key.clone()),
        }
    }

    /// The load if it is due, replicas and tags that are not written, and keys to delete.
    fn missing_writes(&self, now: u64) -> Vec<(Key, Option<Vec<u8>>)> {
        let this = &self.this.id;
        let mut writes = Vec::new();
        let mut put = |key: Key, value: Vec<u8>| {
            let written = self.written.get(&key);
            if written.is_none_or(|(before, _)| before.as_ref() != Some(&value)) {
                writes.push((key, Some(value)));
            }
        };
        let is_load_due = self
            .load_at
            .is_none_or(|at| now >= at + self.timing.load_ms);
        if is_load_due {
            put(Key::Load(this.clone()), keys::encode(&self.load));
        }
        for (key, value) in &self.published {
            put(key.clone(), value.clone());
        }
        let view = self.mirror.view();
        let replicas = view.replicas.iter();
        let replicas = replicas.filter(|(_, nodes)| nodes.contains_key(this));
        let replicas = replicas.map(|(template, _)| Key::Replica(template.clone(), this.clone()));
        let tags = view.tags.iter();
        let tags = tags.filter(|(_, nodes)| nodes.contains_key(this));
        let tags = tags.map(|(template, _)| Key::Tags(template.clone(), this.clone()));
        let found = replicas.chain(tags);
        let written = self.written.iter();
        let written = written.filter(|(_, (value, _))| value.is_some());
        let mut known: Vec<Key> = written.map(|(key, _)| key.clone()).collect();
        // A view that is older than a deletion still contains the key.
        known.extend(found.filter(|key| {
            let written = self.written.get(key);
            written.is_none_or(|(_, revision)| view.revision >= *revision)
        }));
        known.sort();
        known.dedup();
        let is_unwanted = |key: &Key| match key {
            Key::Replica(..) | Key::Tags(..) => !self.published.contains_key(key),
            _ => false,
        };
        let unwanted = known.into_iter().filter(is_unwanted);
        writes.extend(unwanted.map(|key| (key, None)));
        writes.truncate(MAX_WRITES);
        writes
    }

    pub(super) fn write_answered(
        &mut self,
        now: u64,
        writes: Vec<(Key, Option<Vec<u8>>)>,
        answer: Result<Answer, Fault>,
    ) {
        match answer {
            Ok(Answer::Txn {
                revision,
                succeeded: true,
            }) => {
                for (key, value) in writes {
                    self.written.insert(key, (value, revision));
                }
            }
            // The registration that these writes belong to no longer exists.
            Ok(Answer::Txn {
                succeeded: false, ..
            }) => {
                self.registered = None;
                self.list_wanted = true;
                self.later(now, Kind::Write);
            }
            Err(Fault::NoLease) => self.lease_lost(),
            _ => {
                // The writes may have been made, so the values under these keys are unknown.
                for (key, _) in writes {
                    self.written.remove(&key);
                }
                self.later(now, Kind::Write);
            }
        }
    }
}
