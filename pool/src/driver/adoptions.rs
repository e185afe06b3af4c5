//! The adoption of sandboxes that a former server left: their order, and how many are verified at the same time.

use std::{collections::HashMap, time::Duration};

use model::SandboxId;

use super::{Driver, slots::Slots};
use crate::{
    host,
    recover::Leftovers,
    slot::{Event, Stage},
    work::adopt::{AdoptPausedPlan, AdoptPlan},
};

/// A job that takes longer than this waits for a VMM that does not answer. Another job then begins beside it, so that
/// such VMMs do not delay the adoption of others.
const PROMPT: Duration = Duration::from_millis(100);
/// Maximum number of jobs, each of which holds a thread.
const MAX_JOBS: usize = 256;

#[derive(Debug)]
pub(super) struct Adoptions {
    pending: Vec<SandboxId>,
    /// When each job under way began, in CLOCK_MONOTONIC.
    begun: HashMap<SandboxId, u64>,
    /// Maximum number of jobs that have just begun.
    parallel: usize,
    /// Set until the sweep begins.
    leftovers: Option<Leftovers>,
    is_sweeping: bool,
}

impl Adoptions {
    pub(super) fn new(pending: Vec<SandboxId>, leftovers: Leftovers, parallel: usize) -> Self {
        Self {
            pending,
            begun: HashMap::new(),
            parallel,
            leftovers: Some(leftovers),
            is_sweeping: false,
        }
    }

    /// Takes the sandbox to adopt next: one that was killed before its turn, else one with waiting requests, else any.
    /// `None` if none is left or none may begin now.
    fn next(&mut self, slots: &Slots, now_ns: u64) -> Option<SandboxId> {
        let position = |wanted: &dyn Fn(&super::Entry) -> bool| {
            let mut ids = self.pending.iter();
            ids.position(|id| slots.get(id).is_none_or(wanted))
        };
        let killed = position(&|entry| entry.slot.stage == Stage::Ending);
        let may_begin = self.begun.len() < MAX_JOBS && self.prompt(now_ns) < self.parallel;
        let at = killed.or_else(|| {
            let waited_for = position(&|entry| !entry.waiting.is_empty());
            let any = self.pending.len().checked_sub(1);
            waited_for.or(any).filter(|_| may_begin)
        })?;
        Some(self.pending.swap_remove(at))
    }

    /// Number of jobs that have just begun.
    fn prompt(&self, now_ns: u64) -> usize {
        let is_prompt =
            |since: &&u64| u128::from(now_ns.saturating_sub(**since)) < PROMPT.as_nanos();
        self.begun.values().filter(is_prompt).count()
    }

    /// Whether sandboxes are being adopted that are not known to be silent. Work that nobody waits for then yields.
    pub(super) fn is_urgent(&self, now_ns: u64) -> bool {
        !self.pending.is_empty() || self.prompt(now_ns) > 0
    }

    /// Whether everything that the former server left has been removed.
    pub(super) fn is_swept(&self) -> bool {
        self.leftovers.is_none() && !self.is_sweeping
    }

    /// How long the driver may sleep.
    pub(super) fn timer(&self) -> Option<Duration> {
        (!self.pending.is_empty() || self.leftovers.is_some()).then_some(PROMPT)
    }

    pub(super) fn ended(&mut self, id: &SandboxId) {
        self.begun.remove(id);
    }

    pub(super) fn swept(&mut self) {
        self.is_sweeping = false;
    }
}

impl Driver {
    /// Begins as many adoptions as may run now; once none is urgent, begins to remove what else was left.
    pub(super) fn adopt(&mut self) {
        let now_ns = host::monotonic_ns();
        while let Some(id) = self.adoptions.next(&self.slots, now_ns) {
            self.begin_adoption(id, now_ns);
        }
        if !self.adoptions.is_urgent(now_ns)
            && let Some(leftovers) = self.adoptions.leftovers.take()
        {
            self.adoptions.is_sweeping = true;
            self.jobs.sweep(leftovers);
        }
    }

    fn begin_adoption(&mut self, id: SandboxId, now_ns: u64) {
        let patience = self.config.start_timeout;
        let Some(entry) = self.slots.get_mut(&id) else {
            return;
        };
        match entry.slot.stage {
            Stage::Adopting => {
                let plan = AdoptPlan {
                    id: id.clone(),
                    dir: entry.dir.clone(),
                    pid: entry.record.vmm.map_or(0, |vmm| vmm.pid),
                    tap: entry.record.tap,
                    policy: entry.record.policy.clone(),
                    network: self.config.network.clone(),
                    patience,
                };
                self.jobs.adopt(plan);
            }
            Stage::AdoptingPaused(_) => {
                let plan = AdoptPausedPlan {
                    id: id.clone(),
                    dir: entry.dir.clone(),
                    vm: entry.unwatched.take(),
                    groups: self.jobs.groups.clone(),
                    patience,
                };
                self.jobs.adopt_paused(plan);
            }
            // The slot was killed before its turn, so its job ends without having begun.
            _ => {
                let _ = self.event(&id, Event::Failed);
                return;
            }
        }
        self.adoptions.begun.insert(id, now_ns);
    }

    pub(super) fn adopted(&mut self, id: &SandboxId, result: Result<Option<u64>, String>) {
        self.adoptions.ended(id);
        let Some(entry) = self.slots.get_mut(id) else {
            return;
        };
        let event = match result {
            Ok(private) => {
                entry.private = private;
                Event::Adopted
            }
            Err(why) => {
                tracing::warn!(sandbox = %id, why, "cannot adopt a sandbox of the former server: ending it");
                if entry.slot.stage == Stage::Adopting {
                    entry.died.get_or_insert(why);
                }
                Event::Failed
            }
        };
        // Every stage that this slot can be in accepts both events.
        let _ = self.event(id, event);
    }
}
