//! The journal: one record for each sandbox, a small file in the sandbox's directory.
//!
//! ```text
//! sandboxes/<id>/record.json   the record; replaced by a rename
//!                note          only from servers of record version 1: the caller's note
//!                control.sock  vsock.sock  console.log  vmm.stderr
//!                pause/        the snapshot of a paused sandbox
//! ```
//! A renamed file is in the page cache and survives SIGKILL of this process. A crash of the host ends every VM, so only
//! the record of a *paused* sandbox is synced to disk. Order of writes: a VM's process is recorded before it runs a
//! guest, so that no guest runs without a record; a pause is recorded after its snapshot is complete and before the VM
//! is killed, so that the record never names a snapshot that does not exist; and when a sandbox ends, its record is
//! removed before anything else.

use std::{
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Read, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::Arc,
};

use model::SandboxId;
use serde::{Deserialize, Serialize};

use netisolation::{Policy, TapIndex};
use vmm_control::files::Lineage;

use crate::{
    lifetime::Lifetime,
    spec::{CreateSpec, Init, PauseMode, TemplateInfo},
};

/// The version that is written. Version 1 can still be read; it has the note in a file of its own, and the lifetime in
/// the note.
const VERSION: u32 = 2;
const RECORD: &str = "record.json";
const NOTE: &str = "note";
/// Maximum length of a record or note that is read, in bytes.
const MAX_RECORD: u64 = 4 << 20;

/// Whether a slot has an owner, and where its sandbox is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
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
    /// The process that has this id now; `None` if there is none or it is a zombie.
    pub(crate) fn of(pid: u32) -> Option<Self> {
        let start_ticks = crate::host::start_ticks(pid)?;
        Some(Self { pid, start_ticks })
    }

    /// Whether the process still runs. A zombie does not.
    pub(crate) fn is_alive(&self) -> bool {
        Self::of(self.pid).as_ref() == Some(self)
    }
}

/// The files from which a sandbox boots when its memory was not kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct BootFiles {
    pub(crate) kernel: PathBuf,
    pub(crate) initrd: PathBuf,
    pub(crate) root: PathBuf,
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
    /// User and group id of its VMM, which no other VMM of this server has.
    #[serde(default)]
    pub(crate) user: Option<u32>,
    /// The files that the server opened for the VM; `None` before the VM is made. A snapshot of the VM that names other
    /// files is rejected.
    #[serde(default)]
    pub(crate) lineage: Option<Lineage>,
    /// Since version 2. The default until the slot gets its sandbox.
    #[serde(default)]
    pub(crate) lifetime: Lifetime,
    /// The caller's own text. Since version 2. Empty until the slot gets its sandbox.
    #[serde(default, with = "shared")]
    pub(crate) note: Arc<str>,
}

/// (De)serializes `Arc` values, which the driver, its jobs and its answers share.
mod shared {
    use std::sync::Arc;

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<T: Serialize + ?Sized, S: Serializer>(
        value: &Arc<T>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        value.as_ref().serialize(serializer)
    }

    pub(super) fn deserialize<'de, T, D>(deserializer: D) -> Result<Arc<T>, D::Error>
    where
        T: ?Sized,
        Box<T>: Deserialize<'de>,
        D: Deserializer<'de>,
    {
        Box::<T>::deserialize(deserializer).map(Arc::from)
    }
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
            note: Arc::from(""),
        }
    }

    /// Sets the fields that come from the spec of a new sandbox.
    pub(crate) fn take_settings(&mut self, spec: CreateSpec) {
        self.init = spec.init;
        self.policy = spec.policy;
        self.lifetime = spec.lifetime;
        self.note = spec.note.into();
    }
}

/// The kind of crash that a write must survive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Durability {
    /// A crash of this process.
    Process,
    /// Also a crash of the host: the file is synced, which is slow.
    Host,
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
        match fs::remove_file(self.0.join(RECORD)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        }
    }

    /// Removes the record, then the directory. A missing directory is not an error.
    pub(crate) fn remove(&self) -> io::Result<()> {
        self.disown()?;
        match fs::remove_dir_all(&self.0) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        }
    }

    pub(crate) fn write(&self, record: &Record, durability: Durability) -> io::Result<()> {
        let bytes = serde_json::to_vec(record)?;
        replace(&self.0, RECORD, &bytes, durability)
    }

    /// Reads the record. For version 1, also reads the note from its file and the lifetime from the note, unless the
    /// slot has no owner.
    ///
    /// # Errors
    /// Returns an error if the record cannot be read or parsed or has an unknown version, or if the note of a version 1
    /// record cannot be read or has no lifetime.
    pub(crate) fn read(
        &self,
        lifetime_of_note: fn(&str) -> Option<Lifetime>,
    ) -> io::Result<Record> {
        let bytes = read_bounded(&self.0.join(RECORD), MAX_RECORD)?;
        let Header { version } = serde_json::from_slice(&bytes)?;
        if version != VERSION && version != 1 {
            return Err(io::Error::other(format!("a record of version {version}")));
        }
        let mut record: Record = serde_json::from_slice(&bytes)?;
        if version == 1 && record.kept != Kept::Nobody {
            let note = read_bounded(&self.0.join(NOTE), MAX_RECORD)?;
            let note = String::from_utf8(note).map_err(io::Error::other)?;
            record.lifetime = lifetime_of_note(&note)
                .ok_or_else(|| io::Error::other("its note of version 1 has no lifetime"))?;
            record.note = note.into();
        }
        record.version = VERSION;
        Ok(record)
    }
}

/// Creates a directory, and missing parents, that only their owner may enter. An existing directory is not an error;
/// its mode is not changed.
pub(crate) fn private_dir(dir: &Path) -> io::Result<()> {
    DirBuilder::new().mode(0o700).recursive(true).create(dir)
}

/// Reads a file. Returns an error if it has more than `limit` bytes.
pub(crate) fn read_bounded(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(limit + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit {
        Err(io::Error::other("the file is too long"))
    } else {
        Ok(bytes)
    }
}

/// Replaces `dir/name` atomically. Only the owner may read the new file. If the new file cannot be written, the old
/// file stays.
pub(crate) fn replace(
    dir: &Path,
    name: &str,
    bytes: &[u8],
    durability: Durability,
) -> io::Result<()> {
    let draft = dir.join(format!("{name}.new"));
    let written = write_new(&draft, bytes, durability);
    if written.is_err() {
        // Frees the space of an incomplete file: the disk may be full.
        let _ = fs::remove_file(&draft);
    }
    written?;
    fs::rename(&draft, dir.join(name))?;
    if durability == Durability::Host {
        File::open(dir)?.sync_all()?;
    }
    Ok(())
}

/// Writes a new file. Removes first any file that a killed server left at `path`.
fn write_new(path: &Path, bytes: &[u8], durability: Durability) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)?;
    file.write_all(bytes)?;
    match durability {
        Durability::Host => file.sync_all(),
        Durability::Process => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn no_notes(_: &str) -> Option<Lifetime> {
        None
    }

    fn record() -> Record {
        let template = TemplateInfo {
            id: "t".into(),
            names: vec!["base".into()],
            memory: model::Bytes::mib(256),
            vcpus: 1,
            disk: model::Bytes::mib(4096),
            created_unix_s: 1,
            is_snapshot: false,
            source: None,
            spawned: 0,
            warm: 0,
        };
        let boot = BootFiles {
            kernel: "/k".into(),
            initrd: "/i".into(),
            root: "/r".into(),
        };
        Record::new("boot", Arc::new(template), Some(boot), "0".repeat(32))
    }

    #[test]
    fn a_record_reads_back_and_is_private() {
        let root = tempfile::tempdir().unwrap();
        let dir = SlotDir::new(root.path(), &SandboxId::from_random([7; 19]));
        dir.create().unwrap();
        let mut record = record();
        record.init.access_token = Some("secret".into());
        record.note = "the caller's".into();
        record.lifetime.set(5, 7);
        record.tap = Some(TapIndex(7));
        record.policy = Policy::internet();
        for kept in [
            Kept::Nobody,
            Kept::Running,
            Kept::Paused(PauseMode::Memory),
            Kept::Paused(PauseMode::FilesystemOnly),
        ] {
            record.kept = kept;
            record.vmm = ProcessName::of(std::process::id());
            dir.write(&record, Durability::Host).unwrap();
            assert_eq!(dir.read(no_notes).unwrap(), record);
        }
        assert!(record.vmm.unwrap().is_alive());
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&dir.path().join(RECORD)), 0o600);
        assert_eq!(mode(dir.path()), 0o700);
        dir.remove().unwrap();
        dir.remove().unwrap();
        assert!(dir.read(no_notes).is_err());
    }

    #[test]
    fn records_of_another_version_are_refused() {
        let root = tempfile::tempdir().unwrap();
        let dir = SlotDir::new(root.path(), &SandboxId::from_random([7; 19]));
        dir.create().unwrap();
        let mut record = record();
        record.version = VERSION + 1;
        dir.write(&record, Durability::Process).unwrap();
        assert!(dir.read(no_notes).is_err());
        fs::write(dir.path().join(RECORD), b"{}").unwrap();
        assert!(dir.read(no_notes).is_err());
    }

    #[test]
    fn a_record_of_version_1_gets_its_lifetime_from_its_note() {
        let root = tempfile::tempdir().unwrap();
        let dir = SlotDir::new(root.path(), &SandboxId::from_random([7; 19]));
        dir.create().unwrap();
        let mut wanted = record();
        wanted.kept = Kept::Running;
        let mut old = serde_json::to_value(&wanted).unwrap();
        let fields = old.as_object_mut().unwrap();
        fields.insert("version".into(), 1.into());
        fields.remove("lifetime");
        fields.remove("note");
        let write = |old: &serde_json::Value| fs::write(dir.path().join(RECORD), old.to_string());
        write(&old).unwrap();
        let read_note = |note: &str| {
            let mut lifetime = Lifetime::default();
            lifetime.set(0, note.parse().ok()?);
            Some(lifetime)
        };
        assert!(dir.read(read_note).is_err(), "no note");
        fs::write(dir.path().join(NOTE), "9").unwrap();
        wanted.note = "9".into();
        wanted.lifetime.set(0, 9);
        assert_eq!(dir.read(read_note).unwrap(), wanted);
        // The next write makes it a record of the present version.
        dir.write(&wanted, Durability::Process).unwrap();
        assert_eq!(dir.read(no_notes).unwrap(), wanted);
        write(&old).unwrap();
        fs::write(dir.path().join(NOTE), "something else").unwrap();
        assert!(dir.read(read_note).is_err(), "a note without a lifetime");
        // A warm slot has no note.
        old["kept"] = "nobody".into();
        write(&old).unwrap();
        assert_eq!(dir.read(no_notes).unwrap().kept, Kept::Nobody);
    }

    #[test]
    fn a_process_of_the_same_id_is_another_one() {
        let mut name = ProcessName::of(std::process::id()).unwrap();
        assert!(name.is_alive());
        name.start_ticks += 1;
        assert!(!name.is_alive());
    }
}
