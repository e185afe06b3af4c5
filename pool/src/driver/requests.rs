//! Requests that create or change sandboxes.

use std::{path::PathBuf, sync::Arc};

use library::{durable::Durability, info::TemplateInfo, template::IMAGE};
use model::SandboxId;
use netisolation::Policy;

use super::{
    Driver,
    admission::{queue::Want, space::Saving},
    entry::{AfterWrite, Serving},
};
use crate::{
    answer::{Answer, Reply},
    change::ChangeKind,
    error::PoolError,
    host,
    message::{ForkAnswers, Request, SandboxRequest, SnapshotFor, Unclaimed},
    network,
    policy::StartFor,
    sandbox::{Connected, CreateSpec, MAX_NOTE, OnClose, Priority, TimeoutChange},
    slot::{Event, Next, Refusal, Stage, decide},
    state::PauseMode,
    state_dir::FORKS,
    work::{
        WorkError,
        save::{Content, ForkSnapshot, Guest, PausePlan, SnapshotFrom, SnapshotPlan},
    },
};

/// Maximum number of requests that wait for a change of one sandbox.
const MAX_WAITING: usize = 1024;

impl Driver {
    pub(super) fn request(&mut self, request: Request) {
        match request {
            Request::Create {
                spec,
                accepted_ns,
                answer,
            } => self.create(spec, accepted_ns, answer),
            Request::Sandbox(id, request) => self.decide(id, request),
            Request::Drain(drained) => self.stopping.drain(drained),
            Request::Settle(settled) => self.stopping.settle(settled),
            Request::Close(on_close, closed) => self.close(on_close, closed),
            question => self.answer(question),
        }
    }

    fn create(&mut self, spec: Box<CreateSpec>, accepted_ns: u64, answer: Answer<Unclaimed>) {
        if spec.priority == Priority::Normal {
            self.admission.stock.callers.asked(accepted_ns);
        }
        let template = match self.library.find(&spec.template) {
            _ if self.stopping.is_draining() => Err(PoolError::Draining),
            None => Err(PoolError::NoTemplate(spec.template.clone())),
            Some(template) => check_note(&spec.note).map(|()| template.info.id.clone()),
        };
        let Some((template, answer)) = answer.or_refuse(template) else {
            return;
        };
        let want = Want::New {
            spec,
            template,
            fork: None,
            answer,
        };
        self.admission.queue.push(want, accepted_ns);
        self.look_again = true;
    }

    /// Decides on a request that depends on the sandbox's state, and acts on the decision.
    pub(super) fn decide(&mut self, id: SandboxId, request: SandboxRequest) {
        let now = self.slots.clock.now();
        let decided = match self.slots.get(&id) {
            Some(entry) => decide(&entry.slot, request.operation(), now).and_then(|next| {
                let claim = entry.record.claim.as_ref();
                let is_exempt = matches!(
                    request,
                    SandboxRequest::SetClaim(..) | SandboxRequest::Discard(_)
                );
                let claim = claim.filter(|_| !is_exempt);
                let refusal = claim.and_then(|claim| claim.forbids(entry.slot.stage, next));
                refusal.map_or(Ok(next), Err)
            }),
            None => Err(Refusal::NotFound),
        };
        match decided {
            Err(refusal) => request.refuse(PoolError::Refused(id, refusal)),
            Ok(Next::Wait) => self.wait(id, request),
            Ok(next) => self.act(id, request, next != Next::Grant),
        }
    }

    fn wait(&mut self, id: SandboxId, request: SandboxRequest) {
        match self.slots.get_mut(&id) {
            Some(entry) if entry.waiting.len() < MAX_WAITING => {
                entry.waiting.push(request);
                self.adoptions.requested(&id);
            }
            _ => request.refuse(PoolError::Refused(id, Refusal::Crowded)),
        }
    }

    /// Serves an admitted request. `begins` is true if the request needs a change of stage.
    fn act(&mut self, id: SandboxId, request: SandboxRequest, begins: bool) {
        let has_left = matches!(request, SandboxRequest::Discard(_));
        match request {
            SandboxRequest::Connect { accepted_ns, .. } if begins => {
                self.queue_resume(id, StartFor::Resume, accepted_ns, request);
            }
            SandboxRequest::Reach { accepted_ns, .. } if begins => {
                self.queue_resume(id, StartFor::Wake, accepted_ns, request);
            }
            SandboxRequest::Connect {
                timeout_s, answer, ..
            } => {
                let extended = |timeout_s| self.set_deadline(&id, TimeoutChange::Extend, timeout_s);
                let is_extended = timeout_s.is_some_and(extended);
                self.connected(&id, false, is_extended, answer);
            }
            SandboxRequest::Reach { answer, .. } => answer.send(self.sandbox(&id)),
            SandboxRequest::SetTimeout(change, timeout_s, answer) => {
                self.set_deadline(&id, change, timeout_s);
                let changed = AfterWrite::Changed(ChangeKind::Updated);
                self.write_record(&id, vec![changed, AfterWrite::Adjusted(answer)]);
            }
            SandboxRequest::SetPolicy {
                policy,
                note,
                answer,
            } => answer.send(self.set_policy(&id, policy, note)),
            SandboxRequest::Pause(mode, answer) => self.pause(&id, mode, Some(answer)),
            SandboxRequest::SetClaim(..) => self.set_claim(&id, request),
            SandboxRequest::Kill(answer) | SandboxRequest::Discard(answer) => {
                // If its record cannot be removed, the sandbox stays paused, because the next server would find it.
                if let Err(e) = self.disown_paused(&id) {
                    return answer.send(Err(e));
                }
                if let Some(entry) = self.slots.get_mut(&id) {
                    entry.kill = Some(answer);
                    entry.has_left = has_left;
                }
                self.end(&id);
            }
            SandboxRequest::Snapshot(names, answer) => self.snapshot(&id, names, answer),
            SandboxRequest::SaveDisk(_) | SandboxRequest::Publish(..) => {
                self.make_template(&id, request);
            }
            SandboxRequest::Fork {
                specs,
                accepted_ns,
                answer,
            } => self.fork(&id, specs, accepted_ns, answer),
        }
    }

    /// Removes the record of a paused sandbox. Does nothing for other sandboxes: killing the VM removes their record.
    fn disown_paused(&self, id: &SandboxId) -> Result<(), PoolError> {
        let entry = self.slots.leased(id)?;
        match entry.slot.stage {
            Stage::Paused(_) => entry
                .dir
                .disown()
                .map_err(|e| PoolError::of_disk("remove the sandbox's record", &e)),
            _ => Ok(()),
        }
    }

    /// Moves the deadline of a sandbox. Returns whether it changed.
    fn set_deadline(&mut self, id: &SandboxId, change: TimeoutChange, timeout_s: u32) -> bool {
        let now = self.slots.clock.now();
        let moved = self.slots.update(id, |entry| match change {
            TimeoutChange::Extend => entry.slot.extend_deadline(now, timeout_s),
            TimeoutChange::Renew { until } => entry.slot.renew_deadline(now, timeout_s, until),
            TimeoutChange::Replace => {
                entry.slot.set_deadline(now, timeout_s);
                true
            }
        });
        moved == Some(true)
    }

    /// Responds to a connect. With `write`, the record is written first.
    pub(super) fn connected(
        &mut self,
        id: &SandboxId,
        resumed: bool,
        write: bool,
        answer: Answer<Connected>,
    ) {
        let Some((sandbox, answer)) = answer.or_refuse(self.sandbox(id)) else {
            return;
        };
        let connected = Connected { sandbox, resumed };
        if write {
            let kind = if resumed {
                ChangeKind::Resumed
            } else {
                ChangeKind::Updated
            };
            let after = AfterWrite::Connected(Box::new(connected), answer);
            self.write_record(id, vec![AfterWrite::Changed(kind), after]);
        } else {
            answer.send(Ok(connected));
        }
    }

    /// Writes the record with the current lifetime, then responds to `after`. If a write is already under way, another
    /// one follows it.
    pub(super) fn write_record(&mut self, id: &SandboxId, after: Vec<AfterWrite>) {
        let offset_ms = self.slots.clock.offset_ms();
        let Some(entry) = self.slots.get_mut(id) else {
            return;
        };
        if entry.slot.writing {
            let next = entry.writes.next.get_or_insert_default();
            return next.extend(after);
        }
        entry.record.set_lifetime(entry.slot.lifetime, offset_ms);
        let (dir, record) = (entry.dir.clone(), entry.record.clone());
        if self.event(id, Event::WriteBegun).is_err() {
            for after in after {
                after.answer(Err(PoolError::not_found(id)));
            }
            return;
        }
        if let Some(entry) = self.slots.get_mut(id) {
            entry.writes.under_way.extend(after);
        }
        self.jobs.write(id.clone(), dir, record);
    }

    /// Replaces the policy and the note of a running sandbox. Runs on the driver's task, because writing a small file
    /// and a few map entries takes less time than handing the work to a thread. The record is written before the policy
    /// takes effect, because after a crash the next server applies the policy in the record.
    fn set_policy(
        &mut self,
        id: &SandboxId,
        policy: Policy,
        note: String,
    ) -> Result<(), PoolError> {
        check_note(&note)?;
        let (now, offset_ms) = (self.slots.clock.now(), self.slots.clock.offset_ms());
        let entry = self
            .slots
            .get_mut(id)
            .ok_or_else(|| PoolError::not_found(id))?;
        let mut record = entry.record.clone();
        record.set_lifetime(entry.slot.lifetime, offset_ms);
        record.policy = policy;
        record.note = note.into();
        let changed = entry
            .dir
            .write(&record, Durability::Process)
            .map_err(|e| WorkError::Io("write the sandbox's record", e))
            .and_then(|()| network::update(self.config.network.as_ref(), &record));
        match changed {
            Ok(()) => {
                entry.record = record;
                entry.add_event(now, "network policy replaced");
                self.changed(id, ChangeKind::Updated);
                Ok(())
            }
            Err(e) => {
                if let Err(error) = entry.dir.write(&entry.record, Durability::Process) {
                    tracing::error!(
                        sandbox = %id,
                        %error,
                        "cannot apply the sandbox's new network policy, which its record already has"
                    );
                }
                Err(e.into_pool("replace the sandbox's network policy", id))
            }
        }
    }

    fn queue_resume(
        &mut self,
        id: SandboxId,
        start_for: StartFor,
        accepted_ns: u64,
        request: SandboxRequest,
    ) {
        self.admission.stock.callers.asked(host::monotonic_ns());
        if self.stopping.is_closing() {
            return request.refuse(PoolError::Draining);
        }
        if self.event(&id, Event::QueueResume).is_err() {
            return request.refuse(PoolError::not_found(&id));
        }
        if let Some(entry) = self.slots.get_mut(&id) {
            entry.serving = Some(Serving::Request(request));
        }
        self.admission
            .queue
            .push(Want::Resume(id, start_for), accepted_ns);
    }

    /// Begins a pause, for a caller or at the deadline.
    pub(super) fn pause(&mut self, id: &SandboxId, mode: PauseMode, answer: Option<Answer<()>>) {
        let admitted = self
            .may_save()
            .and_then(|()| self.set_space_aside(id, mode.into()));
        if let Err(error) = admitted {
            return self.pause_failed(id, error, answer);
        }
        if self.event(id, Event::Pause(mode)).is_err() {
            return self.pause_failed(id, PoolError::not_found(id), answer);
        }
        let offset_ms = self.slots.clock.offset_ms();
        let Some(entry) = self.slots.get_mut(id) else {
            return;
        };
        entry.record.set_lifetime(entry.slot.lifetime, offset_ms);
        entry.serving = answer.map(|a| Serving::Request(SandboxRequest::Pause(mode, a)));
        let plan = PausePlan {
            dir: entry.dir.clone(),
            record: entry.record.clone(),
            mode,
            control: entry.take_control(),
            timeout: self.config.start_timeout,
        };
        self.jobs.pause(id.clone(), plan);
    }

    /// Handles a refused or failed pause: the sandbox keeps running, or is about to end.
    pub(super) fn pause_failed(
        &mut self,
        id: &SandboxId,
        error: PoolError,
        answer: Option<Answer<()>>,
    ) {
        let now = self.slots.clock.now();
        tracing::error!(sandbox = %id, %error, "cannot pause the sandbox");
        self.slots
            .add_event(id, format!("the pause failed: {error}"));
        self.slots
            .update(id, |entry| entry.slot.postpone_pause(now));
        if let Some(answer) = answer {
            answer.send(Err(error));
        }
    }

    fn snapshot(&mut self, id: &SandboxId, names: Vec<String>, answer: Answer<TemplateInfo>) {
        let drafted = self.admit_snapshot(id, &names).and_then(|()| {
            let failed = |e| PoolError::of_disk("make a template", &e);
            self.library.draft().map_err(failed)
        });
        let Some(((template, home), answer)) = answer.or_refuse(drafted) else {
            return;
        };
        let request = SandboxRequest::Snapshot(names, answer);
        let purpose = SnapshotFor::Template(template);
        self.begin_snapshot(id, home.join(IMAGE), purpose, request);
    }

    fn admit_snapshot(&mut self, id: &SandboxId, names: &[String]) -> Result<(), PoolError> {
        self.library.check_names(names)?;
        self.may_save()?;
        let entry = self.slots.leased(id)?;
        // A snapshot of a paused sandbox needs no space, because it links the existing files.
        if entry.slot.stage == Stage::Running {
            self.set_space_aside(id, Saving::Diff)?;
        }
        self.check_quota(id)
    }

    /// Begins a fork: takes a snapshot of this sandbox, from which the new sandboxes continue. They get the source's
    /// policy. The other settings come from their specs.
    fn fork(
        &mut self,
        id: &SandboxId,
        mut specs: Vec<CreateSpec>,
        accepted_ns: u64,
        answer: Answer<ForkAnswers>,
    ) {
        self.admission.stock.callers.asked(host::monotonic_ns());
        let checked = specs
            .iter()
            .try_for_each(|spec| check_note(&spec.note))
            .and_then(|()| self.set_space_aside(id, Saving::Diff));
        let source = self.slots.leased(id).map(|e| e.record.clone());
        let Some((source, answer)) = answer.or_refuse(checked.and(source)) else {
            return;
        };
        for spec in &mut specs {
            spec.policy = source.policy.clone();
            spec.priority = source.priority;
        }
        self.forks += 1;
        let dir = self
            .config
            .state
            .join(FORKS)
            .join(format!("{}-{}", self.forks_name, self.forks));
        let purpose = SnapshotFor::Forks(Arc::new(ForkSnapshot::new(dir.clone(), source)));
        let request = SandboxRequest::Fork {
            specs,
            accepted_ns,
            answer,
        };
        self.begin_snapshot(id, dir, purpose, request);
    }

    pub(super) fn begin_snapshot(
        &mut self,
        id: &SandboxId,
        to: PathBuf,
        purpose: SnapshotFor,
        request: SandboxRequest,
    ) {
        if self.stopping.is_closing() {
            return request.refuse(PoolError::Draining);
        }
        let Ok(stage) = self.event(id, Event::Snapshot) else {
            return request.refuse(PoolError::not_found(id));
        };
        let Some(entry) = self.slots.get_mut(id) else {
            return;
        };
        let guest = Guest {
            token: entry.record.init.access_token.clone(),
            pid: entry.record.vmm.map_or(0, |vmm| vmm.pid),
        };
        let content = match &request {
            SandboxRequest::SaveDisk(_) => Content::Disk(guest),
            SandboxRequest::Publish(..) => Content::Whole(guest),
            _ => Content::Diff,
        };
        entry.serving = Some(Serving::Request(request));
        let from = match stage {
            Stage::Snapshotting => {
                let control = entry.take_control();
                SnapshotFrom::Vm(control, entry.record.lineage.clone(), content)
            }
            _ => SnapshotFrom::Pause,
        };
        let plan = SnapshotPlan {
            dir: entry.dir.clone(),
            from,
            to,
            durability: match purpose {
                SnapshotFor::Template(_) => Durability::Host,
                // Forks of a snapshot do not survive a crash of the host.
                SnapshotFor::Forks(_) => Durability::Process,
            },
        };
        self.jobs.snapshot(id.clone(), plan, purpose);
    }

    /// Queues the starts of forks whose snapshot has been written.
    pub(super) fn queue_forks(
        &mut self,
        template: &str,
        specs: Vec<CreateSpec>,
        snapshot: &Arc<ForkSnapshot>,
        accepted_ns: u64,
        answer: Answer<ForkAnswers>,
    ) {
        let mut answers = Vec::new();
        for spec in specs {
            let (answer, answered) = Reply::new();
            answers.push(answered);
            let want = Want::New {
                spec: Box::new(spec),
                template: template.to_owned(),
                fork: Some(Arc::clone(snapshot)),
                answer,
            };
            self.admission.queue.push(want, accepted_ns);
        }
        answer.send(Ok(answers));
    }

    /// Checks that the disk has room to save a running sandbox, and reserves that space for the save.
    pub(super) fn set_space_aside(
        &mut self,
        id: &SandboxId,
        saving: Saving,
    ) -> Result<(), PoolError> {
        let (slots, library) = (&mut self.slots, &self.library);
        self.admission.set_space_aside(slots, library, id, saving)
    }

    /// Checks that a template of this sandbox, whose space is already set aside, stays within the quota of templates.
    pub(super) fn check_quota(&mut self, id: &SandboxId) -> Result<(), PoolError> {
        self.admission.check_quota(&self.slots, &self.library, id)
    }

    /// Checks that one more paused sandbox or snapshot may be kept.
    pub(super) fn may_save(&mut self) -> Result<(), PoolError> {
        self.admission.may_save(&self.slots, &self.library)
    }

    pub(super) fn close(&mut self, on_close: OnClose, closed: Reply<()>) {
        self.stopping.close(on_close, closed);
        if matches!(
            self.stopping.closing(),
            Some(OnClose::Keep | OnClose::HandOver)
        ) {
            self.adoptions.stop();
        }
        self.look_again = true;
        self.upkeep.stop_rebuild();
        let doomed = self.slots.ids(|e| match on_close {
            OnClose::Kill => true,
            OnClose::EndRunning => !e.slot.is_paused(),
            OnClose::Keep | OnClose::HandOver => !e.slot.is_leased(),
        });
        for id in doomed {
            self.end(&id);
        }
    }
}

/// Checks the length of a note.
///
/// # Errors
/// Returns [`PoolError::NoteTooLong`] for more than [`MAX_NOTE`] bytes.
fn check_note(note: &str) -> Result<(), PoolError> {
    match note.len() {
        0..=MAX_NOTE => Ok(()),
        len => Err(PoolError::NoteTooLong(len)),
    }
}
