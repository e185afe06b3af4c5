//! The manifest of a template, and the template that a clone descends from.

use std::{
    fs::File,
    path::{Path, PathBuf},
};

use model::{TEMPLATE_FORMAT, TemplateManifest, hex};
use serde::Deserialize;
use sha2::{Digest, Sha256};
use vmm_control::files::TemplateFile;

use super::directory::{Directory, read_limited};
use super::error::{SnapshotError, at, damaged};
use crate::sys::has_name;

const MAX_MANIFEST: u64 = 1 << 20;

/// The whole template that a clone descends from: the template itself, or the base of a diff.
#[derive(Debug)]
pub struct Ancestor {
    /// The real directory of its manifest, with symbolic links resolved.
    pub home: PathBuf,
    /// SHA-256 of its manifest.
    pub manifest_sha256: String,
    /// Length of its memory file.
    pub memory_bytes: u64,
    manifest: File,
}

impl Ancestor {
    /// Whether the manifest file has neither been deleted nor changed. The client checks that it is still in `home`.
    #[must_use]
    pub fn stands(&self) -> bool {
        has_name(&self.manifest)
            && read_limited(&self.manifest, &self.home, MAX_MANIFEST)
                .is_ok_and(|bytes| hex(&Sha256::digest(&bytes)) == self.manifest_sha256)
    }
}

/// A manifest and its hash.
pub(super) struct Found {
    pub(super) manifest: TemplateManifest,
    pub(super) sha256: String,
}

impl Found {
    pub(super) fn ancestor(&self, dir: &Directory, home: &Path) -> Result<Ancestor, SnapshotError> {
        let manifest = dir.file(TemplateFile::Manifest)?.try_clone();
        Ok(Ancestor {
            home: home.to_owned(),
            manifest_sha256: self.sha256.clone(),
            memory_bytes: self.manifest.memory_sum.bytes,
            manifest: manifest.map_err(at("read", home))?,
        })
    }
}

/// Reads a manifest. The format is checked before the other fields are parsed, so that a manifest of another format is
/// reported as [`SnapshotError::Format`].
pub(super) fn read_manifest(dir: &Directory) -> Result<Found, SnapshotError> {
    #[derive(Deserialize)]
    struct Versioned {
        format: u32,
    }
    let path = dir.path(TemplateFile::Manifest);
    let bytes = dir.read(TemplateFile::Manifest, MAX_MANIFEST)?;
    let bad = |source| SnapshotError::Manifest {
        path: path.clone(),
        source,
    };
    let found = serde_json::from_slice::<Versioned>(&bytes)
        .map_err(bad)?
        .format;
    if found != TEMPLATE_FORMAT {
        return Err(SnapshotError::Format { found });
    }
    let manifest: TemplateManifest = serde_json::from_slice(&bytes).map_err(bad)?;
    if manifest.memory > model::MAX_MEMORY || manifest.memory < model::MIN_MEMORY {
        return Err(damaged(
            &path,
            format!("its memory size of {} is out of range", manifest.memory),
        ));
    }
    Ok(Found {
        manifest,
        sha256: hex(&Sha256::digest(&bytes)),
    })
}
