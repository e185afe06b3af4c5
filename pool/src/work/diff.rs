//! Storing the memory of a template as a diff ([`crate::memory_diff`]), and making the memory file again.
//!
//! The diff is complete, synced and compared with the manifest's sum before the memory file may be removed. The memory file
//! that is made from it is not synced: the next server removes it and makes it again when a VM needs it.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, BufReader, BufWriter, Seek, SeekFrom},
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use model::template_file::MEMORY;
use sha2::{Digest, Sha256};
use vmm_control::template::{loaded_size, next_data};

use crate::{
    durable::{allocated, remove_file, sync_dir},
    error::is_full,
    host,
    images::sum_of_manifest,
    manifest::Manifest,
    memory_diff::{self, BasePages, CHUNK, Header, Pages, is_zero},
};

/// Part of the memory file's space that a diff may take. A larger one is not kept.
const SMALLER: (u64, u64) = (6, 10);
/// The parts of memory that a manifest's sum covers, unless they are zero.
const BLOCK: usize = 64 << 10;
/// A diff that is being written, and a memory file that is being made.
const DRAFTS: [&str; 2] = ["memory.diff.new", "memory.new"];
/// A memory file that is being removed.
const ASIDE: &str = "memory.old";

/// A diff that is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Stored {
    /// Space of the diff on the disk, in bytes.
    pub(crate) bytes: u64,
    pub(crate) header: Header,
    /// The directory of the base, which must stay as long as the diff.
    pub(crate) base: Option<PathBuf>,
}

/// The template whose memory to store.
#[derive(Debug)]
pub(crate) struct DiffPlan {
    pub(crate) id: String,
    pub(crate) dir: PathBuf,
    /// The directory of the base, in the directory of images.
    pub(crate) base: Option<PathBuf>,
    /// Set when the pool closes.
    pub(crate) stop: Arc<AtomicBool>,
}

impl DiffPlan {
    /// Writes the diff. Returns `None` if it is not much smaller than the memory file.
    ///
    /// # Errors
    /// Returns an error if a file cannot be read or written, or the pool closes. The memory file stays as it is.
    pub(crate) fn run(&self) -> io::Result<Option<Stored>> {
        // On Linux, this concerns the calling thread only.
        if let Err(error) = rustix::process::setpriority_process(None, 19) {
            tracing::warn!(%error, "the memory of a template is stored with normal priority");
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
        fs::rename(draft, self.dir.join(memory_diff::NAME))?;
        sync_dir(&self.dir)?;
        Ok(Some(Stored {
            bytes: allocated(&self.dir.join(memory_diff::NAME)),
            header,
            base: self.base.clone(),
        }))
    }

    /// Makes the memory from the diff once, without writing it, and compares its sum.
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
                "the memory does not have the sum in the template's manifest",
            ))
        }
    }

    fn go_on(&self) -> io::Result<()> {
        if self.stop.load(Ordering::SeqCst) {
            Err(io::Error::other("the server stops"))
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
            return Err(io::Error::other("the memory file has no whole pages"));
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

/// Makes the memory from the chunks of a diff, which is open after its header. Calls `act` with the offset and the bytes of
/// each, and returns the sum that a manifest has for this memory: SHA-256 over each block of 64 KiB that is not zero,
/// preceded by its number.
fn unpack_all(
    diff: &File,
    header: &Header,
    base: Option<&File>,
    mut act: impl FnMut(u64, &[u8]) -> io::Result<()>,
) -> io::Result<String> {
    let chunk = CHUNK as u64;
    let mut from = BufReader::new(diff);
    let mut buffer = vec![0; CHUNK];
    let mut sum = Sha256::new();
    let mut next = 0;
    while let Some((number, content)) = memory_diff::read_chunk(&mut from)? {
        let begin = u64::from(number) * chunk;
        if begin < next || begin >= header.length {
            return Err(io::Error::other("its chunks are not in order"));
        }
        next = begin + chunk;
        let memory = part(&mut buffer, header.length - begin);
        memory.fill(0);
        memory_diff::unpack(&content, memory, |page, to| match base {
            Some(base) => base.read_exact_at(to, u64::from(page) * memory_diff::PAGE as u64),
            None => Err(io::Error::other("it has pages of a base, and names none")),
        })?;
        for (block, number) in memory.chunks(BLOCK).zip(begin / BLOCK as u64..) {
            if !is_zero(block) {
                sum.update(number.to_le_bytes());
                sum.update(block);
            }
        }
        act(begin, memory)?;
    }
    Ok(host::hex(&sum.finalize()))
}

/// Finds the diff of the template in `dir`, and removes what the former server left beside it: drafts, and a memory file
/// that can be made again. `None`: the memory is stored whole.
///
/// # Errors
/// Returns a message for people if the diff is damaged or its base is missing. Nothing is removed then.
pub(crate) fn find(dir: &Path, images: &Path) -> Result<Option<Stored>, String> {
    let path = dir.join(memory_diff::NAME);
    let found = match File::open(&path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => None,
        Err(e) => return Err(format!("{}: {e}", path.display())),
        Ok(mut file) => {
            let header = Header::read(&mut file).map_err(|e| cure(&path, &e))?;
            let base = header.base.map(|base| images.join(host::hex(&base)));
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

/// Moves the memory file of a template aside, which is stored as a diff. [`remove_aside`] then frees its space. No start may
/// use the template meanwhile. Returns whether there was a file.
pub(crate) fn set_memory_aside(dir: &Path) -> io::Result<bool> {
    match fs::rename(dir.join(MEMORY), dir.join(ASIDE)) {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(e) => Err(e),
    }
}

pub(crate) fn remove_aside(dir: &Path) -> io::Result<()> {
    remove_file(&dir.join(ASIDE))
}

/// Makes the memory files of templates that are stored as diffs.
#[derive(Clone, Debug)]
pub(crate) struct Restorer {
    /// The directory of images, which has the bases.
    pub(crate) images: PathBuf,
    /// Bytes of the disk that stay free.
    pub(crate) reserve: u64,
}

impl Restorer {
    /// Makes the memory file of the template in `dir`, if it is stored as a diff and has none. Of several callers one makes
    /// it, and the others wait.
    ///
    /// # Errors
    /// Returns an error if there is no room, a file cannot be read or written, or the memory does not have the sum in the
    /// manifest. There is no memory file then.
    pub(crate) fn restore(&self, dir: &Path) -> io::Result<()> {
        let path = dir.join(memory_diff::NAME);
        let mut diff = match File::open(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            opened => opened?,
        };
        let memory = dir.join(MEMORY);
        if memory.exists() {
            return Ok(());
        }
        diff.lock()?;
        if memory.exists() {
            return Ok(());
        }
        let begun = Instant::now();
        let draft = dir.join(DRAFTS[1]);
        let made = self.make(dir, &mut diff, &draft).map_err(|e| {
            let _ = remove_file(&draft);
            if is_full(&e) {
                e
            } else {
                io::Error::new(e.kind(), cure(&path, &e))
            }
        });
        made.and_then(|()| fs::rename(&draft, &memory))?;
        tracing::info!(
            dir = %dir.display(),
            took_ms = begun.elapsed().as_millis(),
            "made a template's memory from its diff"
        );
        Ok(())
    }

    fn make(&self, dir: &Path, diff: &mut File, draft: &Path) -> io::Result<()> {
        diff.seek(SeekFrom::Start(0))?;
        let header = Header::read(diff)?;
        let need = header.loaded_bytes.saturating_add(self.reserve);
        let free = host::disk_free(dir).unwrap_or(u64::MAX);
        if free < need {
            return Err(io::Error::new(
                io::ErrorKind::StorageFull,
                format!("its memory needs {need} bytes, the reserve included, and {free} are free"),
            ));
        }
        let base = header
            .base
            .map(|base| self.images.join(host::hex(&base)).join(MEMORY));
        let base = base.map(|path| {
            File::open(&path).map_err(|e| {
                let base = path.parent().unwrap_or(&path);
                io::Error::new(e.kind(), format!("{e}; {}", base_is_missing(base)))
            })
        });
        let to = create(draft)?;
        to.set_len(header.length)?;
        let sum = unpack_all(diff, &header, base.transpose()?.as_ref(), |at, memory| {
            write_blocks(&to, at, memory)
        })?;
        if sum == sum_of_memory(dir)? {
            Ok(())
        } else {
            Err(io::Error::other(
                "the memory made from it does not have the sum in the manifest, so it or its base is damaged",
            ))
        }
    }
}

/// Writes the blocks that are not zero; the others stay holes.
fn write_blocks(to: &File, at: u64, memory: &[u8]) -> io::Result<()> {
    let blocks = memory.chunks(BLOCK).zip((at..).step_by(BLOCK));
    let mut data = blocks.filter(|(block, _)| !is_zero(block));
    data.try_for_each(|(block, at)| to.write_all_at(block, at))
}

/// Length of a template's memory file in bytes, whether it exists or must be made first.
pub(crate) fn memory_length(dir: &Path) -> io::Result<u64> {
    match fs::metadata(dir.join(MEMORY)) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            let mut diff = File::open(dir.join(memory_diff::NAME))?;
            Ok(Header::read(&mut diff)?.length)
        }
        meta => Ok(meta?.len()),
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use model::MANIFEST_NAME;

    use super::*;
    use crate::templates::tests::image;

    /// Memory of a bit more than two chunks, with a hole, pages of its own, and pages that the base has elsewhere.
    fn memory(seed: u8, shift: usize) -> Vec<u8> {
        let mut bytes = vec![0; 2 * CHUNK + 3 * memory_diff::PAGE];
        let last = bytes.len() / memory_diff::PAGE - 1;
        for page in (0..700).chain([last - shift]) {
            let at = (page + shift) * memory_diff::PAGE;
            bytes[at..at + 8].copy_from_slice(&(page as u64 + 1).to_le_bytes());
        }
        bytes[CHUNK + 9] = seed;
        bytes
    }

    /// A template with this memory, in a directory of its manifest's sum.
    fn template(images: &Path, name: &str, memory: &[u8]) -> PathBuf {
        let dir = images.join(name);
        image(&dir, None);
        let mut hash = Sha256::new();
        for (number, block) in memory.chunks(BLOCK).enumerate() {
            if !is_zero(block) {
                hash.update((number as u64).to_le_bytes());
                hash.update(block);
            }
        }
        let path = dir.join(MANIFEST_NAME);
        let mut json: serde_json::Value =
            serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        json["memory_sum"]["sha256"] = host::hex(&hash.finalize()).into();
        fs::write(&path, json.to_string()).unwrap();
        let file = File::create(dir.join(MEMORY)).unwrap();
        file.set_len(memory.len() as u64).unwrap();
        write_blocks(&file, 0, memory).unwrap();
        let place = images.join(sum_of_manifest(&dir).unwrap());
        fs::rename(dir, &place).unwrap();
        place
    }

    fn plan(dir: &Path, base: Option<&Path>) -> DiffPlan {
        DiffPlan {
            id: "one".to_owned(),
            dir: dir.to_owned(),
            base: base.map(Path::to_owned),
            stop: Arc::default(),
        }
    }

    fn restorer(images: &Path) -> Restorer {
        Restorer {
            images: images.to_owned(),
            reserve: 0,
        }
    }

    fn remove_memory(dir: &Path) {
        assert!(set_memory_aside(dir).unwrap());
        remove_aside(dir).unwrap();
        assert!(!set_memory_aside(dir).unwrap());
    }

    #[test]
    fn memory_comes_back_from_its_diff_and_only_with_its_base() {
        let root = tempfile::tempdir().unwrap();
        let images = root.path();
        let base = template(images, "base", &memory(1, 0));
        let whole = memory(2, 5);
        let dir = template(images, "one", &whole);
        let stored = plan(&dir, Some(&base)).run().unwrap().unwrap();
        assert_eq!(find(&dir, images).unwrap().as_ref(), Some(&stored));
        assert!(!dir.join(MEMORY).exists(), "it can be made again");
        assert_eq!(memory_length(&dir).unwrap(), whole.len() as u64);
        assert_eq!(stored.base.as_ref(), Some(&base));
        assert!(stored.bytes < 64 << 10, "{stored:?}");

        let restorer = restorer(images);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| restorer.restore(&dir).unwrap());
            }
        });
        assert!(fs::read(dir.join(MEMORY)).unwrap() == whole);
        let taken = allocated(&dir.join(MEMORY));
        assert!(taken < whole.len() as u64, "holes stay: {taken}");
        assert!(!dir.join(DRAFTS[1]).exists());
        remove_memory(&dir);

        // Without room nothing is written, and the diff is not blamed.
        let full = Restorer {
            reserve: u64::MAX,
            ..restorer.clone()
        };
        let why = full.restore(&dir).unwrap_err();
        assert!(
            is_full(&why) && !why.to_string().contains("backup"),
            "{why}"
        );

        // Another base of the same length.
        let aside = images.join("aside");
        fs::rename(base.join(MEMORY), &aside).unwrap();
        fs::write(base.join(MEMORY), vec![7; whole.len()]).unwrap();
        let why = restorer.restore(&dir).unwrap_err().to_string();
        assert!(
            why.contains("sum in the manifest") && why.contains("build it again"),
            "{why}"
        );
        fs::remove_file(base.join(MEMORY)).unwrap();
        for why in [
            restorer.restore(&dir).unwrap_err().to_string(),
            find(&dir, images).unwrap_err(),
        ] {
            let base = base.to_str().unwrap();
            assert!(why.contains(base) && why.contains("from a backup"), "{why}");
        }
        assert!(!dir.join(MEMORY).exists() && !dir.join(DRAFTS[1]).exists());
        fs::rename(aside, base.join(MEMORY)).unwrap();
        restorer.restore(&dir).unwrap();

        // A diff that is cut off between two chunks.
        remove_memory(&dir);
        let path = dir.join(memory_diff::NAME);
        let diff = fs::read(&path).unwrap();
        fs::write(&path, &diff[..96]).unwrap();
        let why = restorer.restore(&dir).unwrap_err().to_string();
        assert!(why.contains("sum in the manifest"), "{why}");
        fs::write(&path, &diff[..95]).unwrap();
        assert!(find(&dir, images).unwrap_err().contains("build it again"));
        fs::write(&path, &diff).unwrap();
        restorer.restore(&dir).unwrap();
    }

    #[test]
    fn a_diff_that_is_not_smaller_or_not_right_is_not_kept() {
        let root = tempfile::tempdir().unwrap();
        let images = root.path();
        let mut noise = vec![0; CHUNK];
        File::open("/dev/urandom")
            .and_then(|mut file| io::Read::read_exact(&mut file, &mut noise))
            .unwrap();
        let dir = template(images, "noise", &noise);
        let is_whole =
            |dir: &Path| dir.join(MEMORY).exists() && !dir.join(memory_diff::NAME).exists();
        assert_eq!(plan(&dir, None).run().unwrap(), None);
        assert!(is_whole(&dir) && find(&dir, images).unwrap().is_none());
        assert!(is_whole(&dir), "{:?}", fs::read_dir(&dir));
        // The same noise in the base, so the diff is small.
        let same = template(images, "same", &[noise.clone(), noise.clone()].concat());
        assert!(plan(&same, Some(&dir)).run().unwrap().is_some());

        let other = template(images, "other", &memory(2, 5));
        let stopped = DiffPlan {
            stop: Arc::new(AtomicBool::new(true)),
            ..plan(&other, Some(&dir))
        };
        assert!(stopped.run().unwrap_err().to_string().contains("stops"));
        // The file does not have the manifest's sum any more.
        let memory = File::options()
            .write(true)
            .open(other.join(MEMORY))
            .unwrap();
        memory.write_all_at(b"changed", 0).unwrap();
        let why = plan(&other, Some(&dir)).run().unwrap_err().to_string();
        assert!(why.contains("sum in the template's manifest"), "{why}");
        assert!(is_whole(&other) && !other.join(DRAFTS[0]).exists());
        restorer(images).restore(&other).unwrap();
        assert!(is_whole(&other));
    }
}
