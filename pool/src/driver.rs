//! The driver: one task that owns every slot and receives requests and reports. Work that takes time runs in [`jobs`],
//! which report their end. [`crate::slot`] decides what a slot may do, and [`crate::policy`] decides what is admitted;
//! the driver carries out both decisions.
//!
//! ```text
//! Request ─► requests, queries ─┐                       ┌─► jobs ─► Report ─► reports
//! deadline ─► expire ───────────┼─► slot::{decide,      │
//! tick ─► memory, space         │         transition} ──┼─► waiting requests are decided again
//!                               └─► queue ─► starts ────┘
//! ```

pub(crate) mod admission;
mod adoptions;
mod catalog;
mod claims;
mod diffs;
pub(crate) mod entry;
mod followers;
mod jobs;
mod making;
mod queries;
mod rebuilds;
mod reports;
mod requests;
mod slots;
mod starts;
mod stopping;
mod unused;

use std::{collections::BTreeMap, path::PathBuf, sync::Arc, time::Duration};

use model::SandboxId;
use tokio::{sync::mpsc, task::JoinHandle};

use entry::Entry;
use library::Library;

use crate::{
    cgroup::{FormerServers, Groups},
    clock::{Clock, Reading},
    host,
    message::{Report, Request},
    recover::Leftovers,
    slot::{Effects, Event, Next, Operation, Slot, Stage, Unexpected, decide},
    spec::{ChangeKind, Ended, OnClose, PoolConfig, PoolStats},
    state_dir::StateLock,
    work::{base::Held, needs::GuestSums},
};
use admission::Admission;
use adoptions::Adoptions;
use diffs::Storing;
use followers::Followers;
use jobs::Jobs;
use rebuilds::Running;
use slots::Slots;
use stopping::Stopping;

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
    /// Whether a slot or template has ended since the last search for unused images.
    images_may_be_unused: bool,
    /// Set if a record or template could not be read. Nothing is removed then, because the files may yet be repaired.
    keeps_unused: bool,
    /// The latest task that removes unused files.
    removal: Option<JoinHandle<()>>,
    /// The rebuild under way.
    rebuilding: Option<Running>,
    /// The template whose memory is being stored as a diff.
    storing: Option<Storing>,
    slots: Slots,
    adoptions: Adoptions,
    admission: Admission,
    counters: PoolStats,
    /// Number of fork snapshots so far; the name of each directory contains its number.
    forks: u64,
    /// The prefix of these names. It differs from the prefix of previous servers, whose directories are still being
    /// removed.
    forks_name: String,
    /// Number of templates and renames that are being written to disk.
    publishing: u32,
    guest_sums: GuestSums,
    /// Files needed by sandboxes that are moving to this server, by directory, until the sandboxes have links to them.
    held: BTreeMap<PathBuf, Held>,
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
            images_may_be_unused: true,
            keeps_unused: setup.keeps_unused,
            removal: None,
            rebuilding: None,
            storing: None,
            slots: Slots::new(setup.entries, setup.clock),
            adoptions,
            admission,
            counters: PoolStats::default(),
            forks: 0,
            forks_name: format!("{:x}", host::unix_ns()),
            publishing: 0,
            guest_sums: GuestSums::default(),
            held: BTreeMap::new(),
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
            }
        }
        self.end_rebuild().await;
        self.end_storing().await;
        if let Some(removal) = self.removal.take() {
            // The task logs its own errors. It must end before the next server starts, which may need the files being
            // removed.
            let _ = removal.await;
        }
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
        self.rebuild();
        self.store_diffs();
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
            self.images_may_be_unused = true;
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
            Some(_) if self.publishing > 0 || self.rebuilding.is_some() => false,
            Some(OnClose::Keep | OnClose::HandOver) => {
                let mut all = self.slots.iter();
                self.adoptions.is_idle() && all.all(|(id, e)| self.is_left(id, &e.slot))
            }
            Some(OnClose::Kill) => slots.next().is_none(),
        };
        is_done && self.adoptions.is_swept()
    }
}
