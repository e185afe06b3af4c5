//! The lineage of a VM, and the check of its snapshots against it.

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

/// The root image, size and template from which a VM was made. A snapshot's manifest states them again, and a client
/// that restores the snapshot opens the files and allocates the memory that the manifest states. A compromised VMM
/// could write anything there. The client therefore records the lineage when it makes the VM, and rejects a snapshot
/// whose manifest differs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lineage {
    /// Path of the root image.
    pub root: PathBuf,
    pub size: Size,
    /// The whole template that a diff of the VM may name as its base. `None` if the VM was booted, or if the template's
    /// manifest was missing or unreadable when the VM was restored.
    pub home: Option<Home>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Size {
    /// Guest RAM.
    pub memory: Bytes,
    /// Number of vCPUs.
    pub vcpus: u8,
}

impl Size {
    /// A size that no VM has, for templates whose manifest cannot be read.
    pub(crate) const NONE: Self = Self {
        memory: Bytes(0),
        vcpus: 0,
    };
}

/// The directory of a whole template, and the identity of the manifest in it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Home {
    /// The real directory of the manifest, with symbolic links resolved.
    pub dir: PathBuf,
    /// Device and inode of the manifest.
    pub manifest: (u64, u64),
}

impl Home {
    /// Determines the real directory and the identity of the manifest at `path`.
    pub(super) fn of(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        let real = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
        let manifest = file.metadata()?;
        Ok(Self {
            dir: real.parent().unwrap_or(&real).to_owned(),
            manifest: (manifest.dev(), manifest.ino()),
        })
    }

    /// Whether the same manifest is still in the directory. A check of the manifest's link count would not suffice,
    /// because a manifest that was removed from the directory can have other links.
    fn stands(&self) -> bool {
        fs::metadata(self.dir.join(MANIFEST_NAME))
            .is_ok_and(|found| (found.dev(), found.ino()) == self.manifest)
    }
}

impl Lineage {
    /// The content that a snapshot can have if `content` is requested: full if the template that a diff would name no
    /// longer exists.
    pub(crate) fn possible(&self, content: SnapshotContent) -> SnapshotContent {
        if self.home.as_ref().is_some_and(Home::stands) {
            content
        } else {
            SnapshotContent::Full
        }
    }

    /// Reads a snapshot's manifest and checks that it matches this lineage. Returns the manifest's bytes.
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

/// The fields of a manifest that the client uses.
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
