//! The owner of every slot: one task that hears messages and never blocks. What takes time runs elsewhere and
//! reports back. Decisions are [`policy`]'s, what a slot may do is [`slot`]'s; this performs.

mod ask;
mod entry;
mod need;
mod report;
mod space;
mod stock;

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use model::SandboxId;
use tokio::sync::{mpsc, oneshot};
use vmm_control::VmUser;

pub(crate) use entry::Entry;

use crate::{
    CreateSpec, Ended, Init, PoolConfig, PoolError, PoolStats, Sandbox,
    cgroup::Groups,
    host,
    message::{Answer, Ask, Report},
    network, policy,
    slot::{Effects, Event, Stage, Wrong, transition},
    templates::Templates,
    work,
};

/// How often leased sandboxes are measured, and what was put off is looked at.
const TICK: Duration = Duration::from_secs(1);

/// A fork's snapshot, removed when the last of the forks has started.
#[derive(Debug)]
struct ForkImage {
    dir: PathBuf,
    left: usize,
}

/// Somebody who waits for a sandbox.
#[derive(Debug)]
struct Pending {
    want: Want,
    accepted_ns: u64,
    answer: Answer<Sandbox>,
}

/// Which sandbox.
#[derive(Debug)]
enum Want {
    /// A new one.
    New {
        spec: Box<CreateSpec>,
        /// Id of the template; of the source's for a fork.
        template: String,
        fork: Option<u64>,
    },
    /// One that is paused.
    Resume {
        id: SandboxId,
        init: Init,
        start: policy::StartFor,
    },
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Driver {
    pub(crate) config: Arc<PoolConfig>,
    pub(crate) host_boot_id: String,
    pub(crate) groups: Arc<Groups>,
    pub(crate) templates: Templates,
    pub(crate) slots: HashMap<SandboxId, Entry>,
    /// Warm slots by template, the oldest first.
    warm: BTreeMap<String, VecDeque<SandboxId>>,
    queue: VecDeque<Pending>,
    forks: HashMap<u64, ForkImage>,
    next_fork: u64,
    /// See `free_user`.
    next_user: u32,
    asks: mpsc::Receiver<Ask>,
    reports: mpsc::UnboundedReceiver<Report>,
    reporter: mpsc::UnboundedSender<Report>,
    ended: mpsc::Sender<Ended>,
    counters: PoolStats,
    closing: Option<Closing>,
    /// Of templates whose sandboxes were measured.
    needs: BTreeMap<String, policy::Need>,
    available: Measured,
    disks: space::Disks,
    /// Bytes of templates that were loaded.
    loaded: u64,
    last_foreground_ns: u64,
    last_fill_ns: u64,
    /// Where the next round of measuring goes on.
    measured_up_to: Option<SandboxId>,
    parallel: u32,
    lock: std::fs::File,
}

/// MemAvailable and when it was read.
#[derive(Clone, Copy, Debug, Default)]
struct Measured {
    bytes: u64,
    at_ns: u64,
}

#[derive(Debug)]
struct Closing {
    kill: bool,
    done: Vec<oneshot::Sender<()>>,
}

/// What a driver starts with.
#[derive(Debug)]
pub(crate) struct Setup {
    pub(crate) config: PoolConfig,
    pub(crate) host_boot_id: String,
    pub(crate) groups: Arc<Groups>,
    pub(crate) templates: Templates,
    pub(crate) found: Vec<(SandboxId, Entry)>,
    pub(crate) asks: mpsc::Receiver<Ask>,
    pub(crate) ended: mpsc::Sender<Ended>,
    /// Of the state directory.
    pub(crate) lock: std::fs::File,
}

/// Where the users of this server's VMs begin; see `free_user`.
fn first_user() -> u32 {
    let random = host::random().map_or(0, u32::from_ne_bytes);
    VmUser::POOL.start + random % (VmUser::POOL.end - VmUser::POOL.start)
}

impl Driver {
    pub(crate) fn new(setup: Setup) -> Self {
        let (reporter, reports) = mpsc::unbounded_channel();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let disks = space::Disks::of(&setup.config.state);
        let mut this = Self {
            config: Arc::new(setup.config),
            host_boot_id: setup.host_boot_id,
            groups: setup.groups,
            templates: setup.templates,
            slots: HashMap::new(),
            warm: BTreeMap::new(),
            queue: VecDeque::new(),
            forks: HashMap::new(),
            next_fork: 0,
            next_user: first_user(),
            asks: setup.asks,
            reports,
            reporter,
            ended: setup.ended,
            counters: PoolStats::default(),
            closing: None,
            needs: BTreeMap::new(),
            available: Measured::default(),
            disks,
            loaded: 0,
            last_foreground_ns: 0,
            last_fill_ns: 0,
            measured_up_to: None,
            parallel: u32::try_from(cores).unwrap_or(u32::MAX),
            lock: setup.lock,
        };
        for (id, mut entry) in setup.found {
            if let Some(vm) = entry.unwatched.take() {
                this.watch(&id, vm);
            }
            this.slots.insert(id, entry);
        }
        this
    }

    /// Runs until the pool is closed, or every handle is gone.
    pub(crate) async fn run(mut self) {
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            self.pump();
            if self.is_closed() {
                break;
            }
            let soon = self.next_look();
            tokio::select! {
                biased;
                Some(report) = self.reports.recv() => self.hear(report),
                ask = self.asks.recv() => match ask {
                    Some(ask) => self.answer(ask),
                    // Nobody is left to ask: VMs go on, and the next server adopts them.
                    None if self.closing.is_none() => break,
                    None => {}
                },
                _ = tick.tick() => self.tick(),
                () = tokio::time::sleep(soon.unwrap_or(TICK)), if soon.is_some() => {}
            }
        }
        if let Some(closing) = self.closing.take() {
            self.groups.close();
            // The next server may come as soon as the answer is there.
            drop(self.lock);
            for done in closing.done {
                // Who closed may be gone.
                let _ = done.send(());
            }
        }
    }

    /// A transition of a slot and what follows from it.
    fn event(&mut self, id: &SandboxId, event: Event) -> Result<Stage, Wrong> {
        let entry = self.slots.get_mut(id).ok_or(Wrong)?;
        let before = entry.slot.stage;
        let (next, effects) = transition(entry.slot, event)?;
        entry.slot = next;
        tracing::debug!(sandbox = %id, ?event, from = ?before, to = ?next.stage, "slot");
        if before == Stage::Warm {
            self.take_from_stock(id);
        }
        if next.stage == Stage::Warm {
            let template = self.slots.get(id).map(|e| e.record.template.id.clone());
            self.warm
                .entry(template.unwrap_or_default())
                .or_default()
                .push_back(id.clone());
        }
        self.perform(id, effects);
        Ok(next.stage)
    }

    fn perform(&mut self, id: &SandboxId, effects: Effects) {
        let Some(entry) = self.slots.get_mut(id) else {
            return;
        };
        if effects.kill_vm
            && let Some(pidfd) = entry.pidfd.clone()
        {
            // On disk as its record says, or to be forgotten: then the record goes first, so that a server that
            // follows this one does not miss what was wanted gone.
            let forgotten = (entry.slot.stage == Stage::Ending).then(|| entry.dir.clone());
            let id = id.clone();
            tokio::task::spawn_blocking(move || {
                if let Some(Err(error)) = forgotten.map(|dir| dir.disown()) {
                    tracing::error!(sandbox = %id, %error, "its record cannot be removed");
                }
                crate::vm::kill(&pidfd);
            });
        }
        if effects.clean {
            entry.lines = None;
            let (id, dir) = (id.clone(), entry.dir.clone());
            let groups = Arc::clone(&self.groups);
            let reporter = self.reporter.clone();
            let (network, tap) = (self.config.network.clone(), entry.record.tap.take());
            let vmm = entry.record.vmm;
            tokio::task::spawn_blocking(move || {
                let counters = network::release(network.as_ref(), tap, vmm);
                let _ = reporter.send(Report::Released(counters));
                if let Err(error) = work::save::clean(&dir, &groups, id.as_str()) {
                    tracing::error!(sandbox = %id, %error, "something of it is left");
                }
                // The driver is gone only when the program ends.
                let _ = reporter.send(Report::Cleaned(id));
            });
        }
        if effects.remove
            && let Some(entry) = self.slots.remove(id)
        {
            entry.bury(id, &self.ended);
        }
    }

    fn take_from_stock(&mut self, id: &SandboxId) {
        for ids in self.warm.values_mut() {
            ids.retain(|other| other != id);
        }
    }

    /// Reports the end of a VM process, whenever that comes.
    fn watch(&self, id: &SandboxId, vm: crate::vm::Vm) {
        let (id, reporter) = (id.clone(), self.reporter.clone());
        tokio::spawn(async move {
            if let Err(error) = vm.gone().await {
                tracing::error!(sandbox = %id, %error, "its VMM cannot be watched");
            }
            let _ = reporter.send(Report::Gone(id));
        });
    }

    /// Ends a slot, for whatever reason.
    fn end(&mut self, id: &SandboxId) {
        // From every stage there is a way to the end.
        let _ = self.event(id, Event::Kill);
    }

    fn is_closed(&self) -> bool {
        let Some(closing) = &self.closing else {
            return false;
        };
        self.slots.values().all(|entry| {
            !closing.kill
                && !entry.slot.job
                && !entry.slot.note
                && matches!(entry.slot.stage, Stage::Running | Stage::Paused(_))
        })
    }

    fn now_ns() -> u64 {
        crate::host::monotonic_ns()
    }

    /// When to look again although nothing was heard; absent if the tick will do.
    fn next_look(&self) -> Option<Duration> {
        let wants = self.closing.is_none() && self.templates.iter().any(|t| t.refilling);
        wants.then_some(policy::QUIET)
    }

    fn refuse(answer: Answer<Sandbox>, error: PoolError) {
        // Who does not wait any more needs no refusal.
        let _ = answer.send(Err(error));
    }
}
