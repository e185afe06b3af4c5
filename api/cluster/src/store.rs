//! The interface to etcd. It has two implementations: `etcd` and, for the simulation, a model in memory.

use crate::keys::Key;

/// Number of a lease. Never 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct LeaseId(pub(crate) i64);

/// A key with its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    /// The text, which need not be a [`Key`] of this release.
    pub(crate) key: String,
    pub(crate) value: Vec<u8>,
    /// Revision of its last change.
    pub(crate) revision: u64,
}

/// All requests are linearizable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Request {
    /// All keys below the prefix, as of one revision.
    List,
    Get(Key),
    Txn(Txn),
    Grant {
        ttl_s: u64,
    },
    Renew(LeaseId),
    Revoke(LeaseId),
}

/// Writes that are applied atomically, or not at all if a condition does not hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Txn {
    pub(crate) when: Vec<When>,
    pub(crate) then: Vec<Write>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum When {
    Absent(Key),
    /// The key's last change was at this revision.
    Revision(Key, u64),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Write {
    Put {
        key: Key,
        value: Vec<u8>,
        lease: Option<LeaseId>,
    },
    Delete(Key),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    List {
        revision: u64,
        entries: Vec<Entry>,
    },
    Got {
        revision: u64,
        entry: Option<Entry>,
    },
    Txn {
        revision: u64,
        succeeded: bool,
    },
    Granted(LeaseId),
    /// Whether the lease still existed.
    Renewed {
        alive: bool,
    },
    Revoked,
}

/// A request without a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The request had no effect.
    Refused,
    /// The request may have had its effect.
    Unknown,
    /// A write referred to a lease that does not exist. It had no effect.
    NoLease,
}

/// Reports of a watch on the whole prefix, in this order: `Started`, any number of `Changes`, one end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Watched {
    /// Current revision of the member that serves the watch. If it is less than the start, etcd waits until it reaches
    /// the start, and reports no error.
    Started {
        revision: u64,
    },
    /// Changes of one or more whole revisions.
    Changes(Vec<Change>),
    /// The start has been compacted: the changes since are lost.
    Compacted,
    Broken,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    Put(Entry),
    Delete { key: String, revision: u64 },
}

impl Change {
    pub(crate) fn revision(&self) -> u64 {
        match self {
            Self::Put(entry) => entry.revision,
            Self::Delete { revision, .. } => *revision,
        }
    }
}
