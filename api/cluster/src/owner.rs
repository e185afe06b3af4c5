//! Owner records of sandboxes that can move: `owner/SANDBOX`. They determine which node may run a sandbox.
//!
//! A sandbox without a record belongs to its home node. It gets a record before it can move, and keeps it until it
//! ends.
//!
//! ```text
//!               Share                Start                       Pause
//!  (no record) ──────► Paused, e ───────────► Running, e+1 ───────────► Paused, e+1
//!                        │   ▲
//!                  Offer │   │ Withdraw: the other node has confirmed that it holds nothing
//!                        ▼   │
//!                     offered to B ── Take by B ──► B: Paused, e+1
//!
//!  Take by C: also allowed if the owner is Paused and has no live record (C must reach its storage and find the files:
//!             a restored etcd can have records of ended sandboxes)
//!  Reassert:  the record is older than what the owner holds: etcd was restored from a backup. Records of running
//!             sandboxes are rewritten at once; for a paused one, its node checks the files first
//! ```
//!
//! Every change is one compare-and-swap on the record's revision, made by the node that the change names. These rules
//! keep a sandbox from running twice:
//! 1. A node resumes such a sandbox only after its `Start` has been acknowledged.
//! 2. A running sandbox is never taken. If its node is lost, so is the sandbox.
//! 3. Files of a paused sandbox carry a [`Stamp`]. After each `Take` and `Start`, before anything else, a node stamps
//!    them with its record if [`Stamp::permits`] it. Otherwise it stops using them. On storage shared by several nodes,
//!    a stamp is a file that is created exclusively, with the epoch as its name. This rule holds even if etcd loses
//!    data.
//! 4. A giver that does not know the outcome of an offer asks the taker, and resumes nothing until it responds.

use serde::{Deserialize, Serialize};

use crate::NodeId;

/// The owner record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owner {
    pub node: NodeId,
    /// Incremented by each `Start`, `Take` and `Reassert`.
    pub epoch: u64,
    pub state: OwnerState,
    /// The only node that may take the sandbox while its owner is alive.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub offered_to: Option<NodeId>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OwnerState {
    Paused,
    Running,
}

/// The last node that ran a sandbox from these files, and its epoch at that time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stamp {
    pub node: NodeId,
    pub epoch: u64,
}

/// A record with the etcd revision at which it was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owned {
    pub owner: Owner,
    pub revision: u64,
}

/// A change of a record. The first argument of [`OwnerChange::apply`] is the node that makes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OwnerChange {
    /// The first record of a paused sandbox that another node may now take.
    Share,
    Offer(NodeId),
    Withdraw,
    Take,
    Start,
    Pause,
    /// Restores the record of a sandbox as this node holds it.
    Reassert {
        epoch: u64,
        state: OwnerState,
    },
    /// The sandbox has ended. Deletes the record.
    End,
}

/// The rules forbid the change.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("the sandbox has no owner record")]
    Absent,
    #[error("the sandbox belongs to node {0}")]
    NotOwner(NodeId),
    #[error("the sandbox is running")]
    Running,
    #[error("the sandbox is not running")]
    NotRunning,
    #[error("the sandbox is offered to node {0}")]
    Offered(NodeId),
    #[error("the sandbox is not offered")]
    NotOffered,
    #[error("node {0} is alive and has not offered the sandbox")]
    OwnerLives(NodeId),
    #[error("node {node} holds a later epoch, {epoch}")]
    Superseded { node: NodeId, epoch: u64 },
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OwnerError {
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// Another node changed the record first. Read it again.
    #[error("the owner record has changed")]
    Changed,
    /// The change may or may not have been made. Read the record before anything else.
    #[error("no response from etcd: the outcome is unknown")]
    Unknown,
    /// The change has not been made.
    #[error("etcd cannot be reached")]
    Unavailable,
    #[error("the owner record in etcd cannot be read")]
    Unreadable,
    /// This server has no cluster.
    #[error("this server is not part of a cluster")]
    Alone,
}

impl Owner {
    /// The stamp of files used under this record.
    #[must_use]
    pub fn stamp(&self) -> Stamp {
        Stamp {
            node: self.node.clone(),
            epoch: self.epoch,
        }
    }

    /// Whether this record of another node supersedes what a node holds with `epoch` and `state`. Equal epochs of two
    /// nodes come from two histories of etcd. In that case a running sandbox prevails over files that no node has
    /// started since.
    #[must_use]
    pub fn beats(&self, epoch: u64, state: OwnerState) -> bool {
        let prevails = state == OwnerState::Running && self.state == OwnerState::Paused;
        self.epoch > epoch || (self.epoch == epoch && !prevails)
    }
}

impl Stamp {
    /// Whether a node with the record `by` may continue with files that were last stamped with `last`. If not, etcd has
    /// lost a later record, or another node has used this epoch in a history that etcd has lost.
    #[must_use]
    pub fn permits(last: Option<&Self>, by: &Owner) -> bool {
        last.is_none_or(|last| {
            last.epoch < by.epoch || (last.epoch == by.epoch && last.node == by.node)
        })
    }
}

impl OwnerChange {
    /// Applies the change as node `by`. `Ok(None)` deletes the record. `owner_lives` is whether the current owner has a
    /// live record in `nodes/`. The caller must make this a condition of the write.
    pub fn apply(
        &self,
        by: &NodeId,
        now: Option<&Owner>,
        owner_lives: bool,
    ) -> Result<Option<Owner>, Refusal> {
        match self {
            Self::Share => match now {
                None => Ok(Some(Owner {
                    node: by.clone(),
                    epoch: 1,
                    state: OwnerState::Paused,
                    offered_to: None,
                })),
                Some(owner) => own(by, Some(owner)).map(|owner| Some(owner.clone())),
            },
            Self::Offer(to) => {
                let owner = paused(unoffered(own(by, now)?)?)?;
                let offered_to = Some(to.clone());
                Ok(Some(Owner {
                    offered_to,
                    ..owner.clone()
                }))
            }
            Self::Withdraw => {
                let owner = own(by, now)?;
                if owner.offered_to.is_none() {
                    return Err(Refusal::NotOffered);
                }
                // A new epoch: a take that is still in flight compares with the old record and fails.
                Ok(Some(next(by, owner, OwnerState::Paused)))
            }
            Self::Take => {
                let owner = paused(now.ok_or(Refusal::Absent)?)?;
                let offered = owner.offered_to.as_ref() == Some(by);
                if owner.node == *by || offered || !owner_lives {
                    Ok(Some(next(by, owner, OwnerState::Paused)))
                } else {
                    Err(Refusal::OwnerLives(owner.node.clone()))
                }
            }
            Self::Start => {
                let owner = paused(unoffered(own(by, now)?)?)?;
                Ok(Some(next(by, owner, OwnerState::Running)))
            }
            Self::Pause => {
                let owner = own(by, now)?;
                match owner.state {
                    OwnerState::Paused => Err(Refusal::NotRunning),
                    OwnerState::Running => Ok(Some(Owner {
                        state: OwnerState::Paused,
                        ..owner.clone()
                    })),
                }
            }
            Self::Reassert { epoch, state } => reassert(by, now, *epoch, *state).map(Some),
            Self::End => own(by, now).map(|_| None),
        }
    }
}

fn own<'a>(by: &NodeId, now: Option<&'a Owner>) -> Result<&'a Owner, Refusal> {
    let owner = now.ok_or(Refusal::Absent)?;
    if owner.node == *by {
        Ok(owner)
    } else {
        Err(Refusal::NotOwner(owner.node.clone()))
    }
}

fn paused(owner: &Owner) -> Result<&Owner, Refusal> {
    match owner.state {
        OwnerState::Paused => Ok(owner),
        OwnerState::Running => Err(Refusal::Running),
    }
}

fn unoffered(owner: &Owner) -> Result<&Owner, Refusal> {
    match &owner.offered_to {
        None => Ok(owner),
        Some(to) => Err(Refusal::Offered(to.clone())),
    }
}

fn next(by: &NodeId, owner: &Owner, state: OwnerState) -> Owner {
    Owner {
        node: by.clone(),
        epoch: owner.epoch + 1,
        state,
        offered_to: None,
    }
}

fn reassert(
    by: &NodeId,
    now: Option<&Owner>,
    epoch: u64,
    state: OwnerState,
) -> Result<Owner, Refusal> {
    let found = now.map_or(0, |owner| owner.epoch);
    match now {
        Some(owner) if owner.node != *by && owner.beats(epoch, state) => Err(Refusal::Superseded {
            node: owner.node.clone(),
            epoch: owner.epoch,
        }),
        _ => Ok(Owner {
            node: by.clone(),
            epoch: found.max(epoch) + 1,
            state,
            offered_to: None,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(name: &str) -> NodeId {
        name.parse().unwrap()
    }

    fn owner(name: &str, epoch: u64, state: OwnerState) -> Owner {
        Owner {
            node: node(name),
            epoch,
            state,
            offered_to: None,
        }
    }

    #[test]
    fn only_a_paused_sandbox_is_taken_and_only_with_consent_or_after_a_loss() {
        let b = node("b");
        let paused = owner("a", 3, OwnerState::Paused);
        let running = owner("a", 3, OwnerState::Running);
        let offered = Owner {
            offered_to: Some(b.clone()),
            ..paused.clone()
        };
        let taken = Ok(Some(owner("b", 4, OwnerState::Paused)));
        let take = |now: Option<&Owner>, lives| OwnerChange::Take.apply(&b, now, lives);
        assert_eq!(
            take(Some(&paused), true),
            Err(Refusal::OwnerLives(node("a")))
        );
        assert_eq!(take(Some(&paused), false), taken);
        assert_eq!(take(Some(&offered), true), taken);
        assert_eq!(take(Some(&running), false), Err(Refusal::Running));
        assert_eq!(take(None, false), Err(Refusal::Absent));
        let third = OwnerChange::Take.apply(&node("c"), Some(&offered), true);
        assert_eq!(third, Err(Refusal::OwnerLives(node("a"))));
    }

    #[test]
    fn an_owner_does_not_start_what_it_has_offered() {
        let a = node("a");
        let paused = owner("a", 3, OwnerState::Paused);
        let offer = OwnerChange::Offer(node("b"));
        let offered = offer.apply(&a, Some(&paused), true).unwrap().unwrap();
        let start = OwnerChange::Start.apply(&a, Some(&offered), true);
        assert_eq!(start, Err(Refusal::Offered(node("b"))));
        let back = OwnerChange::Withdraw.apply(&a, Some(&offered), true);
        assert_eq!(back, Ok(Some(owner("a", 4, OwnerState::Paused))));
        let started = OwnerChange::Start.apply(&a, Some(&paused), true);
        assert_eq!(started, Ok(Some(owner("a", 4, OwnerState::Running))));
        let other = OwnerChange::Start.apply(&node("b"), Some(&paused), true);
        assert_eq!(other, Err(Refusal::NotOwner(a)));
    }

    #[test]
    fn a_record_from_an_older_history_does_not_stop_a_running_sandbox() {
        let (b, old) = (node("b"), owner("a", 3, OwnerState::Paused));
        let reassert =
            |epoch, state| OwnerChange::Reassert { epoch, state }.apply(&b, Some(&old), true);
        let again = Ok(Some(owner("b", 4, OwnerState::Running)));
        assert_eq!(reassert(3, OwnerState::Running), again);
        assert!(reassert(3, OwnerState::Paused).is_err());
        assert!(reassert(2, OwnerState::Running).is_err());
        let stamp = Stamp { node: b, epoch: 4 };
        let permits = |by: &Owner| Stamp::permits(Some(&stamp), by);
        assert!(!permits(&old));
        assert!(!permits(&owner("a", 4, OwnerState::Paused)));
        assert!(permits(&owner("b", 4, OwnerState::Paused)));
        assert!(permits(&owner("a", 5, OwnerState::Paused)));
    }
}
