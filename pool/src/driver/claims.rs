//! Sandboxes that other servers can have too: their claims, and the files that move.

use std::{
    collections::BTreeMap,
    fs::File,
    path::{Path, PathBuf},
};

use model::SandboxId;

use super::{Driver, Entry, entry::Serving};
use crate::{
    BaseKind, ChangeKind, Claim, GivesBase, Hold, PauseMode, PauseNeeds, PoolError, SandboxState,
    durable::Durability,
    images::{self, sum_of_manifest},
    message::{Answer, Report, SandboxRequest, Summed},
    record::{Kept, Record, SlotDir},
    slot::{Event, Refusal, Slot, Stage},
    vmms::is_sha256,
    work::{
        base::{BasePlan, Held, HoldPlan, held_vmm, sum_of_guest},
        take::{self, TakePlan},
    },
};

const WRITE: &str = "write the sandbox's record";

/// Sums of the files from which sandboxes booted.
pub(super) type GuestSums = BTreeMap<[PathBuf; 3], String>;

impl Summed {
    fn needs(self, base: String) -> PauseNeeds {
        PauseNeeds {
            base,
            kind: BaseKind::Guest,
            vmm: self.vmm,
            mode: self.mode,
        }
    }
}

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

    /// Answers what a sandbox needs at another server; reads the files of one that booted for that, once.
    pub(super) fn pause_needs(&mut self, id: &SandboxId, answer: Answer<PauseNeeds>) {
        let summed = match self.plan_needs(id) {
            Ok(Ok(needs)) => return drop(answer.send(Ok(needs))),
            Ok(Err(summed)) => summed,
            Err(why) => return drop(answer.send(Err(why))),
        };
        if let Some(sum) = self.guest_sums.get(&summed.paths) {
            return drop(answer.send(Ok(summed.needs(sum.clone()))));
        }
        self.publishing += 1;
        self.jobs.run(move || {
            let sum = sum_of_guest(&summed.paths);
            Report::GuestSummed(Box::new(summed), sum, answer)
        });
    }

    /// What is needed, or the files whose sum must be known first.
    fn plan_needs(&self, id: &SandboxId) -> Result<Result<PauseNeeds, Summed>, PoolError> {
        let entry = self.slots.leased(id)?;
        let mode = match entry.slot.state() {
            Some(SandboxState::Paused(mode)) => mode,
            Some(SandboxState::Running) | None => PauseMode::Memory,
        };
        let base = take::base(&entry.record, &entry.dir.pause()).map_err(lacks)?;
        let vmm = take::vmm_of(&entry.record, mode);
        if let Some(base) = base {
            return Ok(Ok(PauseNeeds {
                base,
                kind: BaseKind::Template,
                vmm,
                mode,
            }));
        }
        let boot = entry.record.boot.as_ref();
        let boot = boot.ok_or_else(|| lacks("it names no files to boot from".to_owned()))?;
        let [kernel, initrd, root] = boot.paths();
        Ok(Err(Summed {
            paths: [root, kernel, initrd],
            vmm,
            mode,
        }))
    }

    pub(super) fn guest_summed(
        &mut self,
        summed: Summed,
        sum: std::io::Result<String>,
        answer: Answer<PauseNeeds>,
    ) {
        self.publishing -= 1;
        let images = self.templates.images().dir();
        let sum = sum.map_err(|e| PoolError::of_disk("read the files of a sandbox", &e));
        let needs = sum.map(|sum| {
            // Only there, files never change.
            if summed.paths.iter().all(|path| path.starts_with(images)) {
                self.guest_sums.insert(summed.paths.clone(), sum.clone());
            }
            summed.needs(sum)
        });
        let _ = answer.send(needs);
    }

    /// Opens the files of the base of a paused sandbox whose claim is not open.
    pub(super) fn base_files(&mut self, id: &SandboxId, answer: Answer<Vec<(String, File)>>) {
        match self.plan_base(id) {
            Err(why) => drop(answer.send(Err(why))),
            Ok(plan) => {
                // A memory file that is made from a diff stays until it is open.
                self.publishing += 1;
                self.jobs
                    .run(move || Report::BaseOpened(plan.run(), answer));
            }
        }
    }

    fn plan_base(&self, id: &SandboxId) -> Result<BasePlan, PoolError> {
        self.pause_files(id)?;
        let base = match self.plan_needs(id)? {
            Ok(needs) => needs.base,
            Err(Summed { paths, .. }) => {
                return Ok(BasePlan {
                    dir: None,
                    guest: images::GUEST.into_iter().zip(paths).collect(),
                    restorer: self.jobs.restorer(),
                });
            }
        };
        let images = self.templates.images();
        let record = &self.slots.leased(id)?.record;
        let lineage = record.lineage.as_ref();
        let linked = images.dir().join(&base);
        if linked.is_dir() {
            let guest = images::GUEST.into_iter().zip(images::guest_links(&linked));
            return Ok(BasePlan {
                dir: Some(linked),
                guest: guest.collect(),
                restorer: self.jobs.restorer(),
            });
        }
        // A template that this server has built, or that is used where it is installed.
        let home = lineage.and_then(|lineage| lineage.home.as_ref());
        let home = home.filter(|home| sum_of_manifest(&home.dir).is_ok_and(|sum| sum == base));
        let (Some(home), Some(lineage)) = (home, lineage) else {
            return Err(lacks(format!("the files of its template {base:.12}")));
        };
        let boot = record.boot.iter();
        let boot = boot.flat_map(|boot| [boot.kernel.clone(), boot.initrd.clone()]);
        let guest = [lineage.root.clone()].into_iter().chain(boot);
        Ok(BasePlan {
            dir: Some(home.dir.clone()),
            guest: images::GUEST.into_iter().zip(guest).collect(),
            restorer: self.jobs.restorer(),
        })
    }

    pub(super) fn hold(
        &mut self,
        id: &SandboxId,
        incoming: &Path,
        needs: PauseNeeds,
        fetched: Option<PathBuf>,
        answer: Answer<bool>,
    ) {
        let vmm = needs.vmm.as_ref().map(|vmm| self.vmms.get(vmm));
        let vmm = match vmm.transpose() {
            Ok(vmm) => vmm.map(|vmm| vmm.path().to_owned()),
            Err(why) => return drop(answer.send(Err(lacks(why)))),
        };
        if !is_sha256(&needs.base) {
            return drop(answer.send(Err(lacks("a well-formed name of a template".to_owned()))));
        }
        let plan = HoldPlan {
            images: self.templates.images().clone(),
            needs,
            fetched,
            vmm,
            to: incoming.join(id.as_str()),
        };
        self.publishing += 1;
        self.jobs
            .run(move || Report::Held(plan.to.clone(), plan.run(), answer));
    }

    pub(super) fn is_held(
        &mut self,
        dir: PathBuf,
        held: Result<Option<Held>, PoolError>,
        answer: Answer<bool>,
    ) {
        self.publishing -= 1;
        let is_here = held.map(|held| {
            let is_here = held.is_some();
            self.held.extend(held.map(|held| (dir, held)));
            is_here
        });
        // A base that has just arrived, and is not held, is of no use.
        self.images_may_be_unused |= is_here.is_err();
        let _ = answer.send(is_here);
    }

    pub(super) fn root_images(&self) -> Vec<PathBuf> {
        let templates = self.templates.iter().map(|template| template.root.clone());
        let mut roots: Vec<_> = templates.chain(self.templates.images().roots()).collect();
        roots.sort();
        roots.dedup();
        roots
    }

    /// Keeps the VMM again that a sandbox on its way needs, if it was removed after it was held.
    fn restore_vmm(&mut self, needs: &PauseNeeds, dir: &Path) -> Result<(), PoolError> {
        let Some(vmm) = &needs.vmm else {
            return Ok(());
        };
        let Err(missing) = self.vmms.get(vmm) else {
            return Ok(());
        };
        let held = held_vmm(dir).ok_or_else(|| lacks(missing.clone()))?;
        match self.vmms.keep(&held) {
            Ok(kept) if kept == *vmm => Ok(()),
            Ok(_) => Err(lacks(missing)),
            Err(why) => Err(PoolError::of_disk("keep a VMM", &why)),
        }
    }

    pub(super) fn can_take(
        &mut self,
        needs: &PauseNeeds,
        gives: GivesBase,
    ) -> Result<(), PoolError> {
        if self.stopping.is_draining {
            return Err(PoolError::Draining);
        }
        self.may_save()?;
        let base = self.templates.images().dir().join(&needs.base);
        let is_here = gives == GivesBase::Yes || base.is_dir();
        if !is_sha256(&needs.base) || !is_here {
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
        needs: Option<PauseNeeds>,
        claim: Option<Claim>,
        answer: Answer<()>,
    ) {
        if self.stopping.closing.is_some() {
            return drop(answer.send(Err(PoolError::Draining)));
        }
        let from = SlotDir::new(incoming, &id);
        let restored = match &needs {
            Some(needs) if !is_sha256(&needs.base) => {
                Err(lacks("a well-formed name of a template".to_owned()))
            }
            Some(needs) => self.restore_vmm(needs, from.path()),
            None => Ok(()),
        };
        if let Err(why) = restored {
            return drop(answer.send(Err(why)));
        }
        let plan = TakePlan {
            store: self.templates.store_with(&from.pause()),
            to: SlotDir::new(&self.config.state.join(crate::SANDBOXES), &id),
            from,
            needs,
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

fn lacks(why: String) -> PoolError {
    PoolError::Failed {
        what: "move a paused sandbox",
        why,
    }
}

#[cfg(test)]
mod tests;
