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

use std::{
    fs::{self, File},
    io::{self, Read},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use model::{FileSum, MANIFEST_NAME, Platform, TEMPLATE_FORMAT, TemplateManifest, template_file};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::{devices::BusState, platform::PlatformState};

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

/// Length and plain SHA-256 of a file.
///
/// # Errors
/// The file's.
pub fn sum(path: &Path) -> Result<FileSum, SnapshotError> {
    let mut hash = Sha256::new();
    let bytes = for_each_block(path, Holes::Read, |_, block| hash.update(block))?;
    Ok(FileSum {
        bytes,
        sha256: hex(&hash.finalize()),
    })
}

/// Length and sum of a file with holes: SHA-256 over each 64 KiB block that is not zero, led by its index
/// (little-endian u64). Holes cost nothing, and how a file system stores zeros does not matter.
///
/// # Errors
/// The file's.
pub fn sparse_sum(path: &Path) -> Result<FileSum, SnapshotError> {
    let mut hash = Sha256::new();
    let bytes = for_each_block(path, Holes::Skip, |index, block| {
        if block.iter().any(|byte| *byte != 0) {
            hash.update(index.to_le_bytes());
            hash.update(block);
        }
    })?;
    Ok(FileSum {
        bytes,
        sha256: hex(&hash.finalize()),
    })
}

#[derive(PartialEq, Eq)]
enum Holes {
    Read,
    Skip,
}

/// Reads a file in blocks of 64 KiB and returns its length.
fn for_each_block(
    path: &Path,
    holes: Holes,
    mut act: impl FnMut(u64, &[u8]),
) -> Result<u64, SnapshotError> {
    const BLOCK: u64 = 64 << 10;
    let file = File::open(path).map_err(at("read", path))?;
    let bytes = file.metadata().map_err(at("read", path))?.len();
    let mut buffer = vec![0; 64 << 10];
    let mut index = 0;
    while index * BLOCK < bytes {
        if holes == Holes::Skip {
            match next_data(&file, index * BLOCK).map_err(at("read", path))? {
                Some(data) => index = data / BLOCK,
                None => break,
            }
        }
        let start = index * BLOCK;
        let n = usize::try_from((bytes - start).min(BLOCK)).unwrap_or(0);
        file.read_exact_at(&mut buffer[..n], start)
            .map_err(at("read", path))?;
        act(index, &buffer[..n]);
        index += 1;
    }
    Ok(bytes)
}

/// Where data begins at or after `from`; `None` if only a hole is left.
fn next_data(file: &File, from: u64) -> io::Result<Option<u64>> {
    use nix::unistd::{Whence, lseek};
    match lseek(file, from.cast_signed(), Whence::SeekData) {
        Ok(at) => Ok(Some(at.cast_unsigned())),
        Err(nix::errno::Errno::ENXIO) => Ok(None),
        Err(e) => Err(e.into()),
    }
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
}

/// Which platform a template is of, by its manifest.
///
/// # Errors
/// See [`SnapshotError`].
pub fn platform(dir: &Path) -> Result<Platform, SnapshotError> {
    Ok(read_manifest(dir)?.platform)
}

/// Opens a template.
///
/// # Errors
/// See [`SnapshotError`].
pub fn open(dir: &Path, host: Platform) -> Result<Template, SnapshotError> {
    let manifest = read_manifest(dir)?;
    if manifest.platform != host {
        let found = manifest.platform;
        return Err(SnapshotError::Platform { found, host });
    }
    for (name, sum) in sums(&manifest) {
        measure(&dir.join(name), sum)?;
    }
    measure(&manifest.root, &manifest.root_sum)?;
    let path = dir.join(template_file::STATE);
    let bytes = read_limited(&path, MAX_BODY)?;
    if hex(&Sha256::digest(&bytes)) != manifest.state_sum.sha256 {
        return Err(damaged(&path, "its SHA-256 differs from the manifest's"));
    }
    Ok(Template {
        state: decode(&path, &bytes, host)?,
        dir: dir.to_owned(),
        manifest,
    })
}

/// Reads every byte of a template, the root image included, and compares it with the manifest.
///
/// # Errors
/// The first file that differs.
pub fn verify(dir: &Path) -> Result<TemplateManifest, SnapshotError> {
    let manifest = read_manifest(dir)?;
    let plain = [
        (dir.join(template_file::STATE), &manifest.state_sum),
        (manifest.root.clone(), &manifest.root_sum),
    ];
    let sparse = [
        (dir.join(template_file::MEMORY), &manifest.memory_sum),
        (dir.join(template_file::LAYER), &manifest.layer_sum),
    ];
    for (path, expected) in plain {
        compare(&path, sum, expected)?;
    }
    for (path, expected) in sparse {
        compare(&path, sparse_sum, expected)?;
    }
    Ok(manifest)
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

fn sums(manifest: &TemplateManifest) -> [(&'static str, &FileSum); 3] {
    [
        (template_file::MEMORY, &manifest.memory_sum),
        (template_file::STATE, &manifest.state_sum),
        (template_file::LAYER, &manifest.layer_sum),
    ]
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
    let mut bytes = Vec::new();
    file.take(limit + 1)
        .read_to_end(&mut bytes)
        .map_err(at("read", path))?;
    if bytes.len() as u64 > limit {
        return Err(damaged(path, format!("it is longer than {limit} bytes")));
    }
    Ok(bytes)
}

/// The format is read first, from JSON of whatever shape.
fn read_manifest(dir: &Path) -> Result<TemplateManifest, SnapshotError> {
    #[derive(Deserialize)]
    struct Versioned {
        format: u32,
    }
    let path = dir.join(MANIFEST_NAME);
    let bytes = read_limited(&path, MAX_MANIFEST)?;
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
    Ok(manifest)
}

/// A template being written. Dropped before [`Draft::finish`], it leaves nothing behind.
#[derive(Debug)]
pub struct Draft {
    temporary: PathBuf,
    place: PathBuf,
    finished: bool,
}

impl Draft {
    /// Begins a template that will appear at `place`.
    ///
    /// # Errors
    /// The place is taken, or its parent cannot be written.
    pub fn begin(place: &Path) -> Result<Self, SnapshotError> {
        if place.exists() {
            return Err(SnapshotError::Exists(place.to_owned()));
        }
        let name = place.file_name().unwrap_or_default().to_string_lossy();
        sweep_drafts(place, &name);
        let temporary = place.with_file_name(format!(".{name}.{}", std::process::id()));
        fs::create_dir(&temporary).map_err(at("create", &temporary))?;
        Ok(Self {
            temporary,
            place: place.to_owned(),
            finished: false,
        })
    }

    /// Path of one of its files.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.temporary.join(name)
    }

    /// Creates one of its files.
    ///
    /// # Errors
    /// The disk's.
    pub fn create(&self, name: &str) -> Result<File, SnapshotError> {
        let path = self.path(name);
        File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(&path)
            .map_err(at("create", &path))
    }

    /// Writes one of its files.
    ///
    /// # Errors
    /// The disk's.
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<(), SnapshotError> {
        let path = self.path(name);
        fs::write(&path, bytes).map_err(at("write", &path))
    }

    /// Writes the manifest and puts the template in its place.
    ///
    /// # Errors
    /// The disk's.
    pub fn finish(mut self, manifest: &TemplateManifest) -> Result<(), SnapshotError> {
        let json =
            serde_json::to_vec_pretty(manifest).map_err(|source| SnapshotError::Manifest {
                path: self.path(MANIFEST_NAME),
                source,
            })?;
        self.write(MANIFEST_NAME, &json)?;
        fs::rename(&self.temporary, &self.place).map_err(at("create", &self.place))?;
        self.finished = true;
        Ok(())
    }
}

/// Removes what a killed process left of an earlier attempt at the same place.
fn sweep_drafts(place: &Path, name: &str) {
    let siblings = place.parent().and_then(|dir| fs::read_dir(dir).ok());
    for entry in siblings.into_iter().flatten().flatten() {
        let file_name = entry.file_name();
        let owner = file_name
            .to_str()
            .and_then(|text| text.strip_prefix(&format!(".{name}.")))
            .and_then(|pid| pid.parse::<u32>().ok());
        if owner.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            // Best effort: what cannot be removed is in nobody's way.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if !self.finished {
            // Best effort: the error that led here is the one to report.
            let _ = fs::remove_dir_all(&self.temporary);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_draft_of_a_dead_process_is_swept_and_one_that_is_dropped_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("base");
        // No process has this number: it is above the kernel's limit.
        fs::create_dir(dir.path().join(".base.4194305")).unwrap();
        fs::create_dir(dir.path().join(".other.4194305")).unwrap();
        drop(Draft::begin(&place).unwrap());
        let left: Vec<_> = fs::read_dir(dir.path()).unwrap().flatten().collect();
        assert_eq!(left.len(), 1);
        assert_eq!(left[0].file_name(), ".other.4194305");
    }

    #[test]
    fn a_sparse_sum_does_not_depend_on_how_zeros_are_stored() {
        let dir = tempfile::tempdir().unwrap();
        let (full, holes) = (dir.path().join("full"), dir.path().join("holes"));
        let mut bytes = vec![0_u8; 1 << 20];
        bytes[700_000] = 7;
        fs::write(&full, &bytes).unwrap();
        let file = File::create(&holes).unwrap();
        file.set_len(1 << 20).unwrap();
        file.write_all_at(&[7], 700_000).unwrap();
        assert_eq!(sparse_sum(&full).unwrap(), sparse_sum(&holes).unwrap());
        bytes[700_001] = 1;
        fs::write(&full, &bytes).unwrap();
        assert_ne!(sparse_sum(&full).unwrap(), sparse_sum(&holes).unwrap());
    }
}
