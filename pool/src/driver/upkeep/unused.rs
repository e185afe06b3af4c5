//! Removes files that only old releases or replaced templates needed: kept VMMs, and links to images.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

use library::{Library, durable::set_aside, images::BootFiles};
use tokio::task::spawn_blocking;

use super::Upkeep;
use crate::{driver::slots::Slots, state_dir::TEMPLATES, work::base::is_held};

impl Upkeep {
    /// Removes VMMs and images that no template needs and no sandbox, whether here or moving to this server. Does
    /// nothing while a start or a new template waits or is under way, because no record names its files yet; nor after
    /// the pool has begun to close, because the next server decides with its own VMM and templates; nor if this server
    /// could not read all records.
    pub(in crate::driver) fn remove_unused(&mut self, library: &mut Library, slots: &Slots) {
        let is_removing = self.removal.as_ref().is_some_and(|r| !r.is_finished());
        if self.keeps_unused || is_removing || self.jobs > 0 {
            return;
        }
        // A sandbox that was moving here has arrived and its record names the files, or the move was abandoned.
        let before = self.held.len();
        self.held.retain(|dir, _| is_held(dir));
        self.images_may_be_unused |= self.held.len() < before;
        let mut unused = Vec::new();
        if library.vmms().has_former() {
            let records = slots.values().filter_map(|e| e.record.vmm_id.clone());
            let templates = library.iter().map(|t| t.vmm.clone());
            let held = self.held.values().filter_map(|held| held.vmm.clone());
            let used = records.chain(templates).chain(held).collect();
            unused = library.vmms_mut().take_unused(&used);
        }
        // Until the job's report, no template's record names a rebuilt template or the base of a diff.
        let is_awaited = self.rebuilding.is_some() || self.storing.is_some();
        if self.images_may_be_unused && !is_awaited {
            self.images_may_be_unused = false;
            unused.extend(self.unused_images(library, slots));
        }
        if unused.is_empty() {
            return;
        }
        // Renamed first: if the server is killed half-way, the remaining files must not look complete.
        let unused: Vec<_> = unused
            .into_iter()
            .map(|dir| (set_aside(&dir), dir))
            .collect();
        self.removal = Some(spawn_blocking(move || {
            for (aside, dir) in unused {
                match aside.and_then(std::fs::remove_dir_all) {
                    Ok(()) => {
                        tracing::info!(dir = %dir.display(), "removed unused directory")
                    }
                    Err(error) => {
                        tracing::warn!(dir = %dir.display(), %error, "cannot remove unused directory")
                    }
                }
            }
        }));
    }

    /// The directories of images that no sandbox and no template uses. Empty as long as there is a pause of an older
    /// release, which refers to the installed path of its template.
    fn unused_images(&self, library: &Library, slots: &Slots) -> Vec<PathBuf> {
        let images = library.images();
        let own = self.config.state.join(TEMPLATES);
        // A template installed in place may be the origin of the links of images.
        let is_elsewhere = |dir: &Path| !dir.starts_with(images.dir()) && !dir.starts_with(&own);
        let mut used = BTreeSet::new();
        for entry in slots.values().filter(|e| e.slot.is_leased()) {
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
        for template in library.iter() {
            used.extend(template.needs());
        }
        used.extend(self.held.values().map(|held| held.base.clone()));
        images.unused(&used)
    }
}

#[cfg(test)]
pub(super) mod tests;
