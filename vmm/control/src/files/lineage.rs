//! What a VM was made from, and the check of its snapshots against that.

use std::{
    fs::{self, File},
    io::{self, Read},
    os::{fd::AsRawFd, unix::fs::MetadataExt},
    path::{Path, PathBuf},
};

use model::{Bytes, MANIFEST_NAME};
use serde::{Deserialize, Serialize};

use super::error::{FilesError, failed};
use super::regular::open;
use crate::SnapshotContent;

/// Longest manifest that is read, in bytes.
const MAX_MANIFEST: u64 = 1 << 20;

/// What a VM was made from. The manifest of a snapshot says so, and whoever restores it opens the files that it
/// names and makes room for the size that it gives; a captured VMM writes what it likes there. So a client keeps the
/// lineage of a VM from its making, and no snapshot of it is accepted that has another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lineage {
    /// The root image.
    pub root: PathBuf,
    /// Its size.
    pub size: Size,
    /// The whole template that a diff may name; absent for a VM that was booted, and for one whose template does not
    /// outlive its start.
    pub home: Option<Home>,
}

/// The size of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Size {
    /// Guest RAM.
    pub memory: Bytes,
    /// Number of vCPUs.
    pub vcpus: u8,
}

impl Size {
    /// Of no VM.
    pub(crate) const NONE: Self = Self {
        memory: Bytes(0),
        vcpus: 0,
    };
}

/// The directory of a whole template, and which manifest was there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Home {
    /// The directory in which the manifest really lay, links followed.
    pub dir: PathBuf,
    /// Device and inode of the manifest.
    pub manifest: (u64, u64),
}

impl Home {
    /// Where a manifest really lies.
    pub(super) fn of(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        let real = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
        let manifest = file.metadata()?;
        Ok(Self {
            dir: real.parent().unwrap_or(&real).to_owned(),
            manifest: (manifest.dev(), manifest.ino()),
        })
    }

    /// Whether the same manifest is still there. One that was removed can have other names all the same.
    fn stands(&self) -> bool {
        fs::metadata(self.dir.join(MANIFEST_NAME))
            .is_ok_and(|found| (found.dev(), found.ino()) == self.manifest)
    }
}

impl Lineage {
    /// As much of a VM as can be written: a diff needs the template that it names.
    pub(crate) fn possible(&self, content: SnapshotContent) -> SnapshotContent {
        if self.home.as_ref().is_some_and(Home::stands) {
            content
        } else {
            SnapshotContent::Full
        }
    }

    /// Accepts a manifest that names this lineage; its bytes.
    pub(crate) fn check(&self, path: &Path) -> Result<Vec<u8>, FilesError> {
        let (named, bytes) = Named::read(path).map_err(failed("read", path))?;
        let home = self.home.as_ref().map(|home| &home.dir);
        let base = named.base.as_ref().map(|base| &base.dir);
        let made_from = named.root == self.root && (base.is_none() || base == home);
        let same = made_from && named.size == self.size;
        same.then_some(bytes).ok_or_else(|| FilesError::Lineage {
            path: path.to_owned(),
        })
    }
}

/// What a manifest says that others rely on.
#[derive(Deserialize)]
pub(super) struct Named {
    pub(super) root: PathBuf,
    #[serde(flatten)]
    pub(super) size: Size,
    #[serde(default)]
    pub(super) base: Option<NamedBase>,
}

#[derive(Deserialize)]
pub(super) struct NamedBase {
    pub(super) dir: PathBuf,
}

impl Named {
    pub(super) fn read(path: &Path) -> io::Result<(Self, Vec<u8>)> {
        let mut bytes = Vec::new();
        open(path)?.take(MAX_MANIFEST).read_to_end(&mut bytes)?;
        Ok((serde_json::from_slice(&bytes)?, bytes))
    }
}
