//! Reports of jobs and watchers.

use std::{sync::Arc, time::Duration};

use model::{SandboxId, StartPhase};

use super::{
    Driver, Entry,
    admission::demand::drop_on_thread,
    entry::{AfterWrite, Serving},
};
use crate::{
    answer::Reply,
    change::ChangeKind,
    error::PoolError,
    host,
    lifetime::OnTimeout,
    message::{Report, SandboxRequest, SnapshotFor, Unclaimed},
    network,
    sandbox::Priority,
    slot::{Event, FailedBy, Stage, Wake},
    state::PauseMode,
    work::{
        WorkError,
        lease::{Lines, Served},
        save::{PauseOutcome, SnapshotFailed},
        start::Started,
        wall_clock::set_again,
    },
};

/// Text and remedy of a failed kill.
pub(super) const NOT_REMOVED: &str = "end the sandbox for good; it may be found paused again by the next server: repair the disk and kill it again";

impl Driver {
    pub(super) fn report(&mut self, report: Report) {
        match report {
            Report::Made(id, made) => self.made(&id, made),
            Report::Leased(id, leased) => self.leased(&id, leased),
            Report::Paused(id, outcome) => self.paused(&id, *outcome),
            Report::Snapshotted(id, purpose, result) => self.snapshotted(&id, purpose, result),
            Report::Claimed(id, claim, result) => self.claimed(&id, claim, result),
            Report::Needs(needed, answer) => self.needed(needed, answer),
            Report::BaseOpened(opened, answer) => {
                self.upkeep.job_ended();
                answer.send(opened);
            }
            Report::Held(dir, held, answer) => self.is_held(dir, held, answer),
            Report::Taken(id, taken, answer) => self.taken(id, taken, answer),
            Report::Written(id, result) => self.written(&id, result),
            Report::WriteEnded(id, forgotten) => self.write_ended(&id, forgotten),
            Report::Published(published) => self.published(published),
            Report::FilesAdded(added) => self.files_added(added),
            Report::Renamed(renamed) => self.renamed(renamed),
            Report::VmExited(id) => self.vm_exited(&id),
            Report::Cleaned(id, disowned) => {
                if let (Some(entry), Err(e)) = (self.slots.get_mut(&id), disowned)
                    && entry.on_disk
                {
                    let error = WorkError::Io("remove the sandbox's record", e);
                    entry.not_removed = Some(error.into_pool(NOT_REMOVED, &id));
                }
                let _ = self.event(&id, Event::Cleaned);
            }
            Report::Released(counters) => network::add(&mut self.counters.network, &counters),
            Report::Asking(id) => self.adoptions.asks(&id),
            Report::Adopted(id, result) => self.adopted(&id, result),
            Report::Rebuilding(vm) => self.upkeep.rebuilding(vm),
            Report::Rebuilt(id, result) => self.rebuilt(&id, result),
            Report::Swept => self.adoptions.swept(),
            Report::ServersLeft(left) => self.former_servers = left,
            Report::Stored(id, stored) => self.upkeep.stored(&mut self.library, &id, stored),
            Report::Loaded(template, dir, size, loaded) => {
                let library = &self.library;
                self.admission
                    .loaded(library, &template, &dir, size, loaded);
            }
            Report::Unclaimed(id) => {
                tracing::warn!(
                    sandbox = %id,
                    "the caller disconnected before its sandbox was ready: ending the sandbox"
                );
                let (answer, _) = Reply::new();
                self.decide(id, SandboxRequest::Kill(answer));
            }
        }
    }

    /// Counts and logs a failed job, and converts its error for callers.
    fn job_failed(&mut self, id: &SandboxId, what: &'static str, error: WorkError) -> PoolError {
        *self.counters.failed.entry(error.cause()).or_default() += 1;
        let mut error = error.into_pool(what, id);
        if let (PoolError::Failed { why, .. }, Some(entry)) = (&mut error, self.slots.get(id))
            && let Some(words) = host::last_words(&entry.dir.stderr())
        {
            *why = format!("{why} (the VMM's last words: {words})");
        }
        tracing::warn!(sandbox = %id, %error, "a job failed");
        error
    }

    fn take_serving(&mut self, id: &SandboxId) -> Option<Serving> {
        self.slots.get_mut(id)?.serving.take()
    }

    fn made(&mut self, id: &SandboxId, made: Result<Box<Started>, WorkError>) {
        let Some(stage) = self.slots.get(id).map(|e| e.slot.stage) else {
            return;
        };
        match made {
            Ok(started) => self.has_vm(id, stage, *started),
            Err(error) => self.not_made(id, stage, error),
        }
    }

    fn has_vm(&mut self, id: &SandboxId, stage: Stage, started: Started) {
        let Started {
            vm,
            record,
            timeline,
            up,
            private,
        } = started;
        let Some(entry) = self.slots.get_mut(id) else {
            return;
        };
        let template = record.template.id.clone();
        entry.pidfd = Some(Arc::clone(&vm.pidfd));
        entry.record = record;
        let began_ns = timeline.at(StartPhase::ProcessStarted);
        entry.timeline = timeline;
        entry.private = private;
        entry.lines = Lines::new(up.control, up.agent).ok();
        if let Some(lines) = entry.lines.as_ref().filter(|_| up.clock_may_be_late) {
            set_again(&lines.agent, self.config.start_timeout);
        }
        self.jobs.watch(id.clone(), vm);
        let took = began_ns.map_or(0, |ns| host::monotonic_ns().saturating_sub(ns));
        let took = Duration::from_nanos(took);
        let event = match stage {
            Stage::Filling => Event::Filled,
            Stage::Resuming(_) => Event::Resumed,
            // In `Ending`, the events of all three jobs have the same effect.
            _ => Event::Started,
        };
        match self.event(id, event) {
            Ok(Stage::Warm) => {
                self.admission
                    .became_warm(&template, private.unwrap_or(0), took);
            }
            Ok(Stage::Running) => self.hand_over(id),
            _ => {}
        }
    }

    /// Responds to the request that a start, lease or resume served, now that the sandbox runs.
    fn hand_over(&mut self, id: &SandboxId) {
        let now = self.slots.clock.now();
        self.slots.has_new_vm(id);
        let Some(entry) = self.slots.get_mut(id) else {
            return;
        };
        let template = entry.record.template.id.clone();
        let is_use = entry.record.priority == Priority::Normal;
        if is_use {
            self.admission.stock.callers.got(host::monotonic_ns());
        }
        let is_new = matches!(entry.serving, Some(Serving::New(_)));
        // A clone made for a build does not count as a use of its template.
        if is_use && let Some(t) = self.library.get_mut(&template) {
            t.info.spawned += u64::from(is_new);
        }
        if is_use {
            self.admission.template_used(&self.library, &template);
        }
        let Some(entry) = self.slots.get_mut(id) else {
            return;
        };
        match entry.serving.take() {
            Some(Serving::New(answer)) => {
                entry.add_event(now, "created");
                tracing::info!(
                    sandbox = %id,
                    template = %entry.record.template.id,
                    warm = entry.record.warm,
                    "created"
                );
                // The job has written the record.
                self.changed(id, ChangeKind::Created);
                let Some(entry) = self.slots.get(id) else {
                    return;
                };
                if let Some(sandbox) = entry.sandbox(id) {
                    let unclaimed = Unclaimed::new(sandbox, self.jobs.reporter.clone());
                    answer.send(Ok(unclaimed));
                }
            }
            Some(Serving::Request(request)) => {
                entry.add_event(now, "resumed");
                tracing::info!(sandbox = %id, "resumed");
                self.resumed(id, request);
            }
            None => {}
        }
    }

    fn resumed(&mut self, id: &SandboxId, request: SandboxRequest) {
        let now = self.slots.clock.now();
        let set_deadline = |entry: &mut Entry, timeout_s: Option<u32>| {
            let timeout_s = timeout_s.unwrap_or(entry.slot.lifetime.resume_timeout_s());
            entry.slot.set_deadline(now, timeout_s);
        };
        match request {
            SandboxRequest::Connect {
                timeout_s,
                wake,
                answer,
                ..
            } => {
                self.slots.update(id, |entry| {
                    match wake {
                        Wake::GoOn { end_at } => entry.slot.lifetime.end_at = end_at,
                        _ => set_deadline(entry, timeout_s),
                    }
                    let on_timeout = &mut entry.slot.lifetime.on_timeout;
                    *on_timeout = on_timeout_after(*on_timeout, wake);
                });
                self.connected(id, true, true, answer);
            }
            SandboxRequest::Reach { answer, .. } => {
                self.slots.update(id, |entry| set_deadline(entry, None));
                answer.send(self.sandbox(id));
                self.write_record(id, vec![AfterWrite::Changed(ChangeKind::Resumed)]);
            }
            // No other request begins a resume.
            other => other.refuse(PoolError::not_found(id)),
        }
    }

    fn not_made(&mut self, id: &SandboxId, stage: Stage, error: WorkError) {
        let what = match stage {
            Stage::Filling => "make a warm slot",
            Stage::Resuming(_) => "resume the sandbox",
            _ => "start a sandbox",
        };
        let error = self.job_failed(id, what, error);
        if let Stage::Resuming(_) = stage {
            let by = failed_by(&error);
            return self.resume_failed(id, by, error);
        }
        if stage == Stage::Filling {
            let template = self.slots.get(id).map(|e| e.record.template.id.clone());
            self.fill_failed(&template.unwrap_or_default());
        }
        if let Some(serving) = self.take_serving(id) {
            serving.refuse(error);
        }
        let _ = self.event(id, Event::Failed);
    }

    fn leased(&mut self, id: &SandboxId, leased: Result<Box<Served>, WorkError>) {
        match leased {
            Ok(served) => {
                let Some(entry) = self.slots.get_mut(id) else {
                    return;
                };
                entry.record = served.record;
                entry.timeline = served.timeline;
                entry.lines = Some(served.lines);
                // In any other stage, the VM has exited or the slot was killed. The caller gets its error when the slot
                // is removed.
                if self.event(id, Event::Leased) == Ok(Stage::Running) {
                    self.hand_over(id);
                }
            }
            Err(error) => {
                let error = self.job_failed(id, "start a sandbox", error);
                if let Some(serving) = self.take_serving(id) {
                    serving.refuse(error);
                }
                let _ = self.event(id, Event::Failed);
            }
        }
    }

    fn paused(&mut self, id: &SandboxId, outcome: PauseOutcome) {
        let (event, error) = match outcome {
            PauseOutcome::OnDisk(record) => {
                if let Some(entry) = self.slots.get_mut(id) {
                    // The job has set the record's `end_at` to the time of the pause.
                    entry.slot.lifetime = record.lifetime;
                    entry.record = *record;
                }
                (Event::Saved, None)
            }
            PauseOutcome::Kept(e) => (Event::PauseFailed, Some(e)),
            PauseOutcome::Lost(e) => (Event::Failed, Some(e)),
        };
        if let Some(error) = error {
            let error = self.job_failed(id, "pause the sandbox", error);
            if event == Event::Failed {
                self.lost(id, error.to_string());
            }
            let answer = match self.take_serving(id) {
                Some(Serving::Request(SandboxRequest::Pause(_, answer))) => Some(answer),
                _ => None,
            };
            self.pause_failed(id, error, answer);
        }
        // If the VM has not exited yet, the caller gets its response when it does.
        if let Ok(Stage::Paused(_)) = self.event(id, event) {
            self.is_paused(id);
        }
    }

    /// Records why a sandbox ends: a job failed and left a VM that cannot continue.
    fn lost(&mut self, id: &SandboxId, why: String) {
        if let Some(entry) = self.slots.get_mut(id)
            && entry.slot.stage != Stage::Ending
        {
            entry.died = Some(why);
        }
    }

    fn is_paused(&mut self, id: &SandboxId) {
        let now = self.slots.clock.now();
        let Some(entry) = self.slots.get_mut(id) else {
            return;
        };
        tracing::info!(sandbox = %id, "paused");
        entry.add_event(now, "paused");
        entry.pidfd = None;
        drop_on_thread(entry.loaded.take());
        entry.on_disk = true;
        entry.lines = None;
        (entry.private, entry.written) = (None, 0);
        self.jobs.release(&mut entry.record);
        entry.record.vmm = None;
        let serving = entry.serving.take();
        self.changed(id, ChangeKind::Paused);
        if let Some(Serving::Request(SandboxRequest::Pause(_, answer))) = serving {
            answer.send(Ok(()));
        }
    }

    fn snapshotted(
        &mut self,
        id: &SandboxId,
        purpose: SnapshotFor,
        result: Result<(), SnapshotFailed>,
    ) {
        let serving = self.take_serving(id);
        let source = self.slots.get(id).map(|e| e.record.template.id.clone());
        let (event, result) = match result {
            Ok(()) => (Event::SnapshotDone, Ok(())),
            Err(SnapshotFailed::Unchanged(e)) => (Event::SnapshotDone, Err(e)),
            Err(SnapshotFailed::Lost(e)) => {
                self.lost(id, "it could not continue after a snapshot".to_owned());
                (Event::Failed, Err(e))
            }
        };
        let result = result.map_err(|e| e.into_pool("snapshot the sandbox", id));
        let _ = self.event(id, event);
        match (serving, purpose) {
            (Some(Serving::Request(request)), SnapshotFor::Template(template)) => {
                self.template_saved(id, &template, request, result);
            }
            (
                Some(Serving::Request(SandboxRequest::Fork {
                    specs,
                    accepted_ns,
                    answer,
                })),
                SnapshotFor::Forks(snapshot),
            ) => match result.and_then(|()| self.check_snapshot(snapshot.dir())) {
                Ok(_) => {
                    let template = source.unwrap_or_default();
                    self.queue_forks(&template, specs, &snapshot, accepted_ns, answer);
                }
                Err(e) => answer.send(Err(e)),
            },
            // Unreachable: a snapshot's job always serves the request that began it.
            _ => {}
        }
    }

    fn written(&mut self, id: &SandboxId, result: std::io::Result<()>) {
        let Some(entry) = self.slots.get_mut(id) else {
            return;
        };
        if let Err(error) = &result {
            tracing::error!(sandbox = %id, %error, "cannot write the sandbox's record");
        }
        let answers = std::mem::take(&mut entry.writes.under_way);
        for after in answers {
            if let (AfterWrite::Changed(kind), Ok(())) = (&after, &result) {
                self.changed(id, kind.clone());
            }
            after.answer(match &result {
                Ok(()) => Ok(()),
                Err(e) => Err(PoolError::of_disk("write the sandbox's record", e)),
            });
        }
    }

    /// Handles the end of the job that wrote the record. `forgotten` tells whether the pause was removed.
    fn write_ended(&mut self, id: &SandboxId, forgotten: std::io::Result<()>) {
        let Some(entry) = self.slots.get_mut(id) else {
            return;
        };
        match forgotten {
            Ok(()) => entry.on_disk = false,
            Err(error) => {
                tracing::error!(
                    sandbox = %id,
                    %error,
                    "cannot remove the files of the sandbox's last pause; the next record write tries again"
                );
            }
        }
        let next = entry.writes.next.take();
        let _ = self.event(id, Event::WriteDone);
        if let Some(after) = next {
            self.write_record(id, after);
        }
    }

    fn vm_exited(&mut self, id: &SandboxId) {
        let Some(entry) = self.slots.get_mut(id) else {
            return;
        };
        let is_wanted = matches!(entry.slot.stage, Stage::Ending | Stage::Stopping(_));
        if !is_wanted {
            let words = host::last_words(&entry.dir.stderr());
            let why = words.unwrap_or_else(|| "the VMM was killed".to_owned());
            tracing::warn!(sandbox = %id, why, "VM exited unexpectedly");
            if entry.slot.is_leased() {
                self.counters.died += 1;
                entry.died = Some(why);
            }
        }
        if let Ok(Stage::Paused(_)) = self.event(id, Event::VmExited) {
            self.is_paused(id);
        }
    }
}

/// Returns the action at the next deadline of a resumed sandbox.
fn on_timeout_after(present: OnTimeout, wake: Wake) -> OnTimeout {
    match (wake, present) {
        (
            Wake::Resume {
                auto_pause: Some(false),
            }
            | Wake::ResumeColdBoot {
                auto_pause: Some(false),
            },
            _,
        ) => OnTimeout::End,
        (
            Wake::Resume {
                auto_pause: Some(true),
            }
            | Wake::ResumeColdBoot {
                auto_pause: Some(true),
            },
            OnTimeout::End,
        ) => OnTimeout::Pause(PauseMode::Memory),
        (
            Wake::Resume { .. }
            | Wake::ResumeColdBoot { .. }
            | Wake::Connect
            | Wake::ConnectColdBoot
            | Wake::GoOn { .. },
            present,
        ) => present,
    }
}

/// Whether a resume failed because of the sandbox itself or because of the host.
fn failed_by(error: &PoolError) -> FailedBy {
    match error {
        PoolError::Failed { .. } | PoolError::AgentSilent(_) => FailedBy::Sandbox,
        PoolError::NoTemplate(_)
        | PoolError::Refused(..)
        | PoolError::NoteTooLong(_)
        | PoolError::Full { .. }
        | PoolError::NoSpace(_)
        | PoolError::TooManySaved(_)
        | PoolError::TemplateQuota { .. }
        | PoolError::InUse(..)
        | PoolError::NoDisk(_)
        | PoolError::BadName(_)
        | PoolError::Unfit { .. }
        | PoolError::Draining => FailedBy::Host,
    }
}
