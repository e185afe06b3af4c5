//! The journal: one record for each sandbox, a small file in the sandbox's directory.
//!
//! ```text
//! sandboxes/<id>/record.json   the record; replaced by a rename
//!                note          only from servers of record version 1: the caller's note
//!                control.sock  vsock.sock  console.log  vmm.stderr
//!                pause/        the snapshot of a paused sandbox, and its record at the time of the pause
//! ```
//! A renamed file is in the page cache and survives SIGKILL of this process. A crash of the host ends every VM, so only
//! a pause is synced to disk. Order of writes: a VM's process is recorded before it runs a guest, so that no guest runs
//! without a record; a pause is recorded after its snapshot is complete and before the VM is killed, so that the record
//! never names a snapshot that does not exist; and when a sandbox ends, its record is removed before anything else.
//!
//! The record that a pause writes is one file with two names, `record.json` and `pause/record.json`. Later records
//! replace only the first name, without a sync. If the host crashes then and leaves a torn `record.json`, the record of
//! the pause still exists. `docs/develop/write-order.md` lists the order of all writes.

use std::{
    fs::{self, DirBuilder},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::{Path, PathBuf},
    sync::Arc,
};

use model::SandboxId;
use serde::{Deserialize, Serialize};

use library::{
    durable::{self, Durability, read_bounded, remove_file, replace, sync_dir, sync_files},
    images::BootFiles,
    info::{TemplateDefaults, TemplateInfo},
    vmms::VmmId,
};
use netisolation::{Policy, TapIndex};
use vmm_control::files::Lineage;

use crate::{
    claim::Claim,
    clock::{Clock, Reading},
    lifetime::Lifetime,
    sandbox::{CreateSpec, Init, Priority},
    shared,
    state::PauseMode,
};

/// The version that is written. Earlier versions can still be read: version 5 has no claim; version 4 also lacks
/// defaults and priority; version 3 also lacks the offset of the clock; version 2 also lacks the VMM's program; version
/// 1 has the note in a separate file, and the lifetime in the note. A record of a later version is never removed. A new
/// version also raises [`crate::version`].
const VERSION: u32 = 6;
pub(crate) const RECORD: &str = "record.json";
const NOTE: &str = "note";
/// Directory for sandbox directories whose record is damaged, next to the directory of sandboxes.
pub(crate) const DAMAGED: &str = "damaged";
/// Maximum length of a record or note that is read, in bytes.
const MAX_RECORD: u64 = 4 << 20;

/// Whether a slot has an owner, and whether its sandbox runs or is paused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Kept {
    /// No owner yet: the slot ends with the server that made it.
    Nobody,
    /// A caller's sandbox whose VM runs.
    Running,
    /// A caller's sandbox on disk.
    Paused(PauseMode),
}

/// Identifies a process uniquely, even if its process id is later reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ProcessName {
    pub(crate) pid: u32,
    /// From [`crate::host::start_ticks`].
    pub(crate) start_ticks: u64,
}

impl ProcessName {
    /// The process that has this id now. `None` if there is none or it is a zombie.
    pub(crate) fn of(pid: u32) -> Option<Self> {
        let start_ticks = crate::host::start_ticks(pid)?;
        Some(Self { pid, start_ticks })
    }

    /// Whether the process still runs. A zombie does not.
    pub(crate) fn is_alive(&self) -> bool {
        Self::of(self.pid).as_ref() == Some(self)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Record {
    pub(crate) version: u32,
    /// From [`crate::host::boot_id`]: process ids are valid only within one boot.
    pub(crate) host_boot_id: String,
    pub(crate) kept: Kept,
    /// The VMM process; `None` before the VM is made.
    pub(crate) vmm: Option<ProcessName>,
    /// The template as it was when the VM was made.
    #[serde(with = "shared")]
    pub(crate) template: Arc<TemplateInfo>,
    /// The files for a resume without memory; `None` if the template does not name them.
    pub(crate) boot: Option<BootFiles>,
    /// The guest's machine id: 32 lower-case hex digits.
    pub(crate) machine_id: String,
    pub(crate) init: Init,
    /// Whether a warm slot served the create.
    pub(crate) warm: bool,
    /// The TAP of its VM; `None` while it has no VM, and without a network.
    #[serde(default)]
    pub(crate) tap: Option<TapIndex>,
    #[serde(default)]
    pub(crate) policy: Policy,
    /// User and group id of its VMM, unique among the VMMs of this server.
    #[serde(default)]
    pub(crate) user: Option<u32>,
    /// The files that the server opened for the VM; `None` before the VM is made. A snapshot of the VM that names other
    /// files is rejected.
    #[serde(default)]
    pub(crate) lineage: Option<Lineage>,
    /// Since version 2. The default until the slot gets its sandbox.
    #[serde(default)]
    pub(crate) lifetime: Lifetime,
    /// From [`crate::clock::Reading::offset_ms`]: the offset of the wall clock to which the deadline refers. Since
    /// version 4. `None` until the slot gets its sandbox, and in records of earlier versions.
    #[serde(default)]
    pub(crate) clock_offset_ms: Option<i64>,
    /// Opaque text of the caller. Since version 2. Empty until the slot gets its sandbox.
    #[serde(default, with = "shared")]
    pub(crate) note: Arc<str>,
    /// The program of its VMM, which also wrote its pause. Since version 3. `None` before the VM is made, and after an
    /// upgrade from a release that did not record it.
    #[serde(default)]
    pub(crate) vmm_id: Option<VmmId>,
    /// Copied from the template. Since version 5.
    #[serde(default)]
    pub(crate) defaults: TemplateDefaults,
    /// Since version 5.
    #[serde(default)]
    pub(crate) priority: Priority,
    /// Since version 6.
    #[serde(default)]
    pub(crate) claim: Option<Claim>,
}

/// The part of a record that is decoded first, because the version determines the meaning of the other fields.
#[derive(Deserialize)]
struct Header {
    version: u32,
}

impl Record {
    pub(crate) fn new(
        host_boot_id: &str,
        template: Arc<TemplateInfo>,
        boot: Option<BootFiles>,
        machine_id: String,
    ) -> Self {
        Self {
            version: VERSION,
            host_boot_id: host_boot_id.to_owned(),
            kept: Kept::Nobody,
            vmm: None,
            template,
            boot,
            machine_id,
            init: Init::default(),
            warm: false,
            tap: None,
            policy: Policy::default(),
            user: None,
            lineage: None,
            lifetime: Lifetime::default(),
            clock_offset_ms: None,
            note: Arc::from(""),
            vmm_id: None,
            defaults: TemplateDefaults::default(),
            priority: Priority::default(),
            claim: None,
        }
    }

    /// Sets the fields that come from the spec of a new sandbox, whose life begins now.
    pub(crate) fn take_settings(&mut self, mut spec: CreateSpec, clock: &Clock) {
        spec.lifetime.set(clock.now(), spec.lifetime.timeout_s);
        self.init = spec.init;
        self.policy = spec.policy;
        self.priority = spec.priority;
        self.set_lifetime(spec.lifetime, clock.offset_ms());
        self.note = spec.note.into();
    }

    /// Sets the lifetime, whose deadline refers to this offset of the wall clock.
    pub(crate) fn set_lifetime(&mut self, lifetime: Lifetime, clock_offset_ms: i64) {
        self.lifetime = lifetime;
        self.clock_offset_ms = Some(clock_offset_ms);
    }

    /// The current lifetime of a sandbox that has been running, in this boot, since the record was written. Its
    /// deadline moves with steps of the wall clock.
    pub(crate) fn lifetime_at(&self, now: Reading) -> Lifetime {
        let mut lifetime = self.lifetime;
        if let Some(step_ms) = self.clock_offset_ms.and_then(|o| now.step_since(o)) {
            lifetime.end_at = lifetime.end_at.saturating_add_signed(step_ms);
        }
        lifetime
    }
}

/// The contents of a sandbox's directory.
#[derive(Debug)]
pub(crate) enum Contents {
    Record(Box<Record>),
    /// There is no record: the sandbox was killed, or its first record had not been written yet.
    Nothing,
    /// The record is damaged, and there is no pause. The sandbox cannot have been paused: it ran, or was a warm slot,
    /// when the host crashed.
    Torn(String),
    /// The record is damaged, and there is a pause that may contain a caller's data.
    Damaged(String),
    /// A later release wrote the record.
    Later(String),
    /// The record cannot be read, for this reason.
    Unusable(String),
}

/// Reason why a record was not read.
#[derive(Debug, thiserror::Error)]
enum Unread {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error(
        "it has version {0}, but this program reads version 1 to {VERSION}: start the release that wrote it"
    )]
    Version(u32),
    #[error("it is damaged: {0}")]
    Damaged(String),
}

/// The path of one sandbox's directory. Dropping it removes nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SlotDir(PathBuf);

impl SlotDir {
    pub(crate) fn new(sandboxes: &Path, id: &SandboxId) -> Self {
        Self(sandboxes.join(id.as_str()))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    pub(crate) fn control(&self) -> PathBuf {
        self.0.join("control.sock")
    }

    pub(crate) fn vsock(&self) -> PathBuf {
        self.0.join("vsock.sock")
    }

    pub(crate) fn console(&self) -> PathBuf {
        self.0.join("console.log")
    }

    pub(crate) fn stderr(&self) -> PathBuf {
        self.0.join("vmm.stderr")
    }

    pub(crate) fn pause(&self) -> PathBuf {
        self.0.join("pause")
    }

    pub(crate) fn create(&self) -> io::Result<()> {
        DirBuilder::new().mode(0o700).create(&self.0)
    }

    /// Removes the record, so that the next server removes the sandbox. A missing record is not an error.
    pub(crate) fn disown(&self) -> io::Result<()> {
        remove_file(&self.0.join(RECORD))
    }

    /// Makes the removal of the record survive a crash of the host. Must follow a removal if the host may have the
    /// record of a pause on disk. A missing directory is not an error.
    pub(crate) fn sync_removal(&self) -> io::Result<()> {
        match sync_dir(&self.0) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        }
    }

    /// Removes the record, then the directory. A missing directory is not an error.
    pub(crate) fn remove(&self) -> io::Result<()> {
        self.disown()?;
        durable::remove_dir(&self.0)
    }

    /// Moves the directory, which has a damaged record, to `damaged/ID` next to the directory of sandboxes. Returns the
    /// new path.
    pub(crate) fn set_aside(&self) -> io::Result<PathBuf> {
        let sandboxes = self.0.parent().unwrap_or(&self.0);
        let damaged = sandboxes.with_file_name(DAMAGED);
        durable::private_dir(&damaged)?;
        let to = damaged.join(self.0.file_name().unwrap_or_default());
        fs::rename(&self.0, &to)?;
        sync_dir(&damaged)?;
        sync_dir(sandboxes)?;
        Ok(to)
    }

    pub(crate) fn write(&self, record: &Record, durability: Durability) -> io::Result<()> {
        let bytes = serde_json::to_vec(record)?;
        replace(&self.0, RECORD, &bytes, durability)
    }

    /// Writes the complete snapshot in `pause/` and then this record to disk. When this returns, both survive a crash
    /// of the host. The record is first written into `pause/`, after the snapshot is synced: a record there means that
    /// the snapshot is complete.
    pub(crate) fn write_pause(&self, record: &Record) -> io::Result<()> {
        let pause = self.pause();
        let bytes = serde_json::to_vec(record)?;
        sync_files(&pause)?;
        durable::write_new(&pause.join(RECORD), &bytes, Durability::Host)?;
        sync_dir(&pause)?;
        // Syncs the entry of the sandbox's directory.
        sync_dir(self.0.parent().unwrap_or(&self.0))?;
        self.link_pause()
    }

    /// Replaces the record of a sandbox that is paused, under both of its names.
    pub(crate) fn rewrite_pause(&self, record: &Record) -> io::Result<()> {
        let bytes = serde_json::to_vec(record)?;
        replace(&self.pause(), RECORD, &bytes, Durability::Host)?;
        self.link_pause()
    }

    /// Links the record of the pause to its second name.
    fn link_pause(&self) -> io::Result<()> {
        let draft = self.0.join(format!("{RECORD}.new"));
        remove_file(&draft)?;
        fs::hard_link(self.pause().join(RECORD), &draft)?;
        fs::rename(&draft, self.0.join(RECORD))?;
        sync_dir(&self.0)
    }

    /// Undoes a failed pause: removes the snapshot. If the record is already that of the pause, first restores the
    /// record of the running sandbox. If that fails, the snapshot remains.
    pub(crate) fn undo_pause(&self, running: &Record) -> io::Result<()> {
        let inode = |path: PathBuf| fs::metadata(path).ok().map(|meta| meta.ino());
        let of_pause = inode(self.pause().join(RECORD));
        if of_pause.is_some() && of_pause == inode(self.0.join(RECORD)) {
            self.write(running, Durability::Process)?;
        }
        if of_pause.is_some() {
            remove_file(&self.pause().join(RECORD))?;
            sync_dir(&self.pause())?;
        }
        durable::remove_dir(&self.pause())
    }

    /// Removes the snapshot of a pause from which the sandbox was resumed. First syncs the record, so that a crash of
    /// the host leaves either the record of the pause and its snapshot, or the record of the running sandbox. Does
    /// nothing if there is no snapshot.
    pub(crate) fn forget_pause(&self) -> io::Result<()> {
        if !self.pause().exists() {
            return Ok(());
        }
        fs::File::open(self.0.join(RECORD))?.sync_all()?;
        sync_dir(&self.0)?;
        durable::remove_dir(&self.pause())?;
        sync_dir(&self.0)
    }

    /// Determines the contents of the directory.
    pub(crate) fn look(&self, lifetime_of_note: fn(&str) -> Option<Lifetime>) -> Contents {
        let failed = match self.read(lifetime_of_note) {
            Ok(record) => return Contents::Record(Box::new(record)),
            Err(Unread::Io(e)) if e.kind() == io::ErrorKind::NotFound => return Contents::Nothing,
            Err(e) => e,
        };
        let path = self.0.join(RECORD);
        let why = format!("{}: {failed}", path.display());
        match failed {
            Unread::Version(_) => return Contents::Later(why),
            Unread::Io(_) => return Contents::Unusable(why),
            Unread::Damaged(_) => {}
        }
        match self.read_from(&self.pause().join(RECORD), lifetime_of_note) {
            Ok(record) if matches!(record.kept, Kept::Paused(_)) => {
                tracing::warn!(%why, "the sandbox's record is damaged: using the record of its last pause");
                Contents::Record(Box::new(record))
            }
            _ if self.pause().exists() => Contents::Damaged(why),
            _ => Contents::Torn(why),
        }
    }

    /// Reads the record. For version 1, also reads the note from its file and the lifetime from the note, unless the
    /// slot has no owner.
    ///
    /// # Errors
    /// Returns [`Unread::Io`] if the record cannot be read, [`Unread::Version`] if its version is unknown, and
    /// [`Unread::Damaged`] if it cannot be parsed, or if the note of a version 1 record cannot be read or has no
    /// lifetime.
    fn read(&self, lifetime_of_note: fn(&str) -> Option<Lifetime>) -> Result<Record, Unread> {
        self.read_from(&self.0.join(RECORD), lifetime_of_note)
    }

    /// Reads the record of the pause.
    pub(crate) fn read_pause(&self) -> Result<Record, String> {
        let read = self.read_from(&self.pause().join(RECORD), |_| None);
        read.map_err(|why| why.to_string())
    }

    fn read_from(
        &self,
        path: &Path,
        lifetime_of_note: fn(&str) -> Option<Lifetime>,
    ) -> Result<Record, Unread> {
        let bytes = read_bounded(path, MAX_RECORD)?;
        let damaged = |e: serde_json::Error| Unread::Damaged(e.to_string());
        let Header { version } = serde_json::from_slice(&bytes).map_err(damaged)?;
        if !(1..=VERSION).contains(&version) {
            return Err(Unread::Version(version));
        }
        let mut record: Record = serde_json::from_slice(&bytes).map_err(damaged)?;
        if version == 1 && record.kept != Kept::Nobody {
            let damaged = |e: String| Unread::Damaged(format!("its note of version 1: {e}"));
            let note = read_bounded(&self.0.join(NOTE), MAX_RECORD);
            let note = note.map_err(|e| damaged(e.to_string()))?;
            let note = String::from_utf8(note).map_err(|e| damaged(e.to_string()))?;
            record.lifetime =
                lifetime_of_note(&note).ok_or_else(|| damaged("no lifetime".to_owned()))?;
            record.note = note.into();
        }
        record.version = VERSION;
        Ok(record)
    }
}

#[cfg(test)]
mod tests;
