//! Several nodes as one service.
//!
//! A *node* is a host with a `cube-api` and a pool. Any node accepts any request: it serves its own sandboxes, and
//! forwards requests for others to the node that has them. Nodes find each other through etcd. Without a cluster the
//! server uses [`Cluster::Alone`], which performs no I/O.
//!
//! Invariants:
//! - A create must not write to etcd. Nodes publish their load at most once a second, and placement reads a [`View`].
//! - Two nodes must not run one sandbox. A sandbox that no other node can run has no record in etcd and is safe without
//!   one. Before a sandbox can move, it gets an [`Owner`] record. From then on its node resumes it only after a change
//!   of that record ([`OwnerChange::Start`]) has been acknowledged. This decision depends on no clock and no lease.
//! - The loss of etcd must not interrupt a stream or a create. The last view stays in use ([`Health`] contains its
//!   age).

mod handle;
mod registrar;

mod driver;
mod engine;
mod etcd;
mod mirror;

mod admission;
mod moves;
mod owner;
mod placement;
mod view;

mod home;
mod keys;
mod member;
mod names;
mod roll;
mod store;

#[cfg(test)]
mod simulation;

pub use etcd::{AccountsError, EtcdConfig, EtcdConfigError, IdentityFiles, TlsFiles};
pub use handle::{Alone, Cluster, ClusterError, Health, JoinConfig, Membership};
pub use home::{HomeKey, HomeSlot};
pub use member::{CpuKind, Load, Member, Node, NodeState, Replica, Tagged, Tags};
pub use moves::{
    GiverStep, Holding, IncomingNote, MoveHalt, NoteStep, OwnerNote, ReclaimStep, RecordStep,
    TakeOutcome, TakeStep, TakerNote, TendStep, UndoStep, giver, giver_without_taker, taker,
};
pub use names::{Incarnation, NameError, NodeId, TemplateId};
pub use owner::{Owned, Owner, OwnerChange, OwnerError, OwnerState, Refusal, Stamp};
pub use placement::{Candidate, Needs, place};
pub use registrar::found;
pub use roll::{Applicant, MemberSigner, MemberVerifier, Registrar, RollSignature};
pub use view::{ClusterEvent, Route, View};
