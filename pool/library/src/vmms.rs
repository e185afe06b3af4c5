//! The VMMs that templates, pauses and running sandboxes need.
//!
//! ```text
//! <state>/vmms/<SHA-256>/cube-vmm
//! ```
//! A snapshot can be read only by the `cube-vmm` that wrote it. Every template, pause and running sandbox therefore
//! names its VMM by content hash, and the pool keeps a copy of each named VMM. New sandboxes get the VMM of their
//! template. A sandbox keeps its VMM through pauses and forks. A cold boot uses the current VMM.
//!
//! What must never happen: a kept VMM is incomplete (it is written to a temporary directory, synced, and renamed),
//! differs from its name (it is hashed before this server first starts it), or is removed while something names it.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
};

use model::is_sha256;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::durable::{DRAFT, name_content, private_dir, read_bounded};

/// File name of a kept VMM, and of the VMM that a template carries.
pub const PROGRAM: &str = "cube-vmm";
/// Maximum size of a program, in bytes.
const MAX_PROGRAM: u64 = 512 << 20;

/// The SHA-256 of a `cube-vmm`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct VmmId(Arc<str>);

impl VmmId {
    /// 64 lower-case hex digits.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    fn of(program: &[u8]) -> Self {
        Self(model::hex(&Sha256::digest(program)).into())
    }
}

impl Default for VmmId {
    /// The SHA-256 of an empty file, which is never a VMM.
    fn default() -> Self {
        Self::of(b"")
    }
}

impl TryFrom<String> for VmmId {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        if is_sha256(&text) {
            Ok(Self(text.into()))
        } else {
            Err(format!("{text:?} is not a SHA-256"))
        }
    }
}

impl From<VmmId> for String {
    fn from(id: VmmId) -> Self {
        id.0.as_ref().to_owned()
    }
}

impl fmt::Display for VmmId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A kept VMM. Its program may be removed when nothing names the VMM any longer.
#[derive(Clone, Debug)]
pub struct Vmm {
    pub id: VmmId,
    path: PathBuf,
    is_checked: Arc<OnceLock<()>>,
    /// Whether it is the current VMM, which came with this server.
    is_current: bool,
}

impl Vmm {
    /// Whether the program can join cgroups itself. Older releases may not do so.
    pub fn joins_groups(&self) -> bool {
        self.is_current
    }

    /// The program, whose content may not have been verified yet.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The program, after its content has been compared with the id. Blocks while the program is hashed for the first
    /// time.
    ///
    /// # Errors
    /// Returns an error if the program cannot be read or its content differs.
    pub fn program(&self) -> io::Result<&Path> {
        if self.is_checked.get().is_none() {
            let found = VmmId::of(&read_bounded(&self.path, MAX_PROGRAM)?);
            if found != self.id {
                let path = self.path.display();
                let why = format!(
                    "{path} is damaged: its SHA-256 is {found}; replace it with the cube-vmm of this SHA-256"
                );
                return Err(io::Error::other(why));
            }
            let _ = self.is_checked.set(());
        }
        Ok(&self.path)
    }
}

#[derive(Debug)]
pub struct Vmms {
    /// `<state>/vmms`.
    dir: PathBuf,
    current: VmmId,
    kept: BTreeMap<VmmId, Vmm>,
}

impl Vmms {
    /// Finds the kept VMMs, and keeps `configured`, which becomes the current VMM. Removes incomplete copies. No other
    /// server can be writing one, because this server holds the lock of the state directory.
    ///
    /// # Errors
    /// Returns an error if `configured` cannot be read or kept, or the directory cannot be read.
    pub fn open(dir: PathBuf, configured: &Path) -> io::Result<Self> {
        private_dir(&dir)?;
        let mut kept = BTreeMap::new();
        for entry in fs::read_dir(&dir)? {
            let entry = entry?;
            let Ok(name) = entry.file_name().into_string() else {
                continue;
            };
            if name.starts_with(DRAFT) {
                fs::remove_dir_all(entry.path())?;
            } else if let Ok(id) = VmmId::try_from(name)
                && entry.path().join(PROGRAM).is_file()
            {
                kept.insert(id.clone(), vmm(&dir, id));
            }
        }
        let mut this = Self {
            dir,
            current: VmmId::default(),
            kept,
        };
        this.current = this.keep(configured)?;
        // The current VMM is certainly needed, so a damaged copy is replaced.
        if let Some(vmm) = this.kept.get(&this.current).cloned()
            && let Err(error) = vmm.program()
        {
            tracing::warn!(%error, "copying cube-vmm again");
            fs::remove_dir_all(this.dir.join(this.current.as_str()))?;
            this.kept.remove(&this.current);
            this.keep(configured)?;
        }
        Ok(this)
    }

    /// Keeps a copy of a program and returns its id.
    ///
    /// # Errors
    /// Returns an error if the program cannot be read or is too large, or the copy cannot be written.
    pub fn keep(&mut self, program: &Path) -> io::Result<VmmId> {
        let id = copy(program, &self.dir)?;
        if !self.kept.contains_key(&id) {
            self.kept.insert(id.clone(), vmm(&self.dir, id.clone()));
        }
        Ok(id)
    }

    /// The directory of all VMMs.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The VMM for all new VMs.
    pub fn current(&self) -> &VmmId {
        &self.current
    }

    /// The kept VMM with this id. Also finds one that was put into the directory after the pool had been opened.
    ///
    /// # Errors
    /// Returns a human-readable message if the VMM is not kept.
    pub fn get(&mut self, id: &VmmId) -> Result<Vmm, String> {
        if let Some(vmm) = self.kept.get(id) {
            return Ok(self.marked(vmm));
        }
        let vmm = vmm(&self.dir, id.clone());
        if !vmm.path.is_file() {
            let path = vmm.path.display();
            return Err(format!(
                "the cube-vmm with SHA-256 {id}, which made it, is missing: put that program at {path}"
            ));
        }
        self.kept.insert(id.clone(), vmm.clone());
        Ok(self.marked(&vmm))
    }

    fn marked(&self, vmm: &Vmm) -> Vmm {
        Vmm {
            is_current: vmm.id == self.current,
            ..vmm.clone()
        }
    }

    /// Whether VMMs other than the current one are kept.
    pub fn has_former(&self) -> bool {
        self.kept.len() > 1
    }

    /// Removes the VMMs from the table that are neither the current one nor in `used`, and returns their directories,
    /// which the caller must delete.
    pub fn take_unused(&mut self, used: &BTreeSet<VmmId>) -> Vec<PathBuf> {
        let (dir, current) = (&self.dir, &self.current);
        let is_used = |id: &VmmId| id == current || used.contains(id);
        let unused = self.kept.keys().filter(|id| !is_used(id));
        let dirs = unused.map(|id| dir.join(id.as_str())).collect();
        self.kept.retain(|id, _| is_used(id));
        dirs
    }
}

/// Copies a program into the directory of all VMMs, unless it is already there, and returns its id. Jobs may call this:
/// [`Vmms::get`] finds the copy.
///
/// # Errors
/// Returns an error if the program cannot be read or is too large, or the copy cannot be written.
pub fn copy(program: &Path, dir: &Path) -> io::Result<VmmId> {
    let named = |e: io::Error| {
        let why = format!("cannot keep a copy of {}: {e}", program.display());
        io::Error::new(e.kind(), why)
    };
    let bytes = read_bounded(program, MAX_PROGRAM).map_err(named)?;
    let id = VmmId::of(&bytes);
    write(dir, &id, &bytes).map_err(named)?;
    Ok(id)
}

fn write(dir: &Path, id: &VmmId, bytes: &[u8]) -> io::Result<()> {
    let place = dir.join(id.as_str());
    if place.join(PROGRAM).is_file() {
        return Ok(());
    }
    let own = model::hex(&crate::host::random::<8>()?);
    let draft = dir.join(format!("{DRAFT}{id}-{own}"));
    let written = write_program(&draft, bytes).and_then(|()| name_content(&draft, &place));
    if written.is_err() {
        // Frees the space: the disk may be full.
        let _ = fs::remove_dir_all(&draft);
    }
    written
}

fn vmm(dir: &Path, id: VmmId) -> Vmm {
    Vmm {
        path: dir.join(id.as_str()).join(PROGRAM),
        id,
        is_checked: Arc::default(),
        is_current: false,
    }
}

/// Writes a program into a new directory, and syncs both.
fn write_program(dir: &Path, bytes: &[u8]) -> io::Result<()> {
    DirBuilder::new().mode(0o700).create(dir)?;
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o500)
        .open(dir.join(PROGRAM))?;
    file.write_all(bytes)?;
    file.sync_all()?;
    File::open(dir)?.sync_all()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_vmm_is_kept_by_its_content_until_nothing_names_it() {
        let root = tempfile::tempdir().unwrap();
        let (dir, program) = (root.path().join("vmms"), root.path().join("cube-vmm"));
        fs::write(&program, "release 1").unwrap();
        let first = Vmms::open(dir.clone(), &program).unwrap().current().clone();
        // The program is replaced in place, as an upgrade does.
        fs::write(&program, "release 2").unwrap();
        let mut vmms = Vmms::open(dir.clone(), &program).unwrap();
        let second = vmms.current().clone();
        assert!(first != second && vmms.has_former());
        let kept = vmms.get(&first).unwrap();
        assert!(vmms.get(&second).unwrap().joins_groups() && !kept.joins_groups());
        let path = kept.program().unwrap();
        assert_eq!(fs::read(path).unwrap(), b"release 1");
        let mode = fs::metadata(path).unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o500);

        assert!(vmms.take_unused(&[first.clone()].into()).is_empty());
        let unused = vmms.take_unused(&BTreeSet::new());
        assert_eq!(unused, [dir.join(first.as_str())]);
        assert!(!vmms.has_former());
        fs::remove_dir_all(&unused[0]).unwrap();
        let why = vmms.get(&first).unwrap_err();
        assert!(
            why.contains(first.as_str()) && why.contains("put that program at"),
            "{why}"
        );
        // An operator puts it back.
        fs::create_dir(&unused[0]).unwrap();
        fs::write(unused[0].join(PROGRAM), "release 1").unwrap();
        assert!(vmms.get(&first).unwrap().program().is_ok());
    }

    #[test]
    fn an_interrupted_copy_is_harmless_and_a_damaged_one_is_never_started() {
        let root = tempfile::tempdir().unwrap();
        let (dir, program) = (root.path().join("vmms"), root.path().join("cube-vmm"));
        fs::write(&program, "release 1").unwrap();
        let id = VmmId::of(b"release 1");
        let half = dir.join(format!("{DRAFT}{id}"));
        fs::create_dir_all(&half).unwrap();
        fs::write(half.join(PROGRAM), "rel").unwrap();
        let mut vmms = Vmms::open(dir.clone(), &program).unwrap();
        assert!(!half.exists());
        assert_eq!(vmms.current(), &id);

        let other = VmmId::of(b"release 0");
        fs::create_dir(dir.join(other.as_str())).unwrap();
        fs::write(dir.join(other.as_str()).join(PROGRAM), "not it").unwrap();
        let why = vmms.get(&other).unwrap().program().unwrap_err();
        assert!(why.to_string().contains("is damaged"), "{why}");

        // The current VMM is copied again.
        let path = dir.join(id.as_str()).join(PROGRAM);
        fs::remove_file(&path).unwrap();
        fs::write(&path, "rele").unwrap();
        let mut vmms = Vmms::open(dir, &program).unwrap();
        assert_eq!(
            fs::read(vmms.get(&id).unwrap().program().unwrap()).unwrap(),
            b"release 1"
        );
    }

    #[test]
    fn an_id_is_never_a_path() {
        for wrong in ["", "..", "../../etc", &"A".repeat(64), &"a".repeat(63)] {
            assert!(VmmId::try_from(wrong.to_owned()).is_err(), "{wrong}");
        }
        assert!(VmmId::try_from("0".repeat(64)).is_ok());
    }
}
