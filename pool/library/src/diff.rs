//! Stores the memory of a template as a diff ([`crate::memory_diff`]), and makes the memory file again.
//!
//! The memory file may be removed only after the diff is complete, synced and verified against the manifest's checksum.
//! A memory file made from the diff is not synced: the next server removes it and makes it again when a VM needs it.

pub(crate) mod restore;

pub use restore::Restorer;

use std::{
    fs::{self, File, OpenOptions},
    io::{self, BufWriter},
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use model::template_file::MEMORY;
use vmm_control::template::{loaded_size, next_data};

use crate::{
    durable::{allocated, remove_file, sync_dir},
    images::sum_of_manifest,
    manifest::Manifest,
    memory_diff::{self, BasePages, CHUNK, Header, Pages},
};
use restore::unpack_all;

/// Maximum size of a diff relative to the memory file's space. Larger diffs are discarded.
const SMALLER: (u64, u64) = (6, 10);
/// Unit of memory that a manifest's checksum covers, unless it is zero.
pub(crate) const BLOCK: usize = 64 << 10;
/// A diff that is being written, and a memory file that is being made.
const DRAFTS: [&str; 2] = ["memory.diff.new", "memory.new"];
/// A memory file that is being removed.
const ASIDE: &str = "memory.old";

/// A diff that is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    /// Disk space of the diff, in bytes.
    pub bytes: u64,
    pub header: Header,
    /// The directory of the base, which must stay as long as the diff.
    pub base: Option<PathBuf>,
}

/// The template whose memory is stored.
#[derive(Debug)]
pub struct DiffPlan {
    pub id: String,
    pub dir: PathBuf,
    /// The directory of the base, in the directory of images.
    pub base: Option<PathBuf>,
    /// Set when the pool closes.
    pub stop: Arc<AtomicBool>,
}

impl DiffPlan {
    /// Writes the diff. Returns `None` if it is not much smaller than the memory file.
    ///
    /// # Errors
    /// Returns an error if a file cannot be read or written, or the pool closes. The memory file remains unchanged.
    pub fn run(&self) -> io::Result<Option<Stored>> {
        // On Linux, this concerns the calling thread only.
        if let Err(error) = rustix::process::setpriority_process(None, 19) {
            tracing::warn!(%error, "cannot lower the priority of storing a template's memory");
        }
        let draft = self.dir.join(DRAFTS[0]);
        let stored = self.store(&draft);
        if !matches!(stored, Ok(Some(_))) {
            remove_file(&draft)?;
        }
        stored
    }

    fn store(&self, draft: &Path) -> io::Result<Option<Stored>> {
        let begun = Instant::now();
        let path = self.dir.join(MEMORY);
        let memory = File::open(&path)?;
        let length = memory.metadata()?.len();
        let base = self.base.as_deref();
        let header = Header {
            length,
            loaded_bytes: loaded_size(&self.dir)?,
            base: base.map(id_of_base).transpose()?,
        };
        let mut index = BasePages::default();
        if let Some(base) = base {
            let memory = File::open(base.join(MEMORY))?;
            self.each_chunk(&memory, |number, chunk| {
                index.add(number, chunk);
                Ok(())
            })?;
        }
        let mut pages = Pages::default();
        let mut to = BufWriter::new(create(draft)?);
        header.write(&mut to)?;
        self.each_chunk(&memory, |number, chunk| {
            let written = memory_diff::write_chunk(number, chunk, &index, &mut to)?;
            pages.of_base += written.of_base;
            pages.stored += written.stored;
            Ok(())
        })?;
        let file = to.into_inner().map_err(io::IntoInnerError::into_error)?;
        let (bytes, whole) = (file.metadata()?.len(), allocated(&path));
        let is_smaller =
            u128::from(bytes) * u128::from(SMALLER.1) <= u128::from(whole) * u128::from(SMALLER.0);
        tracing::info!(
            template = self.id,
            is_smaller,
            memory_bytes = whole,
            diff_bytes = bytes,
            pages_of_base = pages.of_base,
            pages_stored = pages.stored,
            took_ms = begun.elapsed().as_millis(),
            "compared a template's memory with that of its base"
        );
        if !is_smaller {
            return Ok(None);
        }
        file.sync_all()?;
        self.check(draft)?;
        self.put_in_place(draft, sync_dir)?;
        Ok(Some(Stored {
            bytes: allocated(&self.dir.join(memory_diff::NAME)),
            header,
            base: self.base.clone(),
        }))
    }

    /// Renames the diff to its final name. If the rename cannot be synced, removes the diff: the caller does not hold
    /// its base, and the next server could use neither a diff without its base nor a memory file next to a diff.
    fn put_in_place(&self, draft: &Path, sync: impl Fn(&Path) -> io::Result<()>) -> io::Result<()> {
        let diff = self.dir.join(memory_diff::NAME);
        fs::rename(draft, &diff)?;
        sync(&self.dir).or_else(|error| match remove_file(&diff) {
            Ok(()) => Err(error),
            // The diff remains, so its base must remain as well: the diff counts as stored.
            Err(stays) => {
                tracing::error!(
                    template = self.id,
                    %error,
                    %stays,
                    "cannot sync the diff of the template's memory, and cannot remove it"
                );
                Ok(())
            }
        })
    }

    /// Reconstructs the memory from the diff, without writing it, and compares its checksum.
    fn check(&self, draft: &Path) -> io::Result<()> {
        let mut diff = File::open(draft)?;
        let header = Header::read(&mut diff)?;
        let base = self.base.as_ref().map(|dir| File::open(dir.join(MEMORY)));
        let sum = unpack_all(&diff, &header, base.transpose()?.as_ref(), |_, _| {
            self.go_on()
        })?;
        if sum == sum_of_memory(&self.dir)? {
            Ok(())
        } else {
            Err(io::Error::other(
                "the checksum of the memory differs from the template's manifest",
            ))
        }
    }

    fn go_on(&self) -> io::Result<()> {
        if self.stop.load(Ordering::SeqCst) {
            Err(io::Error::other("the server is stopping"))
        } else {
            Ok(())
        }
    }

    /// Calls `act` with the number and the memory of each chunk that has data.
    fn each_chunk(
        &self,
        memory: &File,
        mut act: impl FnMut(u32, &[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let length = memory.metadata()?.len();
        if !length.is_multiple_of(memory_diff::PAGE as u64) {
            return Err(io::Error::other(
                "the length of the memory file is not a multiple of the page size",
            ));
        }
        let chunk = CHUNK as u64;
        let mut buffer = vec![0; CHUNK];
        let mut at = 0;
        while let Some((data, _)) = next_data(memory, at, length)? {
            self.go_on()?;
            let number = data / chunk;
            let begin = number * chunk;
            let part = part(&mut buffer, length - begin);
            memory.read_exact_at(part, begin)?;
            act(u32::try_from(number).map_err(io::Error::other)?, part)?;
            at = begin + chunk;
        }
        Ok(())
    }
}

/// The part of a chunk's buffer that is within the memory.
fn part(buffer: &mut [u8], left: u64) -> &mut [u8] {
    let length = usize::try_from(left).map_or(CHUNK, |left| left.min(CHUNK));
    &mut buffer[..length]
}

fn id_of_base(dir: &Path) -> io::Result<[u8; 32]> {
    let sum = sum_of_manifest(dir)?;
    let mut id = [0; 32];
    for (byte, digits) in id.iter_mut().zip(sum.as_bytes().chunks_exact(2)) {
        let digits = std::str::from_utf8(digits).map_err(io::Error::other)?;
        *byte = u8::from_str_radix(digits, 16).map_err(io::Error::other)?;
    }
    Ok(id)
}

fn sum_of_memory(dir: &Path) -> io::Result<String> {
    let manifest = Manifest::read(dir).map_err(io::Error::other)?;
    Ok(manifest.memory_sum.sha256)
}

fn create(path: &Path) -> io::Result<File> {
    remove_file(path)?;
    let mut options = OpenOptions::new();
    options.write(true).create_new(true).mode(0o600).open(path)
}

/// Finds the diff of the template in `dir`, and removes what the previous server left next to it: drafts, and a memory
/// file that can be made again. `None` if the memory is stored whole.
///
/// # Errors
/// Returns a human-readable message if the diff is damaged or its base is missing. Nothing is removed then.
pub fn find(dir: &Path, images: &Path) -> Result<Option<Stored>, String> {
    let path = dir.join(memory_diff::NAME);
    let found = match File::open(&path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => None,
        Err(e) => return Err(format!("{}: {e}", path.display())),
        Ok(mut file) => {
            let header = Header::read(&mut file).map_err(|e| cure(&path, &e))?;
            let base = header.base.map(|base| images.join(model::hex(&base)));
            if let Some(base) = base.as_ref().filter(|base| !base.join(MEMORY).is_file()) {
                return Err(base_is_missing(base));
            }
            Some(Stored {
                bytes: allocated(&path),
                header,
                base,
            })
        }
    };
    let made = found.is_some().then_some(MEMORY);
    for name in DRAFTS.into_iter().chain([ASIDE]).chain(made) {
        let file = dir.join(name);
        remove_file(&file).map_err(|e| format!("cannot remove {}: {e}", file.display()))?;
    }
    Ok(found)
}

fn cure(diff: &Path, error: &io::Error) -> String {
    format!(
        "{}: {error}; put the file back from a backup, or remove the template and build it again",
        diff.display()
    )
}

fn base_is_missing(base: &Path) -> String {
    format!(
        "its memory is stored as a diff, and the base {} is missing: put that directory back from a backup, or remove the \
         template and build it again",
        base.display()
    )
}

/// Moves aside the memory file of a template that is stored as a diff. [`remove_aside`] then frees its space. No start
/// may use the template in between. Returns whether there was a file.
pub fn set_memory_aside(dir: &Path) -> io::Result<bool> {
    match fs::rename(dir.join(MEMORY), dir.join(ASIDE)) {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(e) => Err(e),
    }
}

/// Removes an unfinished diff.
pub fn remove_draft(dir: &Path) {
    if let Err(error) = remove_file(&dir.join(DRAFTS[0])) {
        tracing::warn!(
            dir = %dir.display(),
            %error,
            "cannot remove an unfinished diff: the next server tries again"
        );
    }
}

pub fn remove_aside(dir: &Path) -> io::Result<()> {
    remove_file(&dir.join(ASIDE))
}

/// Length of a template's memory file in bytes, whether it exists or must first be made.
pub fn memory_length(dir: &Path) -> io::Result<u64> {
    match fs::metadata(dir.join(MEMORY)) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            let mut diff = File::open(dir.join(memory_diff::NAME))?;
            Ok(Header::read(&mut diff)?.length)
        }
        meta => Ok(meta?.len()),
    }
}

#[cfg(test)]
mod tests;
