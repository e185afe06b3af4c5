//! The driver: one task that owns every slot and receives requests and reports. Work that takes time runs in [`jobs`],
//! which report their end. [`crate::slot`] decides what a slot may do, and [`crate::policy`] decides what is admitted;
//! the driver carries out both decisions.
//!
//! ```text
//! Request ─► requests, queries ─┐                       ┌─► jobs ─► Report ─► reports
//! deadline ─► expire ───────────┼─► slot::{decide,      │
//! tick ─► memory, space         │         transition} ──┼─► waiting requests are decided again
//! little memory ─► defence ─────┤                       │
//!                               └─► queue ─► starts ────┘
//! ```

mod admission;
mod adopting;
mod adoptions;
mod catalog;
mod claims;
mod defence;
pub(crate) mod entry;
#[cfg(test)]
mod fixtures;
mod followers;
mod jobs;
mod making;
mod queries;
mod reports;
mod requests;
mod slots;
mod starts;
mod stopping;
mod upkeep;

use std::{sync::Arc, time::Duration};

use model::SandboxId;
use tokio::sync::mpsc;

use entry::Entry;
use library::Library;

use crate::{
    cgroup::{FormerServers, Groups},
    change::{ChangeKind, Ended},
    clock::{Clock, Reading},
    config::PoolConfig,
    host,
    leftovers::Leftovers,
    message::{Report, Request},
    sandbox::OnClose,
    slot::{Effects, Event, Next, Operation, Slot, Stage, Unexpected, decide},
    state_dir::StateLock,
    stats::PoolStats,
    work::rebuild::Outcome,
};
use admission::Admission;
use adoptions::Adoptions;
use followers::Followers;
use jobs::Jobs;
use slots::Slots;
use stopping::Stopping;
use upkeep::{Around, Upkeep};

/// How often sandboxes are measured. Also the longest delay until the driver notices that the wall clock was set.
const TICK: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(crate) struct Driver {
    config: Arc<PoolConfig>,
    host_boot_id: String,
    requests: mpsc::Receiver<Request>,
    reports: mpsc::UnboundedReceiver<Report>,
    followers: Followers,
    jobs: Jobs,
    library: Library,
    upkeep: Upkeep,
    slots: Slots,
    adoptions: Adoptions,
    admission: Admission,
    counters: PoolStats,
    /// Number of fork snapshots so far; the name of each directory contains its number.
    forks: u64,
    /// The prefix of these names. It differs from the prefix of previous servers, whose directories are still being
    /// removed.
    forks_name: String,
    former_servers: FormerServers,
    stopping: Stopping,
    /// Whether a change may allow a start or a fill to begin.
    look_again: bool,
    lock: StateLock,
}

#[derive(Debug)]
pub(crate) struct Setup {
    pub(crate) config: PoolConfig,
    pub(crate) host_boot_id: String,
    pub(crate) groups: Arc<Groups>,
    pub(crate) library: Library,
    pub(crate) keeps_unused: bool,
    pub(crate) entries: Vec<(SandboxId, Entry)>,
    pub(crate) leftovers: Leftovers,
    pub(crate) clock: Clock,
    pub(crate) requests: mpsc::Receiver<Request>,
    pub(crate) ended: mpsc::UnboundedSender<Ended>,
    pub(crate) lock: StateLock,
}

impl Driver {
    pub(crate) fn new(mut setup: Setup) -> Self {
        let (reporter, reports) = mpsc::unbounded_channel();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let parallel = u32::try_from(cores).unwrap_or(u32::MAX);
        // Removed from the configuration, because jobs share it and may outlive the driver.
        let changes = setup.config.changes.take();
        let config = Arc::new(setup.config);
        let admission = Admission::new(&config, parallel);
        let account = admission.account().clone();
        let jobs = Jobs::new(Arc::clone(&config), setup.groups, reporter, account);
        let mut pending = Vec::new();
        for (id, entry) in &mut setup.entries {
            match entry.slot.stage {
                Stage::Adopting => {
                    pending.push(id.clone());
                    if let Some(vm) = entry.unwatched.take() {
                        jobs.watch(id.clone(), vm);
                    }
                }
                Stage::AdoptingPaused(_) => pending.push(id.clone()),
                _ => {}
            }
        }
        let adoptions = Adoptions::new(pending, setup.leftovers, cores.saturating_mul(2));
        Self {
            host_boot_id: setup.host_boot_id,
            requests: setup.requests,
            reports,
            followers: Followers {
                ended: setup.ended,
                changes,
            },
            jobs,
            library: setup.library,
            upkeep: Upkeep::new(&config, setup.keeps_unused),
            slots: Slots::new(setup.entries, setup.clock),
            adoptions,
            admission,
            counters: PoolStats::default(),
            forks: 0,
            forks_name: format!("{:x}", host::unix_ns()),
            former_servers: FormerServers::Gone,
            stopping: Stopping::default(),
            look_again: true,
            lock: setup.lock,
            config,
        }
    }

    /// Runs until the pool is closed or every handle is dropped.
    pub(crate) async fn run(mut self) {
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            self.settle();
            if self.is_closed() {
                break;
            }
            let timer = self.timer();
            let defend_in = self.admission.memory.defend_in(host::monotonic_ns());
            tokio::select! {
                biased;
                Some(report) = self.reports.recv() => {
                    self.look_again = true;
                    self.report(report);
                }
                request = self.requests.recv() => match request {
                    Some(request) => self.request(request),
                    // Every handle was dropped: VMs keep running, and the next server adopts them.
                    None if !self.stopping.is_closing() => break,
                    None => {}
                },
                _ = tick.tick() => self.tick(),
                () = tokio::time::sleep(timer) => self.look_again = true,
                () = tokio::time::sleep(defend_in) => {}
            }
        }
        self.upkeep.end_rebuild(&mut self.reports).await;
        self.upkeep.end_storing().await;
        self.upkeep.end_removal().await;
        if let Some(on_close) = self.stopping.closing() {
            if on_close != OnClose::HandOver {
                self.jobs.groups.close();
            }
            // Must precede the response: the caller may start the next server at once.
            drop(self.lock);
            self.stopping.has_closed();
        }
    }

    /// Does everything that is possible now: acts on expired deadlines, decides waiting requests, begins starts and
    /// fills.
    fn settle(&mut self) {
        self.defend();
        self.adopt();
        self.expire();
        while let Some((id, request)) = self.slots.next_ready() {
            self.decide(id, request);
        }
        if std::mem::take(&mut self.look_again) {
            self.serve_queue();
            if !self.stopping.is_closing() {
                self.fill();
            }
        }
        self.admission.publish(&self.slots);
        if self.stopping.is_awaited() && self.is_drained() {
            self.stopping.has_settled();
        }
    }

    /// How long to sleep if no message arrives.
    fn timer(&self) -> Duration {
        let fills = !self.stopping.is_closing() && self.admission.stock.wants_fills();
        let longest = if fills {
            self.admission.stock.look_again_in(host::monotonic_ns())
        } else {
            TICK
        };
        let longest = longest.min(self.adoptions.timer().unwrap_or(longest));
        let due = self.slots.next_due().map(|due| {
            let left = due.saturating_sub(self.slots.clock.now());
            Duration::from_millis(left)
        });
        due.map_or(longest, |due| due.min(longest))
    }

    fn tick(&mut self) {
        if let Some(step_ms) = self.slots.clock.follow(Reading::now()) {
            tracing::warn!(
                step_ms,
                "the wall clock was set: moving the deadlines of all sandboxes by the same amount"
            );
            self.clock_was_set(step_ms);
        }
        self.look_again = true;
        self.admission.measure(&mut self.slots, &self.library);
        self.remove_unused();
        if self.former_servers == FormerServers::Left && !self.stopping.is_closing() {
            // Remains so until the report arrives.
            self.former_servers = FormerServers::Gone;
            self.jobs.remove_former_servers();
        }
        self.begin_upkeep();
    }

    /// Removes files that nothing needs. No record names the files of a start or of a new template before it is
    /// complete, and after the pool has begun to close, the next server decides with its own VMM and templates.
    fn remove_unused(&mut self) {
        let is_at_rest = |slot: &Slot| slot.stage == Stage::Warm || slot.is_settled();
        if !self.stopping.is_closing()
            && self.admission.queue.is_empty()
            && self.slots.values().all(|e| is_at_rest(&e.slot))
        {
            self.upkeep.remove_unused(&mut self.library, &self.slots);
        }
    }

    /// Begins rebuilds, and stores memory as diffs.
    fn begin_upkeep(&mut self) {
        if self.stopping.is_closing() || !self.adoptions.is_swept() {
            return;
        }
        let mut around = Around {
            slots: &self.slots,
            admission: &mut self.admission,
            jobs: &self.jobs,
        };
        self.upkeep.rebuild(&mut self.library, &mut around);
        self.upkeep
            .store_diffs(&mut self.library, &around, &self.reports);
    }

    /// Records the end of a rebuild.
    fn rebuilt(&mut self, id: &str, result: Result<Outcome, String>) {
        if self.stopping.is_closing() {
            return self.upkeep.rebuild_stopped();
        }
        if self.upkeep.rebuilt(&mut self.library, id, result) {
            let former = self.admission.stock.supply_mut(id).files_replaced();
            self.jobs.change_templates(move || drop(former));
            self.end_stock(id);
        }
    }

    /// Ends the warm slots of a template, including the ones that are being filled.
    fn end_stock(&mut self, template: &str) {
        let is_stock = |stage| matches!(stage, Stage::Warm | Stage::Filling);
        let stock = self
            .slots
            .ids(|e| e.record.template.id == template && is_stock(e.slot.stage));
        for slot in stock {
            self.end(&slot);
        }
    }

    /// Moves all deadlines, and writes the records of running sandboxes.
    fn clock_was_set(&mut self, step_ms: i64) {
        for id in self.slots.ids(|_| true) {
            self.slots.update(&id, |e| e.slot.clock_was_set(step_ms));
            self.write_record(&id, Vec::new());
        }
    }

    /// Acts on expired deadlines.
    fn expire(&mut self) {
        let now = self.slots.clock.now();
        for id in self.slots.due() {
            if self.stopping.is_closing() {
                return;
            }
            let decided = self
                .slots
                .leased(&id)
                .map(|e| decide(&e.slot, Operation::Expire, now));
            let Ok(Ok(Next::Begin(event))) = decided else {
                continue;
            };
            tracing::info!(sandbox = %id, action = ?event, "deadline reached");
            self.slots.add_event(&id, "deadline reached");
            match event {
                Event::Pause(mode) => self.pause(&id, mode, None),
                _ => self.end(&id),
            }
        }
    }

    /// Applies an event to a slot, performs its effects, and queues the slot's waiting requests for a new decision.
    fn event(&mut self, id: &SandboxId, event: Event) -> Result<Stage, Unexpected> {
        let moved = self.slots.apply(id, event)?;
        tracing::debug!(sandbox = %id, ?event, from = ?moved.from, to = ?moved.to, "slot");
        if moved.from == Stage::Warm {
            self.admission.stock.remove(id);
        }
        if moved.from == Stage::Running && moved.to != Stage::Running {
            self.go_on(id);
        }
        if moved.to == Stage::Ending {
            self.adoptions.killed(id);
        }
        if moved.to == Stage::Warm
            && let Some(entry) = self.slots.get(id)
        {
            self.admission
                .stock
                .add(&entry.record.template.id, id.clone());
        }
        self.look_again = true;
        self.perform(id, moved.effects);
        self.slots.stop_waiting(id);
        Ok(moved.to)
    }

    fn perform(&mut self, id: &SandboxId, effects: Effects) {
        let Some(entry) = self.slots.get_mut(id) else {
            return;
        };
        if effects.kill_vm
            && let Some(pidfd) = entry.pidfd.clone()
        {
            let disown = (entry.slot.stage == Stage::Ending).then(|| entry.dir.clone());
            self.jobs.kill(id.clone(), pidfd, disown);
        }
        if effects.clean {
            entry.lines = None;
            self.jobs.clean(
                id.clone(),
                entry.dir.clone(),
                entry.durability(),
                &mut entry.record,
            );
        }
        if effects.remove
            && let Some(mut entry) = self.slots.remove(id)
        {
            admission::demand::drop_on_thread(entry.loaded.take());
            self.upkeep.look_for_unused_images();
            match &entry.died {
                Some(why) => tracing::warn!(sandbox = %id, why, "sandbox ended on its own"),
                None if entry.was_leased() => tracing::info!(sandbox = %id, "ended"),
                None => {}
            }
            if entry.was_leased() {
                let kind = if entry.has_left {
                    ChangeKind::Left
                } else {
                    ChangeKind::Ended(entry.died.clone())
                };
                self.changed(id, kind);
            }
            self.followers.ended(entry.removed(id));
        }
    }

    /// Ends a slot from whatever stage it is in.
    fn end(&mut self, id: &SandboxId) {
        // Every stage accepts a kill.
        let _ = self.event(id, Event::Kill);
    }

    fn is_drained(&self) -> bool {
        let is_stock = |stage| matches!(stage, Stage::Filling | Stage::Warm);
        let mut slots = self.slots.values();
        let is_drained = |slot: &Slot| {
            is_stock(slot.stage) || slot.stage == Stage::Adopting || slot.is_settled()
        };
        self.admission.queue.is_empty()
            && !self.adoptions.is_sweeping()
            && slots.all(|e| is_drained(&e.slot))
    }

    /// Whether to leave this slot to the next server.
    fn is_left(&self, id: &SandboxId, slot: &Slot) -> bool {
        let is_adopted_later = matches!(slot.stage, Stage::Adopting | Stage::AdoptingPaused(_));
        slot.is_settled() || is_adopted_later || self.adoptions.is_pending(id)
    }

    fn is_closed(&self) -> bool {
        let mut slots = self.slots.values();
        let is_done = match self.stopping.closing() {
            None => false,
            Some(_) if self.upkeep.is_busy() => false,
            Some(OnClose::Keep | OnClose::HandOver) => {
                let mut all = self.slots.iter();
                self.adoptions.is_idle() && all.all(|(id, e)| self.is_left(id, &e.slot))
            }
            Some(OnClose::EndRunning) => {
                let left = |e: &Entry| matches!(e.slot.stage, Stage::Paused(_));
                self.adoptions.is_idle() && slots.all(left)
            }
            Some(OnClose::Kill) => slots.next().is_none(),
        };
        is_done && self.adoptions.is_swept()
    }
}
