//! The note that a node keeps about a sandbox that other nodes may own, and the decisions of that node.

use serde::{Deserialize, Serialize};

use crate::{NodeId, Owned, Owner, OwnerChange, OwnerState, Stamp};

const FORMAT: u32 = 1;

/// Stored with the sandbox, durably, before the step that it announces.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnerNote {
    format: u32,
    /// The record as this node last wrote or read it, and its revision. `None`: a first record may have been written.
    pub owner: Option<Owner>,
    pub revision: u64,
    /// Stamp of the files.
    pub stamp: Option<Stamp>,
    pub step: NoteStep,
    /// The deadline, in Unix milliseconds, of a sandbox that was running before it was paused for the move. It is
    /// resumed at the target.
    pub wake: Option<u64>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NoteStep {
    Held,
    /// About to be offered. Nothing is certain without reading the record.
    Sharing,
    Offered {
        to: NodeId,
    },
}

/// Why a node must leave a sandbox as it is.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MoveHalt {
    #[error("another node has the sandbox")]
    Superseded,
    #[error("the outcome of the offer to node {0} is still unknown")]
    Unsettled(NodeId),
    #[error("etcd lost a newer owner record of the sandbox")]
    Stale,
}

/// The way to a record of a wanted state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RecordStep {
    /// The record has this state.
    Done(Owned),
    /// Make this change, then read the record again.
    Change(OwnerChange),
}

/// How a node ends the preparations for an offer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UndoStep {
    /// The offer was made nevertheless: note it. Its outcome decides.
    Offered { owned: Owned, to: NodeId },
    /// The record names this node: note that it holds the sandbox.
    Hold(Owned),
    /// Nothing was shared: remove the note.
    Forget,
    /// etcd lost the record: make this change, then hold the sandbox.
    Reassert(OwnerChange),
    /// This other node has a later record: remove the sandbox.
    Discard(NodeId),
}

/// The response to a paused sandbox whose record is missing or names another node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReclaimStep {
    Keep,
    /// Make this change, then hold the sandbox.
    Reassert(OwnerChange),
    /// This other node has a later record: remove the sandbox.
    Discard(NodeId),
}

/// The outstanding work for a sandbox. Decided by a view, so each step reads the record before it changes anything.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TendStep {
    Nothing,
    /// Settle the offer ([`crate::giver`]).
    Settle,
    /// Undo the preparations for an offer ([`OwnerNote::undo`]).
    Undo,
    /// Resume the sandbox, with this deadline.
    Resume(u64),
    /// The sandbox has been resumed: remove the deadline from the note.
    Resumed,
    /// Record that the sandbox is paused ([`OwnerNote::record`]).
    RecordPaused,
    /// This other node has a later record: remove the sandbox.
    Discard(NodeId),
    /// Read the record, which may be missing or name another node ([`OwnerNote::reclaim`]).
    Reclaim,
}

impl OwnerNote {
    #[must_use]
    pub fn sharing() -> Self {
        Self {
            format: FORMAT,
            owner: None,
            revision: 0,
            stamp: None,
            step: NoteStep::Sharing,
            wake: None,
        }
    }

    /// A note according to the record, which names this node as owner.
    #[must_use]
    pub fn held(owned: &Owned, stamp: Option<Stamp>, wake: Option<u64>) -> Self {
        Self {
            format: FORMAT,
            owner: Some(owned.owner.clone()),
            revision: owned.revision,
            stamp,
            step: NoteStep::Held,
            wake,
        }
    }

    /// The note of an offer of this record. It is durable before the offer is made.
    #[must_use]
    pub fn offered(&self, owned: &Owned, to: &NodeId) -> Self {
        Self {
            owner: Some(Owner {
                offered_to: Some(to.clone()),
                ..owned.owner.clone()
            }),
            revision: owned.revision,
            step: NoteStep::Offered { to: to.clone() },
            ..self.clone()
        }
    }

    /// `None` if this release cannot read the note.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let note: Self = serde_json::from_str(text).ok()?;
        (note.format == FORMAT).then_some(note)
    }

    #[must_use]
    pub fn text(&self) -> String {
        // A struct of strings and numbers always serializes.
        serde_json::to_string(self).unwrap_or_default()
    }

    #[must_use]
    pub fn owned(&self) -> Option<Owned> {
        let owner = self.owner.clone()?;
        let revision = self.revision;
        Some(Owned { owner, revision })
    }

    #[must_use]
    pub fn is_offered(&self) -> bool {
        matches!(self.step, NoteStep::Offered { .. })
    }

    /// Whether this node took the sandbox in this epoch of the offer or later. False for older files that it has not
    /// removed yet.
    #[must_use]
    pub fn is_taken(&self, this: &NodeId, offered: u64) -> bool {
        let owner = self.owner.as_ref();
        self.step == NoteStep::Held
            && owner.is_some_and(|owner| owner.node == *this && owner.epoch > offered)
    }

    /// Whether the record of another node supersedes this note.
    fn is_beaten(&self, by: &Owner, state: OwnerState) -> bool {
        let owner = self.owner.as_ref();
        owner.is_some_and(|owner| owner.node != by.node && by.beats(owner.epoch, state))
    }

    /// Restores the noted record, which etcd has lost.
    fn reassert(&self, owner: &Owner, state: OwnerState) -> Result<OwnerChange, MoveHalt> {
        let epoch = owner.epoch;
        if Stamp::permits(self.stamp.as_ref(), owner) {
            Ok(OwnerChange::Reassert { epoch, state })
        } else {
            Err(MoveHalt::Stale)
        }
    }

    /// Creates or changes the record of a paused sandbox of this node until it has the wanted state. `found` is a
    /// linearizable read.
    ///
    /// # Errors
    /// Returns [`MoveHalt`] if the sandbox, or the decision about it, may belong to another node.
    pub fn record(
        &self,
        this: &NodeId,
        wanted: OwnerState,
        found: Option<&Owned>,
    ) -> Result<RecordStep, MoveHalt> {
        let change = match (found, &self.owner) {
            (None, None) => OwnerChange::Share,
            (None, Some(owner)) => self.reassert(owner, OwnerState::Paused)?,
            (Some(found), _) if found.owner.node != *this => return Err(MoveHalt::Superseded),
            (Some(found), _) => match (&found.owner.offered_to, found.owner.state) {
                (Some(to), _) => return Err(MoveHalt::Unsettled(to.clone())),
                (None, state) if state == wanted => return Ok(RecordStep::Done(found.clone())),
                (None, OwnerState::Running) => OwnerChange::Pause,
                (None, OwnerState::Paused) => OwnerChange::Start,
            },
        };
        Ok(RecordStep::Change(change))
    }

    /// Ends the preparations for an offer of a sandbox in this state. `found` is a linearizable read.
    ///
    /// # Errors
    /// Returns [`MoveHalt`] if the sandbox may belong to another node.
    pub fn undo(
        &self,
        this: &NodeId,
        state: OwnerState,
        found: Option<Owned>,
    ) -> Result<UndoStep, MoveHalt> {
        match (found, &self.owner) {
            (Some(owned), _) if owned.owner.node == *this => {
                Ok(match owned.owner.offered_to.clone() {
                    Some(to) => UndoStep::Offered { owned, to },
                    None => UndoStep::Hold(owned),
                })
            }
            (Some(owned), _) if self.is_beaten(&owned.owner, OwnerState::Paused) => {
                Ok(UndoStep::Discard(owned.owner.node))
            }
            (Some(_), _) => Err(MoveHalt::Superseded),
            (None, None) => Ok(UndoStep::Forget),
            (None, Some(owner)) => self.reassert(owner, state).map(UndoStep::Reassert),
        }
    }

    /// Decides about a paused sandbox that this node holds. `found` is a linearizable read.
    ///
    /// # Errors
    /// Returns [`MoveHalt::Stale`] if another node may have run the sandbox since.
    pub fn reclaim(&self, this: &NodeId, found: Option<&Owner>) -> Result<ReclaimStep, MoveHalt> {
        let Some(owner) = &self.owner else {
            return Ok(ReclaimStep::Keep);
        };
        match found {
            Some(found) if found.node == *this => Ok(ReclaimStep::Keep),
            Some(found) if found.beats(owner.epoch, OwnerState::Paused) => {
                Ok(ReclaimStep::Discard(found.node.clone()))
            }
            Some(_) | None => {
                let change = self.reassert(owner, OwnerState::Paused)?;
                Ok(ReclaimStep::Reassert(change))
            }
        }
    }

    /// The outstanding work for a sandbox in this state. `seen` is its record in this node's view.
    #[must_use]
    pub fn tend(&self, this: &NodeId, state: OwnerState, seen: Option<&Owner>) -> TendStep {
        match self.step {
            NoteStep::Offered { .. } => return TendStep::Settle,
            NoteStep::Sharing => return TendStep::Undo,
            NoteStep::Held => {}
        }
        match (self.wake, state) {
            (Some(end_at), OwnerState::Paused) => return TendStep::Resume(end_at),
            (Some(_), OwnerState::Running) => return TendStep::Resumed,
            (None, _) => {}
        }
        match (seen, state) {
            // An offer that seemed to have failed was made nevertheless.
            (Some(seen), _) if seen.node == *this && seen.offered_to.is_some() => TendStep::Undo,
            (Some(seen), _) if seen.node == *this => match (state, seen.state) {
                (OwnerState::Paused, OwnerState::Running) => TendStep::RecordPaused,
                _ => TendStep::Nothing,
            },
            (Some(_) | None, OwnerState::Paused) => TendStep::Reclaim,
            // The event may have been missed.
            (Some(seen), OwnerState::Running) if self.is_beaten(seen, OwnerState::Running) => {
                TendStep::Discard(seen.node.clone())
            }
            // The cluster's task decides about running sandboxes.
            (Some(_) | None, OwnerState::Running) => TendStep::Nothing,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owner(node: &str, epoch: u64) -> Owner {
        Owner {
            node: node.parse().unwrap(),
            epoch,
            state: OwnerState::Paused,
            offered_to: None,
        }
    }

    fn owned(owner: Owner) -> Owned {
        Owned { owner, revision: 1 }
    }

    fn note(step: NoteStep, node: &str, epoch: u64) -> OwnerNote {
        OwnerNote {
            owner: Some(owner(node, epoch)),
            step,
            ..OwnerNote::sharing()
        }
    }

    fn offered() -> NoteStep {
        NoteStep::Offered {
            to: "a".parse().unwrap(),
        }
    }

    #[test]
    fn files_of_before_an_offer_are_not_taken() {
        let b: NodeId = "b".parse().unwrap();
        for (note, expected) in [
            (note(NoteStep::Held, "b", 5), true),
            (note(NoteStep::Held, "b", 4), false),
            (note(NoteStep::Held, "a", 5), false),
            (note(NoteStep::Sharing, "b", 5), false),
            (note(offered(), "b", 5), false),
            (OwnerNote::sharing(), false),
        ] {
            assert_eq!(note.is_taken(&b, 4), expected, "{note:?}");
        }
    }

    #[test]
    fn only_a_later_record_of_another_node_ends_what_this_node_has() {
        let held = note(NoteStep::Sharing, "b", 4);
        assert!(held.is_beaten(&owner("a", 5), OwnerState::Paused));
        assert!(!held.is_beaten(&owner("b", 5), OwnerState::Paused));
        assert!(!held.is_beaten(&owner("a", 3), OwnerState::Paused));
        assert!(!OwnerNote::sharing().is_beaten(&owner("a", 5), OwnerState::Paused));
    }

    #[test]
    fn a_record_is_changed_step_by_step_and_only_by_its_node() {
        use OwnerState::{Paused, Running};
        let b: NodeId = "b".parse().unwrap();
        let held = note(NoteStep::Held, "b", 4);
        let stale = OwnerNote {
            stamp: Some(Stamp {
                node: "a".parse().unwrap(),
                epoch: 5,
            }),
            ..held.clone()
        };
        let running = Owner {
            state: Running,
            ..owner("b", 4)
        };
        let offered = Owner {
            offered_to: Some("a".parse().unwrap()),
            ..owner("b", 4)
        };
        let reassert = OwnerChange::Reassert {
            epoch: 4,
            state: Paused,
        };
        let change = |change| Ok(RecordStep::Change(change));
        for (note, wanted, found, expected) in [
            (
                &OwnerNote::sharing(),
                Paused,
                None,
                change(OwnerChange::Share),
            ),
            (&held, Running, None, change(reassert)),
            (&stale, Running, None, Err(MoveHalt::Stale)),
            (
                &held,
                Paused,
                Some(owner("b", 4)),
                Ok(RecordStep::Done(owned(owner("b", 4)))),
            ),
            (
                &held,
                Running,
                Some(owner("b", 4)),
                change(OwnerChange::Start),
            ),
            (&held, Paused, Some(running), change(OwnerChange::Pause)),
            (
                &held,
                Paused,
                Some(owner("a", 5)),
                Err(MoveHalt::Superseded),
            ),
            (
                &held,
                Paused,
                Some(offered),
                Err(MoveHalt::Unsettled("a".parse().unwrap())),
            ),
        ] {
            let step = note.record(&b, wanted, found.clone().map(owned).as_ref());
            assert_eq!(step, expected, "{note:?} {wanted:?} {found:?}");
        }
    }

    #[test]
    fn a_sandbox_is_resumed_only_after_its_offer_is_settled() {
        use OwnerState::{Paused, Running};
        let b: NodeId = "b".parse().unwrap();
        let woken = |step| OwnerNote {
            wake: Some(7),
            ..note(step, "b", 4)
        };
        let held = || note(NoteStep::Held, "b", 4);
        let running = Owner {
            state: Running,
            ..owner("b", 4)
        };
        for (note, state, seen, expected) in [
            (
                woken(offered()),
                Paused,
                Some(owner("b", 5)),
                TendStep::Settle,
            ),
            (woken(NoteStep::Sharing), Paused, None, TendStep::Undo),
            (
                woken(NoteStep::Held),
                Paused,
                Some(owner("b", 4)),
                TendStep::Resume(7),
            ),
            (
                woken(NoteStep::Held),
                Running,
                Some(running.clone()),
                TendStep::Resumed,
            ),
            (
                held(),
                Paused,
                Some(running.clone()),
                TendStep::RecordPaused,
            ),
            (held(), Running, Some(running), TendStep::Nothing),
            (held(), Paused, Some(owner("a", 5)), TendStep::Reclaim),
            (held(), Paused, None, TendStep::Reclaim),
            (
                held(),
                Running,
                Some(owner("a", 5)),
                TendStep::Discard("a".parse().unwrap()),
            ),
            (held(), Running, Some(owner("a", 4)), TendStep::Nothing),
            (held(), Running, None, TendStep::Nothing),
        ] {
            assert_eq!(
                note.tend(&b, state, seen.as_ref()),
                expected,
                "{note:?} {state:?} {seen:?}"
            );
        }
    }
}
