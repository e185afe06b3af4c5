//! The note next to the files of a sandbox that is moving to a node, and the decisions of that node.

use serde::{Deserialize, Serialize};

use crate::{NodeId, Owned, Owner, OwnerError, Stamp};

/// Stored next to incoming files, durably, before the step that it announces. `N` is what the files need on this node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IncomingNote<N> {
    pub from: NodeId,
    /// The epoch of the offer.
    pub epoch: u64,
    pub stamp: Option<Stamp>,
    /// The sandbox is resumed here, with this deadline in Unix milliseconds.
    pub wake: Option<u64>,
    /// `None` if an older release wrote the note.
    #[serde(default = "Option::default")]
    pub needs: Option<N>,
    /// A take has been sent, and its outcome may be unknown.
    pub is_taking: bool,
}

/// The next step of a node whose files have arrived.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TakeStep {
    /// This node owns the sandbox: hold it.
    Hold(Owned),
    /// Check the files, note that a take is sent, then apply [`crate::OwnerChange::Take`] to this record.
    Take(Owned),
    /// The offer is not in force.
    Stop,
}

/// The conclusion from the record about files that have arrived.
#[derive(Debug, PartialEq, Eq)]
pub enum TakeOutcome {
    /// This node owns the sandbox.
    Taken(Owned),
    /// A take may have been made, or may still be.
    Open,
    /// Nothing was taken, and nothing will be: remove the files.
    Nothing,
    /// Like `Nothing`, because no take was sent.
    Failed(OwnerError),
}

impl<N> IncomingNote<N> {
    /// Whether the record has the noted offer. A take can be in progress only under that one.
    #[must_use]
    pub fn is_offered(&self, this: &NodeId, owner: &Owner) -> bool {
        owner.offered_to.as_ref() == Some(this)
            && owner.node == self.from
            && owner.epoch == self.epoch
    }

    /// Decides about the take. `found` is a linearizable read.
    #[must_use]
    pub fn take(&self, this: &NodeId, found: Option<Owned>) -> TakeStep {
        match found {
            Some(owned) if owned.owner.node == *this => TakeStep::Hold(owned),
            Some(owned)
                if self.is_offered(this, &owned.owner)
                    && Stamp::permits(self.stamp.as_ref(), &owned.owner) =>
            {
                TakeStep::Take(owned)
            }
            Some(_) | None => TakeStep::Stop,
        }
    }

    /// Decides after the last attempt, or after [`TakeStep::Stop`]. Only a read proves that nothing was taken and nothing
    /// will be.
    #[must_use]
    pub fn outcome(&self, this: &NodeId, found: Result<Option<Owned>, OwnerError>) -> TakeOutcome {
        match found {
            Ok(Some(owned)) if owned.owner.node == *this => TakeOutcome::Taken(owned),
            Ok(Some(owned)) if self.is_taking && self.is_offered(this, &owned.owner) => {
                TakeOutcome::Open
            }
            Ok(Some(_) | None) => TakeOutcome::Nothing,
            Err(_) if self.is_taking => TakeOutcome::Open,
            Err(why) => TakeOutcome::Failed(why),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::OwnerState;

    fn note(from: &str, epoch: u64, is_taking: bool) -> IncomingNote<()> {
        IncomingNote {
            from: from.parse().unwrap(),
            epoch,
            stamp: None,
            wake: None,
            needs: None,
            is_taking,
        }
    }

    #[test]
    fn only_the_noted_offer_keeps_the_outcome_of_a_take_open() {
        let this: NodeId = "b".parse().unwrap();
        let owned = |node: &str, epoch, offered_to: Option<&str>| Owned {
            owner: Owner {
                node: node.parse().unwrap(),
                epoch,
                state: OwnerState::Paused,
                offered_to: offered_to.map(|to| to.parse().unwrap()),
            },
            revision: 1,
        };
        let outcome = |found: &Owned, is_taking| {
            note("a", 4, is_taking).outcome(&this, Ok(Some(found.clone())))
        };
        let offered = owned("a", 4, Some("b"));
        assert_eq!(outcome(&offered, true), TakeOutcome::Open);
        assert_eq!(outcome(&offered, false), TakeOutcome::Nothing);
        for other in [
            // A later offer: the note reappeared after a power loss.
            owned("a", 5, Some("b")),
            owned("c", 4, Some("b")),
            owned("a", 4, Some("c")),
            owned("a", 5, None),
        ] {
            assert_eq!(outcome(&other, true), TakeOutcome::Nothing, "{other:?}");
        }
        let taken = owned("b", 5, None);
        assert_eq!(outcome(&taken, true), TakeOutcome::Taken(taken.clone()));
        let read = |found, is_taking| note("a", 4, is_taking).outcome(&this, found);
        assert_eq!(read(Ok(None), true), TakeOutcome::Nothing);
        let failed = OwnerError::Unavailable;
        assert_eq!(read(Err(failed.clone()), true), TakeOutcome::Open);
        assert_eq!(
            read(Err(failed.clone()), false),
            TakeOutcome::Failed(failed)
        );
    }
}
