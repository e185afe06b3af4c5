//! The note that a node keeps about a sandbox that other nodes may own.

use std::sync::Arc;

use cluster::{NodeId, Owned, Owner, OwnerState, Stamp};
use pool::{Claim, Hold, Sandbox, UnixMs};
use serde::{Deserialize, Serialize};

const FORMAT: u32 = 1;

/// The text of a claim.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Noted {
    pub(super) format: u32,
    /// The record as this node last wrote or read it, and its revision. `None`: a first record may have been written.
    pub(super) owner: Option<Owner>,
    pub(super) revision: u64,
    /// Stamp of the files.
    pub(super) stamp: Option<Stamp>,
    pub(super) step: Step,
    /// The deadline of a sandbox that was running before it was paused for the move. It is resumed at the target.
    pub(super) wake: Option<UnixMs>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Step {
    Held,
    /// About to be offered. Nothing is certain without reading the record.
    Sharing,
    Offered {
        to: NodeId,
    },
}

impl Step {
    pub(super) fn is_offered(&self) -> bool {
        matches!(self, Self::Offered { .. })
    }
}

impl Noted {
    pub(super) fn sharing() -> Self {
        Self {
            format: FORMAT,
            owner: None,
            revision: 0,
            stamp: None,
            step: Step::Sharing,
            wake: None,
        }
    }

    /// A claim according to the record, which names this node as owner.
    pub(super) fn held(owned: &Owned, stamp: Option<Stamp>, wake: Option<UnixMs>) -> Self {
        Self {
            format: FORMAT,
            owner: Some(owned.owner.clone()),
            revision: owned.revision,
            stamp,
            step: Step::Held,
            wake,
        }
    }

    /// `None` if the sandbox has no claim, or one that this release cannot read.
    pub(super) fn of(sandbox: &Sandbox) -> Option<Self> {
        let claim = sandbox.claim.as_ref()?;
        let noted: Self = serde_json::from_str(&claim.text).ok()?;
        (noted.format == FORMAT).then_some(noted)
    }

    pub(super) fn claim(&self, hold: Hold) -> Claim {
        // A struct of strings and numbers always serializes.
        let text = serde_json::to_string(self).unwrap_or_default();
        Claim {
            hold,
            text: Arc::from(text),
        }
    }

    /// Whether the record of another node supersedes this claim.
    pub(super) fn is_beaten(&self, by: &Owner, state: OwnerState) -> bool {
        let owner = self.owner.as_ref();
        owner.is_some_and(|owner| owner.node != by.node && by.beats(owner.epoch, state))
    }

    /// Whether this node took the sandbox in this epoch of the offer or later. False for older files that it has not
    /// removed yet.
    pub(super) fn is_taken(&self, this: &NodeId, offered: u64) -> bool {
        let owner = self.owner.as_ref();
        self.step == Step::Held
            && owner.is_some_and(|owner| owner.node == *this && owner.epoch > offered)
    }

    pub(super) fn owned(&self) -> Option<Owned> {
        let owner = self.owner.clone()?;
        let revision = self.revision;
        Some(Owned { owner, revision })
    }
}

/// The stamp of files used under this record.
pub(super) fn stamp(owner: &Owner) -> Stamp {
    Stamp {
        node: owner.node.clone(),
        epoch: owner.epoch,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noted(step: Step, node: &str, epoch: u64) -> Noted {
        Noted {
            owner: Some(Owner {
                node: node.parse().unwrap(),
                epoch,
                state: OwnerState::Paused,
                offered_to: None,
            }),
            step,
            ..Noted::sharing()
        }
    }

    #[test]
    fn files_of_before_an_offer_are_not_taken() {
        let b: NodeId = "b".parse().unwrap();
        let offered = Step::Offered {
            to: "a".parse().unwrap(),
        };
        for (noted, expected) in [
            (noted(Step::Held, "b", 5), true),
            (noted(Step::Held, "b", 4), false),
            (noted(Step::Held, "a", 5), false),
            (noted(Step::Sharing, "b", 5), false),
            (noted(offered, "b", 5), false),
            (Noted::sharing(), false),
        ] {
            assert_eq!(noted.is_taken(&b, 4), expected, "{noted:?}");
        }
    }

    #[test]
    fn only_a_later_record_of_another_node_ends_what_this_node_has() {
        let by = |node, epoch| noted(Step::Held, node, epoch).owner.unwrap();
        let held = noted(Step::Sharing, "b", 4);
        assert!(held.is_beaten(&by("a", 5), OwnerState::Paused));
        assert!(!held.is_beaten(&by("b", 5), OwnerState::Paused));
        assert!(!held.is_beaten(&by("a", 3), OwnerState::Paused));
        assert!(!Noted::sharing().is_beaten(&by("a", 5), OwnerState::Paused));
    }
}
