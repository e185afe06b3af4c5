//! Installed templates that the pool has rebuilt with a newer VMM, kernel or root image.
//!
//! A rebuilt template lies in the directory of images. Its record `rebuilt.json` names the installed template that it
//! replaces. When that template is reinstalled, the rebuilt one is no longer used.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::{
    durable::{Durability, read_bounded, replace},
    images::{Images, sum_of_manifest},
    maker::maker,
    manifest::{MAX_FILE, Manifest},
    vmms::{VmmId, Vmms},
};

const RECORD: &str = "rebuilt.json";

/// Whether an installed template was made with the current VMM, kernel and root image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RebuildState {
    /// Not examined yet. Rebuilds wait for each other, for the adoption of sandboxes and for memory.
    Waiting,
    /// Being examined or rebuilt.
    Running,
    /// Made with the current files.
    Current,
    /// The last rebuild failed. It will be retried.
    Failed,
    /// Outdated, and cannot be rebuilt: it has no recipe, or an input file is gone.
    Kept,
}

impl RebuildState {
    pub const ALL: [Self; 5] = [
        Self::Waiting,
        Self::Running,
        Self::Current,
        Self::Failed,
        Self::Kept,
    ];

    /// The name used in metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Running => "rebuilding",
            Self::Current => "current",
            Self::Failed => "failed",
            Self::Kept => "kept",
        }
    }
}

/// The rebuild of an installed template.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rebuild {
    /// Directory of the installed template.
    pub installed: PathBuf,
    pub state: RebuildState,
    /// Number of consecutive failed rebuilds.
    pub failures: u32,
    /// No rebuild begins before this time (CLOCK_MONOTONIC).
    pub not_before_ns: u64,
}

impl Rebuild {
    pub(crate) fn of(installed: &Path) -> Self {
        Self {
            installed: installed.to_owned(),
            state: RebuildState::Waiting,
            failures: 0,
            not_before_ns: 0,
        }
    }
}

/// The contents of `rebuilt.json`. Newer releases may add fields, so unknown fields are ignored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rebuilt {
    /// The template's id.
    pub template: String,
    /// SHA-256 of the manifest of the installed template.
    pub installed_sha256: String,
    /// The VMM that made the rebuilt template.
    pub vmm: VmmId,
}

impl Rebuilt {
    fn read(dir: &Path) -> Option<Self> {
        let bytes = read_bounded(&dir.join(RECORD), MAX_FILE).ok()?;
        serde_json::from_slice(&bytes).ok()
    }

    /// Writes the record of the rebuilt template in `dir`.
    pub fn write(&self, dir: &Path) -> std::io::Result<()> {
        let bytes = serde_json::to_vec_pretty(self)?;
        replace(dir, RECORD, &bytes, Durability::Host)
    }
}

/// The files from which sandboxes of an installed template start, and the VMM that made them: rebuilt files of the
/// current VMM if there are any, otherwise the installed files if the current VMM made them, otherwise the newest.
///
/// # Errors
/// Returns a human-readable message if the template has no manifest, or the VMM of the installed files is missing and
/// there are no others.
pub(crate) fn choose(
    installed: &Path,
    id: &str,
    images: &Images,
    vmms: &mut Vmms,
) -> Result<(PathBuf, VmmId), String> {
    let sum = sum_of_manifest(installed).map_err(|e| e.to_string())?;
    let mut rebuilt: Vec<_> = images
        .all()
        .into_iter()
        .filter_map(|dir| Some((Rebuilt::read(&dir)?, dir)))
        .filter(|(of, _)| of.template == id && of.installed_sha256 == sum)
        .filter(|(of, _)| vmms.get(&of.vmm).is_ok())
        .filter_map(|(of, dir)| Some((Manifest::read(&dir).ok()?.taken_at_unix_ns, of.vmm, dir)))
        .collect();
    rebuilt.sort();
    let current = vmms.current().clone();
    let present = rebuilt.iter().rposition(|(_, vmm, _)| *vmm == current);
    if let Some(at) = present {
        let (_, vmm, dir) = rebuilt.swap_remove(at);
        return Ok((dir, vmm));
    }
    match (maker(installed, vmms), rebuilt.pop()) {
        (Ok(vmm), Some((_, newest, dir))) if vmm != current => Ok((dir, newest)),
        (Err(_), Some((_, newest, dir))) => Ok((dir, newest)),
        (made_by, _) => Ok((installed.to_owned(), made_by?)),
    }
}
