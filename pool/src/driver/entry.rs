//! What the driver keeps of a slot.

use std::{os::fd::OwnedFd, os::unix::net::UnixStream, sync::Arc};

use model::{SandboxId, Timeline};
use tokio::sync::{mpsc, oneshot};

use crate::{
    Ended, PoolError, Sandbox, SandboxState, TemplateInfo,
    message::Answer,
    policy::StartFor,
    record::{Record, SlotDir},
    slot::{Slot, Stage},
    vm::Vm,
    work::lease::Lines,
};

/// Who waits for the job of a slot.
#[derive(Debug)]
pub(crate) enum Waiter {
    /// Of a create, a fork or a resume.
    Sandbox(Answer<Sandbox>),
    /// Of a pause.
    Pause(Answer<()>),
    /// Of a snapshot that becomes a template of this id and these names.
    Template {
        id: String,
        names: Vec<String>,
        answer: Answer<TemplateInfo>,
    },
    /// Of a snapshot for forks.
    Fork(super::ask::ForkPlan),
}

/// A note that waits for the one before it to be written.
#[derive(Debug, Default)]
pub(crate) struct Notes {
    pub(crate) next: Option<String>,
    /// Those whose note is being written.
    pub(crate) writing: Vec<Answer<()>>,
    /// Those whose note is the next.
    pub(crate) waiting: Vec<Answer<()>>,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) slot: Slot,
    pub(crate) dir: SlotDir,
    pub(crate) record: Record,
    pub(crate) timeline: Timeline,
    pub(crate) pidfd: Option<Arc<OwnedFd>>,
    /// A VM that was found at the start and is not watched yet.
    pub(crate) unwatched: Option<Vm>,
    pub(crate) lines: Option<Lines>,
    pub(crate) waiter: Option<Waiter>,
    pub(crate) notes: Notes,
    /// Those who wait for its end.
    pub(crate) mourners: Vec<oneshot::Sender<Result<(), PoolError>>>,
    /// Why it ended, if nobody asked for it and a caller has its id.
    pub(crate) died: Option<String>,
    /// The fork's image that it starts from.
    pub(crate) fork: Option<u64>,
    /// Bytes that were its own when it was measured last.
    pub(crate) private: Option<u64>,
    /// What its last start was for.
    pub(crate) start_for: StartFor,
    /// What the save under way may write at most, bytes.
    pub(crate) save: u64,
}

impl Entry {
    pub(crate) fn new(slot: Slot, dir: SlotDir, record: Record) -> Self {
        Self {
            slot,
            dir,
            record,
            timeline: Timeline::default(),
            pidfd: None,
            unwatched: None,
            lines: None,
            waiter: None,
            notes: Notes::default(),
            mourners: Vec::new(),
            died: None,
            fork: None,
            private: None,
            start_for: StartFor::default(),
            save: 0,
        }
    }

    pub(crate) fn sandbox(&self, id: &SandboxId) -> Sandbox {
        Sandbox {
            id: id.clone(),
            template: self.record.template.clone(),
            vsock: self.dir.vsock(),
            console: self.dir.console(),
            pid: self.record.vmm.map_or(0, |vmm| vmm.pid),
            timeline: self.timeline.clone(),
            warm: self.record.warm,
        }
    }

    pub(crate) fn state(&self) -> SandboxState {
        match self.slot.stage {
            Stage::Running => SandboxState::Running,
            Stage::Paused(mode) => SandboxState::Paused(mode),
            Stage::Filling
            | Stage::Warm
            | Stage::Starting
            | Stage::Pausing(_)
            | Stage::Stopping(_)
            | Stage::Resuming(_)
            | Stage::Saving
            | Stage::SavingPaused(_)
            | Stage::Ending => SandboxState::Changing,
        }
    }

    /// The control connection, if one is open, for a job that blocks.
    pub(crate) fn take_control(&mut self) -> Option<UnixStream> {
        let lines = self.lines.take()?;
        lines.control.into_std().ok()
    }

    /// The slot is gone, and nothing of it is left: those who wait hear of it.
    pub(crate) fn bury(self, id: &SandboxId, ended: &mpsc::Sender<Ended>) {
        let gone = || PoolError::NoSandbox(id.clone());
        match self.waiter {
            Some(Waiter::Sandbox(answer)) => super::Driver::refuse(answer, gone()),
            Some(Waiter::Pause(answer)) => drop(answer.send(Err(gone()))),
            Some(Waiter::Template { answer, .. }) => drop(answer.send(Err(gone()))),
            Some(Waiter::Fork(plan)) => drop(plan.answer.send(Err(gone()))),
            None => {}
        }
        for answer in self.notes.writing.into_iter().chain(self.notes.waiting) {
            let _ = answer.send(Err(gone()));
        }
        for mourner in self.mourners {
            let _ = mourner.send(Ok(()));
        }
        if let Some(why) = self.died {
            let note = Ended {
                id: id.clone(),
                why,
            };
            if let Err(mpsc::error::TrySendError::Full(note)) = ended.try_send(note) {
                let ended = ended.clone();
                tokio::spawn(async move { ended.send(note).await });
            }
        }
    }
}
