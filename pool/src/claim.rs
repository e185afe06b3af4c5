//! A caller's claim on a sandbox that other servers can have too. The pool keeps it in the sandbox's record, and does not
//! do with a paused sandbox what the claim forbids. A pause seals the sandbox.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::{
    record::shared,
    slot::{Event, Next, Refusal, Stage},
    spec::PauseMode,
    vmms::VmmId,
};

/// The claim.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Claim {
    pub hold: Hold,
    /// The caller's own text.
    #[serde(with = "shared")]
    pub text: Arc<str>,
}

/// What a claim forbids while the sandbox is paused. It forbids nothing while the sandbox runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Hold {
    Open,
    /// The sandbox is not resumed before the caller has opened it.
    Sealed,
    /// The sandbox is neither resumed, killed nor copied: another server may have it already.
    Moving,
}

/// What the files of a pause need at the server that takes them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PauseNeeds {
    /// SHA-256 of the files that the pause does not contain.
    pub base: String,
    /// Former releases have templates only.
    #[serde(default)]
    pub kind: BaseKind,
    /// Of the template. `None` without a template, and from a release that offers no files of it.
    #[serde(default)]
    pub format: Option<u32>,
    /// With a template: the sum of its kernel and initramfs, which its manifest does not name. `None`: it has none to boot
    /// from.
    #[serde(default)]
    pub boot: Option<String>,
    /// The VMM that must read them; `None` for a pause without memory.
    pub vmm: Option<VmmId>,
    pub mode: PauseMode,
}

/// What a pause does not contain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BaseKind {
    /// The template that the sandbox was made from, by its manifest: memory, layer and root image.
    #[default]
    Template,
    /// Root image, kernel and initramfs of a sandbox that has booted.
    Guest,
}

/// Whether a server that offers a paused sandbox offers the files of its base, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GivesBase {
    Yes,
    No,
}

impl Claim {
    /// Why the next step of a request is refused.
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
