//! What a node notes about a sandbox that other nodes can have.

use std::sync::Arc;

use cluster::{NodeId, Owned, Owner, Stamp};
use pool::{Claim, Hold, Sandbox, UnixMs};
use serde::{Deserialize, Serialize};

const FORMAT: u32 = 1;

/// The text of a claim.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Noted {
    pub(super) format: u32,
    /// The record as this node last wrote or read it, and its revision. `None`: a first one may have been written.
    pub(super) owner: Option<Owner>,
    pub(super) revision: u64,
    /// Of the files.
    pub(super) stamp: Option<Stamp>,
    pub(super) step: Step,
    /// The deadline of a sandbox that ran before it was paused to move: it goes on where it arrives.
    pub(super) wake: Option<UnixMs>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Step {
    Held,
    /// It is about to be offered: nothing is certain without a read of the record.
    Sharing,
    Offered {
        to: NodeId,
    },
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

    /// As the record says that this node has it.
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

    /// `None`: the sandbox has no claim, or one that this release cannot read.
    pub(super) fn of(sandbox: &Sandbox) -> Option<Self> {
        let claim = sandbox.claim.as_ref()?;
        let noted: Self = serde_json::from_str(&claim.text).ok()?;
        (noted.format == FORMAT).then_some(noted)
    }

    pub(super) fn claim(&self, hold: Hold) -> Claim {
        // A struct of texts and numbers can be written.
        let text = serde_json::to_string(self).unwrap_or_default();
        Claim {
            hold,
            text: Arc::from(text),
        }
    }

    pub(super) fn owned(&self) -> Option<Owned> {
        let owner = self.owner.clone()?;
        let revision = self.revision;
        Some(Owned { owner, revision })
    }
}

/// The stamp of files that are used under this record.
pub(super) fn stamp(owner: &Owner) -> Stamp {
    Stamp {
        node: owner.node.clone(),
        epoch: owner.epoch,
    }
}
