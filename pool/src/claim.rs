//! A caller's claim on a sandbox that several servers can run. The pool keeps the claim in the sandbox's record, and
//! refuses operations on a paused sandbox that the claim forbids. Each pause seals the sandbox.

use std::sync::Arc;

use library::vmms::VmmId;
use serde::{Deserialize, Serialize};

use crate::{
    shared,
    slot::{Event, Next, Refusal, Stage},
    state::PauseMode,
};

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Claim {
    pub hold: Hold,
    /// Opaque text of the caller.
    #[serde(with = "shared")]
    pub text: Arc<str>,
}

/// Restrictions that a claim places on a paused sandbox. A running sandbox is not restricted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Hold {
    Open,
    /// The sandbox cannot be resumed until the caller opens it.
    Sealed,
    /// The sandbox cannot be resumed, killed or copied, because another server may already have it.
    Moving,
}

/// External files that a pause needs on the server that receives it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PauseNeeds {
    /// SHA-256 that identifies the files which the pause does not contain.
    pub base: String,
    /// Older releases have templates only.
    #[serde(default)]
    pub kind: BaseKind,
    /// Format of the template. `None` without a template, or from a release that does not serve its files.
    #[serde(default)]
    pub format: Option<u32>,
    /// With a template: the checksum of its kernel and initramfs, which its manifest does not name. `None` if it has
    /// none to boot from.
    #[serde(default)]
    pub boot: Option<String>,
    /// The VMM that must read them. `None` for a pause without memory.
    pub vmm: Option<VmmId>,
    pub mode: PauseMode,
}

/// The files that a pause does not contain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BaseKind {
    /// The template from which the sandbox was made, identified by its manifest: memory, layer and root image.
    #[default]
    Template,
    /// Root image, kernel and initramfs of a sandbox that has booted.
    Guest,
}

/// Whether a server that offers a paused sandbox also serves the files of its base.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GivesBase {
    Yes,
    No,
}

impl Claim {
    /// Returns why the claim forbids the next step of a request, if it does.
    pub(crate) fn forbids(&self, stage: Stage, next: Next) -> Option<Refusal> {
        let is_paused = matches!(stage, Stage::Paused(_));
        match (self.hold, next) {
            _ if !is_paused => None,
            (Hold::Sealed, Next::Begin(Event::QueueResume)) => Some(Refusal::Sealed),
            (Hold::Moving, Next::Begin(Event::QueueResume | Event::Kill | Event::Snapshot)) => {
                Some(Refusal::Moving)
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_claim_forbids_only_what_a_paused_sandbox_could_do_elsewhere() {
        let forbids = |hold, stage, event| {
            let text = Arc::from("");
            Claim { hold, text }.forbids(stage, Next::Begin(event))
        };
        let paused = Stage::Paused(PauseMode::Memory);
        for event in [Event::QueueResume, Event::Kill, Event::Snapshot] {
            let sealed = (event == Event::QueueResume).then_some(Refusal::Sealed);
            assert_eq!(forbids(Hold::Open, paused, event), None);
            assert_eq!(forbids(Hold::Sealed, paused, event), sealed);
            assert_eq!(forbids(Hold::Moving, paused, event), Some(Refusal::Moving));
            assert_eq!(forbids(Hold::Moving, Stage::Running, event), None);
        }
    }
}
