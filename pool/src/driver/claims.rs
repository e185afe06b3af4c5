//! Sandboxes that other servers can have too: their claims, and the files that move.

use std::path::{Path, PathBuf};

use model::SandboxId;

use super::{Driver, Entry, entry::Serving};
use crate::{
    ChangeKind, Claim, Hold, PauseMode, PauseNeeds, PoolError, SandboxState,
    durable::Durability,
    message::{Answer, Report, SandboxRequest},
    record::{Kept, Record, SlotDir},
    slot::{Event, Refusal, Slot, Stage},
    vmms::is_sha256,
    work::take::{self, TakePlan},
};

const WRITE: &str = "write the sandbox's record";

impl Driver {
    /// Sets a claim. Of a running sandbox at once, as a policy; of a paused one by a job, because it is synced.
    pub(super) fn set_claim(&mut self, id: &SandboxId, request: SandboxRequest) {
        let Some(entry) = self.slots.get_mut(id) else {
            return request.refuse(PoolError::not_found(id));
        };
        let SandboxRequest::SetClaim(claim, _) = &request else {
            return;
        };
        let mut record = entry.record.clone();
        record.claim.clone_from(claim);
        if let Stage::Paused(_) = entry.slot.stage {
            let (dir, claim) = (entry.dir.clone(), claim.clone());
            if self.event(id, Event::Snapshot).is_err() {
                return request.refuse(PoolError::not_found(id));
            }
            if let Some(entry) = self.slots.get_mut(id) {
                entry.serving = Some(Serving::Request(request));
            }
            let id = id.clone();
            return self
                .jobs
                .run(move || Report::Claimed(id, claim, dir.rewrite_pause(&record)));
        }
        record.set_lifetime(entry.slot.lifetime, self.clock.offset_ms());
        let written = entry.dir.write(&record, Durability::Process);
        if written.is_ok() {
            entry.record = record;
        }
        if let SandboxRequest::SetClaim(_, answer) = request {
            let _ = answer.send(written.map_err(|e| PoolError::of_disk(WRITE, &e)));
        }
    }

    pub(super) fn claimed(
        &mut self,
        id: &SandboxId,
        claim: Option<Claim>,
        written: std::io::Result<()>,
    ) {
        let Some(entry) = self.slots.get_mut(id) else {
            return;
        };
        if written.is_ok() {
            entry.record.claim = claim;
        }
        let serving = entry.serving.take();
        let _ = self.event(id, Event::SnapshotDone);
        if let Some(Serving::Request(SandboxRequest::SetClaim(_, answer))) = serving {
            let _ = answer.send(written.map_err(|e| PoolError::of_disk(WRITE, &e)));
        }
    }

    pub(super) fn pause_files(&self, id: &SandboxId) -> Result<PathBuf, PoolError> {
        let entry = self.slots.leased(id)?;
        let hold = entry.record.claim.as_ref().map(|claim| claim.hold);
        let is_closed = matches!(hold, Some(Hold::Sealed | Hold::Moving));
        match entry.slot.stage {
            Stage::Paused(_) if is_closed => Ok(entry.dir.pause()),
            _ => Err(PoolError::Refused(id.clone(), Refusal::AlreadyRunning)),
        }
    }

    pub(super) fn pause_needs(&self, id: &SandboxId) -> Result<PauseNeeds, PoolError> {
        let entry = self.slots.leased(id)?;
        let mode = match entry.slot.state() {
            Some(SandboxState::Paused(mode)) => mode,
            Some(SandboxState::Running) | None => PauseMode::Memory,
        };
        let what = "move the sandbox";
        let base = take::base(&entry.record, &entry.dir.pause());
        let base = base.map_err(|why| PoolError::Failed { what, why })?;
        let vmm = entry.record.vmm_id.clone();
        let vmm = vmm.filter(|_| mode == PauseMode::Memory);
        Ok(PauseNeeds { base, vmm, mode })
    }

    pub(super) fn can_take(&mut self, needs: &PauseNeeds) -> Result<(), PoolError> {
        if self.stopping.is_draining {
            return Err(PoolError::Draining);
        }
        self.may_save()?;
        let lacks = |why: String| PoolError::Failed {
            what: "take a paused sandbox",
            why,
        };
        let base = self.templates.images().dir().join(&needs.base);
        if !is_sha256(&needs.base) || !base.is_dir() {
            let why = format!("this node has no template {:.12}", needs.base);
            return Err(lacks(why));
        }
        match &needs.vmm {
            Some(vmm) => self.vmms.get(vmm).map(drop).map_err(lacks),
            None => Ok(()),
        }
    }

    pub(super) fn take(
        &mut self,
        id: SandboxId,
        incoming: &Path,
        claim: Option<Claim>,
        answer: Answer<()>,
    ) {
        if self.stopping.closing.is_some() {
            return drop(answer.send(Err(PoolError::Draining)));
        }
        let from = SlotDir::new(incoming, &id);
        let plan = TakePlan {
            store: self.templates.store_with(&from.pause()),
            to: SlotDir::new(&self.config.state.join(crate::SANDBOXES), &id),
            from,
            claim,
            host_boot_id: self.host_boot_id.clone(),
        };
        // What the sandbox needs is in no record yet.
        self.publishing += 1;
        self.jobs.run(move || Report::Taken(id, plan.run(), answer));
    }

    pub(super) fn taken(
        &mut self,
        id: SandboxId,
        taken: Result<Option<Box<Record>>, PoolError>,
        answer: Answer<()>,
    ) {
        self.publishing -= 1;
        let result = taken.map(|record| {
            if let Some(record) = record {
                self.arrived(id, *record);
            }
        });
        let _ = answer.send(result);
    }

    fn arrived(&mut self, id: SandboxId, record: Record) {
        // The job has checked it.
        let Kept::Paused(mode) = record.kept else {
            return;
        };
        let dir = SlotDir::new(&self.config.state.join(crate::SANDBOXES), &id);
        let slot = Slot::recovered(Stage::Paused(mode), record.lifetime);
        self.slots
            .insert(id.clone(), Entry::recovered(slot, dir, record, None));
        let now = self.clock.now();
        self.slots.has_new_vm(&id, now);
        self.add_event(&id, now, "taken over from another node");
        self.changed(&id, ChangeKind::Arrived);
        self.look_again = true;
    }
}
