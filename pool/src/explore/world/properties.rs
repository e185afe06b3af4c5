//! Properties of every state.

use super::{Disk, MAX_SAVED, PLACES, Place, Told, Violation, World, violated};
use crate::{
    record::Kept,
    slot::{Slot, Stage, check_invariants},
};

impl World {
    pub(in crate::explore) fn check(&self) -> Result<(), Violation> {
        if !self.up {
            return Ok(());
        }
        for place in &self.places {
            self.check_place(place)?;
        }
        let starts = self.count(|slot| slot.stage == Stage::Starting && !slot.vm);
        let resumes = self.count(|slot| matches!(slot.stage, Stage::Resuming(_)));
        let saved = self.count(|slot| slot.is_saved());
        let vms = self
            .places
            .iter()
            .filter(|place| place.vm && !place.leftover)
            .count();
        match () {
            () if self.room().slots > self.bounds.max => {
                violated("no more slots take memory than may")
            }
            () if vms > self.bounds.max as usize + MAX_SAVED => {
                violated("no more VMs exist than may")
            }
            () if starts + resumes > PLACES => violated("no more VMs start at once than may"),
            () if resumes >= PLACES => violated("resumes leave a place to creates"),
            () if saved as usize > MAX_SAVED => violated("no more sandboxes are saved than may"),
            () if self.internal().is_empty() => self.check_quiet(),
            () => Ok(()),
        }
    }

    fn check_place(&self, place: &Place) -> Result<(), Violation> {
        let Some(slot) = place.slot else {
            if place.leftover || place.is_empty() {
                return Ok(());
            }
            return violated("no slot is lost");
        };
        check_invariants(slot);
        if place.leases > 1 || place.leases > 0 && slot.stage == Stage::Warm {
            return violated("no slot is leased twice");
        }
        if place.told == Told::Exists && !slot.is_leased() {
            return violated("a sandbox exists until its end is reported");
        }
        if place.vm && !slot.vm && !slot.job {
            return violated("no process is lost");
        }
        if slot.stage == Stage::Running && place.disk.record != Some(Kept::Running) {
            return violated("a crash does not lose a sandbox that runs");
        }
        if let Stage::Paused(mode) = slot.stage
            && !(place.disk.files && place.disk.record == Some(Kept::Paused(mode)))
        {
            return violated("a crash does not lose a paused sandbox");
        }
        Ok(())
    }

    /// If nothing is under way, no request waits, and the stock is full or has no room.
    fn check_quiet(&self) -> Result<(), Violation> {
        let is_stable =
            |slot: &Slot| matches!(slot.stage, Stage::Warm | Stage::Running | Stage::Paused(_));
        if !self.slots().all(is_stable) {
            return violated("no slot stays in a change");
        }
        let waits = |place: &Place| place.waiting.is_some() || place.serves_create;
        if self.queued > 0 || self.places.iter().any(waits) {
            return violated("no request waits for ever");
        }
        if self.warm().is_none()
            && self.bounds.warm > 0
            && !self.closing
            && self.room().slots < self.bounds.max
        {
            return violated("the stock is refilled");
        }
        Ok(())
    }

    /// The state in one line, for the output of a path.
    pub(in crate::explore) fn summary(&self) -> String {
        let place = |place: &Place| {
            let Disk { record, files, .. } = place.disk;
            let stage = place
                .stage()
                .map_or("no slot".to_owned(), |stage| format!("{stage:?}"));
            let vm = if place.vm { " with a VM" } else { "" };
            let files = if files { " and files" } else { "" };
            format!(
                "{stage}{vm}, record {record:?}{files}, told {:?}",
                place.told
            )
        };
        let places: Vec<String> = self.places.iter().map(place).collect();
        let server = if self.up { "up" } else { "down" };
        format!("server {server}; {}", places.join(" · "))
    }
}
