//! The cluster's note about a sandbox, stored as the text of its claim.

use std::sync::Arc;

use cluster::OwnerNote;
use pool::{Claim, Hold, Sandbox};

/// `None` if the sandbox has no claim, or one that this release cannot read.
pub(super) fn noted(sandbox: &Sandbox) -> Option<OwnerNote> {
    let claim = sandbox.claim.as_ref()?;
    OwnerNote::parse(&claim.text)
}

pub(super) fn claim(note: &OwnerNote, hold: Hold) -> Claim {
    let text = Arc::from(note.text());
    Claim { hold, text }
}
