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
//! A snapshot is written to a temporary directory beside its place and renamed when it is whole, so that
//! one that exists is complete.
//!
//! A *diff* holds of memory and layer only what differs from its base, a whole template elsewhere, and names
//! that by its directory and its manifest's sum. A base is never a diff: a clone of a diff descends from the
//! diff's base, and its own diff holds everything again that differs from that.

mod draft;
mod sums;

use std::{
    fs::{self, File},
    io::{self, Read},
    os::fd::AsRawFd,
    path::{Path, PathBuf},
};

use model::{
    FileSum, MANIFEST_NAME, Platform, TEMPLATE_FORMAT, TemplateBase, TemplateManifest,
    template_file,
};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

pub use draft::{Draft, write_file};
pub use sums::{SummedFile, sparse_sum, sum};

use crate::{
    devices::BusState,
    extents::{self, Extents, ExtentsError},
    platform::PlatformState,
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
    /// The place is taken.
    #[error("{0} exists already")]
    Exists(PathBuf),
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

/// An opened template: manifest and state checked, the large files only measured.
#[derive(Debug)]
pub struct Template {
    /// Its directory.
    pub dir: PathBuf,
    /// Its manifest.
    pub manifest: TemplateManifest,
    /// CPU and devices.
    pub state: MachineState,
    /// What a clone of it descends from.
    pub root: Ancestor,
    /// What lies over that, in a diff.
    pub diff: Option<Diff>,
}

/// The whole template that a clone descends from: the template itself, or the base of a diff.
#[derive(Debug, Clone)]
pub struct Ancestor {
    /// Where to read it now; a copy that is gone with its loader, perhaps.
    pub dir: PathBuf,
    /// Where it is kept: the directory in which its manifest really lies, links followed.
    pub home: PathBuf,
    /// SHA-256 of its manifest.
    pub manifest_sha256: String,
    /// Length of its memory file.
    pub memory_bytes: u64,
}

impl Ancestor {
    /// Whether its home still holds it, as far as a manifest tells.
    #[must_use]
    pub fn stands(&self) -> bool {
        read_manifest(&self.home).is_ok_and(|found| found.sha256 == self.manifest_sha256)
    }
}

/// Where the pages and blocks of a diff belong; checked against the lengths of its base.
#[derive(Debug)]
pub struct Diff {
    /// Of the memory.
    pub memory: Extents,
    /// Of the layer.
    pub layer: Extents,
}

/// Which platform a template is of, by its manifest.
///
/// # Errors
/// See [`SnapshotError`].
pub fn platform(dir: &Path) -> Result<Platform, SnapshotError> {
    Ok(read_manifest(dir)?.manifest.platform)
}

/// Opens a template. The base of a diff is looked for at `base`, else where the manifest says.
///
/// # Errors
/// See [`SnapshotError`].
pub fn open(dir: &Path, base: Option<&Path>, host: Platform) -> Result<Template, SnapshotError> {
    let found = read_manifest(dir)?;
    if found.manifest.platform != host {
        let found = found.manifest.platform;
        return Err(SnapshotError::Platform { found, host });
    }
    let manifest = &found.manifest;
    measure_all(dir, manifest)?;
    measure(&manifest.root, &manifest.root_sum)?;
    let path = dir.join(template_file::STATE);
    let bytes = read_limited(&path, MAX_BODY)?;
    if hex(&Sha256::digest(&bytes)) != manifest.state_sum.sha256 {
        return Err(damaged(&path, "its SHA-256 differs from the manifest's"));
    }
    let state = decode(&path, &bytes, host)?;
    let (root, diff) = match &manifest.base {
        None => (found.ancestor(dir), None),
        Some(named) => {
            let at = base.unwrap_or(&named.dir);
            let root = open_base(dir, named, at)?;
            let diff = read_extents(dir, manifest, named, &root.manifest)?;
            (root.ancestor(at), Some(diff))
        }
    };
    Ok(Template {
        dir: dir.to_owned(),
        manifest: found.manifest,
        state,
        root,
        diff,
    })
}

/// The manifest of a diff's base, if it is the one that the diff was made from.
fn open_base(diff: &Path, named: &TemplateBase, at: &Path) -> Result<Found, SnapshotError> {
    let because = |source| SnapshotError::Base {
        diff: diff.to_owned(),
        base: at.to_owned(),
        source: Box::new(source),
    };
    let found = read_manifest(at).map_err(because)?;
    if found.sha256 != named.manifest_sha256 {
        return Err(SnapshotError::OtherBase {
            diff: diff.to_owned(),
            base: at.to_owned(),
        });
    }
    if found.manifest.base.is_some() {
        let path = at.join(MANIFEST_NAME);
        return Err(because(damaged(&path, "a base is never a diff itself")));
    }
    measure_all(at, &found.manifest).map_err(because)?;
    Ok(found)
}

fn read_extents(
    dir: &Path,
    manifest: &TemplateManifest,
    named: &TemplateBase,
    base: &TemplateManifest,
) -> Result<Diff, SnapshotError> {
    let path = dir.join(template_file::EXTENTS);
    measure(&path, &named.extents_sum)?;
    let bytes = read_limited(&path, extents::MAX_FILE)?;
    if hex(&Sha256::digest(&bytes)) != named.extents_sum.sha256 {
        return Err(damaged(&path, "its SHA-256 differs from the manifest's"));
    }
    let lengths = (base.memory_sum.bytes, base.layer_sum.bytes);
    let (memory, layer) = extents::decode(&bytes, TEMPLATE_FORMAT, lengths)
        .map_err(|e| damaged(&path, e.to_string()))?;
    let stored = [
        (template_file::MEMORY, &memory, &manifest.memory_sum),
        (template_file::LAYER, &layer, &manifest.layer_sum),
    ];
    for (name, extents, sum) in stored {
        let (listed, bytes) = (extents.bytes(), sum.bytes);
        if listed != bytes {
            let what = format!("it lists {listed} bytes of the {name} file, which has {bytes}");
            return Err(damaged(&path, what));
        }
    }
    Ok(Diff { memory, layer })
}

/// Reads every byte of a template, its root image and its base included, and compares it with the manifests.
///
/// # Errors
/// The first file that differs.
pub fn verify(dir: &Path) -> Result<TemplateManifest, SnapshotError> {
    let manifest = read_manifest(dir)?.manifest;
    compare(&manifest.root, sum, &manifest.root_sum)?;
    verify_files(dir, &manifest)?;
    if let Some(named) = &manifest.base {
        let base = open_base(dir, named, &named.dir)?.manifest;
        read_extents(dir, &manifest, named, &base)?;
        verify_files(&named.dir, &base).map_err(|source| SnapshotError::Base {
            diff: dir.to_owned(),
            base: named.dir.clone(),
            source: Box::new(source),
        })?;
    }
    Ok(manifest)
}

fn verify_files(dir: &Path, manifest: &TemplateManifest) -> Result<(), SnapshotError> {
    compare(&dir.join(template_file::STATE), sum, &manifest.state_sum)?;
    let sparse = [
        (template_file::MEMORY, &manifest.memory_sum),
        (template_file::LAYER, &manifest.layer_sum),
    ];
    for (name, expected) in sparse {
        compare(&dir.join(name), sparse_sum, expected)?;
    }
    Ok(())
}

fn compare(
    path: &Path,
    sum: fn(&Path) -> Result<FileSum, SnapshotError>,
    expected: &FileSum,
) -> Result<(), SnapshotError> {
    measure(path, expected)?;
    if sum(path)? == *expected {
        return Ok(());
    }
    Err(damaged(path, "its sum differs from the manifest's"))
}

fn measure_all(dir: &Path, manifest: &TemplateManifest) -> Result<(), SnapshotError> {
    let files = [
        (template_file::MEMORY, &manifest.memory_sum),
        (template_file::STATE, &manifest.state_sum),
        (template_file::LAYER, &manifest.layer_sum),
    ];
    files
        .into_iter()
        .try_for_each(|(name, sum)| measure(&dir.join(name), sum))
}

fn measure(path: &Path, expected: &FileSum) -> Result<(), SnapshotError> {
    let found = fs::metadata(path).map_err(at("read", path))?.len();
    if found == expected.bytes {
        return Ok(());
    }
    let what = format!("it has {found} bytes, the manifest says {}", expected.bytes);
    Err(damaged(path, what))
}

fn read_limited(path: &Path, limit: u64) -> Result<Vec<u8>, SnapshotError> {
    let file = File::open(path).map_err(at("read", path))?;
    read_file_limited(&file, path, limit)
}

fn read_file_limited(file: &File, path: &Path, limit: u64) -> Result<Vec<u8>, SnapshotError> {
    let mut bytes = Vec::new();
    file.take(limit + 1)
        .read_to_end(&mut bytes)
        .map_err(at("read", path))?;
    if bytes.len() as u64 > limit {
        return Err(damaged(path, format!("it is longer than {limit} bytes")));
    }
    Ok(bytes)
}

/// A manifest as it was found.
struct Found {
    manifest: TemplateManifest,
    sha256: String,
    home: PathBuf,
}

impl Found {
    fn ancestor(&self, dir: &Path) -> Ancestor {
        Ancestor {
            dir: dir.to_owned(),
            home: self.home.clone(),
            manifest_sha256: self.sha256.clone(),
            memory_bytes: self.manifest.memory_sum.bytes,
        }
    }
}

/// The format is read first, from JSON of whatever shape.
fn read_manifest(dir: &Path) -> Result<Found, SnapshotError> {
    #[derive(Deserialize)]
    struct Versioned {
        format: u32,
    }
    let path = dir.join(MANIFEST_NAME);
    let file = File::open(&path).map_err(at("read", &path))?;
    let bytes = read_file_limited(&file, &path, MAX_MANIFEST)?;
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
        home: home_of(&file).map_err(at("find", &path))?,
    })
}

/// The directory in which an open file really lies. The kernel knows it, whatever links led to the file; a
/// loaded template is links to the one that it was loaded from.
fn home_of(file: &File) -> io::Result<PathBuf> {
    let path = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
    Ok(path.parent().unwrap_or(&path).to_owned())
}
