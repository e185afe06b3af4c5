//! Adopts the sandboxes of the previous server, in the order of [`super::adoptions`].

use model::SandboxId;

use super::Driver;
use crate::{
    host,
    slot::{Event, Stage},
    vm,
    work::adopt::{AdoptPausedPlan, AdoptPlan},
};

impl Driver {
    /// Begins as many adoptions as may run now. Once none is urgent, begins to remove other leftovers.
    pub(super) fn adopt(&mut self) {
        let now_ns = host::monotonic_ns();
        while let Some(id) = self.adoptions.next(now_ns) {
            self.begin_adoption(id, now_ns);
        }
        if let Some(leftovers) = self.adoptions.take_leftovers(now_ns) {
            self.jobs.sweep(leftovers);
        }
    }

    fn begin_adoption(&mut self, id: SandboxId, now_ns: u64) {
        let Some(entry) = self.slots.get_mut(&id) else {
            return;
        };
        match entry.slot.stage {
            Stage::Adopting => {
                // The previous server has not continued the VMs that it had stopped.
                if let (Some(pidfd), Some(vmm)) = (&entry.pidfd, entry.record.vmm)
                    && vm::is_halted(vmm.pid)
                {
                    vm::go_on(vmm.pid, pidfd);
                }
                let plan = AdoptPlan {
                    id: id.clone(),
                    dir: entry.dir.clone(),
                    pid: entry.record.vmm.map_or(0, |vmm| vmm.pid),
                    tap: entry.record.tap,
                    policy: entry.record.policy.clone(),
                    network: self.config.network.clone(),
                    patience: self.config.adopt_timeout,
                };
                self.jobs.adopt(plan);
            }
            Stage::AdoptingPaused(_) => {
                let plan = AdoptPausedPlan {
                    id: id.clone(),
                    dir: entry.dir.clone(),
                    vm: entry.unwatched.take(),
                    groups: self.jobs.groups.clone(),
                    patience: self.config.start_timeout,
                };
                self.jobs.adopt_paused(plan);
            }
            // The slot was killed before its turn, so its job ends without having begun.
            _ => {
                let _ = self.event(&id, Event::Failed);
                return;
            }
        }
        self.adoptions.begun(id, now_ns);
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
                tracing::warn!(sandbox = %id, why, "cannot adopt the previous server's sandbox: ending it");
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
