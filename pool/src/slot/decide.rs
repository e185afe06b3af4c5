//! Decisions on requests: each is granted, is refused, begins a change, or waits for the change under way.

use super::{Event, Slot, Stage};
use crate::{
    lifetime::{OnTimeout, UnixMs},
    state::PauseMode,
};

/// How a client resumes a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wake {
    /// Resume as it was paused. A running sandbox is left unchanged.
    Connect,
    /// Boot from the disk without the memory. Refused if the sandbox was paused with its memory. A running sandbox is
    /// left unchanged.
    ConnectColdBoot,
    /// Resume as it was paused. Refused if the sandbox runs.
    Resume {
        /// Whether the next deadline pauses the sandbox (`true`) or ends it (`false`). `None` keeps the current action.
        auto_pause: Option<bool>,
    },
    /// Combines [`Self::Resume`] and [`Self::ConnectColdBoot`].
    ResumeColdBoot { auto_pause: Option<bool> },
    /// Continue after a move to this server, with the sandbox's previous deadline. A running sandbox is left unchanged.
    GoOn { end_at: UnixMs },
}

/// An operation on a sandbox, requested by a client, by traffic or by its deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    Connect(Wake),
    /// Move the deadline.
    SetTimeout,
    /// Replace the network policy and the note.
    SetPolicy,
    Pause(PauseMode),
    /// Make a template from the running or paused sandbox.
    Snapshot,
    /// Make sandboxes that continue from the current state.
    Fork,
    /// Make a template from the running sandbox, either from its disk alone or from its whole state.
    MakeTemplate,
    Kill,
    /// Set the claim, which limits what other servers and this one may do with the sandbox.
    SetClaim,
    /// Remove the sandbox, which another server has now.
    Discard,
    /// Forward traffic to a port.
    Reach,
    /// The deadline has passed.
    Expire,
}

/// The step that the driver takes for an operation that is not refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// Perform it immediately, without a change of stage.
    Grant,
    /// Apply this event and start the change that it begins. The caller gets its response when the change has ended.
    Begin(Event),
    /// Decide again after the next event of the slot.
    Wait,
}

/// Reason why a request for a sandbox is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The sandbox is unknown or has ended. For traffic, also if its deadline has passed, or if it is paused without
    /// its memory or without auto-resume.
    #[error("was not found")]
    NotFound,
    #[error("is already paused")]
    AlreadyPaused,
    /// The request needs a running sandbox, and this one is paused.
    #[error("is paused: connect to it first")]
    NotRunning,
    #[error("is already running")]
    AlreadyRunning,
    /// A cold boot was requested of a sandbox that was paused with its memory.
    #[error("was paused with its memory, and this server resumes such a pause only from memory")]
    ColdBoot,
    /// A snapshot was requested of a sandbox that was paused without its memory.
    #[error("was paused without its memory, which a snapshot needs")]
    NoMemory,
    /// The last resume failed, and traffic may not cause another one yet.
    #[error("did not come back; traffic wakes it again in {delay_s} s")]
    BackingOff { delay_s: u64 },
    /// Its claim is sealed: see [`crate::Hold::Sealed`].
    #[error("is not resumed before its owner in the cluster is certain")]
    Sealed,
    /// See [`crate::Hold::Moving`].
    #[error("moves to another node: try again in a moment")]
    Moving,
    /// Too many requests wait for the change under way.
    #[error("has too many requests waiting")]
    Crowded,
}

/// Decides on an operation at wall-clock time `now`.
///
/// # Errors
/// Returns a [`Refusal`] if the operation cannot be performed, now or after the change under way.
pub(crate) fn decide(slot: &Slot, operation: Operation, now: UnixMs) -> Result<Next, Refusal> {
    use Operation as O;
    use Stage as S;
    let lifetime = &slot.lifetime;
    match (slot.stage, operation) {
        (S::Filling | S::Warm | S::Starting | S::Ending, _) => Err(Refusal::NotFound),

        // The deadline has passed, but a snapshot delays the end, or the automatic pause failed.
        (S::Running | S::Snapshotting, O::Reach) if lifetime.end_at <= now => {
            Err(Refusal::NotFound)
        }
        (
            S::Running | S::Snapshotting,
            O::Connect(Wake::Resume { .. } | Wake::ResumeColdBoot { .. }),
        ) => Err(Refusal::AlreadyRunning),
        // The record is written by one writer at a time.
        (S::Running | S::Snapshotting, O::SetPolicy | O::SetClaim) if slot.writing => {
            Ok(Next::Wait)
        }
        // A sandbox stays usable while a snapshot of it is written.
        (
            S::Running | S::Snapshotting,
            O::Connect(_) | O::SetTimeout | O::SetPolicy | O::SetClaim | O::Reach,
        ) => Ok(Next::Grant),
        (S::Running, O::Expire) => match lifetime.on_timeout {
            OnTimeout::End => Ok(Next::Begin(Event::Kill)),
            OnTimeout::Pause(mode) => Ok(pause(slot, mode)),
        },
        (S::Running, O::Pause(mode)) => Ok(pause(slot, mode)),
        (S::Running, O::Snapshot | O::Fork | O::MakeTemplate) => Ok(Next::Begin(Event::Snapshot)),
        // A VMM that is being adopted may be unresponsive for a long time. Ending it does not need its response.
        (S::Running | S::Paused(_) | S::Adopting, O::Kill | O::Discard) => {
            Ok(Next::Begin(Event::Kill))
        }
        // The job writes the record.
        (S::Paused(_), O::SetClaim) => Ok(Next::Begin(Event::Snapshot)),

        (
            S::Paused(PauseMode::Memory),
            O::Connect(Wake::ConnectColdBoot | Wake::ResumeColdBoot { .. }),
        ) => Err(Refusal::ColdBoot),
        (S::Paused(_), O::Connect(_)) => Ok(Next::Begin(Event::QueueResume)),
        (S::Paused(PauseMode::Memory), O::Reach) if lifetime.auto_resume => {
            match slot.backoff.delay_s(now) {
                Some(delay_s) => Err(Refusal::BackingOff { delay_s }),
                None => Ok(Next::Begin(Event::QueueResume)),
            }
        }
        (S::Paused(_), O::Reach) => Err(Refusal::NotFound),
        (S::Paused(_), O::SetTimeout | O::SetPolicy | O::Fork | O::MakeTemplate) => {
            Err(Refusal::NotRunning)
        }
        (S::Paused(_), O::Pause(_)) => Err(Refusal::AlreadyPaused),
        (S::Paused(PauseMode::Memory), O::Snapshot) => Ok(Next::Begin(Event::Snapshot)),
        (S::Paused(PauseMode::FilesystemOnly), O::Snapshot) => Err(Refusal::NoMemory),
        // A paused sandbox has no deadline.
        (S::Paused(_), O::Expire) => Ok(Next::Grant),

        (S::Pausing(mode) | S::Stopping(mode), O::Reach) => match mode {
            PauseMode::Memory if lifetime.auto_resume => Ok(Next::Wait),
            PauseMode::Memory | PauseMode::FilesystemOnly => Err(Refusal::NotFound),
        },
        (
            S::Pausing(_)
            | S::Stopping(_)
            | S::ResumeQueued(_)
            | S::Resuming(_)
            | S::Snapshotting
            | S::SnapshottingPaused(_)
            | S::Adopting
            | S::AdoptingPaused(_),
            _,
        ) => Ok(Next::Wait),
    }
}

/// Begins a pause. The pause's job writes the record, so the pause must wait for a write that is under way.
fn pause(slot: &Slot, mode: PauseMode) -> Next {
    if slot.writing {
        Next::Wait
    } else {
        Next::Begin(Event::Pause(mode))
    }
}
