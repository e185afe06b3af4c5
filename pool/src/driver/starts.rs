//! Starts of VMs: for requests in the queue, and for the warm stock.

use std::{path::Path, sync::Arc, time::Duration};

use library::{
    account::Allowance,
    images::BootFiles,
    info::{TemplateDefaults, TemplateInfo, TemplateKind},
    store::Checked,
    template::Template,
    vmms::VmmId,
};
use model::{SandboxId, StartPhase, Timeline, WarmUpRequest, template_file};
use vmm_control::template::LoadedTemplate;

use super::{
    Driver, Entry,
    admission::{
        demand::drop_on_thread,
        queue::{Pending, Want},
        stock::{Memory, fill_failed},
    },
    entry::Serving,
};
use crate::{
    answer::Answer,
    error::PoolError,
    host,
    message::Unclaimed,
    policy::{self, Placement, Short, StartFor, Supplied},
    record::{Record, SlotDir},
    sandbox::{CreateSpec, Priority},
    slot::{Event, FailedBy, Slot, Stage},
    state::PauseMode,
    state_dir::{SANDBOXES, SCRATCH},
    work::{
        NewIdentity,
        lease::LeasePlan,
        save::ForkSnapshot,
        start::{Image, Purpose, ReadAhead, Source, StartPlan},
    },
};

/// Files and settings from which a new VM is made.
struct Origin {
    source: Source,
    info: Arc<TemplateInfo>,
    boot: Option<BootFiles>,
    vmm: Option<VmmId>,
    defaults: TemplateDefaults,
    warm_up: Arc<[WarmUpRequest]>,
}

impl Driver {
    pub(super) fn serve_queue(&mut self) {
        for pending in self.admission.queue.take_all() {
            if let Some(pending) = self.place(pending) {
                self.admission.queue.put_back(pending);
            }
        }
    }

    /// Serves or refuses one queued request. Returns the request if it must keep waiting.
    fn place(&mut self, mut pending: Pending) -> Option<Pending> {
        if self.stopping.is_closing() {
            self.refuse(pending.want, PoolError::Draining);
            return None;
        }
        let timeout = self.config.start_timeout;
        let now_ns = host::monotonic_ns();
        let waited = Duration::from_nanos(now_ns.saturating_sub(pending.accepted_ns));
        let is_given_up =
            matches!(&pending.want, Want::New { answer, .. } if answer.is_abandoned());
        if is_given_up || waited > timeout {
            let full = PoolError::Full {
                why: format!("it was not started within {timeout:?}"),
                retry_after: Duration::from_secs(1),
            };
            self.refuse(pending.want, full);
            return None;
        }
        let placement = self.admission.placement(&pending, &self.slots, now_ns);
        if matches!(placement, Placement::Take | Placement::Start) {
            self.admission.count_create(&pending);
        }
        let (start_for, others) = (pending.start_for(), self.admission.queue.awaiting_room());
        match placement {
            Placement::Take => self.lease(pending),
            Placement::Start => self.start(pending),
            Placement::Wait => return Some(pending),
            Placement::Evict => {
                if let Some(id) = self.admission.stock.to_evict().cloned() {
                    tracing::info!(sandbox = %id, "ending a warm slot to make room");
                    self.end(&id);
                }
                return Some(pending);
            }
            Placement::Refuse(short) if policy::may_wait(short, start_for, waited, others) => {
                let is_first_wake = start_for == StartFor::Wake && !pending.awaits_room;
                self.counters.wakes_waited += u64::from(is_first_wake);
                pending.awaits_room = true;
                return Some(pending);
            }
            Placement::Refuse(short) => {
                self.admission.count_refused(short);
                self.refuse(pending.want, full(short));
            }
        }
        None
    }

    fn refuse(&mut self, want: Want, error: PoolError) {
        match want {
            Want::New { answer, .. } => answer.send(Err(error)),
            Want::Resume(id, _) => self.resume_failed(&id, FailedBy::Host, error),
        }
    }

    /// Handles a refused or failed resume: the sandbox stays paused.
    pub(super) fn resume_failed(&mut self, id: &SandboxId, by: FailedBy, error: PoolError) {
        tracing::warn!(sandbox = %id, %error, "the resume failed");
        self.slots
            .add_event(id, format!("the resume failed: {error}"));
        let entry = self.slots.get_mut(id);
        let (serving, loaded) = entry.map_or((None, None), |e| (e.serving.take(), e.loaded.take()));
        // A paused sandbox has no VM that maps it.
        drop_on_thread(loaded);
        // An error means that the slot is already ending.
        let _ = self.event(id, Event::ResumeFailed(by));
        if let Some(serving) = serving {
            serving.refuse(error);
        }
    }

    /// Gives the oldest warm slot to a create.
    fn lease(&mut self, pending: Pending) {
        let Some(id) = self.admission.warm_slot_for(&pending.want).cloned() else {
            return self.admission.queue.put_back(pending);
        };
        let Want::New { spec, answer, .. } = pending.want else {
            return;
        };
        if self.event(&id, Event::Lease).is_err() {
            answer.send(Err(PoolError::not_found(&id)));
            return;
        }
        let clock = self.slots.clock;
        let Some(entry) = self.slots.get_mut(&id) else {
            return;
        };
        entry.serving = Some(Serving::New(answer));
        let Some(lines) = entry.lines.take() else {
            // A warm slot always has open connections. If one is missing, ending the slot refuses the create.
            return self.end(&id);
        };
        entry.record.take_settings(*spec, &clock);
        entry.slot.lifetime = entry.record.lifetime;
        self.counters.warm_hits += 1;
        let template = &entry.record.template.id;
        self.admission.stock.supply_mut(template).hits += 1;
        self.jobs.lease(
            LeasePlan {
                id,
                dir: entry.dir.clone(),
                network: self.config.network.clone(),
                authority: self.config.ca_bundle.clone(),
                record: entry.record.clone(),
                timeline: accepted(pending.accepted_ns),
                timeout: self.config.start_timeout,
            },
            lines,
        );
    }

    /// Begins to make a VM for a create, a fork or a resume.
    fn start(&mut self, pending: Pending) {
        let timeline = accepted(pending.accepted_ns);
        match pending.want {
            Want::New {
                spec,
                template,
                fork,
                answer,
            } => self.start_new(*spec, &template, fork, timeline, answer),
            Want::Resume(id, start_for) => {
                let plan = match self.resume_plan(&id, timeline) {
                    Ok(plan) => plan,
                    Err(e) => return self.resume_failed(&id, FailedBy::Sandbox, e),
                };
                // An error means that the sandbox was killed in the queue.
                if self.event(&id, Event::Resume).is_ok() {
                    if let Some(entry) = self.slots.get_mut(&id) {
                        entry.start_for = start_for;
                        entry.loaded = plan.source.loaded();
                    }
                    self.jobs.start(id, plan);
                }
            }
        }
    }

    fn start_new(
        &mut self,
        spec: CreateSpec,
        template: &str,
        fork: Option<Arc<ForkSnapshot>>,
        timeline: Timeline,
        answer: Answer<Unclaimed>,
    ) {
        let is_fork = fork.is_some();
        let made = self.new_slot(template, Stage::Starting, fork);
        let Some(((id, mut plan), answer)) = answer.or_refuse(made) else {
            return;
        };
        self.counters.warm_misses += u64::from(!is_fork);
        if !is_fork {
            let supply = self.admission.stock.supply_mut(template);
            supply.misses += 1;
            let now_ns = host::monotonic_ns();
            if supply.is_memory_idle(now_ns, self.config.idle) {
                plan.read_ahead = ReadAhead::Memory;
            }
        }
        if spec.priority == Priority::Normal {
            self.admission.template_used(&self.library, template);
        }
        let start_for = match spec.priority {
            Priority::Normal => StartFor::Create,
            Priority::Background => StartFor::Build,
        };
        plan.lease(spec, &self.slots.clock, timeline);
        if let Some(entry) = self.slots.get_mut(&id) {
            entry.start_for = start_for;
            entry.record.priority = plan.record.priority;
            entry.slot.lifetime = plan.record.lifetime;
            entry.serving = Some(Serving::New(answer));
        }
        self.jobs.start(id, plan);
    }

    fn resume_plan(&mut self, id: &SandboxId, timeline: Timeline) -> Result<StartPlan, PoolError> {
        let user = self.slots.free_user();
        let entry = self.slots.leased(id)?;
        let Stage::ResumeQueued(mode) = entry.slot.stage else {
            return Err(PoolError::not_found(id));
        };
        let dir = entry.dir.clone();
        let mut record = entry.record.clone();
        record.user = Some(user);
        record.host_boot_id.clone_from(&self.host_boot_id);
        let source = match mode {
            PauseMode::Memory => {
                let checked = self.check_snapshot(&dir.pause())?;
                Source::Snapshot(self.image(checked))
            }
            PauseMode::FilesystemOnly => {
                record.vmm_id = None;
                Source::Boot {
                    files: record.boot.clone().ok_or_else(|| {
                        PoolError::Failed {
                    what: "resume the sandbox",
                    why:
                        "its template does not name a kernel, initramfs and root image to boot from"
                            .to_owned(),
                }
                    })?,
                    layer: dir.pause().join(template_file::LAYER),
                    memory: record.template.memory,
                    vcpus: record.template.vcpus,
                }
            }
        };
        let mut plan =
            self.start_plan(id, dir, record, source, Purpose::GoOn, NewIdentity::Keep)?;
        // As with layers, lack of space does not refuse a resume.
        plan.restorer.allowance = Allowance::All;
        Ok(StartPlan { timeline, ..plan })
    }

    /// Plans a start with the VMM that the record names. If it names none, uses the current VMM and records it.
    fn start_plan(
        &mut self,
        id: &SandboxId,
        dir: SlotDir,
        mut record: Record,
        source: Source,
        purpose: Purpose,
        identity: NewIdentity,
    ) -> Result<StartPlan, PoolError> {
        let vmm = record
            .vmm_id
            .get_or_insert_with(|| self.library.vmms().current().clone());
        let vmm = self
            .library
            .vmms_mut()
            .get(vmm)
            .map_err(|why| PoolError::Failed {
                what: "start the sandbox",
                why,
            })?;
        Ok(StartPlan {
            vmm,
            id: id.clone(),
            dir,
            source,
            purpose,
            identity,
            ram: record.template.memory.0,
            layer_limit: self.config.limits.layer,
            record,
            groups: Arc::clone(&self.jobs.groups),
            network: self.config.network.clone(),
            authority: self.config.ca_bundle.clone(),
            timeout: self.config.start_timeout,
            timeline: Timeline::default(),
            read_ahead: ReadAhead::Nothing,
            restorer: self.jobs.restorer(),
        })
    }

    /// Adds a slot for a VM made from a template or, with `fork`, from the snapshot of a fork. Returns the plan for the
    /// VM.
    fn new_slot(
        &mut self,
        template: &str,
        stage: Stage,
        fork: Option<Arc<ForkSnapshot>>,
    ) -> Result<(SandboxId, StartPlan), PoolError> {
        let random = |e: std::io::Error| PoolError::Failed {
            what: "generate random bytes",
            why: e.to_string(),
        };
        let id = self.config.ids.make(host::random().map_err(random)?);
        let machine_id = model::hex(&host::random::<16>().map_err(random)?);
        let Origin {
            source,
            info,
            boot,
            vmm,
            defaults,
            warm_up,
        } = match fork {
            Some(fork) => self.origin_of_fork(fork)?,
            None => self.origin_of_template(template)?,
        };
        let purpose = Purpose::Wait { warm_up };
        let mut record = Record::new(&self.host_boot_id, info, boot, machine_id.clone());
        record.user = Some(self.slots.free_user());
        record.vmm_id = vmm;
        record.defaults = defaults;
        let dir = SlotDir::new(&self.config.state.join(SANDBOXES), &id);
        let identity = NewIdentity::Fresh {
            id: id.clone(),
            machine_id,
        };
        let plan = self.start_plan(&id, dir.clone(), record, source, purpose, identity)?;
        let record = plan.record.clone();
        let mut entry = Entry::new(Slot::new(stage), dir, record);
        entry.loaded = plan.source.loaded();
        self.slots.insert(id.clone(), entry);
        Ok((id, plan))
    }

    fn origin_of_template(&self, id: &str) -> Result<Origin, PoolError> {
        let template = self.library.get(id);
        let template = template.ok_or_else(|| PoolError::NoTemplate(id.to_owned()))?;
        if template.info.kind == TemplateKind::Disk {
            return self.origin_of_disk(template);
        }
        let source = match &self.admission.stock.supply(id).memory {
            Memory::Loaded(loaded) => Source::Loaded(loaded.clone(), template.root.clone()),
            Memory::OnDisk | Memory::Loading | Memory::Unloadable => Source::Snapshot(Image {
                dir: template.dir.clone(),
                root: template.root.clone(),
                base: template.base.clone(),
                loaded_base: self.loaded_base(template.base.as_deref()),
            }),
        };
        Ok(Origin {
            source,
            info: Arc::new(template.info.clone()),
            boot: template.boot.clone(),
            vmm: Some(template.vmm.clone()),
            defaults: template.defaults.clone(),
            warm_up: template.warm_up.clone(),
        })
    }

    /// A disk template boots in the current VMM, with the current kernel and initramfs of the server's installed
    /// templates.
    fn origin_of_disk(&self, template: &Template) -> Result<Origin, PoolError> {
        let recorded = template.boot.clone();
        let mut files = recorded.ok_or_else(|| PoolError::NoTemplate(template.info.id.clone()))?;
        if let Some(guest) = self.library.guest() {
            (files.kernel, files.initrd) = (guest.kernel, guest.initrd);
        }
        Ok(Origin {
            source: Source::Boot {
                files: files.clone(),
                layer: template.dir.join(template_file::LAYER),
                memory: template.info.memory,
                vcpus: template.info.vcpus,
            },
            info: Arc::new(template.info.clone()),
            boot: Some(files),
            vmm: None,
            defaults: template.defaults.clone(),
            warm_up: Arc::default(),
        })
    }

    /// A fork continues with its source's files and VMM, whatever its template is now.
    fn origin_of_fork(&self, fork: Arc<ForkSnapshot>) -> Result<Origin, PoolError> {
        let image = self.image(self.check_snapshot(fork.dir())?);
        let Record {
            template,
            boot,
            vmm_id,
            defaults,
            ..
        } = fork.source.clone();
        Ok(Origin {
            source: Source::Fork(fork, image),
            info: template,
            boot,
            vmm: vmm_id,
            defaults,
            warm_up: Arc::default(),
        })
    }

    /// Checks that a snapshot written by a VMM names only files in the store, and resolves them.
    pub(super) fn check_snapshot(&self, dir: &Path) -> Result<Checked, PoolError> {
        self.library
            .check_snapshot(dir)
            .map_err(|why| PoolError::Failed {
                what: "use a snapshot",
                why,
            })
    }

    fn image(&self, checked: Checked) -> Image {
        Image {
            loaded_base: self.loaded_base(checked.base.as_deref()),
            dir: checked.dir,
            root: checked.root,
            base: checked.base,
        }
    }

    /// The template that is the base in this directory, if it is loaded.
    fn loaded_base(&self, base: Option<&Path>) -> Option<Arc<LoadedTemplate>> {
        let base = base?;
        let template = self.library.iter().find(|t| t.dir == base)?;
        match &self.admission.stock.supply(&template.info.id).memory {
            Memory::Loaded(loaded) => Some(loaded.clone()),
            Memory::OnDisk | Memory::Loading | Memory::Unloadable => None,
        }
    }

    /// Begins fills as long as templates need them and admission allows them.
    pub(super) fn fill(&mut self) {
        while self.fill_next() {}
    }

    /// Loads a template or begins a fill. Returns whether there was work to do and room for it.
    fn fill_next(&mut self) -> bool {
        let now_ns = host::monotonic_ns();
        for id in self.admission.divide(&self.slots, &self.library, now_ns) {
            self.end(&id);
        }
        if self.adoptions.is_urgent(now_ns) {
            return false;
        }
        let (slots, library) = (&self.slots, &self.library);
        let Some((id, supplied)) = self.admission.next_supply(slots, library, now_ns) else {
            return false;
        };
        match supplied {
            Supplied::Memory => self.admission.load(library, &self.jobs, &id),
            Supplied::Slot => self.fill_one(&id, now_ns),
        }
        true
    }

    fn fill_one(&mut self, template: &str, now_ns: u64) {
        self.admission.stock.fill_begun(now_ns);
        match self.new_slot(template, Stage::Filling, None) {
            Ok((id, plan)) => self.jobs.start(id, plan),
            Err(error) => {
                tracing::error!(template, %error, "cannot make a warm slot");
                self.fill_failed(template);
            }
        }
    }

    pub(super) fn fill_failed(&mut self, template: &str) {
        fill_failed(
            self.admission.stock.supply_mut(template),
            host::monotonic_ns(),
        );
    }
}

fn accepted(ns: u64) -> Timeline {
    let mut timeline = Timeline::default();
    timeline.stamp(StartPhase::Accepted, ns);
    timeline
}

fn full(short: Short) -> PoolError {
    match short {
        Short::Disk { .. } => {
            PoolError::NoSpace(format!("one more sandbox: {short} at {}", SCRATCH))
        }
        Short::Memory { .. } | Short::Slots { .. } | Short::Pressure { .. } => PoolError::Full {
            why: short.to_string(),
            retry_after: policy::retry_after(short),
        },
    }
}

#[cfg(test)]
mod tests {
    use netisolation::{DefaultEgress, Policy};

    use super::*;
    use crate::{driver::fixtures::driver, lifetime::Lifetime, sandbox::Init};

    #[tokio::test]
    async fn a_build_has_as_much_more_time_to_boot_as_it_has_less_cpu_time() {
        let root = tempfile::tempdir().unwrap();
        let (mut driver, template) = driver(root.path());
        let normal = driver.config.start_timeout;
        for (priority, wanted) in [
            (Priority::Normal, normal),
            (Priority::Background, normal * 10),
        ] {
            let (_, mut plan) = driver.new_slot(&template, Stage::Starting, None).unwrap();
            let spec = CreateSpec {
                priority,
                template: template.clone(),
                init: Init::default(),
                note: String::new(),
                lifetime: Lifetime::default(),
                policy: Policy::of_lists(DefaultEgress::Deny, &[], &[]),
            };
            plan.lease(spec, &driver.slots.clock, Timeline::default());
            assert_eq!(plan.timeout, wanted);
            assert_eq!(plan.record.priority, priority);
        }
    }
}
