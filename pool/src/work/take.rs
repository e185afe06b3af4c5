//! Takes over a paused sandbox whose files another server has written.

use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use library::{
    durable::{sync_dir, sync_files},
    images::Images,
    store::Store,
    vmms,
};
use model::{MANIFEST_NAME, is_sha256};
use vmm_control::files::{Home, Lineage, Size};

use crate::{
    claim::{BaseKind, Claim, PauseNeeds},
    error::PoolError,
    record::{Kept, Record, SlotDir},
    sandbox::MAX_NOTE,
    state::PauseMode,
    work::{Stop, base, needs::vmm_of},
};

const WHAT: &str = "take over the paused sandbox";

#[derive(Debug)]
pub(crate) struct TakePlan {
    /// The directory of the received files.
    pub(crate) from: SlotDir,
    pub(crate) to: SlotDir,
    /// The base that it needs. `None` if an older release wrote the request.
    pub(crate) needs: Option<PauseNeeds>,
    /// `None` if the files are only checked.
    pub(crate) claim: Option<Claim>,
    /// The directory of all VMMs, and a human-readable message, if the VMM of `needs` is not kept here.
    pub(crate) missing_vmm: Option<(PathBuf, String)>,
    /// Admits the files of the pause.
    pub(crate) store: Store,
    pub(crate) host_boot_id: String,
    pub(crate) stop: Stop,
}

impl TakePlan {
    /// Checks the files. With a claim, moves them and returns the record.
    ///
    /// # Errors
    /// Returns [`PoolError::Failed`] or [`PoolError::NoSpace`].
    pub(crate) fn run(self) -> Result<Option<Box<Record>>, PoolError> {
        self.stop.outcome(self.take())
    }

    fn take(&self) -> Result<Option<Box<Record>>, PoolError> {
        let failed = |why| PoolError::Failed { what: WHAT, why };
        let (record, mode) = self.sent().map_err(failed)?;
        self.keep_vmm()?;
        if let Some(needs) = &self.needs {
            self.prepare(needs, mode)
                .map_err(|e| PoolError::of_disk(WHAT, &e))?;
        }
        let mut record = self.checked(record, mode).map_err(failed)?;
        if self.claim.is_none() {
            return Ok(None);
        }
        record.claim = self.claim.clone();
        let moved = self.commit(&record);
        moved.map_err(|e| PoolError::of_disk(WHAT, &e))?;
        Ok(Some(Box::new(record)))
    }

    /// Keeps the VMM again, if it has been removed since it was held.
    fn keep_vmm(&self) -> Result<(), PoolError> {
        let Some((vmms, why)) = &self.missing_vmm else {
            return Ok(());
        };
        let lacks = || PoolError::Failed {
            what: WHAT,
            why: why.clone(),
        };
        let held = base::held_vmm(self.from.path()).ok_or_else(lacks)?;
        let kept = vmms::copy(&held, vmms).map_err(|e| PoolError::of_disk(WHAT, &e))?;
        let wanted = self.needs.as_ref().and_then(|needs| needs.vmm.as_ref());
        if wanted == Some(&kept) {
            Ok(())
        } else {
            Err(lacks())
        }
    }

    /// Recreates the base if it has been removed, and sets the local root image in a pause without a base.
    fn prepare(&self, needs: &PauseNeeds, mode: PauseMode) -> io::Result<()> {
        let images = self.store.images();
        base::restore(self.from.path(), images, needs, &self.stop)?;
        if (needs.kind, mode) == (BaseKind::Guest, PauseMode::Memory) {
            let root = images.dir().join(&needs.base).join(library::images::ROOT);
            base::set_root(&self.from.pause(), &root)?;
        }
        Ok(())
    }

    /// The received record, which must belong to the offered pause.
    fn sent(&self) -> Result<(Record, PauseMode), String> {
        let record = self.from.read_pause()?;
        let Kept::Paused(mode) = record.kept else {
            return Err("the record does not belong to a pause".to_owned());
        };
        if record.note.len() > MAX_NOTE {
            return Err(format!("the note has {} bytes", record.note.len()));
        }
        if let Some(needs) = &self.needs {
            if needs.mode != mode {
                return Err(format!(
                    "the mode of the pause is {mode:?}, but {:?} was offered",
                    needs.mode
                ));
            }
            if needs.vmm != vmm_of(&record, mode) {
                return Err("the VMM in the record differs from the offered one".to_owned());
            }
        }
        Ok((record, mode))
    }

    /// The record of the pause for this server: with local paths, and without a process.
    fn checked(&self, mut record: Record, mode: PauseMode) -> Result<Record, String> {
        let (root, size, home) = match mode {
            PauseMode::Memory => {
                let checked = self.store.check(&self.from.pause())?;
                let named = checked.manifest.base.map(|base| base.manifest_sha256);
                let offered = self.needs.as_ref().map(|needs| match needs.kind {
                    BaseKind::Template => Some(needs.base.clone()),
                    BaseKind::Guest => None,
                });
                if offered.is_some_and(|offered| offered != named) {
                    return Err("the base of the pause differs from the offered one".to_owned());
                }
                let size = Size {
                    memory: checked.manifest.memory,
                    vcpus: checked.manifest.vcpus,
                };
                let home = checked
                    .base
                    .map(|base| home(&base).map_err(|e| format!("{}: {e}", base.display())));
                if home.is_none() && self.needs.is_none() {
                    return Err("the pause has no base".to_owned());
                }
                (checked.root, size, home.transpose()?)
            }
            PauseMode::FilesystemOnly => {
                let base = match &self.needs {
                    Some(needs) => needs.base.clone(),
                    None => base_of_former(&record).ok_or("the pause has no base")?,
                };
                let root = self
                    .store
                    .images()
                    .dir()
                    .join(base)
                    .join(library::images::ROOT);
                let size = Size {
                    memory: record.template.memory,
                    vcpus: record.template.vcpus,
                };
                (self.store.admit(&root)?, size, None)
            }
        };
        let of_template = (record.template.memory, record.template.vcpus);
        if of_template != (size.memory, size.vcpus) {
            return Err("the record and the manifest have different sizes".to_owned());
        }
        record.boot = Images::boot_files(&root);
        record.lineage = Some(Lineage { root, size, home });
        record.host_boot_id.clone_from(&self.host_boot_id);
        (record.vmm, record.tap, record.user) = (None, None, None);
        Ok(record)
    }

    /// Moves the directory to its final place. When this returns, the move survives a crash of the host.
    fn commit(&self, record: &Record) -> io::Result<()> {
        sync_files(&self.from.pause())?;
        self.from.rewrite_pause(record)?;
        arrive(self.from.path(), self.to.path(), sync_dir)?;
        // The record names the files now. Remaining links are removed with the sandbox.
        if let Err(error) = base::forget(self.to.path()) {
            tracing::warn!(%error, "cannot remove the links to the base of the received sandbox");
        }
        Ok(())
    }
}

/// Moves a directory, and syncs both parents. If a sync fails, moves the directory back, so that the sandbox has not
/// arrived yet: if the caller were told that it is missing here, the source would remove its files. The next attempt is
/// another rename, which changes both parents again, and does not depend on the page cache after the failed sync.
///
/// If it cannot be moved back either, the sandbox has arrived. After a crash of the host its directory is in one of the
/// two places, with all its files, which are synced. In the new place the next server finds it paused. In the old place
/// its note names the next step.
fn arrive(from: &Path, to: &Path, sync: impl Fn(&Path) -> io::Result<()>) -> io::Result<()> {
    fs::rename(from, to)?;
    let synced = [to, from].map(|dir| sync(dir.parent().unwrap_or(dir)));
    let Err(error) = synced.into_iter().collect::<io::Result<()>>() else {
        return Ok(());
    };
    match fs::rename(to, from) {
        Ok(()) => Err(error),
        Err(stays) => {
            let dir = to.display();
            tracing::error!(
                %dir,
                %error,
                %stays,
                "cannot sync the directory of the received sandbox, and cannot move it back: this server keeps it; repair the disk"
            );
            Ok(())
        }
    }
}

fn home(base: &Path) -> io::Result<Home> {
    let manifest = fs::metadata(base.join(MANIFEST_NAME))?;
    Ok(Home {
        dir: base.to_owned(),
        manifest: (manifest.dev(), manifest.ino()),
    })
}

/// The directory in the directory of images with the root image of a pause without memory, as older releases record it.
fn base_of_former(record: &Record) -> Option<String> {
    let root = record.boot.as_ref()?.root.parent()?;
    let name = root.file_name()?.to_str()?;
    is_sha256(name).then(|| name.to_owned())
}

#[cfg(test)]
#[path = "take/tests.rs"]
mod tests;
