//! Removal of what only former releases or replaced templates needed: kept VMMs, and links to images.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use tokio::task::spawn_blocking;

use super::Driver;
use crate::{
    durable::set_aside,
    record::BootFiles,
    slot::{Slot, Stage},
    spec::{PauseMode, SandboxState, TemplateKind, VmmUse},
    state_dir::TEMPLATES,
    templates::Template,
    vmms::VmmId,
    work::base::is_held,
};

impl Driver {
    /// Removes the VMMs and the images that no sandbox, on its way to this server or here, and no template needs. Does nothing while a start or a new
    /// template waits or is under way: what it will need is not in a record yet. Does nothing either once the pool
    /// closes: the next server decides with its own VMM and templates. Does nothing at all if this server could not read
    /// all records.
    pub(super) fn remove_unused(&mut self) {
        let is_removing = self.removal.as_ref().is_some_and(|r| !r.is_finished());
        if self.keeps_unused
            || is_removing
            || self.stopping.closing.is_some()
            || self.publishing > 0
            || !self.is_at_rest()
        {
            return;
        }
        // A sandbox that was on its way is here, and its record names the files, or the move was given up.
        let before = self.held.len();
        self.held.retain(|dir, _| is_held(dir));
        self.images_may_be_unused |= self.held.len() < before;
        let mut unused = Vec::new();
        if self.vmms.has_former() {
            let records = self.slots.values().filter_map(|e| e.record.vmm_id.clone());
            let templates = self.templates.iter().map(|t| t.vmm.clone());
            let held = self.held.values().filter_map(|held| held.vmm.clone());
            let used = records.chain(templates).chain(held).collect();
            unused = self.vmms.take_unused(&used);
        }
        // A rebuilt template, or the base of a diff, is in no template's record until the job's report.
        let is_awaited = self.rebuilding.is_some() || self.storing.is_some();
        if self.images_may_be_unused && !is_awaited {
            self.images_may_be_unused = false;
            unused.extend(self.unused_images());
        }
        if unused.is_empty() {
            return;
        }
        // Renamed before anything else happens: what a killed server has removed in part must not be taken for whole.
        let unused: Vec<_> = unused
            .into_iter()
            .map(|dir| (set_aside(&dir), dir))
            .collect();
        self.removal = Some(spawn_blocking(move || {
            for (aside, dir) in unused {
                match aside.and_then(std::fs::remove_dir_all) {
                    Ok(()) => {
                        tracing::info!(dir = %dir.display(), "removed: nothing needs it any more")
                    }
                    Err(error) => {
                        tracing::warn!(dir = %dir.display(), %error, "cannot remove what nothing needs")
                    }
                }
            }
        }));
    }

    /// Whether no start waits or is under way.
    pub(super) fn is_at_rest(&self) -> bool {
        let is_at_rest = |slot: &Slot| slot.stage == Stage::Warm || slot.is_settled();
        self.queue.is_empty() && self.slots.values().all(|e| is_at_rest(&e.slot))
    }

    /// The directories of images that no sandbox and no template uses. None, as long as there is a pause of a former
    /// release, which names the place where its template was installed.
    fn unused_images(&self) -> Vec<PathBuf> {
        let images = self.templates.images();
        let own = self.config.state.join(TEMPLATES);
        // Installed in place: it may be the template that images have links of.
        let is_elsewhere = |dir: &Path| !dir.starts_with(images.dir()) && !dir.starts_with(&own);
        let mut used = BTreeSet::new();
        for entry in self.slots.values().filter(|e| e.slot.is_leased()) {
            let Some(lineage) = &entry.record.lineage else {
                return Vec::new();
            };
            let home = lineage.home.as_ref();
            if home.is_some_and(|home| is_elsewhere(&home.dir)) {
                return Vec::new();
            }
            used.extend(home.map(|home| home.dir.clone()));
            used.insert(lineage.root.clone());
            used.extend(entry.record.boot.iter().flat_map(BootFiles::paths));
        }
        for template in self.templates.iter() {
            used.extend(template.needs());
        }
        used.extend(self.held.values().map(|held| held.base.clone()));
        images.unused(&used)
    }

    /// The uses of every kept VMM.
    pub(super) fn vmm_uses(&self) -> BTreeMap<VmmId, VmmUse> {
        let mut uses: BTreeMap<VmmId, VmmUse> = BTreeMap::new();
        uses.entry(self.vmms.current().clone())
            .or_default()
            .is_present = true;
        for entry in self.slots.values() {
            let Some(id) = &entry.record.vmm_id else {
                continue;
            };
            match entry.slot.state() {
                Some(SandboxState::Paused(PauseMode::FilesystemOnly)) => {}
                Some(SandboxState::Paused(PauseMode::Memory)) => {
                    uses.entry(id.clone()).or_default().paused += 1;
                }
                Some(SandboxState::Running) | None => {
                    uses.entry(id.clone()).or_default().running += 1;
                }
            }
        }
        let has_memory = |t: &&Template| t.info.kind != TemplateKind::Disk;
        for template in self.templates.iter().filter(has_memory) {
            uses.entry(template.vmm.clone()).or_default().templates += 1;
        }
        uses
    }
}

#[cfg(test)]
pub(super) mod tests;
