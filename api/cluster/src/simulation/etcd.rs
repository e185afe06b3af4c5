//! etcd as a linearizable map in memory, with revisions, leases, a log for watches, compaction and backups.

use std::collections::BTreeMap;

use crate::{
    keys::PREFIX,
    store::{Answer, Change, Entry, Fault, LeaseId, Request, Txn, When, Write},
};

#[derive(Clone, Debug)]
struct Stored {
    value: Vec<u8>,
    revision: u64,
    lease: Option<LeaseId>,
}

#[derive(Clone, Copy, Debug)]
struct Lease {
    ttl_ms: u64,
    ends: u64,
}

#[derive(Clone, Debug)]
pub(crate) struct Etcd {
    revision: u64,
    keys: BTreeMap<String, Stored>,
    log: Vec<Change>,
    /// Changes up to this revision are compacted.
    compacted: u64,
    leases: BTreeMap<LeaseId, Lease>,
    /// Never decreases: ids of leases are random in etcd.
    last_lease: i64,
}

impl Etcd {
    pub(crate) fn new() -> Self {
        Self {
            revision: 1,
            keys: BTreeMap::new(),
            log: Vec::new(),
            compacted: 0,
            leases: BTreeMap::new(),
            last_lease: 0,
        }
    }

    pub(crate) fn revision(&self) -> u64 {
        self.revision
    }

    pub(crate) fn perform(&mut self, now: u64, request: Request) -> Result<Answer, Fault> {
        self.end_leases(now);
        let revision = self.revision;
        match request {
            Request::List => Ok(Answer::List {
                revision,
                entries: self.entries(),
            }),
            Request::Get(key) => {
                let key = key.to_string();
                let entry = self.keys.get(&key).map(|stored| entry(&key, stored));
                Ok(Answer::Got { revision, entry })
            }
            Request::Txn(txn) => self.txn(txn),
            Request::Grant { ttl_s } => {
                self.last_lease += 1;
                let ttl_ms = ttl_s * 1000;
                let ends = now + ttl_ms;
                self.leases
                    .insert(LeaseId(self.last_lease), Lease { ttl_ms, ends });
                Ok(Answer::Granted(LeaseId(self.last_lease)))
            }
            Request::Renew(id) => {
                let lease = self.leases.get_mut(&id);
                let alive = lease.is_some();
                if let Some(lease) = lease {
                    lease.ends = now + lease.ttl_ms;
                }
                Ok(Answer::Renewed { alive })
            }
            Request::Revoke(id) => {
                self.end_lease(id);
                Ok(Answer::Revoked)
            }
        }
    }

    pub(crate) fn entries(&self) -> Vec<Entry> {
        let ours = self.keys.iter().filter(|(key, _)| key.starts_with(PREFIX));
        ours.map(|(key, stored)| entry(key, stored)).collect()
    }

    /// The changes from this revision on, or `None` if some of them are compacted.
    pub(crate) fn since(&self, from: u64) -> Option<Vec<Change>> {
        if from <= self.compacted {
            return None;
        }
        let later = self.log.iter().filter(|change| change.revision() >= from);
        Some(later.cloned().collect())
    }

    pub(crate) fn compact(&mut self) {
        self.compacted = self.revision;
        self.log.clear();
    }

    /// Restarts etcd. A new leader gives every lease its full time again.
    pub(crate) fn restart(&mut self, now: u64) {
        for lease in self.leases.values_mut() {
            lease.ends = now + lease.ttl_ms;
        }
    }

    pub(crate) fn restore(&mut self, backup: &Self, now: u64) {
        let last_lease = self.last_lease;
        *self = backup.clone();
        self.last_lease = last_lease;
        self.restart(now);
    }

    pub(crate) fn end_leases(&mut self, now: u64) {
        let ended = self.leases.iter().filter(|(_, lease)| lease.ends <= now);
        let ended: Vec<LeaseId> = ended.map(|(id, _)| *id).collect();
        for id in ended {
            self.end_lease(id);
        }
    }

    fn end_lease(&mut self, id: LeaseId) {
        self.leases.remove(&id);
        let attached = self
            .keys
            .iter()
            .filter(|(_, stored)| stored.lease == Some(id));
        let attached: Vec<String> = attached.map(|(key, _)| key.clone()).collect();
        if !attached.is_empty() {
            self.revision += 1;
        }
        for key in attached {
            self.delete(key);
        }
    }

    fn txn(&mut self, txn: Txn) -> Result<Answer, Fault> {
        let holds = |when: &When| match when {
            When::Absent(key) => !self.keys.contains_key(&key.to_string()),
            When::Revision(key, revision) => {
                let stored = self.keys.get(&key.to_string());
                stored.is_some_and(|stored| stored.revision == *revision)
            }
        };
        if !txn.when.iter().all(holds) {
            let revision = self.revision;
            return Ok(Answer::Txn {
                revision,
                succeeded: false,
            });
        }
        let lease_of = |write: &Write| match write {
            Write::Put { lease, .. } => *lease,
            Write::Delete(_) => None,
        };
        let is_gone = |lease| !self.leases.contains_key(&lease);
        if txn.then.iter().filter_map(lease_of).any(is_gone) {
            return Err(Fault::NoLease);
        }
        self.revision += 1;
        for write in txn.then {
            match write {
                Write::Put { key, value, lease } => {
                    let key = key.to_string();
                    let revision = self.revision;
                    let stored = Stored {
                        value,
                        revision,
                        lease,
                    };
                    self.log.push(Change::Put(entry(&key, &stored)));
                    self.keys.insert(key, stored);
                }
                Write::Delete(key) => self.delete(key.to_string()),
            }
        }
        let revision = self.revision;
        Ok(Answer::Txn {
            revision,
            succeeded: true,
        })
    }

    fn delete(&mut self, key: String) {
        if self.keys.remove(&key).is_some() {
            let revision = self.revision;
            self.log.push(Change::Delete { key, revision });
        }
    }
}

fn entry(key: &str, stored: &Stored) -> Entry {
    Entry {
        key: key.to_owned(),
        value: stored.value.clone(),
        revision: stored.revision,
    }
}
