//! The base of a paused sandbox on another server: the files of a whole template, identified by the SHA-256 of its
//! manifest, or the files from which the sandbox booted, identified by their checksum.
//!
//! ```text
//! giver:  images/<sum>/ or templates/<id>/image/  ─► open files (BasePlan)
//! taker:  incoming/base-<sum>/   fetched ─► checked ─► images/<sum>/     (HoldPlan)
//!         incoming/<id>/base/    links to images/<sum>/, until the sandbox is here
//!         incoming/<id>/vmm      link to the VMM, likewise
//! ```
//! As long as the links exist, the driver removes neither the files of `images` nor the VMM. The next server may remove
//! them, because no record names them yet. A [`super::take::TakePlan`] then recreates them from the links.
//!
//! Several jobs may make the same directory of `images` at the same time. Each writes and syncs its own draft, and the
//! first rename wins ([`name_content`]).
//!
//! What must never happen: a directory in `images` has the name of a template but not the content that its manifest
//! states.

use std::{
    fs::{self, DirBuilder, File},
    io,
    os::unix::fs::{DirBuilderExt, FileExt},
    path::{Path, PathBuf},
};

use library::{
    diff::Restorer,
    durable::{
        DRAFT, Durability, name_content, read_bounded, remove_dir, remove_file, replace, sync_dir,
    },
    images::{self, Images, sum_of_manifest},
    manifest::Manifest,
    vmms::VmmId,
};
use model::{MANIFEST_NAME, TEMPLATE_FORMAT, template_file};
use serde::Deserialize;
use sha2::{Digest, Sha256};
use vmm_control::template::next_data;

use crate::{
    claim::{BaseKind, PauseNeeds},
    error::PoolError,
    host,
    work::Stop,
};

const WHAT: &str = "use the base of a paused sandbox";
/// The directory of links to the base, next to the files of an incoming pause.
const BASE: &str = "base";
/// The link to the VMM.
const VMM: &str = "vmm";
const MAX_MANIFEST: u64 = 1 << 20;
/// Blocks of this size are hashed, unless they are zero.
const BLOCK: usize = 64 << 10;
/// The files that every base has. The others make it start faster, or allow it to boot.
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
    /// `None` if the sandbox has booted and needs only the files of `guest`.
    pub(crate) dir: Option<PathBuf>,
    /// Root image, kernel and initramfs, with their file names in `images`.
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

/// Files held by the links of a sandbox that is moving here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Held {
    /// The directory in `images`.
    pub(crate) base: PathBuf,
    pub(crate) vmm: Option<VmmId>,
}

/// Holds the files that a paused sandbox needs until it belongs to this server.
#[derive(Debug)]
pub(crate) struct HoldPlan {
    pub(crate) images: Images,
    pub(crate) needs: PauseNeeds,
    /// The files of the base, if they were just fetched. They are moved to `images`.
    pub(crate) fetched: Option<PathBuf>,
    /// The program of the VMM, if it is needed.
    pub(crate) vmm: Option<PathBuf>,
    /// The directory of the sandbox that is moving here.
    pub(crate) to: PathBuf,
    pub(crate) stop: Stop,
}

impl HoldPlan {
    /// Returns the held files, or `None` if the base is not here.
    ///
    /// # Errors
    /// Returns [`PoolError`] if the fetched files are not the base, or cannot be linked.
    pub(crate) fn run(&self) -> Result<Option<Held>, PoolError> {
        self.stop.outcome(self.hold())
    }

    fn hold(&self) -> Result<Option<Held>, PoolError> {
        let of_disk = |e: io::Error| PoolError::of_disk(WHAT, &e);
        let place = self.images.dir().join(&self.needs.base);
        match &self.fetched {
            None => {}
            Some(fetched) if place.is_dir() => remove_dir(fetched).map_err(of_disk)?,
            Some(fetched) => {
                check(fetched, &self.needs, &self.stop).map_err(|why| match why {
                    NotUsed::Unfit(why) => PoolError::Unfit { what: WHAT, why },
                    NotUsed::Disk(why) => of_disk(why),
                })?;
                let placed = self.images.place(fetched, &self.needs.base);
                placed.map_err(of_disk)?;
            }
        }
        if !place.is_dir() {
            return Ok(None);
        }
        self.link(&place).map_err(of_disk)?;
        Ok(Some(Held {
            base: place,
            vmm: self.needs.vmm.clone(),
        }))
    }

    fn link(&self, place: &Path) -> io::Result<()> {
        is_complete(place, self.needs.kind)?;
        let links = self.to.join(BASE);
        // An earlier attempt to move the sandbox may have needed another base.
        remove_dir(&links)?;
        link_dir(place, &links)?;
        if let Some(program) = &self.vmm {
            let link = self.to.join(VMM);
            remove_file(&link)?;
            fs::hard_link(program, link)?;
        }
        sync_dir(&self.to)
    }
}

/// Recreates the base of `needs` from the links of a sandbox that is moving here, if the base has been removed.
pub(super) fn restore(
    from: &Path,
    images: &Images,
    needs: &PauseNeeds,
    stop: &Stop,
) -> io::Result<()> {
    let (place, held) = (images.dir().join(&needs.base), from.join(BASE));
    if !place.is_dir() && held.is_dir() {
        is_complete(&held, needs.kind)?;
        if sum_of(&held, needs.kind, stop)? != needs.base {
            return Err(io::Error::other("the links belong to another base"));
        }
        return link_dir(&held, &place);
    }
    if place.is_dir() {
        is_complete(&place, needs.kind)?;
        // Another job may have renamed it a moment ago.
        sync_dir(images.dir())?;
    }
    Ok(())
}

/// Whether a sandbox that is moving here still has links to its base.
pub(crate) fn is_held(dir: &Path) -> bool {
    dir.join(BASE).is_dir()
}

/// Checks that the mandatory files of a base exist.
fn is_complete(dir: &Path, kind: BaseKind) -> io::Result<()> {
    let needed: &[&str] = match kind {
        BaseKind::Template => &NEEDED,
        BaseKind::Guest => &images::GUEST,
    };
    match needed.iter().find(|name| !dir.join(name).is_file()) {
        None => Ok(()),
        Some(name) => {
            let why = format!("{} is incomplete: {name} is missing", dir.display());
            Err(io::Error::new(io::ErrorKind::NotFound, why))
        }
    }
}

/// Removes the links once they are no longer needed.
pub(super) fn forget(dir: &Path) -> io::Result<()> {
    remove_dir(&dir.join(BASE))?;
    remove_file(&dir.join(VMM))
}

/// The program of a VMM that is held for a sandbox in `dir`.
pub(crate) fn held_vmm(dir: &Path) -> Option<PathBuf> {
    let program = dir.join(VMM);
    program.is_file().then_some(program)
}

/// Links every file of a directory into a new one, which gets its final name when it is complete and synced. An
/// existing directory is left unchanged.
fn link_dir(from: &Path, to: &Path) -> io::Result<()> {
    let name = to.file_name().unwrap_or_default().to_string_lossy();
    let own = model::hex(&host::random::<8>()?);
    let draft = to.with_file_name(format!("{DRAFT}{name}-{own}"));
    let linked = link_files(from, &draft)
        .and_then(|()| sync_dir(&draft))
        .and_then(|()| name_content(&draft, to));
    if linked.is_err() {
        let _ = remove_dir(&draft);
    }
    linked
}

fn link_files(from: &Path, to: &Path) -> io::Result<()> {
    // Fails if the parent is missing: an abandoned move must not come back.
    DirBuilder::new().mode(0o700).create(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        if entry.file_type()?.is_file() {
            fs::hard_link(entry.path(), to.join(entry.file_name()))?;
        }
    }
    Ok(())
}

/// The checksum that identifies the files in `dir`.
fn sum_of(dir: &Path, kind: BaseKind, stop: &Stop) -> io::Result<String> {
    match kind {
        BaseKind::Template => sum_of_manifest(dir),
        BaseKind::Guest => sum_of_guest(&images::guest_links(dir), stop),
    }
}

/// SHA-256 over lengths and checksums of root image, kernel and initramfs.
pub(crate) fn sum_of_guest(paths: &[PathBuf], stop: &Stop) -> io::Result<String> {
    let mut hash = Sha256::new();
    for path in paths {
        let named = |e: io::Error| io::Error::new(e.kind(), format!("{}: {e}", path.display()));
        let found = File::open(path).and_then(|file| sum(&file, Form::Whole, stop));
        let Sum { bytes, sha256 } = found.map_err(named)?;
        hash.update(bytes.to_le_bytes());
        hash.update(sha256);
    }
    Ok(model::hex(&hash.finalize()))
}

/// Sets the root image in the manifest of a pause that has no base. The manifest still names the path on the other
/// server.
pub(super) fn set_root(pause: &Path, root: &Path) -> io::Result<()> {
    let bytes = read_bounded(&pause.join(MANIFEST_NAME), MAX_MANIFEST)?;
    let mut manifest: serde_json::Map<String, serde_json::Value> = serde_json::from_slice(&bytes)?;
    let root = root.to_str().ok_or(io::ErrorKind::InvalidFilename)?;
    manifest.insert("root".to_owned(), root.into());
    let bytes = serde_json::to_vec(&manifest)?;
    replace(pause, MANIFEST_NAME, &bytes, Durability::Host)
}

/// Length and checksum of a file.
#[derive(Debug, PartialEq, Eq, Deserialize)]
struct Sum {
    bytes: u64,
    sha256: String,
}

/// The checksums in a manifest of this release's format.
#[derive(Deserialize)]
struct Sums {
    root_sum: Sum,
    memory_sum: Sum,
    state_sum: Sum,
    layer_sum: Sum,
}

/// Whether a file can have unwritten blocks.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    Whole,
    Sparse,
}

/// Reason to reject fetched files.
#[derive(Debug, thiserror::Error)]
enum NotUsed {
    /// The files are not the base. The message is for users.
    #[error("{0}")]
    Unfit(String),
    #[error(transparent)]
    Disk(#[from] io::Error),
}

impl From<String> for NotUsed {
    fn from(why: String) -> Self {
        Self::Unfit(why)
    }
}

/// Checks that the files in `dir` are the base that is needed.
fn check(dir: &Path, needs: &PauseNeeds, stop: &Stop) -> Result<(), NotUsed> {
    let PauseNeeds { base, kind, .. } = needs;
    let unfit = |why: &str| Err(NotUsed::Unfit(why.to_owned()));
    let named = |name: &str, e: io::Error| io::Error::new(e.kind(), format!("{name}: {e}"));
    for entry in fs::read_dir(dir)? {
        let name = entry?.file_name();
        let name = name.to_string_lossy();
        if !is_file_of_base(&name) || *kind == BaseKind::Guest && !images::GUEST.contains(&&*name) {
            return unfit(&format!("{name} is not part of it"));
        }
    }
    if *kind == BaseKind::Guest {
        if sum_of(dir, *kind, stop)? != *base {
            return unfit("the checksum of its files differs");
        }
        return Ok(());
    }
    let bytes = read_bounded(&dir.join(MANIFEST_NAME), MAX_MANIFEST);
    let bytes = bytes.map_err(|e| named(MANIFEST_NAME, e))?;
    if model::hex(&Sha256::digest(&bytes)) != *base {
        return unfit("the checksum of its manifest differs");
    }
    let manifest = Manifest::read(dir)?;
    can_check(manifest.format)?;
    if manifest.base.is_some() {
        return unfit("it is a diff");
    }
    check_boot(dir, needs.boot.as_deref(), stop)?;
    let sums: Sums = serde_json::from_slice(&bytes).map_err(|e| e.to_string())?;
    for (name, form, wanted) in [
        (template_file::STATE, Form::Whole, sums.state_sum),
        (template_file::MEMORY, Form::Sparse, sums.memory_sum),
        (template_file::LAYER, Form::Sparse, sums.layer_sum),
        (images::ROOT, Form::Whole, sums.root_sum),
    ] {
        let found = File::open(dir.join(name)).and_then(|file| sum(&file, form, stop));
        if found.map_err(|e| named(name, e))? != wanted {
            return unfit(&format!("the checksum of {name} differs from the manifest"));
        }
    }
    Ok(())
}

/// # Errors
/// Returns a human-readable message if this release computes the checksums of a template of this format differently.
pub(crate) fn can_check(format: u32) -> Result<(), String> {
    if format == TEMPLATE_FORMAT {
        return Ok(());
    }
    Err(format!(
        "its template has format {format}, and this release can check format {TEMPLATE_FORMAT} only: resume and pause the \
         sandbox under a template of this release"
    ))
}

/// Checks the files of a template that its manifest does not name.
fn check_boot(dir: &Path, wanted: Option<&str>, stop: &Stop) -> Result<(), NotUsed> {
    let [_, kernel, initrd] = images::guest_links(dir);
    let Some(wanted) = wanted else {
        return match [&kernel, &initrd].into_iter().find(|path| path.exists()) {
            None => Ok(()),
            Some(path) => Err(format!("{} was not announced", path.display()).into()),
        };
    };
    if sum_of_guest(&[kernel, initrd], stop)? == wanted {
        Ok(())
    } else {
        Err("the checksum of its kernel and initramfs differs"
            .to_owned()
            .into())
    }
}

/// Whether a base can have a file with this name.
pub(crate) fn is_file_of_base(name: &str) -> bool {
    images::FILES.contains(&name) || images::GUEST.contains(&name)
}

/// The checksum that a manifest has for a file: SHA-256, for a sparse file only over blocks that are not all zero, each
/// preceded by its number.
fn sum(file: &File, form: Form, stop: &Stop) -> io::Result<Sum> {
    let bytes = file.metadata()?.len();
    let block = BLOCK as u64;
    let (mut hash, mut buffer, mut at) = (Sha256::new(), vec![0; BLOCK], 0);
    while at < bytes {
        stop.go_on()?;
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
    let sha256 = model::hex(&hash.finalize());
    Ok(Sum { bytes, sha256 })
}

#[cfg(test)]
#[path = "base/tests.rs"]
mod tests;
