//! `template.json`, the record of a template in the state directory.

use std::{
    io,
    path::{Path, PathBuf},
};

use model::SandboxId;
use serde::{Deserialize, Serialize};

use crate::{
    durable::{self, Durability, private_dir, replace, sync_dir},
    vmms::VmmId,
};

pub(super) const RECORD: &str = "template.json";
/// The version that is written. Version 1 did not name the VMM.
pub(super) const VERSION: u32 = 2;

/// The contents of `template.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Kept {
    pub(super) version: u32,
    pub(super) names: Vec<String>,
    pub(super) created_unix_s: u64,
    pub(super) is_snapshot: bool,
    /// The sandbox from which a snapshot was made; `None` for other templates.
    pub(super) source: Option<SandboxId>,
    /// The directory of the template's files; `None`: the directory `image` beside this record.
    pub(super) elsewhere: Option<PathBuf>,
    /// The VMM that made the template. Since version 2. `None`: the files elsewhere name it.
    #[serde(default)]
    pub(super) vmm: Option<VmmId>,
}

/// The directory of a template in the state directory, and the record that belongs there.
#[derive(Clone, Debug)]
pub(crate) struct TemplateRecord {
    pub(super) home: PathBuf,
    pub(super) kept: Kept,
}

impl TemplateRecord {
    /// Writes the record, so that it survives a crash of the host.
    pub(crate) fn write(&self) -> io::Result<()> {
        private_dir(&self.home)?;
        write_kept(&self.home, &self.kept)?;
        sync_dir(self.home.parent().unwrap_or(&self.home))
    }

    /// Removes the record first, so that a crash of the host leaves either the whole template or none.
    pub(crate) fn remove(&self) -> io::Result<()> {
        let record = self.home.join(RECORD);
        if record.exists() {
            durable::remove_file(&record)?;
            sync_dir(&self.home)?;
        }
        durable::remove_dir(&self.home)
    }
}

/// Records the VMM of a template that a former release made, so that the template stays usable after the next upgrade. A
/// failure is only logged: the next server tries again.
pub(super) fn name_vmm(home: &Path, kept: &Kept) {
    if let Err(error) = write_kept(home, kept) {
        tracing::warn!(dir = %home.display(), %error, "cannot record the VMM of a template");
    }
}

fn write_kept(home: &Path, kept: &Kept) -> io::Result<()> {
    replace(
        home,
        RECORD,
        &serde_json::to_vec_pretty(kept)?,
        Durability::Host,
    )
}
