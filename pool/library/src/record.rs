//! `template.json`, the record of a template in the state directory.

use std::{
    io,
    path::{Path, PathBuf},
};

use model::{Bytes, SandboxId};
use serde::{Deserialize, Serialize};

use crate::{
    durable::{self, Durability, private_dir, read_bounded, replace, sync_dir},
    images::BootFiles,
    info::{TemplateDefaults, TemplateKind},
    manifest::MAX_FILE,
    vmms::VmmId,
};

pub(crate) const RECORD: &str = "template.json";
/// The version that is written. Version 2 had `is_snapshot` for the kind, and neither disks nor defaults; version 1 did
/// not name the VMM either.
const VERSION: u32 = 3;

/// The contents of `template.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Kept {
    pub(crate) version: u32,
    pub(crate) names: Vec<String>,
    pub(crate) created_unix_s: u64,
    pub(crate) kind: TemplateKind,
    /// The sandbox from which the template was made. `None` if there was no sandbox.
    pub(crate) source: Option<SandboxId>,
    /// The directory of the template's files. `None` for the directory `image` next to this record.
    pub(crate) elsewhere: Option<PathBuf>,
    /// The VMM that made the template. `None` if the files elsewhere name it, or the template is a disk.
    pub(crate) vmm: Option<VmmId>,
    /// Size of the VMs of a disk template.
    pub(crate) machine: Option<Size>,
    /// The files from which sandboxes boot: all sandboxes of a disk template, and sandboxes without memory of a built
    /// template. `None` for other templates, whose kernel and initramfs lie next to their root image.
    pub(crate) boot: Option<BootFiles>,
    pub(crate) defaults: TemplateDefaults,
}

/// The size of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Size {
    /// Guest RAM.
    pub memory: Bytes,
    pub vcpus: u8,
}

impl Size {
    /// # Errors
    /// Returns a human-readable message if no VM can have this size.
    pub fn check(self) -> Result<(), String> {
        let memory = model::MIN_MEMORY..=model::MAX_MEMORY;
        if !memory.contains(&self.memory) {
            return Err(format!(
                "{} of memory; use {} to {}",
                self.memory,
                memory.start(),
                memory.end()
            ));
        }
        match self.vcpus {
            0 => Err("a VM needs at least one CPU".to_owned()),
            _ => Ok(()),
        }
    }
}

/// The contents of `template.json` in versions 1 and 2.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Former {
    #[expect(dead_code, reason = "the header has already been decoded")]
    version: u32,
    names: Vec<String>,
    created_unix_s: u64,
    is_snapshot: bool,
    source: Option<SandboxId>,
    elsewhere: Option<PathBuf>,
    /// Since version 2.
    #[serde(default)]
    vmm: Option<VmmId>,
}

/// The part that is decoded first, because the version determines the meaning of the other fields.
#[derive(Deserialize)]
struct Header {
    version: u32,
}

impl Kept {
    /// A record with the fields that every template has.
    pub(crate) fn new(kind: TemplateKind, names: Vec<String>, created_unix_s: u64) -> Self {
        Self {
            version: VERSION,
            names,
            created_unix_s,
            kind,
            source: None,
            elsewhere: None,
            vmm: None,
            machine: None,
            boot: None,
            defaults: TemplateDefaults::default(),
        }
    }

    /// Reads the record in the template's directory, in the current or an older version.
    ///
    /// # Errors
    /// Returns [`io::ErrorKind::NotFound`] if there is no record, and another error if it cannot be read.
    pub(crate) fn read(home: &Path) -> io::Result<Self> {
        let bytes = read_bounded(&home.join(RECORD), MAX_FILE)?;
        let Header { version } = serde_json::from_slice(&bytes)?;
        match version {
            VERSION => Ok(serde_json::from_slice(&bytes)?),
            1 | 2 => Ok(serde_json::from_slice::<Former>(&bytes)?.into()),
            later => Err(io::Error::other(format!(
                "it has version {later}, but this program reads version 1 to {VERSION}: start the release that wrote it"
            ))),
        }
    }
}

impl From<Former> for Kept {
    fn from(former: Former) -> Self {
        let kind = if former.is_snapshot {
            TemplateKind::Snapshot
        } else {
            TemplateKind::Installed
        };
        Self {
            source: former.source,
            elsewhere: former.elsewhere,
            vmm: former.vmm,
            ..Self::new(kind, former.names, former.created_unix_s)
        }
    }
}

/// The directory of a template in the state directory, and the record that belongs there.
#[derive(Clone, Debug)]
pub struct TemplateRecord {
    pub(crate) home: PathBuf,
    pub(crate) kept: Kept,
}

impl TemplateRecord {
    /// Writes the record, so that it survives a crash of the host.
    pub fn write(&self) -> io::Result<()> {
        private_dir(&self.home)?;
        write_kept(&self.home, &self.kept)?;
        sync_dir(self.home.parent().unwrap_or(&self.home))
    }

    /// Removes the record first, so that a crash of the host leaves either the complete template or none.
    pub fn remove(&self) -> io::Result<()> {
        let record = self.home.join(RECORD);
        if record.exists() {
            durable::remove_file(&record)?;
            sync_dir(&self.home)?;
        }
        durable::remove_dir(&self.home)
    }
}

/// Records the VMM of a template that an older release made, so that the template stays usable after the next upgrade.
/// Failures are only logged, because the next server tries again.
pub(crate) fn name_vmm(home: &Path, kept: &Kept) {
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

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_record_of_a_former_version_is_read_and_one_of_a_later_version_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(RECORD);
        let missing = Kept::read(dir.path()).unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
        let former = r#"{"version": 1, "names": ["a"], "created_unix_s": 5, "is_snapshot": true, "source": null,
                         "elsewhere": null}"#;
        let wanted = |kind| Kept::new(kind, vec!["a".into()], 5);
        fs::write(&path, former).unwrap();
        assert_eq!(
            Kept::read(dir.path()).unwrap(),
            wanted(TemplateKind::Snapshot)
        );
        let vmm = VmmId::try_from("0".repeat(64)).unwrap();
        let second = former
            .replace("true", "false")
            .replace(": 1,", &format!(": 2, \"vmm\": \"{vmm}\","));
        fs::write(&path, second).unwrap();
        let installed = Kept {
            vmm: Some(vmm),
            ..wanted(TemplateKind::Installed)
        };
        assert_eq!(Kept::read(dir.path()).unwrap(), installed);
        write_kept(dir.path(), &installed).unwrap();
        assert_eq!(Kept::read(dir.path()).unwrap(), installed);
        let later = serde_json::json!({"version": VERSION + 1, "more": true});
        fs::write(&path, later.to_string()).unwrap();
        let why = Kept::read(dir.path()).unwrap_err().to_string();
        assert!(why.contains("start the release that wrote it"), "{why}");
    }
}
