//! Sandboxes that several servers can run: their claims, and the files that move.

use std::{
    fs::File,
    path::{Path, PathBuf},
};

use library::durable::Durability;
use model::{SandboxId, is_sha256};
use tokio::task::spawn_blocking;

use super::{
    Driver,
    entry::{Entry, Serving},
};
use crate::{
    answer::{Answer, Reply},
    change::ChangeKind,
    claim::{BaseKind, Claim, GivesBase, Hold, PauseNeeds},
    error::PoolError,
    message::{Report, SandboxRequest},
    record::{Kept, Record, SlotDir},
    slot::{Event, Refusal, Slot, Stage},
    state::{PauseMode, SandboxState},
    state_dir::SANDBOXES,
    work::{
        base::{Held, HoldPlan, can_check},
        needs::{Needed, NeedsPlan, lacks},
        take::TakePlan,
    },
};

const WRITE: &str = "write the sandbox's record";

impl Driver {
    /// Sets a claim. For a running sandbox this happens immediately, as for a policy. For a paused one a job does it,
    /// because the record is synced.
    pub(super) fn set_claim(&mut self, id: &SandboxId, request: SandboxRequest) {
        let offset_ms = self.slots.clock.offset_ms();
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
        record.set_lifetime(entry.slot.lifetime, offset_ms);
        let written = entry.dir.write(&record, Durability::Process);
        if written.is_ok() {
            entry.record = record;
        }
        if let SandboxRequest::SetClaim(_, answer) = request {
            answer.send(written.map_err(|e| PoolError::of_disk(WRITE, &e)));
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
            answer.send(written.map_err(|e| PoolError::of_disk(WRITE, &e)));
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

    /// Responds with the files that a sandbox needs on another server.
    pub(super) fn pause_needs(&mut self, id: &SandboxId, answer: Answer<PauseNeeds>) {
        if let Some((plan, answer)) = answer.or_refuse(self.needs_plan(id)) {
            self.upkeep.job_begins();
            self.jobs
                .run(move || Report::Needs(plan.run().map(Box::new), answer));
        }
    }

    fn needs_plan(&self, id: &SandboxId) -> Result<NeedsPlan, PoolError> {
        let entry = self.slots.leased(id)?;
        let mode = match entry.slot.state() {
            Some(SandboxState::Paused(mode)) => mode,
            Some(SandboxState::Running) | None => PauseMode::Memory,
        };
        Ok(NeedsPlan {
            record: entry.record.clone(),
            mode,
            pause: entry.dir.pause(),
            images: self.library.images().clone(),
            sums: self.upkeep.guest_sums().clone(),
            stop: self.stopping.jobs(),
        })
    }

    pub(super) fn needed(
        &mut self,
        needed: Result<Box<Needed>, PoolError>,
        answer: Answer<PauseNeeds>,
    ) {
        self.upkeep.job_ended();
        let needs = needed.map(|needed| {
            self.upkeep.add_guest_sum(needed.summed);
            needed.needs
        });
        answer.send(needs);
    }

    /// Opens the files of the base of a paused sandbox whose claim is not open.
    pub(super) fn base_files(&mut self, id: &SandboxId, answer: Answer<Vec<(String, File)>>) {
        let plan = self.pause_files(id).and_then(|_| self.needs_plan(id));
        if let Some((plan, answer)) = answer.or_refuse(plan) {
            // A memory file made from a diff is kept until it has been opened.
            self.upkeep.job_begins();
            let restorer = self.jobs.restorer();
            self.jobs.run(move || {
                let opened = plan.base(restorer).and_then(|base| base.run());
                Report::BaseOpened(opened, answer)
            });
        }
    }

    pub(super) fn hold(
        &mut self,
        id: &SandboxId,
        incoming: &Path,
        needs: PauseNeeds,
        fetched: Option<PathBuf>,
        answer: Answer<bool>,
    ) {
        let vmms = self.library.vmms_mut();
        let vmm = needs.vmm.as_ref().map(|vmm| vmms.get(vmm)).transpose();
        let vmm = is_named(&needs).and(vmm).map_err(lacks);
        let Some((vmm, answer)) = answer.or_refuse(vmm) else {
            return;
        };
        let plan = HoldPlan {
            images: self.library.images().clone(),
            needs,
            fetched,
            vmm: vmm.map(|vmm| vmm.path().to_owned()),
            to: incoming.join(id.as_str()),
            stop: self.stopping.jobs(),
        };
        self.upkeep.job_begins();
        self.jobs
            .run(move || Report::Held(plan.to.clone(), plan.run(), answer));
    }

    pub(super) fn is_held(
        &mut self,
        dir: PathBuf,
        held: Result<Option<Held>, PoolError>,
        answer: Answer<bool>,
    ) {
        self.upkeep.job_ended();
        let is_here = held.map(|held| {
            let is_here = held.is_some();
            if let Some(held) = held {
                self.upkeep.hold(dir, held);
            }
            is_here
        });
        // A base that has just arrived and is not held is unused.
        if is_here.is_err() {
            self.upkeep.look_for_unused_images();
        }
        answer.send(is_here);
    }

    pub(super) fn root_images(&self, answer: Reply<Vec<PathBuf>>) {
        let templates = self.library.iter().map(|template| template.root.clone());
        let mut roots: Vec<_> = templates.collect();
        let images = self.library.images().clone();
        drop(spawn_blocking(move || {
            roots.extend(images.roots());
            roots.sort();
            roots.dedup();
            answer.send(roots);
        }));
    }

    pub(super) fn can_take(
        &mut self,
        needs: &PauseNeeds,
        gives: GivesBase,
    ) -> Result<(), PoolError> {
        if self.stopping.is_draining() {
            return Err(PoolError::Draining);
        }
        self.may_save()?;
        let base = self.library.images().dir().join(&needs.base);
        let is_here = is_sha256(&needs.base) && base.is_dir();
        if !is_here {
            can_fetch(needs, gives).map_err(lacks)?;
        }
        match &needs.vmm {
            Some(vmm) => self.library.vmms_mut().get(vmm).map(drop).map_err(lacks),
            None => Ok(()),
        }
    }

    pub(super) fn take(
        &mut self,
        id: SandboxId,
        incoming: &Path,
        needs: Option<PauseNeeds>,
        claim: Option<Claim>,
        answer: Answer<()>,
    ) {
        let named = match &needs {
            _ if self.stopping.is_closing() => Err(PoolError::Draining),
            Some(needs) => is_named(needs).map_err(lacks),
            None => Ok(()),
        };
        let Some(((), answer)) = answer.or_refuse(named) else {
            return;
        };
        let from = SlotDir::new(incoming, &id);
        let vmm = needs.as_ref().and_then(|needs| needs.vmm.as_ref());
        let missing_vmm = vmm.and_then(|vmm| self.library.vmms_mut().get(vmm).err());
        let vmms = self.library.vmms().dir().to_owned();
        let plan = TakePlan {
            store: self.library.store_with(&from.pause()),
            to: SlotDir::new(&self.config.state.join(SANDBOXES), &id),
            from,
            needs,
            claim,
            missing_vmm: missing_vmm.map(|why| (vmms, why)),
            host_boot_id: self.host_boot_id.clone(),
            stop: self.stopping.jobs(),
        };
        // No record names the files yet that the sandbox needs.
        self.upkeep.job_begins();
        self.jobs.run(move || Report::Taken(id, plan.run(), answer));
    }

    pub(super) fn taken(
        &mut self,
        id: SandboxId,
        taken: Result<Option<Box<Record>>, PoolError>,
        answer: Answer<()>,
    ) {
        self.upkeep.job_ended();
        let result = taken.map(|record| {
            if let Some(record) = record {
                self.arrived(id, *record);
            }
        });
        answer.send(result);
    }

    fn arrived(&mut self, id: SandboxId, record: Record) {
        // The job may have kept the VMM again. It is not removed as long as a record names it.
        if let Some(vmm) = &record.vmm_id {
            let _ = self.library.vmms_mut().get(vmm);
        }
        // The job has checked this.
        let Kept::Paused(mode) = record.kept else {
            return;
        };
        let dir = SlotDir::new(&self.config.state.join(SANDBOXES), &id);
        let slot = Slot::recovered(Stage::Paused(mode), record.lifetime);
        self.slots
            .insert(id.clone(), Entry::recovered(slot, dir, record, None));
        self.slots.has_new_vm(&id);
        self.slots.add_event(&id, "taken over from another node");
        self.changed(&id, ChangeKind::Arrived);
        self.look_again = true;
    }
}

fn is_named(needs: &PauseNeeds) -> Result<(), String> {
    if is_sha256(&needs.base) {
        Ok(())
    } else {
        Err("the base has no well-formed name".to_owned())
    }
}

/// Whether a base that is missing here can be fetched and checked.
fn can_fetch(needs: &PauseNeeds, gives: GivesBase) -> Result<(), String> {
    is_named(needs)?;
    let (base, kind, format) = (&needs.base, needs.kind, needs.format);
    match (gives, kind, format) {
        (GivesBase::No, ..) => Err(format!("this node has no template {base:.12}")),
        (GivesBase::Yes, BaseKind::Guest, _) => Ok(()),
        (GivesBase::Yes, BaseKind::Template, Some(format)) => can_check(format),
        (GivesBase::Yes, BaseKind::Template, None) => Err(format!(
            "the format of template {base:.12} was not announced: upgrade its node"
        )),
    }
}

#[cfg(test)]
mod tests;
