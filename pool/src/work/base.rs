//! The base of a pause at another server: the files of a whole template, by the SHA-256 of its manifest, or those from
//! which a sandbox booted, by their own.
//!
//! ```text
//! giver:  images/<sum>/ or templates/<id>/image/  ─► open files (BasePlan)
//! taker:  incoming/base-<sum>/   fetched ─► checked ─► images/<sum>/     (HoldPlan)
//!         incoming/<id>/base/    links to images/<sum>/, until the sandbox is here
//!         incoming/<id>/vmm      link to the VMM, likewise
//! ```
//! Files of `images` and VMMs that no record names may be removed at any time, also by the next server. A sandbox that is
//! on its way therefore has links of its own, from which a [`super::take::TakePlan`] makes them again.
//!
//! What must never happen: files have the name of a template in `images`, and not the content that its manifest states.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use model::{MANIFEST_NAME, TEMPLATE_FORMAT, template_file};
use serde::Deserialize;
use sha2::{Digest, Sha256};
use vmm_control::template::next_data;

use crate::{
    BaseKind, PauseNeeds, PoolError,
    durable::{Durability, read_bounded, remove_dir, remove_file, replace, sync_dir},
    host,
    images::{self, Images, sum_of_manifest},
    manifest::Manifest,
    work::diff::Restorer,
};

const WHAT: &str = "use the base of a paused sandbox";
/// The directory of links to the base, beside the files of a pause that arrives.
const BASE: &str = "base";
/// The link to the VMM.
const VMM: &str = "vmm";
const MAX_MANIFEST: u64 = 1 << 20;
/// Blocks of this size are summed, unless they are zero.
const BLOCK: usize = 64 << 10;
/// The files that a base must have. The others are those with which it starts faster, and boots.
const NEEDED: [&str; 5] = [
    MANIFEST_NAME,
    template_file::STATE,
    template_file::MEMORY,
    template_file::LAYER,
    images::ROOT,
];

/// Opens the files of a base for another server.
#[derive(Debug)]
pub(crate) struct BasePlan {
    /// `None`: the sandbox booted, and needs the files of `guest` only.
    pub(crate) dir: Option<PathBuf>,
    /// Root image, kernel and initramfs, by the names that they have in `images`.
    pub(crate) guest: Vec<(&'static str, PathBuf)>,
    /// Makes the memory file if it is stored as a diff.
    pub(crate) restorer: Restorer,
}

impl BasePlan {
    /// # Errors
    /// Returns [`PoolError::Failed`] if a file is missing, or the memory cannot be made.
    pub(crate) fn run(&self) -> Result<Vec<(String, File)>, PoolError> {
        self.open().map_err(|e| PoolError::of_disk(WHAT, &e))
    }

    fn open(&self) -> io::Result<Vec<(String, File)>> {
        let mut paths = self.guest.clone();
        if let Some(dir) = &self.dir {
            self.restorer.restore(dir)?;
            paths.extend(images::FILES.map(|name| (name, dir.join(name))));
        }
        let mut files = Vec::new();
        for (name, path) in paths {
            match File::open(&path) {
                Err(e) if e.kind() == io::ErrorKind::NotFound && !NEEDED.contains(&name) => {}
                Err(e) => {
                    let why = format!("{}: {e}", path.display());
                    return Err(io::Error::new(e.kind(), why));
                }
                Ok(file) => files.push((name.to_owned(), file)),
            }
        }
        Ok(files)
    }
}

/// Keeps what a paused sandbox needs until it is this server's.
#[derive(Debug)]
pub(crate) struct HoldPlan {
    pub(crate) images: Images,
    pub(crate) needs: PauseNeeds,
    /// The files of the base, if they have just arrived. They become those of `images`.
    pub(crate) fetched: Option<PathBuf>,
    /// The program of the VMM, if it is needed.
    pub(crate) vmm: Option<PathBuf>,
    /// The directory of the sandbox that is on its way.
    pub(crate) to: PathBuf,
}

impl HoldPlan {
    /// Returns whether the base is here.
    ///
    /// # Errors
    /// Returns [`PoolError`] if the files that have arrived are not the base, or cannot be linked.
    pub(crate) fn run(&self) -> Result<bool, PoolError> {
        let failed = |why: String| PoolError::Failed { what: WHAT, why };
        let place = self.images.dir().join(&self.needs.base);
        if let Some(fetched) = self.fetched.as_ref().filter(|_| !place.is_dir()) {
            check(fetched, &self.needs).map_err(failed)?;
            let placed = self.images.place(fetched, &self.needs.base);
            placed.map_err(|e| PoolError::of_disk(WHAT, &e))?;
        }
        if !place.is_dir() {
            return Ok(false);
        }
        self.link(&place)
            .map_err(|e| PoolError::of_disk(WHAT, &e))?;
        Ok(true)
    }

    fn link(&self, place: &Path) -> io::Result<()> {
        link_dir(place, &self.to.join(BASE))?;
        if let Some(program) = &self.vmm {
            let link = self.to.join(VMM);
            remove_file(&link)?;
            fs::hard_link(program, link)?;
        }
        sync_dir(&self.to)
    }
}

/// Makes the base of `needs` from the links of a sandbox that is on its way, if it was removed meanwhile.
pub(super) fn restore(from: &Path, images: &Images, needs: &PauseNeeds) -> io::Result<()> {
    let (place, held) = (images.dir().join(&needs.base), from.join(BASE));
    if place.is_dir() || !held.is_dir() {
        return Ok(());
    }
    if sum_of(&held, needs.kind)? != needs.base {
        return Err(io::Error::other("the links are those of another base"));
    }
    link_dir(&held, &place)
}

/// Removes the links when nothing needs them any more.
pub(super) fn forget(dir: &Path) -> io::Result<()> {
    remove_dir(&dir.join(BASE))?;
    remove_file(&dir.join(VMM))
}

/// The program of a VMM that is held for a sandbox in `dir`.
pub(crate) fn held_vmm(dir: &Path) -> Option<PathBuf> {
    let program = dir.join(VMM);
    program.is_file().then_some(program)
}

/// Links every file of a directory into a new one, which has its name when it is complete and on disk.
fn link_dir(from: &Path, to: &Path) -> io::Result<()> {
    let parent = to.parent().unwrap_or(to);
    let name = to.file_name().unwrap_or_default().to_string_lossy();
    let draft = parent.join(format!("{}{name}", crate::durable::DRAFT));
    for old in [&draft, to] {
        remove_dir(old)?;
    }
    crate::durable::private_dir(&draft)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        if entry.file_type()?.is_file() {
            fs::hard_link(entry.path(), draft.join(entry.file_name()))?;
        }
    }
    sync_dir(&draft)?;
    fs::rename(&draft, to)?;
    sync_dir(parent)
}

/// The sum that identifies the files in `dir`.
fn sum_of(dir: &Path, kind: BaseKind) -> io::Result<String> {
    match kind {
        BaseKind::Template => sum_of_manifest(dir),
        BaseKind::Guest => sum_of_guest(&images::guest_links(dir)),
    }
}

/// SHA-256 of the lengths and sums of root image, kernel and initramfs.
pub(crate) fn sum_of_guest(paths: &[PathBuf; 3]) -> io::Result<String> {
    let mut hash = Sha256::new();
    for path in paths {
        let named = |e: io::Error| io::Error::new(e.kind(), format!("{}: {e}", path.display()));
        let found = File::open(path).and_then(|file| sum(&file, Form::Whole));
        let Sum { bytes, sha256 } = found.map_err(named)?;
        hash.update(bytes.to_le_bytes());
        hash.update(sha256);
    }
    Ok(host::hex(&hash.finalize()))
}

/// Names the root image in the manifest of a pause that has no base. The one in it is at another server.
pub(super) fn set_root(pause: &Path, root: &Path) -> io::Result<()> {
    let bytes = read_bounded(&pause.join(MANIFEST_NAME), MAX_MANIFEST)?;
    let mut manifest: serde_json::Map<String, serde_json::Value> = serde_json::from_slice(&bytes)?;
    let root = root.to_str().ok_or(io::ErrorKind::InvalidFilename)?;
    manifest.insert("root".to_owned(), root.into());
    let bytes = serde_json::to_vec(&manifest)?;
    replace(pause, MANIFEST_NAME, &bytes, Durability::Host)
}

/// A file's length and sum.
#[derive(Debug, PartialEq, Eq, Deserialize)]
struct Sum {
    bytes: u64,
    sha256: String,
}

/// The sums of a manifest of this release's format.
#[derive(Deserialize)]
struct Sums {
    root_sum: Sum,
    memory_sum: Sum,
    state_sum: Sum,
    layer_sum: Sum,
}

/// Whether a file has blocks that are not written.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    Whole,
    Sparse,
}

/// Checks that the files in `dir` are the base that is needed.
///
/// # Errors
/// Returns a message for people.
fn check(dir: &Path, needs: &PauseNeeds) -> Result<(), String> {
    let PauseNeeds { base, kind, .. } = needs;
    let failed = |name: &str, e: io::Error| format!("{name}: {e}");
    for entry in fs::read_dir(dir).map_err(|e| e.to_string())? {
        let name = entry.map_err(|e| e.to_string())?.file_name();
        let name = name.to_string_lossy();
        if !is_file_of_base(&name) || *kind == BaseKind::Guest && !images::GUEST.contains(&&*name) {
            return Err(format!("{name} is no file of it"));
        }
    }
    if *kind == BaseKind::Guest {
        let found = sum_of(dir, *kind).map_err(|e| e.to_string())?;
        let is_right = found == *base;
        return is_right
            .then_some(())
            .ok_or_else(|| "its files have another sum".to_owned());
    }
    let bytes = read_bounded(&dir.join(MANIFEST_NAME), MAX_MANIFEST);
    let bytes = bytes.map_err(|e| failed(MANIFEST_NAME, e))?;
    if host::hex(&Sha256::digest(&bytes)) != *base {
        return Err("its manifest has another sum".to_owned());
    }
    let manifest = Manifest::read(dir)?;
    if manifest.format != TEMPLATE_FORMAT {
        return Err(format!(
            "it has format {}, and this release can check format {TEMPLATE_FORMAT} only: resume and pause the sandbox \
             under a template of this release",
            manifest.format
        ));
    }
    if manifest.base.is_some() {
        return Err("it is a diff".to_owned());
    }
    let sums: Sums = serde_json::from_slice(&bytes).map_err(|e| e.to_string())?;
    for (name, form, wanted) in [
        (template_file::STATE, Form::Whole, sums.state_sum),
        (template_file::MEMORY, Form::Sparse, sums.memory_sum),
        (template_file::LAYER, Form::Sparse, sums.layer_sum),
        (images::ROOT, Form::Whole, sums.root_sum),
    ] {
        let found = File::open(dir.join(name)).and_then(|file| sum(&file, form));
        if found.map_err(|e| failed(name, e))? != wanted {
            return Err(format!("{name} has another sum than the manifest says"));
        }
    }
    Ok(())
}

/// Whether a base can have a file of this name.
pub(crate) fn is_file_of_base(name: &str) -> bool {
    images::FILES.contains(&name) || images::GUEST.contains(&name)
}

/// The sum that a manifest has for a file: SHA-256, of a sparse one only of the blocks that are not all zero, each preceded
/// by its number.
fn sum(file: &File, form: Form) -> io::Result<Sum> {
    let bytes = file.metadata()?.len();
    let block = BLOCK as u64;
    let (mut hash, mut buffer, mut at) = (Sha256::new(), vec![0; BLOCK], 0);
    while at < bytes {
        if form == Form::Sparse {
            match next_data(file, at, bytes)? {
                None => break,
                Some((data, _)) => at = data / block * block,
            }
        }
        let len = usize::try_from(bytes - at).map_or(BLOCK, |left| left.min(BLOCK));
        let part = &mut buffer[..len];
        file.read_exact_at(part, at)?;
        match form {
            Form::Whole => hash.update(&part),
            Form::Sparse if part.iter().any(|byte| *byte != 0) => {
                hash.update((at / block).to_le_bytes());
                hash.update(&part);
            }
            Form::Sparse => {}
        }
        at += block;
    }
    let sha256 = host::hex(&hash.finalize());
    Ok(Sum { bytes, sha256 })
}

#[cfg(test)]
#[path = "base/tests.rs"]
mod tests;
