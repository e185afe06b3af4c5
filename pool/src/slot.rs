//! The life of a slot, and of the sandbox that it becomes, as a pure state machine.
//!
//! ```text
//!  fill ─► Filling ─► Warm ─lease─► Starting ─► Running ◄──► Snapshotting (snapshot, fork)
//!  create without a warm slot ─────────┘         │   ▲
//!                                pause, deadline │   │ VM made
//!                                                ▼   │
//!                                          Pausing   Resuming ─────────┐
//!                                 on disk    │          ▲              │ failed
//!                                            ▼          │ admitted     │
//!                                         Stopping   ResumeQueued ─────┤ refused
//!                                 VM exited  │          ▲              │
//!                                            ▼          │ connect, resume, traffic
//!                 SnapshottingPaused ◄──► Paused ───────┘              │
//!                                            ▲                         │
//!                                            └─────────────────────────┘
//!
//!  found by a new server:  Adopting ─► Running          AdoptingPaused ─► Paused
//!
//!  from every stage: kill, deadline, a failed job, the exit of the VM ─► Ending ─► removed
//! ```
//!
//! Two functions determine how a slot changes. [`decide`] takes an [`Operation`] (a client's request, traffic, or an
//! expired deadline) and grants it, refuses it, begins a change, or makes it wait for the change under way. A waiting
//! request is decided again after each event of its slot. [`transition`] applies an [`Event`] and returns the new slot
//! and the [`Effects`] that the driver must perform.
//!
//! In addition to its stage, a slot has at most one job (work on a thread or task that will report its end), at most
//! one VM process, and at most one write of its record under way. Once a slot in `Ending` has none of the three, its
//! directory and cgroup are deleted and the slot is removed. A running sandbox always has a deadline.
//!
//! What must never happen: a way back to `Warm`, two jobs on a slot, a removed slot that leaves a process or a
//! directory behind, a slot that stays in `Ending`.

mod decide;
#[cfg(test)]
mod tests;

pub(crate) use decide::{Next, Operation, decide};
pub use decide::{Refusal, Wake};

use crate::{
    lifetime::{Backoff, Lifetime, UnixMs},
    state::{PauseMode, SandboxState},
};

/// Delay in milliseconds before a failed automatic pause is tried again.
const PAUSE_AGAIN_MS: u64 = 30_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Stage {
    /// A VM is being made for the warm stock.
    Filling,
    /// A paused VM with its own identity waits for a lease. No caller has its id yet.
    Warm,
    /// The slot is being started or leased for a create or a fork, which waits for it.
    Starting,
    /// A caller has the sandbox's id.
    Running,
    /// The sandbox is being written to disk.
    Pausing(PauseMode),
    /// The sandbox is on disk. Its VM is being killed, and its exit has not been reported yet.
    Stopping(PauseMode),
    /// The sandbox is on disk only.
    Paused(PauseMode),
    /// A resume waits for memory or for a start place.
    ResumeQueued(PauseMode),
    /// A VM is being made from the files on disk.
    Resuming(PauseMode),
    /// A snapshot of the VM is being written, for a template or a fork; the VM continues afterwards.
    Snapshotting,
    /// The paused sandbox's files are being linked into a template.
    SnapshottingPaused(PauseMode),
    /// A new server has found the sandbox, with a VM that the previous server left running. Its VMM and network are
    /// being verified, or wait for verification.
    Adopting,
    /// A new server has found the sandbox on disk, together with a process of the previous server, which is being
    /// ended.
    AdoptingPaused(PauseMode),
    /// The slot is to be removed.
    Ending,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// The fill's job ended with a VM.
    Filled,
    /// A lease takes a warm slot; its job begins.
    Lease,
    /// The lease's job ended: the agent has applied the caller's settings.
    Leased,
    /// The job of a cold start ended with a VM.
    Started,
    /// A pause's job begins.
    Pause(PauseMode),
    /// The pause's job ended: everything is on disk.
    Saved,
    /// The pause's job failed, and the VM continues.
    PauseFailed,
    /// A resume was requested and is queued for its start.
    QueueResume,
    /// The resume's job begins.
    Resume,
    /// The resume's job ended with a VM.
    Resumed,
    /// The resume was refused or failed and left no VM; the files on disk are untouched.
    ResumeFailed(FailedBy),
    /// A snapshot's job begins.
    Snapshot,
    /// The snapshot's job ended, successfully or not. A running VM continues.
    SnapshotDone,
    /// The job of the adoption ended: the sandbox may be used.
    Adopted,
    /// A job failed, and the slot must end. A failed fill or cold start leaves no VM.
    Failed,
    /// The VM process exited.
    VmExited,
    Kill,
    /// A write of the record begins.
    WriteBegun,
    /// The write of the record ended, successfully or not.
    WriteDone,
    /// The directory and the cgroup were removed.
    Cleaned,
}

/// The cause of a failed resume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FailedBy {
    /// The sandbox's guest or files. Such failures count towards the back-off.
    Sandbox,
    /// The host: it has no room, or the server is stopping.
    Host,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Slot {
    pub(crate) stage: Stage,
    /// A job will report its end.
    pub(crate) job: bool,
    /// A VM process exists that has not been reaped.
    pub(crate) vm: bool,
    /// A write of the record is under way.
    pub(crate) writing: bool,
    /// The cleaning job runs; only in [`Stage::Ending`].
    pub(crate) cleaning: bool,
    /// Set when the slot gets its sandbox.
    pub(crate) lifetime: Lifetime,
    /// After an automatic pause has failed: the time of the next attempt. Zero otherwise.
    pause_again_at: UnixMs,
    backoff: Backoff,
}

/// Actions that the driver must perform after a transition.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Effects {
    pub(crate) kill_vm: bool,
    /// Start the cleaning job.
    pub(crate) clean: bool,
    /// Drop the slot, which has no process, directory or cgroup left.
    pub(crate) remove: bool,
}

/// An event that the slot's stage does not accept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Unexpected;

impl Slot {
    /// A new slot. In stages with a job, the job has begun.
    pub(crate) fn new(stage: Stage) -> Self {
        Self {
            stage,
            job: matches!(
                stage,
                Stage::Filling | Stage::Starting | Stage::Adopting | Stage::AdoptingPaused(_)
            ),
            vm: false,
            writing: false,
            cleaning: false,
            lifetime: Lifetime::default(),
            pause_again_at: 0,
            backoff: Backoff::default(),
        }
    }

    /// A slot found in the state directory when the pool opened: with a VM that must be adopted, or paused.
    pub(crate) fn recovered(stage: Stage, lifetime: Lifetime) -> Self {
        Self {
            vm: stage == Stage::Adopting,
            lifetime,
            ..Self::new(stage)
        }
    }

    /// Whether the slot is a sandbox whose id a caller has.
    pub(crate) fn is_leased(&self) -> bool {
        self.state().is_some()
    }

    /// The state that clients see: while a pause or resume is under way, the old state. `None` if no caller has the
    /// slot's id, or the slot is ending.
    pub(crate) fn state(&self) -> Option<SandboxState> {
        match self.stage {
            Stage::Filling | Stage::Warm | Stage::Starting | Stage::Ending => None,
            Stage::Running
            | Stage::Pausing(_)
            | Stage::Stopping(_)
            | Stage::Snapshotting
            | Stage::Adopting => Some(SandboxState::Running),
            Stage::Paused(mode)
            | Stage::AdoptingPaused(mode)
            | Stage::ResumeQueued(mode)
            | Stage::Resuming(mode)
            | Stage::SnapshottingPaused(mode) => Some(SandboxState::Paused(mode)),
        }
    }

    /// Whether clients see a paused sandbox.
    pub(crate) fn is_paused(&self) -> bool {
        matches!(self.state(), Some(SandboxState::Paused(_)))
    }

    /// Whether the sandbox is on disk or is being written there to stay. A sandbox that is being resumed still counts.
    pub(crate) fn is_saved(&self) -> bool {
        match self.stage {
            Stage::Pausing(_)
            | Stage::Stopping(_)
            | Stage::Paused(_)
            | Stage::ResumeQueued(_)
            | Stage::Resuming(_)
            | Stage::SnapshottingPaused(_)
            | Stage::AdoptingPaused(_) => true,
            Stage::Filling
            | Stage::Warm
            | Stage::Starting
            | Stage::Running
            | Stage::Snapshotting
            | Stage::Adopting
            | Stage::Ending => false,
        }
    }

    /// Whether the slot has, or is about to have, a VM, which takes host memory.
    pub(crate) fn takes_memory(&self) -> bool {
        match self.stage {
            Stage::Paused(_)
            | Stage::ResumeQueued(_)
            | Stage::SnapshottingPaused(_)
            | Stage::AdoptingPaused(_) => false,
            Stage::Ending => self.vm || self.job,
            Stage::Filling
            | Stage::Warm
            | Stage::Starting
            | Stage::Running
            | Stage::Pausing(_)
            | Stage::Stopping(_)
            | Stage::Resuming(_)
            | Stage::Snapshotting
            | Stage::Adopting => true,
        }
    }

    /// Whether the slot is running or paused with nothing under way.
    pub(crate) fn is_settled(&self) -> bool {
        matches!(self.stage, Stage::Running | Stage::Paused(_)) && !self.job && !self.writing
    }

    /// Time of the next action at the deadline. `None` unless the sandbox runs with nothing under way.
    pub(crate) fn due(&self) -> Option<UnixMs> {
        let is_armed = self.stage == Stage::Running && !self.writing;
        is_armed.then(|| self.lifetime.end_at.max(self.pause_again_at))
    }

    /// Sets the deadline to `timeout_s` seconds from `now`.
    pub(crate) fn set_deadline(&mut self, now: UnixMs, timeout_s: u32) {
        self.lifetime.set(now, timeout_s);
        self.pause_again_at = 0;
    }

    /// Moves the deadline to `timeout_s` seconds from `now`, at most to `until`, if the current deadline is earlier.
    pub(crate) fn renew_deadline(&mut self, now: UnixMs, timeout_s: u32, until: UnixMs) -> bool {
        let end_at = now.saturating_add(u64::from(timeout_s) * 1000).min(until);
        let is_later = end_at > self.lifetime.end_at;
        if is_later {
            self.lifetime.end_at = end_at;
            self.pause_again_at = 0;
        }
        is_later
    }

    /// Like [`Slot::set_deadline`], but keeps a current deadline that is not earlier. Returns whether the deadline
    /// changed.
    pub(crate) fn extend_deadline(&mut self, now: UnixMs, timeout_s: u32) -> bool {
        let mut later = *self;
        later.set_deadline(now, timeout_s);
        let is_later = later.lifetime.end_at > self.lifetime.end_at;
        if is_later {
            *self = later;
        }
        is_later
    }

    /// Moves the deadline and the times of next attempts by the step of the wall clock.
    pub(crate) fn clock_was_set(&mut self, step_ms: i64) {
        // For a sandbox on disk, the deadline is the time of its pause.
        if !self.is_saved() || matches!(self.stage, Stage::Pausing(_)) {
            self.lifetime.end_at = self.lifetime.end_at.saturating_add_signed(step_ms);
        }
        if self.pause_again_at > 0 {
            self.pause_again_at = self.pause_again_at.saturating_add_signed(step_ms);
        }
        self.backoff.clock_was_set(step_ms);
    }

    /// Delays the next automatic pause after a pause that failed or was refused. Has no effect before the deadline.
    pub(crate) fn postpone_pause(&mut self, now: UnixMs) {
        if self.lifetime.end_at <= now {
            self.pause_again_at = now + PAUSE_AGAIN_MS;
        }
    }
}

/// Applies an event at wall-clock time `now`.
///
/// # Errors
/// Returns [`Unexpected`] if the slot's stage does not accept the event.
pub(crate) fn transition(
    slot: Slot,
    event: Event,
    now: UnixMs,
) -> Result<(Slot, Effects), Unexpected> {
    let mut next = advance(slot, event, now)?;
    if event == Event::Cleaned {
        let effects = Effects {
            remove: true,
            ..Effects::default()
        };
        return Ok((next, effects));
    }
    let ends = next.stage == Stage::Ending;
    let clean = ends && !next.job && !next.vm && !next.writing && !next.cleaning;
    next.cleaning |= clean;
    // A write under way could put the record back after the kill has removed it, so the kill waits for the write.
    let kill_vm = next.vm && (ends && !next.writing || matches!(next.stage, Stage::Stopping(_)));
    check_invariants(next);
    let effects = Effects {
        kill_vm,
        clean,
        remove: false,
    };
    Ok((next, effects))
}

fn advance(slot: Slot, event: Event, now: UnixMs) -> Result<Slot, Unexpected> {
    use Event as E;
    use Stage as S;
    let mut next = slot;
    match (slot.stage, event) {
        (S::Running | S::Snapshotting, E::WriteBegun) if !slot.writing => next.writing = true,
        (_, E::WriteDone) if slot.writing => next.writing = false,

        (S::Filling, E::Filled) => next = ended(slot, S::Warm, true),
        (S::Warm, E::Lease) => next = begun(slot, S::Starting),
        (S::Starting, E::Started) if !slot.vm => next = ended(slot, S::Running, true),
        (S::Starting, E::Leased) if slot.vm => next = ended(slot, S::Running, true),
        // The VM exited during the lease.
        (S::Starting, E::Leased) => next = ended(slot, S::Ending, false),

        (S::Running, E::Pause(mode)) if !slot.writing => next = begun(slot, S::Pausing(mode)),
        (S::Pausing(mode), E::Saved) => {
            let stage = if slot.vm {
                S::Stopping(mode)
            } else {
                S::Paused(mode)
            };
            next = ended(slot, stage, slot.vm);
        }
        (S::Pausing(_), E::PauseFailed) | (S::Snapshotting, E::SnapshotDone) => {
            let stage = if slot.vm { S::Running } else { S::Ending };
            next = ended(slot, stage, slot.vm);
            if event == E::PauseFailed {
                next.postpone_pause(now);
            }
        }
        (S::Stopping(mode), E::VmExited) => next = ended(slot, S::Paused(mode), false),

        (S::Paused(mode), E::QueueResume) => next.stage = S::ResumeQueued(mode),
        (S::ResumeQueued(mode), E::Resume) => next = begun(slot, S::Resuming(mode)),
        (S::Resuming(_), E::Resumed) => {
            next = ended(slot, S::Running, true);
            next.backoff = Backoff::default();
        }
        (S::ResumeQueued(mode) | S::Resuming(mode), E::ResumeFailed(by)) => {
            next = ended(slot, S::Paused(mode), false);
            if by == FailedBy::Sandbox {
                next.backoff.fail(now);
            }
        }

        (S::Running, E::Snapshot) => next = begun(slot, S::Snapshotting),
        (S::Paused(mode), E::Snapshot) => next = begun(slot, S::SnapshottingPaused(mode)),
        (S::SnapshottingPaused(mode), E::SnapshotDone) => {
            next = ended(slot, S::Paused(mode), false)
        }

        (S::Adopting, E::Adopted) => {
            let stage = if slot.vm { S::Running } else { S::Ending };
            next = ended(slot, stage, slot.vm);
        }
        (S::AdoptingPaused(mode), E::Adopted) => next = ended(slot, S::Paused(mode), false),

        (S::Filling | S::Starting | S::Pausing(_) | S::Snapshotting | S::Adopting, E::Failed) => {
            next = ended(slot, S::Ending, slot.vm);
        }
        // The job notices the exit, fails, and reports its failure as another event.
        (S::Starting | S::Pausing(_) | S::Snapshotting | S::Adopting, E::VmExited) if slot.vm => {
            next.vm = false;
        }
        (S::Warm | S::Running, E::VmExited) => next = ended(slot, S::Ending, false),
        (S::Ending, _) => return advance_ending(slot, event),
        (_, E::Kill) => next.stage = S::Ending,
        _ => return Err(Unexpected),
    }
    Ok(next)
}

/// Events of a slot that was killed, possibly while a job ran.
fn advance_ending(slot: Slot, event: Event) -> Result<Slot, Unexpected> {
    use Event as E;
    let mut next = slot;
    match event {
        E::Kill => {}
        E::VmExited if slot.vm => next.vm = false,
        // The jobs that report these events have made a VM, which must be killed.
        E::Filled | E::Started | E::Resumed if slot.job && !slot.vm => {
            next = ended(slot, Stage::Ending, true);
        }
        E::Leased
        | E::Saved
        | E::PauseFailed
        | E::ResumeFailed(_)
        | E::SnapshotDone
        | E::Adopted
        | E::Failed
            if slot.job =>
        {
            next = ended(slot, Stage::Ending, slot.vm);
        }
        E::Cleaned if slot.cleaning => next.cleaning = false,
        _ => return Err(Unexpected),
    }
    Ok(next)
}

fn begun(slot: Slot, stage: Stage) -> Slot {
    Slot {
        stage,
        job: true,
        ..slot
    }
}

fn ended(slot: Slot, stage: Stage, vm: bool) -> Slot {
    Slot {
        stage,
        job: false,
        vm,
        ..slot
    }
}

/// Checks the invariants that hold between any two events.
///
/// # Panics
/// In debug builds, if an invariant is violated.
pub(crate) fn check_invariants(slot: Slot) {
    use Stage as S;
    let Slot {
        stage,
        job,
        vm,
        writing,
        cleaning,
        ..
    } = slot;
    let fits = match stage {
        S::Filling | S::Resuming(_) | S::SnapshottingPaused(_) | S::AdoptingPaused(_) => job && !vm,
        // The VM may exit while the job runs.
        S::Starting | S::Pausing(_) | S::Snapshotting | S::Adopting => job,
        S::Warm | S::Running | S::Stopping(_) => vm && !job,
        S::Paused(_) | S::ResumeQueued(_) => !vm && !job,
        S::Ending => !cleaning || !(job || vm || writing),
    };
    debug_assert!(fits, "impossible slot: {slot:?}");
    debug_assert!(!cleaning || stage == S::Ending, "cleaned early: {slot:?}");
    debug_assert!(
        stage != S::Ending || job || vm || writing || cleaning,
        "a slot that no event will remove: {slot:?}"
    );
    let may_write = matches!(stage, S::Running | S::Snapshotting | S::Ending);
    debug_assert!(!writing || may_write, "a write beside a job's: {slot:?}");
    debug_assert_eq!(
        slot.due().is_some(),
        stage == S::Running && !writing,
        "a running sandbox without a deadline: {slot:?}"
    );
}
