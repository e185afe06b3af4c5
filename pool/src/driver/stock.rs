//! Who gets a sandbox from where, and the warm stock behind it.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use model::{SandboxId, StartPhase, Timeline, template_file};
use vmm_control::VmUser;

use super::{Driver, Entry, Measured, Pending, Want, entry::Waiter};
use crate::{
    CreateSpec, Init, PauseMode, PoolError, Sandbox, host,
    message::{Answer, Report},
    policy::{self, Demand, Foreground, Need, Placement, Room, Short, StartFor, Stock},
    record::{Record, SlotDir},
    slot::{Event, Slot, Stage},
    templates::{Memory, base_of},
    work::{
        Who,
        lease::{LeasePlan, serve},
        start::{Purpose, Source, StartPlan},
    },
};

/// MemAvailable is read again when it is older than this.
const FRESH: Duration = Duration::from_millis(20);
/// Sandboxes that are measured at one tick.
const MEASURED_AT_ONCE: usize = 64;
/// Loaded templates are in pages of this size.
const HUGE_PAGE: u64 = 2 << 20;
/// First and longest time without a fill after one that failed.
const BACKOFF: Duration = Duration::from_millis(500);
const LONGEST_BACKOFF: Duration = Duration::from_secs(30);

impl Driver {
    /// Serves those who wait, then fills the stock.
    pub(super) fn pump(&mut self) {
        if self.closing.is_some() {
            for pending in std::mem::take(&mut self.queue) {
                self.drop_pending(pending, PoolError::Closing);
            }
            return;
        }
        let mut waiting = std::mem::take(&mut self.queue);
        while let Some(pending) = waiting.pop_front() {
            if let Some(pending) = self.place(pending) {
                self.queue.push_back(pending);
            }
        }
        self.fill();
    }

    /// Serves one who waits; gives him back if he has to wait on.
    fn place(&mut self, pending: Pending) -> Option<Pending> {
        let timeout = self.config.start_timeout;
        let waited = Duration::from_nanos(Self::now_ns().saturating_sub(pending.accepted_ns));
        if pending.answer.is_closed() || waited > timeout {
            let full = PoolError::Full {
                why: format!("there was no turn for it within {timeout:?}"),
                retry_after: Duration::from_secs(1),
            };
            self.drop_pending(pending, full);
            return None;
        }
        let warm = match &pending.want {
            Want::New {
                template,
                fork: None,
                ..
            } => self.warm.get(template).and_then(|w| w.front()).cloned(),
            Want::New { .. } | Want::Resume { .. } => None,
        };
        let demand = Demand {
            warm: warm.is_some(),
            has_layer: matches!(pending.want, Want::Resume { .. }),
            other_warm: self.warm.values().any(|w| !w.is_empty()),
            ending: self
                .slots
                .values()
                .any(|e| e.slot.stage == Stage::Ending && e.slot.vm),
            place: self.places().has_one_for(pending.want.start_for()),
        };
        let room = self.room_for(&self.need_of(&pending.want));
        match policy::place(&room, &demand) {
            Placement::Take => {
                if let Some(id) = warm {
                    self.lease(&id, pending);
                }
            }
            Placement::Start => self.start(pending),
            Placement::Wait => return Some(pending),
            Placement::Evict => {
                self.evict();
                return Some(pending);
            }
            Placement::Refuse(short) => {
                self.counters.refused += 1;
                let full = match short {
                    Short::Disk { .. } => PoolError::NoSpace(format!(
                        "one more sandbox: {short} at {}",
                        crate::SCRATCH
                    )),
                    Short::Memory { .. } | Short::Slots { .. } => PoolError::Full {
                        why: short.to_string(),
                        retry_after: policy::retry_after(short),
                    },
                };
                self.drop_pending(pending, full);
            }
        }
        None
    }

    pub(super) fn drop_pending(&mut self, pending: Pending, error: PoolError) {
        if let Want::New {
            fork: Some(fork), ..
        } = pending.want
        {
            self.fork_started(fork);
        }
        Self::refuse(pending.answer, error);
    }

    /// A warm slot of the template that has most of them ends.
    fn evict(&mut self) {
        let most = self.warm.values().max_by_key(|w| w.len());
        if let Some(id) = most.and_then(|w| w.front()).cloned() {
            tracing::info!(sandbox = %id, "a warm slot gives way");
            self.end(&id);
        }
    }

    /// Gives a warm slot to who waits.
    fn lease(&mut self, id: &SandboxId, pending: Pending) {
        let Want::New { spec, .. } = pending.want else {
            return Self::refuse(pending.answer, PoolError::NoSandbox(id.clone()));
        };
        if self.event(id, Event::Acquire).is_err() {
            return Self::refuse(pending.answer, PoolError::NoSandbox(id.clone()));
        }
        let timeout = self.config.start_timeout;
        let Some(entry) = self.slots.get_mut(id) else {
            return;
        };
        let Some(lines) = entry.lines.take() else {
            // A bug; whoever waits hears of it when the slot is gone.
            entry.waiter = Some(Waiter::Sandbox(pending.answer));
            self.end(id);
            return;
        };
        entry.record.init = spec.init;
        entry.record.policy = spec.policy;
        let mut timeline = Timeline::default();
        timeline.stamp(StartPhase::Accepted, pending.accepted_ns);
        entry.waiter = Some(Waiter::Sandbox(pending.answer));
        let plan = LeasePlan {
            id: id.clone(),
            dir: entry.dir.clone(),
            network: self.config.network.clone(),
            record: entry.record.clone(),
            note: spec.note,
            timeline,
            timeout,
        };
        let (id, reporter) = (id.clone(), self.reporter.clone());
        self.counters.warm_hits += 1;
        tokio::spawn(async move {
            let served = serve(plan, lines).await.map(Box::new);
            let _ = reporter.send(Report::Told(id, served));
        });
    }

    /// Makes a VM for who waits.
    fn start(&mut self, pending: Pending) {
        match pending.want {
            Want::New {
                spec,
                template,
                fork,
            } => self.start_new(*spec, &template, fork, pending.accepted_ns, pending.answer),
            Want::Resume { id, init, start } => {
                self.start_resume(&id, init, start, pending.accepted_ns, pending.answer);
            }
        }
    }

    fn start_new(
        &mut self,
        spec: CreateSpec,
        template: &str,
        fork: Option<u64>,
        accepted_ns: u64,
        answer: Answer<Sandbox>,
    ) {
        let (id, mut plan) = match self.new_slot(template, Stage::Starting, fork) {
            Ok(made) => made,
            Err(e) => {
                if let Some(fork) = fork {
                    self.fork_started(fork);
                }
                return Self::refuse(answer, e);
            }
        };
        plan.record.init = spec.init;
        plan.record.policy = spec.policy;
        plan.purpose = Purpose::Lease { note: spec.note };
        plan.timeline.stamp(StartPhase::Accepted, accepted_ns);
        if let Some(entry) = self.slots.get_mut(&id) {
            entry.waiter = Some(Waiter::Sandbox(answer));
            entry.fork = fork;
        }
        self.counters.warm_misses += u64::from(fork.is_none());
        self.make(id, plan);
    }

    fn start_resume(
        &mut self,
        id: &SandboxId,
        init: Init,
        start: StartFor,
        accepted_ns: u64,
        answer: Answer<Sandbox>,
    ) {
        let user = self.free_user();
        let Some(entry) = self.slots.get(id) else {
            return Self::refuse(answer, PoolError::NoSandbox(id.clone()));
        };
        let state = entry.state();
        let planned = match entry.slot.stage {
            Stage::Paused(mode) => self.resume_plan(user, id, entry, mode, init, accepted_ns),
            _ => Err(PoolError::WrongState {
                id: id.clone(),
                state,
            }),
        };
        let plan = match planned {
            Ok(plan) => plan,
            Err(e) => return Self::refuse(answer, e),
        };
        if self.event(id, Event::Resume).is_err() {
            return Self::refuse(answer, PoolError::NoSandbox(id.clone()));
        }
        if let Some(entry) = self.slots.get_mut(id) {
            entry.waiter = Some(Waiter::Sandbox(answer));
            entry.start_for = start;
        }
        self.make(id.clone(), plan);
    }

    fn resume_plan(
        &self,
        user: u32,
        id: &SandboxId,
        entry: &Entry,
        mode: PauseMode,
        init: Init,
        accepted_ns: u64,
    ) -> Result<StartPlan, PoolError> {
        let pause = entry.dir.pause();
        let mut record = entry.record.clone();
        record.init = init;
        record.user = Some(user);
        record.host_boot_id.clone_from(&self.host_boot_id);
        let source = match mode {
            PauseMode::Memory => {
                self.check_snapshot(&pause)?;
                self.snapshot_source(pause)
            }
            PauseMode::FilesystemOnly => Source::Boot {
                files: record.boot.clone().ok_or_else(|| PoolError::Failed {
                    what: "resume the sandbox",
                    why: "its template does not say what it boots from".to_owned(),
                })?,
                layer: pause.join(template_file::LAYER),
                memory: record.template.memory,
                vcpus: record.template.vcpus,
            },
        };
        let mut timeline = Timeline::default();
        timeline.stamp(StartPhase::Accepted, accepted_ns);
        Ok(StartPlan {
            vmm: self.config.vmm.clone(),
            id: id.clone(),
            dir: entry.dir.clone(),
            source,
            purpose: Purpose::GoOn,
            who: Who::Same,
            ram: record.template.memory.0,
            layer_limit: self.config.limits.layer,
            record,
            groups: self.groups.clone(),
            network: self.config.network.clone(),
            timeout: self.config.start_timeout,
            timeline,
        })
    }

    /// A user that no VM of this pool has. The numbers go round, from a random one on: another server on this host
    /// begins elsewhere.
    fn free_user(&mut self) -> u32 {
        loop {
            let user = self.next_user;
            self.next_user = match user + 1 {
                next if next < VmUser::POOL.end => next,
                _ => VmUser::POOL.start,
            };
            if self.slots.values().all(|e| e.record.user != Some(user)) {
                return user;
            }
        }
    }

    /// Runs a start's job.
    pub(super) fn make(&self, id: SandboxId, plan: StartPlan) {
        let reporter = self.reporter.clone();
        tokio::task::spawn_blocking(move || {
            let made = plan.run().map(Box::new);
            let _ = reporter.send(Report::Made(id, made));
        });
    }

    /// A new slot of a template (or of a fork's image) and the plan to make its VM.
    fn new_slot(
        &mut self,
        template: &str,
        stage: Stage,
        fork: Option<u64>,
    ) -> Result<(SandboxId, StartPlan), PoolError> {
        let random = |e: std::io::Error| PoolError::Failed {
            what: "draw random bytes",
            why: e.to_string(),
        };
        let id = SandboxId::from_random(host::random().map_err(random)?);
        let machine_id = host::hex(&host::random::<16>().map_err(random)?);
        let known = self
            .templates
            .get(template)
            .ok_or_else(|| PoolError::NoTemplate(template.to_owned()))?;
        let source = match (fork.and_then(|n| self.forks.get(&n)), &known.memory) {
            (Some(image), _) => self.snapshot_source(image.dir.clone()),
            (None, Memory::Loaded(loaded)) => Source::Loaded(loaded.clone()),
            (None, Memory::OnDisk | Memory::Loading | Memory::Unloadable) => {
                self.snapshot_source(known.dir.clone())
            }
        };
        let (info, boot) = (known.info.clone(), known.boot.clone());
        let warm_up = known.warm_up.clone();
        let ram = info.memory.0;
        let mut record = Record::new(&self.host_boot_id, info, boot, machine_id.clone());
        record.user = Some(self.free_user());
        let dir = SlotDir::new(&self.config.state.join(crate::SANDBOXES), &id);
        let plan = StartPlan {
            vmm: self.config.vmm.clone(),
            id: id.clone(),
            dir: dir.clone(),
            source,
            purpose: Purpose::Wait { warm_up },
            who: Who::New {
                id: id.clone(),
                machine_id,
            },
            record: record.clone(),
            ram,
            layer_limit: self.config.limits.layer,
            groups: self.groups.clone(),
            network: self.config.network.clone(),
            timeout: self.config.start_timeout,
            timeline: Timeline::default(),
        };
        let entry = Entry::new(Slot::new(stage), dir, record);
        self.slots.insert(id.clone(), entry);
        Ok((id, plan))
    }

    /// Whether what a VMM wrote names only files that it may.
    pub(super) fn check_snapshot(&self, dir: &Path) -> Result<(), PoolError> {
        self.templates
            .check_snapshot(dir)
            .map_err(|why| PoolError::Failed {
                what: "use a snapshot",
                why,
            })
    }

    /// To restore from a directory: if it is a diff, over the loaded copy of its base.
    fn snapshot_source(&self, dir: PathBuf) -> Source {
        let base = base_of(&dir).and_then(|base| {
            let template = self.templates.iter().find(|t| t.dir == base)?;
            match &template.memory {
                Memory::Loaded(loaded) => Some(loaded.clone()),
                Memory::OnDisk | Memory::Loading | Memory::Unloadable => None,
            }
        });
        Source::Snapshot(dir, base)
    }

    /// What there is of the host for one that needs so much, and what of it is promised.
    pub(super) fn room_for(&mut self, need: &Need) -> Room {
        let now = Self::now_ns();
        if u128::from(now - self.available.at_ns) > FRESH.as_nanos() {
            self.available = Measured {
                bytes: host::meminfo("MemAvailable").unwrap_or(0),
                at_ns: now,
            };
        }
        let mut promised = 0_u64;
        let mut slots = 0_u32;
        for entry in self.slots.values().filter(|e| e.slot.takes_memory()) {
            slots += 1;
            let own = self.need(&entry.record.template.id);
            let has = match entry.slot.stage {
                // It will be paused again before it grows.
                Stage::Warm | Stage::Ending | Stage::Pausing(_) | Stage::Stopping(_) => continue,
                Stage::Filling => own.expected.saturating_sub(own.warm_has),
                _ => entry.private.unwrap_or(0),
            };
            promised = promised.saturating_add(own.expected.saturating_sub(has));
        }
        Room {
            available: self.available.bytes,
            reserve: self.config.memory_reserve.0,
            expected: need.expected,
            warm_has: need.warm_has,
            promised,
            slots,
            max: self.config.max_sandboxes,
            disk: self.layer_space(),
            layer: self.layer_share(),
        }
    }

    /// Begins fills while they are wanted and allowed.
    fn fill(&mut self) {
        let marks = self.config.warm;
        if marks.high == 0 {
            return;
        }
        for id in self.templates.ids() {
            let filling = self.filling_of(Some(&id));
            let warm = self
                .warm
                .get(&id)
                .map_or(0, std::collections::VecDeque::len);
            let Some(template) = self.templates.get_mut(&id) else {
                continue;
            };
            if !template.wanted {
                continue;
            }
            let stock = Stock {
                warm: u32::try_from(warm).unwrap_or(u32::MAX),
                filling,
                low: marks.low,
                high: marks.high,
                refilling: template.refilling,
            };
            template.refilling = policy::refilling(&stock);
        }
        loop {
            let now = Self::now_ns();
            let next = self
                .templates
                .iter()
                .filter(|t| t.refilling && now >= t.not_before_ns)
                .min_by_key(|t| {
                    self.warm
                        .get(&t.info.id)
                        .map_or(0, std::collections::VecDeque::len)
                });
            let Some(template) = next.map(|t| t.info.id.clone()) else {
                return;
            };
            let foreground = self.foreground(now);
            let room = self.room_for(&self.need(&template));
            if !policy::may_fill(&room, &foreground) {
                return;
            }
            match self.templates.get(&template).map(|t| &t.memory) {
                Some(Memory::OnDisk) => self.load(&template),
                Some(Memory::Loaded(_) | Memory::Unloadable) => self.fill_one(&template),
                // Clones of what is on disk now would not share its huge pages.
                Some(Memory::Loading) | None => {}
            }
            let stock = self.stock(&template);
            if let Some(t) = self.templates.get_mut(&template) {
                t.refilling = stock.is_some_and(|s| policy::refilling(&s));
                if matches!(t.memory, Memory::Loading) {
                    return;
                }
            }
        }
    }

    fn stock(&self, id: &str) -> Option<Stock> {
        let template = self.templates.get(id)?;
        let warm = self.warm.get(id).map_or(0, std::collections::VecDeque::len);
        Some(Stock {
            warm: u32::try_from(warm).unwrap_or(u32::MAX),
            filling: self.filling_of(Some(id)),
            low: self.config.warm.low,
            high: self.config.warm.high,
            refilling: template.refilling,
        })
    }

    pub(super) fn filling_of(&self, template: Option<&str>) -> u32 {
        let filling = self.slots.values().filter(|e| {
            e.slot.stage == Stage::Filling && template.is_none_or(|t| e.record.template.id == t)
        });
        u32::try_from(filling.count()).unwrap_or(u32::MAX)
    }

    fn foreground(&self, now: u64) -> Foreground {
        let busy = self.slots.values().any(|e| {
            matches!(
                e.slot.stage,
                Stage::Starting | Stage::Resuming(_) | Stage::Pausing(_) | Stage::Saving
            )
        });
        Foreground {
            waiting: busy || !self.queue.is_empty(),
            quiet_for: Duration::from_nanos(now.saturating_sub(self.last_foreground_ns)),
            since_fill: Duration::from_nanos(now.saturating_sub(self.last_fill_ns)),
            filling: self.filling_of(None),
            max_filling: self.parallel,
        }
    }

    fn fill_one(&mut self, template: &str) {
        self.last_fill_ns = Self::now_ns();
        match self.new_slot(template, Stage::Filling, None) {
            Ok((id, plan)) => self.make(id, plan),
            Err(error) => {
                tracing::error!(template, %error, "no warm slot");
                self.fill_failed(template);
            }
        }
    }

    /// The next fill of this template waits, longer each time.
    pub(super) fn fill_failed(&mut self, template: &str) {
        let now = Self::now_ns();
        if let Some(t) = self.templates.get_mut(template) {
            let wait = BACKOFF
                .saturating_mul(1 << t.failures.min(10))
                .min(LONGEST_BACKOFF);
            t.failures += 1;
            t.not_before_ns = now + u64::try_from(wait.as_nanos()).unwrap_or(u64::MAX);
        }
    }

    /// Copies a template's memory into huge pages.
    fn load(&mut self, id: &str) {
        let Some(template) = self.templates.get_mut(id) else {
            return;
        };
        if base_of(&template.dir).is_some() {
            template.memory = Memory::Unloadable;
            return;
        }
        let dir = template.dir.clone();
        let room = self.make_room_to_load(&dir);
        let Some(template) = self.templates.get_mut(id) else {
            return;
        };
        if let Err(error) = room {
            tracing::error!(template = id, %error, "it is not loaded: its clones come from the disk");
            template.memory = Memory::Unloadable;
            return;
        }
        template.memory = Memory::Loading;
        let (id, reporter) = (id.to_owned(), self.reporter.clone());
        tokio::task::spawn_blocking(move || {
            let loaded = vmm_control::template::LoadedTemplate::load(&dir);
            let loaded = loaded
                .map(std::sync::Arc::new)
                .map_err(|e| model::chain(&e));
            let _ = reporter.send(Report::Loaded(id, loaded));
        });
    }

    /// A loaded template counts in the server's control group, so the limit of that grows by its size. It does not
    /// shrink again, since VMMs may hold the memory of a template that the server has forgotten.
    fn make_room_to_load(&mut self, dir: &Path) -> std::io::Result<()> {
        let Some(memory) = self.config.server_memory else {
            return Ok(());
        };
        let size = std::fs::metadata(dir.join(template_file::MEMORY))?.len();
        self.loaded += size.next_multiple_of(HUGE_PAGE);
        self.groups
            .limit_server(memory.0.saturating_add(self.loaded))
    }

    /// Once a second: measure, and look at what was put off.
    pub(super) fn tick(&mut self) {
        self.watch_disks();
        let mut running: Vec<_> = self
            .slots
            .iter()
            .filter(|(_, e)| e.slot.stage == Stage::Running)
            .map(|(id, _)| id.clone())
            .collect();
        running.sort_unstable();
        let from = self
            .measured_up_to
            .take()
            .map_or(0, |last| running.partition_point(|id| *id <= last));
        for id in running.iter().skip(from).take(MEASURED_AT_ONCE) {
            let Some(entry) = self.slots.get_mut(id) else {
                continue;
            };
            let pid = entry.record.vmm.map_or(0, |vmm| vmm.pid);
            if let Some(bytes) = host::private_bytes(pid) {
                entry.private = Some(bytes);
            }
        }
        if from + MEASURED_AT_ONCE < running.len() {
            self.measured_up_to = running.get(from + MEASURED_AT_ONCE - 1).cloned();
        }
        self.estimate();
    }
}
