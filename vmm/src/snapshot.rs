//! Templates on disk: what is written, and what is checked before a byte of it is believed.
//!
//! `state` begins with a fixed header, outside the codec:
//! ```text
//! offset 0  magic "CUBESNAP"            8 bytes
//!        8  format, little-endian       4 bytes
//!       12  platform (3 ring3, 0 hvm)   4 bytes
//!       16  body length, LE             8 bytes, at most 64 MiB
//!       24  SHA-256 of the body        32 bytes
//! ```
//! All files are opened by the client and handed over; the paths here are for messages. The client also puts a
//! snapshot in its place when it is whole, so that one that exists is complete.
//!
//! A *diff* holds of memory and layer only what differs from its base, a whole template elsewhere, and names
//! that by its directory and its manifest's sum. A base is never a diff: a clone of a diff descends from the
//! diff's base, and its own diff holds everything again that differs from that.

mod sums;

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, Read},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use model::{FileSum, Platform, TEMPLATE_FORMAT, TemplateBase, TemplateManifest};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use vmm_control::files::{self, FileRole, Files, TemplateFile};

pub use sums::{SummedFile, sparse_sum, sum, sum_of};

use crate::{
    devices::BusState,
    extents::{self, Extents, ExtentsError},
    platform::PlatformState,
    sys::{has_name, length},
};

const MAGIC: [u8; 8] = *b"CUBESNAP";
const HEADER: usize = 56;
const MAX_BODY: u64 = 64 << 20;
const MAX_MANIFEST: u64 = 1 << 20;

/// Everything but memory and disk.
#[derive(Debug, Serialize, Deserialize)]
pub struct MachineState {
    /// CPU and platform.
    pub platform: PlatformState,
    /// Devices.
    pub bus: BusState,
}

/// Why a template is refused or could not be written.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// A file cannot be read or written.
    #[error("cannot {verb} {path}")]
    File {
        /// `read`, `write`, …
        verb: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The manifest is not what it should be.
    #[error("{path} is no template manifest")]
    Manifest {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: serde_json::Error,
    },
    /// Another format.
    #[error(
        "template of format {found}, this program reads {TEMPLATE_FORMAT}: make the template again"
    )]
    Format {
        /// What was found.
        found: u32,
    },
    /// Another platform.
    #[error("template of platform {}, this host runs {}: make the template again here", found.name(), host.name())]
    Platform {
        /// The template's.
        found: Platform,
        /// The host's.
        host: Platform,
    },
    /// Not a state file.
    #[error("{0} is not a VM state file")]
    Magic(PathBuf),
    /// Length or sum differ.
    #[error("{path} is damaged: {what}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What differs.
        what: String,
    },
    /// The files of a template to verify cannot be opened.
    #[error(transparent)]
    Open(#[from] files::FilesError),
    /// The base of a diff cannot be used.
    #[error("cannot use {base}, the base of the diff {diff}")]
    Base {
        /// The diff's directory.
        diff: PathBuf,
        /// The base's.
        base: PathBuf,
        /// The cause.
        #[source]
        source: Box<SnapshotError>,
    },
    /// The base of a diff is another template now.
    #[error(
        "{base} is not the template that the diff {diff} was made from: its manifest has another sum"
    )]
    OtherBase {
        /// The diff's directory.
        diff: PathBuf,
        /// The base's.
        base: PathBuf,
    },
    /// Too many scattered pages for a diff.
    #[error("too scattered for a diff, take a full snapshot")]
    Scattered(#[source] ExtentsError),
    /// The state cannot be encoded (a bug).
    #[error("the state cannot be encoded")]
    Encode(#[source] postcard::Error),
}

impl SnapshotError {
    /// Whether a full disk is the cause.
    #[must_use]
    pub fn is_no_space(&self) -> bool {
        matches!(self, Self::File { source, .. } if source.kind() == io::ErrorKind::StorageFull
            || source.kind() == io::ErrorKind::QuotaExceeded)
    }
}

/// Attaches what was done to which file.
pub fn at(verb: &'static str, path: &Path) -> impl FnOnce(io::Error) -> SnapshotError {
    let path = path.to_owned();
    move |source| SnapshotError::File { verb, path, source }
}

/// The client found no such file, and left it out.
pub(crate) fn not_there() -> io::Error {
    io::Error::from_raw_os_error(nix::libc::ENOENT)
}

fn damaged(path: &Path, what: impl Into<String>) -> SnapshotError {
    SnapshotError::Damaged {
        path: path.to_owned(),
        what: what.into(),
    }
}

fn platform_code(platform: Platform) -> u32 {
    match platform {
        Platform::Ring3 => 3,
        Platform::Hvm => 0,
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// Encodes a state file.
///
/// # Errors
/// The codec's.
pub fn encode(state: &MachineState, platform: Platform) -> Result<Vec<u8>, SnapshotError> {
    let body = postcard::to_allocvec(state).map_err(SnapshotError::Encode)?;
    let mut bytes = MAGIC.to_vec();
    bytes.extend(TEMPLATE_FORMAT.to_le_bytes());
    bytes.extend(platform_code(platform).to_le_bytes());
    bytes.extend((body.len() as u64).to_le_bytes());
    bytes.extend(Sha256::digest(&body));
    bytes.extend(body);
    Ok(bytes)
}

/// Decodes a state file; header, length and sum are checked in this order before the body is looked at.
///
/// # Errors
/// See [`SnapshotError`].
pub fn decode(path: &Path, bytes: &[u8], host: Platform) -> Result<MachineState, SnapshotError> {
    let word = |at: usize| {
        let b = bytes.get(at..at + 4).and_then(|b| b.try_into().ok());
        b.map(u32::from_le_bytes)
    };
    if !bytes.starts_with(&MAGIC) {
        return Err(SnapshotError::Magic(path.to_owned()));
    }
    let (Some(found), Some(platform), true) = (word(8), word(12), bytes.len() >= HEADER) else {
        return Err(damaged(path, "it ends inside its header"));
    };
    if found != TEMPLATE_FORMAT {
        return Err(SnapshotError::Format { found });
    }
    if platform != platform_code(host) {
        let found = if platform == platform_code(Platform::Hvm) {
            Platform::Hvm
        } else {
            Platform::Ring3
        };
        return Err(SnapshotError::Platform { found, host });
    }
    let length = u64::from_le_bytes(bytes[16..24].try_into().unwrap_or_default());
    let body = &bytes[HEADER..];
    if length != body.len() as u64 {
        let what = format!("its header says {length} bytes follow, {} do", body.len());
        return Err(damaged(path, what));
    }
    if Sha256::digest(body)[..] != bytes[24..HEADER] {
        return Err(damaged(
            path,
            "its SHA-256 differs from the one in its header",
        ));
    }
    postcard::from_bytes(body)
        .map_err(|e| damaged(path, format!("its body cannot be decoded: {e}")))
}

/// The files of a template's directory, as they were handed over.
#[derive(Debug)]
pub struct Directory {
    /// For messages.
    dir: PathBuf,
    files: BTreeMap<TemplateFile, File>,
}

impl Directory {
    /// Takes what there is of a directory.
    #[must_use]
    pub fn take(dir: &Path, role: fn(TemplateFile) -> FileRole, files: &mut Files) -> Self {
        let taken = TemplateFile::ALL
            .into_iter()
            .filter_map(|name| Some((name, files.take(role(name))?.into())));
        Self {
            dir: dir.to_owned(),
            files: taken.collect(),
        }
    }

    /// Path of a file, for messages.
    #[must_use]
    pub fn path(&self, name: TemplateFile) -> PathBuf {
        self.dir.join(name.name())
    }

    /// A file.
    ///
    /// # Errors
    /// There is none.
    pub fn file(&self, name: TemplateFile) -> Result<&File, SnapshotError> {
        let missing = || at("read", &self.path(name))(not_there());
        self.files.get(&name).ok_or_else(missing)
    }

    /// A file, if there is one.
    #[must_use]
    pub fn optional(&self, name: TemplateFile) -> Option<&File> {
        self.files.get(&name)
    }

    fn read(&self, name: TemplateFile, limit: u64) -> Result<Vec<u8>, SnapshotError> {
        read_limited(self.file(name)?, &self.path(name), limit)
    }

    fn measure(&self, name: TemplateFile, expected: &FileSum) -> Result<(), SnapshotError> {
        measure(self.file(name)?, &self.path(name), expected)
    }

    fn measure_all(&self, manifest: &TemplateManifest) -> Result<(), SnapshotError> {
        self.measure(TemplateFile::Memory, &manifest.memory_sum)?;
        self.measure(TemplateFile::State, &manifest.state_sum)?;
        self.measure(TemplateFile::Layer, &manifest.layer_sum)
    }
}

/// An opened template: manifest and state checked, the large files only measured.
#[derive(Debug)]
pub struct Template {
    /// Its own files.
    pub own: Directory,
    /// Its root image.
    pub root_image: File,
    /// Its manifest.
    pub manifest: TemplateManifest,
    /// CPU and devices.
    pub state: MachineState,
    /// What a clone of it descends from.
    pub root: Ancestor,
    /// What lies over that, in a diff.
    pub diff: Option<Diff>,
}

impl Template {
    /// The files of the whole template: its own, or those of the base of a diff.
    #[must_use]
    pub fn whole(&self) -> &Directory {
        self.diff.as_ref().map_or(&self.own, |diff| &diff.base)
    }
}

/// The whole template that a clone descends from: the template itself, or the base of a diff.
#[derive(Debug)]
pub struct Ancestor {
    /// The directory in which its manifest really lies.
    pub home: PathBuf,
    /// SHA-256 of its manifest.
    pub manifest_sha256: String,
    /// Length of its memory file.
    pub memory_bytes: u64,
    manifest: File,
}

impl Ancestor {
    /// Whether its manifest has a name and says the same. Whether it is the one at its home is the client's to look.
    #[must_use]
    pub fn stands(&self) -> bool {
        has_name(&self.manifest)
            && read_limited(&self.manifest, &self.home, MAX_MANIFEST)
                .is_ok_and(|bytes| hex(&Sha256::digest(&bytes)) == self.manifest_sha256)
    }
}

/// Where the pages and blocks of a diff belong; checked against the lengths of its base.
#[derive(Debug)]
pub struct Diff {
    /// The files that it is laid over.
    pub base: Directory,
    /// Of the memory.
    pub memory: Extents,
    /// Of the layer.
    pub layer: Extents,
}

/// What is restored: whose files came, and where the whole template really lies.
#[derive(Debug)]
pub struct Source<'a> {
    /// The template's directory.
    pub dir: &'a Path,
    /// The directory of a diff's base, if it is not the one that the manifest names.
    pub base: Option<&'a Path>,
    /// See [`Ancestor::home`].
    pub home: &'a Path,
}

/// Opens a template; `host` is asked for its platform when the template's is known.
///
/// # Errors
/// See [`SnapshotError`]; `E` is the platform probe's.
pub fn open<E: From<SnapshotError>>(
    source: &Source<'_>,
    files: &mut Files,
    host: impl FnOnce(Platform) -> Result<Platform, E>,
) -> Result<Template, E> {
    let own = Directory::take(source.dir, FileRole::Template, files);
    let found = read_manifest(&own)?;
    let host = host(found.manifest.platform)?;
    Ok(open_on(source, files, own, found, host)?)
}

fn open_on(
    source: &Source<'_>,
    files: &mut Files,
    own: Directory,
    found: Found,
    host: Platform,
) -> Result<Template, SnapshotError> {
    let manifest = &found.manifest;
    if manifest.platform != host {
        let found = manifest.platform;
        return Err(SnapshotError::Platform { found, host });
    }
    own.measure_all(manifest)?;
    let root_image = root_image(manifest, files)?;
    let bytes = own.read(TemplateFile::State, MAX_BODY)?;
    let path = own.path(TemplateFile::State);
    if hex(&Sha256::digest(&bytes)) != manifest.state_sum.sha256 {
        return Err(damaged(&path, "its SHA-256 differs from the manifest's"));
    }
    let state = decode(&path, &bytes, host)?;
    let (root, diff) = match &manifest.base {
        None => (found.ancestor(&own, source.home)?, None),
        Some(named) => {
            let at = source.base.unwrap_or(&named.dir);
            let base = Directory::take(at, FileRole::Base, files);
            let root = open_base(source.dir, named, &base)?;
            let diff = read_extents(&own, manifest, named, &root.manifest)?;
            (root.ancestor(&base, source.home)?, Some(diff.over(base)))
        }
    };
    Ok(Template {
        own,
        root_image,
        manifest: found.manifest,
        state,
        root,
        diff,
    })
}

fn root_image(manifest: &TemplateManifest, files: &mut Files) -> Result<File, SnapshotError> {
    let path = &manifest.root;
    let missing = || at("read", path)(not_there());
    let file: File = files.take(FileRole::Root).ok_or_else(missing)?.into();
    measure(&file, path, &manifest.root_sum)?;
    Ok(file)
}

/// The manifest of a diff's base, if it is the one that the diff was made from.
fn open_base(diff: &Path, named: &TemplateBase, base: &Directory) -> Result<Found, SnapshotError> {
    let because = |source| SnapshotError::Base {
        diff: diff.to_owned(),
        base: base.dir.clone(),
        source: Box::new(source),
    };
    let found = read_manifest(base).map_err(because)?;
    if found.sha256 != named.manifest_sha256 {
        return Err(SnapshotError::OtherBase {
            diff: diff.to_owned(),
            base: base.dir.clone(),
        });
    }
    if found.manifest.base.is_some() {
        let path = base.path(TemplateFile::Manifest);
        return Err(because(damaged(&path, "a base is never a diff itself")));
    }
    base.measure_all(&found.manifest).map_err(because)?;
    Ok(found)
}

/// Where the pages and blocks of a diff belong, before its base is known.
struct Lists {
    memory: Extents,
    layer: Extents,
}

impl Lists {
    fn over(self, base: Directory) -> Diff {
        let Self { memory, layer } = self;
        Diff {
            base,
            memory,
            layer,
        }
    }
}

fn read_extents(
    own: &Directory,
    manifest: &TemplateManifest,
    named: &TemplateBase,
    base: &TemplateManifest,
) -> Result<Lists, SnapshotError> {
    let path = own.path(TemplateFile::Extents);
    own.measure(TemplateFile::Extents, &named.extents_sum)?;
    let bytes = own.read(TemplateFile::Extents, extents::MAX_FILE)?;
    if hex(&Sha256::digest(&bytes)) != named.extents_sum.sha256 {
        return Err(damaged(&path, "its SHA-256 differs from the manifest's"));
    }
    let lengths = (base.memory_sum.bytes, base.layer_sum.bytes);
    let (memory, layer) = extents::decode(&bytes, TEMPLATE_FORMAT, lengths)
        .map_err(|e| damaged(&path, e.to_string()))?;
    let stored = [
        (TemplateFile::Memory, &memory, &manifest.memory_sum),
        (TemplateFile::Layer, &layer, &manifest.layer_sum),
    ];
    for (file, extents, sum) in stored {
        let (listed, bytes) = (extents.bytes(), sum.bytes);
        if listed != bytes {
            let name = file.name();
            let what = format!("it lists {listed} bytes of the {name} file, which has {bytes}");
            return Err(damaged(&path, what));
        }
    }
    Ok(Lists { memory, layer })
}

/// Reads every byte of a template, its root image and its base included, and compares it with the manifests.
///
/// # Errors
/// The first file that differs.
pub fn verify(dir: &Path) -> Result<TemplateManifest, SnapshotError> {
    let (mut files, _) = files::of_template(dir, None)?;
    let own = Directory::take(dir, FileRole::Template, &mut files);
    let manifest = read_manifest(&own)?.manifest;
    let root = root_image(&manifest, &mut files)?;
    compare(&root, &manifest.root, sum, &manifest.root_sum)?;
    verify_files(&own, &manifest)?;
    if let Some(named) = &manifest.base {
        let base = Directory::take(&named.dir, FileRole::Base, &mut files);
        let whole = open_base(dir, named, &base)?.manifest;
        read_extents(&own, &manifest, named, &whole)?;
        verify_files(&base, &whole).map_err(|source| SnapshotError::Base {
            diff: dir.to_owned(),
            base: named.dir.clone(),
            source: Box::new(source),
        })?;
    }
    Ok(manifest)
}

type Summed = fn(&File, &Path) -> Result<FileSum, SnapshotError>;

fn verify_files(dir: &Directory, manifest: &TemplateManifest) -> Result<(), SnapshotError> {
    let files: [(_, Summed, _); 3] = [
        (TemplateFile::State, sum, &manifest.state_sum),
        (TemplateFile::Memory, sparse_sum, &manifest.memory_sum),
        (TemplateFile::Layer, sparse_sum, &manifest.layer_sum),
    ];
    for (name, sum, expected) in files {
        compare(dir.file(name)?, &dir.path(name), sum, expected)?;
    }
    Ok(())
}

fn compare(file: &File, path: &Path, sum: Summed, expected: &FileSum) -> Result<(), SnapshotError> {
    measure(file, path, expected)?;
    if sum(file, path)? == *expected {
        return Ok(());
    }
    Err(damaged(path, "its sum differs from the manifest's"))
}

fn measure(file: &File, path: &Path, expected: &FileSum) -> Result<(), SnapshotError> {
    let found = length(file).map_err(at("read", path))?;
    if found == expected.bytes {
        return Ok(());
    }
    let what = format!("it has {found} bytes, the manifest says {}", expected.bytes);
    Err(damaged(path, what))
}

/// Reads a whole file, wherever its offset stands.
fn read_limited(file: &File, path: &Path, limit: u64) -> Result<Vec<u8>, SnapshotError> {
    let mut bytes = Vec::new();
    FromStart { file, at: 0 }
        .take(limit + 1)
        .read_to_end(&mut bytes)
        .map_err(at("read", path))?;
    if bytes.len() as u64 > limit {
        return Err(damaged(path, format!("it is longer than {limit} bytes")));
    }
    Ok(bytes)
}

/// Reads without the offset that all copies of a descriptor share.
struct FromStart<'a> {
    file: &'a File,
    at: u64,
}

impl Read for FromStart<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let n = self.file.read_at(into, self.at)?;
        self.at += n as u64;
        Ok(n)
    }
}

/// A manifest as it was found.
struct Found {
    manifest: TemplateManifest,
    sha256: String,
}

impl Found {
    fn ancestor(&self, dir: &Directory, home: &Path) -> Result<Ancestor, SnapshotError> {
        let manifest = dir.file(TemplateFile::Manifest)?.try_clone();
        Ok(Ancestor {
            home: home.to_owned(),
            manifest_sha256: self.sha256.clone(),
            memory_bytes: self.manifest.memory_sum.bytes,
            manifest: manifest.map_err(at("read", home))?,
        })
    }
}

/// The format is read first, from JSON of whatever shape.
fn read_manifest(dir: &Directory) -> Result<Found, SnapshotError> {
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
        return Err(damaged(&path, format!("memory of {}", manifest.memory)));
    }
    Ok(Found {
        manifest,
        sha256: hex(&Sha256::digest(&bytes)),
    })
}
