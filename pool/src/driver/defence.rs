//! The defence of the host's memory: carries out what [`crate::policy::defend`] decides.

use model::SandboxId;

use super::{Driver, entry::Entry};
use crate::{host, policy::Step, slot::Stage, vm};

impl Driver {
    /// Reads the host's memory if it is time to, and acts on it.
    pub(super) fn defend(&mut self) {
        let now_ns = host::monotonic_ns();
        let Some(decision) = self.admission.memory.defend(&self.slots, now_ns) else {
            return;
        };
        let before = std::mem::replace(&mut self.admission.memory.pressure, decision.pressure);
        if before != decision.pressure {
            tracing::warn!(
                ?before,
                now = ?decision.pressure,
                "the shortage of memory has changed: docs/operate/pool.md, \"Admission\""
            );
            self.admission.stock.has_changed = true;
            self.look_again = true;
        }
        let growing = match decision.step {
            Step::Nothing => return,
            Step::ContinueOne => return self.continue_smallest(),
            Step::StopGrowing => self.admission.memory.growing(&mut self.slots),
            Step::StopAll => self.slots.ids(may_stop),
        };
        for id in growing {
            self.halt(&id);
        }
    }

    /// Stops the VM of a running sandbox.
    fn halt(&mut self, id: &SandboxId) {
        let Some(entry) = self.slots.get_mut(id).filter(|e| may_stop(e)) else {
            return;
        };
        let (Some(pidfd), Some(vmm)) = (&entry.pidfd, entry.record.vmm) else {
            return;
        };
        match vm::halt(vmm.pid, pidfd) {
            Ok(()) => {
                entry.is_stopped = true;
                tracing::warn!(sandbox = %id, "stopped a sandbox until the host has memory");
                self.slots
                    .add_event(id, "stopped until the host has memory for its growth");
            }
            Err(error) => tracing::warn!(sandbox = %id, %error, "cannot stop a sandbox"),
        }
    }

    /// Continues the smallest stopped sandbox: the host has most likely enough memory for that one.
    fn continue_smallest(&mut self) {
        let stopped = self.slots.iter().filter(|(_, e)| e.is_stopped);
        let smallest = stopped.min_by_key(|(_, e)| e.private);
        if let Some(id) = smallest.map(|(id, _)| id.clone()) {
            self.go_on(&id);
        }
    }

    /// Continues the VM of a sandbox, if it is stopped.
    pub(super) fn go_on(&mut self, id: &SandboxId) {
        let Some(entry) = self.slots.get_mut(id).filter(|e| e.is_stopped) else {
            return;
        };
        entry.is_stopped = false;
        if let (Some(pidfd), Some(vmm)) = (&entry.pidfd, entry.record.vmm) {
            vm::go_on(vmm.pid, pidfd);
        }
        tracing::info!(sandbox = %id, "continued a stopped sandbox");
        self.slots.add_event(id, "continued");
    }
}

/// A VM in another stage has a job that talks to its VMM, or does not grow.
fn may_stop(entry: &Entry) -> bool {
    entry.slot.stage == Stage::Running && !entry.is_stopped
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{
        driver::fixtures::driver,
        lifetime::Lifetime,
        record::{Record, SlotDir},
        slot::{Event, Slot},
        state::PauseMode,
        vm::tests::sleeper,
    };

    /// Adds a running sandbox of this size, whose VM is a process that sleeps.
    fn add(driver: &mut Driver, number: u8, size: u64) -> SandboxId {
        let id = SandboxId::from_random([number; 19]);
        let template = Arc::new(library::fixtures::info());
        let mut record = Record::new("this boot", template, None, "0".repeat(32));
        let vm = sleeper();
        record.vmm = Some(vm.name);
        let mut slot = Slot::recovered(Stage::Adopting, Lifetime::default());
        (slot.stage, slot.job) = (Stage::Running, false);
        let dir = SlotDir::new(&driver.config.state, &id);
        let mut entry = Entry::recovered(slot, dir, record, Some(vm));
        entry.private = Some(size);
        driver.slots.insert(id.clone(), entry);
        id
    }

    #[tokio::test]
    async fn the_smallest_stopped_sandbox_continues_first_and_each_before_its_next_change() {
        let root = tempfile::tempdir().unwrap();
        let (mut driver, _) = driver(root.path());
        let ids = [(1, 30), (2, 10), (3, 20)].map(|(number, size)| add(&mut driver, number, size));
        let stopped = |driver: &Driver| {
            let is_stopped = |id: &SandboxId| driver.slots.get(id).unwrap().is_stopped;
            ids.each_ref().map(is_stopped)
        };
        ids.iter().for_each(|id| driver.halt(id));
        assert_eq!(stopped(&driver), [true; 3]);
        driver.continue_smallest();
        assert_eq!(stopped(&driver), [true, false, true]);
        driver.continue_smallest();
        assert_eq!(stopped(&driver), [true, false, false]);
        // The VMM has to respond to the pause.
        driver
            .event(&ids[0], Event::Pause(PauseMode::Memory))
            .unwrap();
        assert_eq!(stopped(&driver), [false; 3]);
        driver.halt(&ids[0]);
        assert_eq!(
            stopped(&driver),
            [false; 3],
            "a VM with a job is not stopped"
        );
        for id in &ids {
            vm::kill(driver.slots.get(id).unwrap().pidfd.as_ref().unwrap());
        }
    }
}
