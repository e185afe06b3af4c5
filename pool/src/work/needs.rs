//! Finds the files of a sandbox that another server needs to run it.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use library::{
    diff::Restorer,
    images::{self, Images, sum_of_manifest},
    manifest::Manifest,
    vmms::VmmId,
};
use model::is_sha256;

use crate::{
    claim::{BaseKind, PauseNeeds},
    error::PoolError,
    record::{Kept, Record},
    state::PauseMode,
    work::{
        Stop,
        base::{BasePlan, sum_of_guest},
    },
};

/// Checksums of files from which sandboxes boot.
pub(crate) type GuestSums = BTreeMap<Vec<PathBuf>, String>;

/// Finds the files that a running or paused sandbox needs. Reads the files from which it boots, once, to compute their
/// checksum.
#[derive(Debug)]
pub(crate) struct NeedsPlan {
    pub(crate) record: Record,
    pub(crate) mode: PauseMode,
    /// The directory of its pause, if it is paused.
    pub(crate) pause: PathBuf,
    pub(crate) images: Images,
    /// Checksums that were computed earlier.
    pub(crate) sums: GuestSums,
    pub(crate) stop: Stop,
}

/// Files that a sandbox needs.
#[derive(Debug)]
pub(crate) struct Needed {
    pub(crate) needs: PauseNeeds,
    /// A newly computed checksum, which remains valid.
    pub(crate) summed: Option<(Vec<PathBuf>, String)>,
}

/// The base of a sandbox on this server.
#[derive(Debug, PartialEq, Eq)]
struct Found {
    /// The template that the pause is a diff of: the SHA-256 of its manifest, and its directory. `None` if the sandbox
    /// needs only the files of the guest.
    template: Option<(String, PathBuf)>,
    root: PathBuf,
    /// Kernel and initramfs. `None` if the template cannot boot.
    beside: Option<[PathBuf; 2]>,
}

impl NeedsPlan {
    /// # Errors
    /// Returns [`PoolError`] if the sandbox can only be used on this server, or files cannot be read.
    pub(crate) fn run(&self) -> Result<Needed, PoolError> {
        self.stop.outcome(self.needed())
    }

    fn needed(&self) -> Result<Needed, PoolError> {
        let Found {
            template,
            root,
            beside,
        } = self.find().map_err(lacks)?;
        let beside = beside.into_iter().flatten();
        let paths: Vec<_> = match template {
            // The manifest has the checksum of the root image.
            Some(_) => beside.collect(),
            None => [root].into_iter().chain(beside).collect(),
        };
        let sum = match paths.as_slice() {
            [] => None,
            [_, ..] => Some(self.sum(&paths)?),
        };
        let (vmm, mode) = (vmm_of(&self.record, self.mode), self.mode);
        let needs = match template {
            Some((base, dir)) => PauseNeeds {
                base,
                kind: BaseKind::Template,
                format: Some(Manifest::read(&dir).map_err(lacks)?.format),
                boot: sum.clone(),
                vmm,
                mode,
            },
            None => PauseNeeds {
                base: sum.clone().unwrap_or_default(),
                kind: BaseKind::Guest,
                format: None,
                boot: None,
                vmm,
                mode,
            },
        };
        // Files are immutable only in the directory of images.
        let images = self.images.dir();
        let is_kept = paths.iter().all(|path| path.starts_with(images));
        let summed = sum.filter(|_| is_kept).map(|sum| (paths, sum));
        Ok(Needed { needs, summed })
    }

    /// Finds the files of the base.
    ///
    /// # Errors
    /// Returns [`PoolError`] if they are not on this server.
    pub(crate) fn base(&self, restorer: Restorer) -> Result<BasePlan, PoolError> {
        let found = self.find().map_err(lacks)?;
        let guest = [found.root].into_iter();
        let guest = guest.chain(found.beside.into_iter().flatten());
        Ok(BasePlan {
            dir: found.template.map(|(_, dir)| dir),
            guest: images::GUEST.into_iter().zip(guest).collect(),
            restorer,
        })
    }

    fn find(&self) -> Result<Found, String> {
        let boot = self.record.boot.as_ref();
        let Some(base) = base_of(&self.record, &self.pause)? else {
            let boot = boot.ok_or("it names no files to boot from")?;
            return Ok(Found {
                template: None,
                root: boot.root.clone(),
                beside: Some([boot.kernel.clone(), boot.initrd.clone()]),
            });
        };
        let linked = self.images.dir().join(&base);
        if linked.is_dir() {
            let [root, kernel, initrd] = images::guest_links(&linked);
            return Ok(Found {
                template: Some((base, linked)),
                root,
                beside: bootable([kernel, initrd]),
            });
        }
        // A template that this server has built, or that is used in its installed directory.
        let lineage = self.record.lineage.as_ref();
        let home = lineage.and_then(|lineage| lineage.home.as_ref());
        let home = home.filter(|home| sum_of_manifest(&home.dir).is_ok_and(|sum| sum == base));
        let (Some(home), Some(lineage)) = (home, lineage) else {
            return Err(format!(
                "this server no longer has the files of its template {base:.12}"
            ));
        };
        let beside = boot.map(|boot| [boot.kernel.clone(), boot.initrd.clone()]);
        Ok(Found {
            template: Some((base, home.dir.clone())),
            root: lineage.root.clone(),
            beside: beside.and_then(bootable),
        })
    }

    fn sum(&self, paths: &[PathBuf]) -> Result<String, PoolError> {
        if let Some(sum) = self.sums.get(paths) {
            return Ok(sum.clone());
        }
        let failed = |e| PoolError::of_disk("read the files of a sandbox", &e);
        sum_of_guest(paths, &self.stop).map_err(failed)
    }
}

/// Returns these files if all exist.
fn bootable(beside: [PathBuf; 2]) -> Option<[PathBuf; 2]> {
    beside.iter().all(|path| path.is_file()).then_some(beside)
}

/// The VMM that must read a pause of this mode.
pub(super) fn vmm_of(record: &Record, mode: PauseMode) -> Option<VmmId> {
    match mode {
        PauseMode::Memory => record.vmm_id.clone(),
        PauseMode::FilesystemOnly => None,
    }
}

/// SHA-256 of the manifest of the template whose files a sandbox needs. `dir` is the directory of its pause, if it is
/// paused.
///
/// `None` if it needs only the files from which it boots or has booted, and neither memory nor layer of a template.
///
/// # Errors
/// Returns a human-readable message if the manifest cannot be read.
fn base_of(record: &Record, dir: &Path) -> Result<Option<String>, String> {
    let base = match record.kept {
        Kept::Paused(PauseMode::Memory) => {
            Manifest::read(dir)?.base.map(|base| base.manifest_sha256)
        }
        Kept::Paused(PauseMode::FilesystemOnly) => None,
        // A pause of it will be a diff of this template, if the template still exists.
        Kept::Nobody | Kept::Running => {
            let home = record.lineage.as_ref().and_then(|l| l.home.as_ref());
            home.and_then(|home| sum_of_manifest(&home.dir).ok())
        }
    };
    Ok(base.filter(|base| is_sha256(base)))
}

/// The error of a sandbox that cannot move because something is missing.
pub(crate) fn lacks(why: String) -> PoolError {
    PoolError::Failed {
        what: "move a paused sandbox",
        why,
    }
}
