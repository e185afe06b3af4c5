//! Everything that the driver keeps of one slot.

use std::{collections::VecDeque, os::fd::OwnedFd, os::unix::net::UnixStream, sync::Arc};

use model::{SandboxId, Timeline};
use tokio::sync::mpsc;

use crate::{
    Connected, Ended, LifeEvent, PoolError, Sandbox,
    lifetime::UnixMs,
    message::{Answer, SandboxRequest, Unclaimed},
    policy::StartFor,
    record::{Record, SlotDir},
    slot::Slot,
    vm::Vm,
    work::lease::Lines,
};

/// Most life events that are kept of one sandbox.
const MAX_EVENTS: usize = 256;

/// The request that a slot's job serves.
#[derive(Debug)]
pub(crate) enum Serving {
    /// A create or a fork.
    New(Answer<Unclaimed>),
    Request(SandboxRequest),
}

impl Serving {
    pub(crate) fn refuse(self, error: PoolError) {
        match self {
            Self::New(answer) => drop(answer.send(Err(error))),
            Self::Request(request) => request.refuse(error),
        }
    }
}

/// A request that is answered when the record is on disk.
#[derive(Debug)]
pub(crate) enum AfterWrite {
    Adjusted(Answer<()>),
    Connected(Box<Connected>, Answer<Connected>),
}

impl AfterWrite {
    pub(crate) fn answer(self, result: Result<(), PoolError>) {
        match self {
            Self::Adjusted(answer) => drop(answer.send(result)),
            Self::Connected(connected, answer) => drop(answer.send(result.map(|()| *connected))),
        }
    }
}

/// Writes of one record: while one is under way, changes collect for the next one.
#[derive(Debug, Default)]
pub(crate) struct RecordWrites {
    pub(crate) under_way: Vec<AfterWrite>,
    pub(crate) next: Option<Vec<AfterWrite>>,
}

#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) slot: Slot,
    pub(crate) dir: SlotDir,
    /// Its lifetime is that of the last write; the slot has the present one.
    pub(crate) record: Record,
    pub(crate) timeline: Timeline,
    pub(crate) pidfd: Option<Arc<OwnedFd>>,
    /// A VM that was found at the start and is not watched yet.
    pub(crate) unwatched: Option<Vm>,
    pub(crate) lines: Option<Lines>,
    pub(crate) serving: Option<Serving>,
    /// The kill that ends the slot.
    pub(crate) kill: Option<Answer<()>>,
    /// Requests that wait for the change under way, in their order.
    pub(crate) waiting: Vec<SandboxRequest>,
    pub(crate) writes: RecordWrites,
    /// Why it ended, if no caller and no deadline ended it.
    pub(crate) died: Option<String>,
    /// Private memory in bytes, as last measured; `None` before the first measurement.
    pub(crate) private: Option<u64>,
    /// The cause of its last start.
    pub(crate) start_for: StartFor,
    /// Most bytes that the save under way may write.
    pub(crate) save: u64,
    /// Oldest first.
    pub(crate) events: VecDeque<LifeEvent>,
    generation: u64,
    vm_since: UnixMs,
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
            serving: None,
            kill: None,
            waiting: Vec::new(),
            writes: RecordWrites::default(),
            died: None,
            private: None,
            start_for: StartFor::default(),
            save: 0,
            events: VecDeque::new(),
            generation: 0,
            vm_since: 0,
        }
    }

    /// The sandbox as callers see it; `None` if they cannot name it.
    pub(crate) fn sandbox(&self, id: &SandboxId) -> Option<Sandbox> {
        Some(Sandbox {
            id: id.clone(),
            template: Arc::clone(&self.record.template),
            state: self.slot.state()?,
            lifetime: self.slot.lifetime,
            note: Arc::clone(&self.record.note),
            vsock: self.dir.vsock(),
            console: self.dir.console(),
            pid: self.record.vmm.map_or(0, |vmm| vmm.pid),
            timeline: self.timeline.clone(),
            warm: self.record.warm,
            generation: self.generation,
            vm_since: self.vm_since,
        })
    }

    pub(crate) fn has_new_vm(&mut self, generation: u64, now: UnixMs) {
        self.generation = generation;
        self.vm_since = now;
    }

    /// Adds a life event; the oldest gives way.
    pub(crate) fn add_event(&mut self, at: UnixMs, what: impl Into<String>) {
        if self.events.len() == MAX_EVENTS {
            self.events.pop_front();
        }
        let what = what.into();
        self.events.push_back(LifeEvent { at, what });
    }

    /// The control connection, if one is open, for a job that blocks.
    pub(crate) fn take_control(&mut self) -> Option<UnixStream> {
        let lines = self.lines.take()?;
        lines.control.into_std().ok()
    }

    /// Whether a caller has, or has had, the slot's id.
    pub(crate) fn was_leased(&self) -> bool {
        self.generation > 0
    }

    /// The slot is removed: answers every request that still waits for it.
    pub(crate) fn removed(self, id: &SandboxId, ended: &mpsc::UnboundedSender<Ended>) {
        let was_leased = self.was_leased();
        if let Some(serving) = self.serving {
            serving.refuse(PoolError::not_found(id));
        }
        let writes = self.writes.next.into_iter().flatten();
        for write in self.writes.under_way.into_iter().chain(writes) {
            write.answer(Err(PoolError::not_found(id)));
        }
        for request in self.waiting {
            request.refuse(PoolError::not_found(id));
        }
        if let Some(kill) = self.kill {
            let _ = kill.send(Ok(()));
        }
        if was_leased {
            // The receiver may have been dropped.
            let _ = ended.send(Ended {
                id: id.clone(),
                why: self.died,
            });
        }
    }
}
