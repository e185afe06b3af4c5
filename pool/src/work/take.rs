//! Taking over a paused sandbox whose files another server has written.

use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use model::MANIFEST_NAME;
use vmm_control::files::{Home, Lineage, Size};

use crate::{
    claim::{BaseKind, Claim, PauseNeeds},
    durable::{sync_dir, sync_files},
    error::PoolError,
    images::Images,
    record::{Kept, Record, SlotDir},
    spec::{MAX_NOTE, PauseMode},
    store::Store,
    vmms::{self, is_sha256},
    work::{Stop, base, needs::vmm_of},
};

const WHAT: &str = "take over the paused sandbox";

#[derive(Debug)]
pub(crate) struct TakePlan {
    /// Where the files have arrived.
    pub(crate) from: SlotDir,
    pub(crate) to: SlotDir,
    /// The base that it needs. `None`: noted by a former release.
    pub(crate) needs: Option<PauseNeeds>,
    /// `None`: the files are only checked.
    pub(crate) claim: Option<Claim>,
    /// The VMM of `needs`, if it is not kept here: the directory of all VMMs, and a message for people.
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

    /// Keeps the VMM again, if it was removed after it was held.
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

    /// Makes the base again if it was removed meanwhile, and lets a pause without a base name its root image here.
    fn prepare(&self, needs: &PauseNeeds, mode: PauseMode) -> io::Result<()> {
        let images = self.store.images();
        base::restore(self.from.path(), images, needs, &self.stop)?;
        if (needs.kind, mode) == (BaseKind::Guest, PauseMode::Memory) {
            let root = images.dir().join(&needs.base).join(crate::images::ROOT);
            base::set_root(&self.from.pause(), &root)?;
        }
        Ok(())
    }

    /// The record that has arrived, which must be that of the pause that was offered.
    fn sent(&self) -> Result<(Record, PauseMode), String> {
        let record = self.from.read_pause()?;
        let Kept::Paused(mode) = record.kept else {
            return Err("the record is not that of a pause".to_owned());
        };
        if record.note.len() > MAX_NOTE {
            return Err(format!("the note has {} bytes", record.note.len()));
        }
        if let Some(needs) = &self.needs {
            if needs.mode != mode {
                return Err(format!(
                    "the pause is one of {mode:?}, one of {:?} was offered",
                    needs.mode
                ));
            }
            if needs.vmm != vmm_of(&record, mode) {
                return Err("the record names another VMM than was offered".to_owned());
            }
        }
        Ok((record, mode))
    }

    /// The record of the pause as this server keeps it: with the paths of its own files, and without a process.
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
                    return Err("the pause has another base than was offered".to_owned());
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
                    .join(crate::images::ROOT);
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

    /// Makes the directory the sandbox's. When this returns, that survives a crash of the host.
    fn commit(&self, record: &Record) -> io::Result<()> {
        sync_files(&self.from.pause())?;
        self.from.rewrite_pause(record)?;
        arrive(self.from.path(), self.to.path(), sync_dir)?;
        // The record names them now. What stays goes with the sandbox.
        if let Err(error) = base::forget(self.to.path()) {
            tracing::warn!(%error, "cannot remove the links of a sandbox that has arrived");
        }
        Ok(())
    }
}

/// Moves a directory, and syncs both parents. If that fails, moves it back, so that the sandbox is still on its way: the
/// caller must not be answered that it is not here, for its giver would remove its files. The next attempt is another rename,
/// which changes both parents again, and does not depend on what the failed sync has left in the page cache.
///
/// If it cannot be moved back either, it is here. A crash of the host then leaves it in one of the two places, with all its
/// files, which are synced: here the next server finds it paused, there its note has the next step.
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
            tracing::error!(%dir, %error, %stays, "cannot sync the name of a sandbox that has arrived, and cannot move it back: it is this server's; repair the disk");
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

/// The directory of images that has the root image of a pause without memory, as a former release names it.
fn base_of_former(record: &Record) -> Option<String> {
    let root = record.boot.as_ref()?.root.parent()?;
    let name = root.file_name()?.to_str()?;
    is_sha256(name).then(|| name.to_owned())
}

#[cfg(test)]
#[path = "take/tests.rs"]
mod tests;
