//! The driver's state for one slot.

use std::{
    collections::VecDeque, os::fd::OwnedFd, os::unix::net::UnixStream, sync::Arc, time::Duration,
};

use library::durable::Durability;
use model::{SandboxId, Timeline};
use vmm_control::template::LoadedTemplate;

use crate::{
    answer::Answer,
    change::{ChangeKind, Ended},
    error::PoolError,
    lifetime::UnixMs,
    message::{SandboxRequest, Unclaimed},
    policy::StartFor,
    record::{Record, SlotDir},
    sandbox::{Connected, LifeEvent, Sandbox},
    slot::Slot,
    vm::Vm,
    work::lease::Lines,
};

/// Maximum number of life events that are kept for one sandbox.
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
            Self::New(answer) => answer.send(Err(error)),
            Self::Request(request) => request.refuse(error),
        }
    }
}

/// A request whose response waits for the record to be written.
#[derive(Debug)]
pub(crate) enum AfterWrite {
    Adjusted(Answer<()>),
    Connected(Box<Connected>, Answer<Connected>),
    /// A change to report to the follower of the pool.
    Changed(ChangeKind),
}

impl AfterWrite {
    pub(crate) fn answer(self, result: Result<(), PoolError>) {
        match self {
            Self::Adjusted(answer) => answer.send(result),
            Self::Connected(connected, answer) => answer.send(result.map(|()| *connected)),
            // A change that was not written is not reported.
            Self::Changed(_) => {}
        }
    }
}

/// Requests that wait for writes of one record: `under_way` for the current write, `next` for the one that must follow.
#[derive(Debug, Default)]
pub(crate) struct RecordWrites {
    pub(crate) under_way: Vec<AfterWrite>,
    pub(crate) next: Option<Vec<AfterWrite>>,
}

#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) slot: Slot,
    pub(crate) dir: SlotDir,
    /// The record. Its lifetime is the one last written. The current lifetime is in the slot.
    pub(crate) record: Record,
    pub(crate) timeline: Timeline,
    pub(crate) pidfd: Option<Arc<OwnedFd>>,
    /// A VM of the previous server, until it is watched or, if its sandbox is paused, ended.
    pub(crate) unwatched: Option<Vm>,
    pub(crate) lines: Option<Lines>,
    /// The template memory in huge pages that the VM maps. Held to determine how long the pages are in use.
    pub(crate) loaded: Option<Arc<LoadedTemplate>>,
    pub(crate) serving: Option<Serving>,
    /// The kill request that ends the slot, if any.
    pub(crate) kill: Option<Answer<()>>,
    /// Requests that wait for the change under way, in order of arrival.
    pub(crate) waiting: Vec<SandboxRequest>,
    pub(crate) writes: RecordWrites,
    /// Reason why the sandbox ended, if neither a caller nor its deadline ended it.
    pub(crate) died: Option<String>,
    /// The VMM's private memory in bytes, as last measured; `None` before the first measurement.
    pub(crate) private: Option<u64>,
    /// Bytes that its VM has written to its layer, as last measured.
    pub(crate) written: u64,
    /// Whether its VM is stopped, because the host has no memory for its growth.
    pub(crate) is_stopped: bool,
    /// The kind of the slot's last start.
    pub(crate) start_for: StartFor,
    /// Maximum number of bytes that the save under way may write.
    pub(crate) save: u64,
    /// Life events, oldest first.
    pub(crate) events: VecDeque<LifeEvent>,
    /// Whether record and files of a pause may survive a crash of the host, so that the end of the sandbox must be
    /// synced.
    pub(crate) on_disk: bool,
    /// Whether another server has the sandbox. Its end here is then not the end of the sandbox.
    pub(crate) has_left: bool,
    /// Error of removing the record when the slot ended.
    pub(crate) not_removed: Option<PoolError>,
    generation: u64,
    vm_since: UnixMs,
}

impl Entry {
    pub(crate) fn new(slot: Slot, dir: SlotDir, record: Record) -> Self {
        Self {
            on_disk: slot.is_saved(),
            has_left: false,
            not_removed: None,
            slot,
            dir,
            record,
            timeline: Timeline::default(),
            pidfd: None,
            unwatched: None,
            lines: None,
            loaded: None,
            serving: None,
            kill: None,
            waiting: Vec::new(),
            writes: RecordWrites::default(),
            died: None,
            private: None,
            written: 0,
            is_stopped: false,
            start_for: StartFor::default(),
            save: 0,
            events: VecDeque::new(),
            generation: 0,
            vm_since: 0,
        }
    }

    /// A slot found in the state directory, with the VM that the previous server left running, if any.
    pub(crate) fn recovered(slot: Slot, dir: SlotDir, record: Record, vm: Option<Vm>) -> Self {
        Self {
            pidfd: vm.as_ref().map(|vm| Arc::clone(&vm.pidfd)),
            unwatched: vm,
            // The previous server may have ended during a pause or a resume.
            on_disk: slot.is_saved() || dir.pause().exists(),
            ..Self::new(slot, dir, record)
        }
    }

    /// The sandbox as callers see it. `None` if no caller has the slot's id, or the slot is ending.
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
            claim: self.record.claim.clone(),
        })
    }

    /// The kind of crash after which the sandbox must remain ended.
    pub(crate) fn durability(&self) -> Durability {
        if self.on_disk {
            Durability::Host
        } else {
            Durability::Process
        }
    }

    pub(crate) fn has_new_vm(&mut self, generation: u64, now: UnixMs) {
        self.generation = generation;
        self.vm_since = now;
    }

    /// The time since the sandbox got its VM. Zero while it has none.
    pub(crate) fn age(&self, now: UnixMs) -> Duration {
        let since = if self.vm_since == 0 {
            now
        } else {
            self.vm_since
        };
        Duration::from_millis(now.saturating_sub(since))
    }

    /// Adds a life event, and removes the oldest one if there are too many.
    pub(crate) fn add_event(&mut self, at: UnixMs, what: impl Into<String>) {
        if self.events.len() == MAX_EVENTS {
            self.events.pop_front();
        }
        let what = what.into();
        self.events.push_back(LifeEvent { at, what });
    }

    /// Takes the control connection, if one is open, for a blocking job. Closes the connection to the agent.
    pub(crate) fn take_control(&mut self) -> Option<UnixStream> {
        let lines = self.lines.take()?;
        lines.control.into_std().ok()
    }

    /// Whether a caller has, or has had, the slot's id.
    pub(crate) fn was_leased(&self) -> bool {
        self.generation > 0
    }

    /// Responds to every request that still waits for the removed slot. Returns the end of its sandbox, if it had one.
    pub(crate) fn removed(self, id: &SandboxId) -> Option<Ended> {
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
            kill.send(self.not_removed.map_or(Ok(()), Err));
        }
        was_leased.then(|| Ended {
            id: id.clone(),
            why: self.died,
        })
    }
}
