//! Lists of files with the hashes of their chunks. A list from another node is validated while it is parsed.

use std::{
    collections::BTreeSet,
    fs::File,
    io::{self, ErrorKind},
    os::unix::fs::FileExt,
    sync::LazyLock,
};

use model::{Bytes, hex};
use nix::{
    errno::Errno,
    unistd::{Whence, lseek},
};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::CHUNK;

/// Maximum number of files in a list.
const MAX_FILES: usize = 64;
/// Maximum total size of the files in a list.
const MAX_BYTES: u64 = 256 << 30;
/// Maximum length of a file name in bytes.
const MAX_NAME: usize = 64;
const SUM: usize = 32;
/// Hash of a chunk of zeros. Layers are mostly holes, which are neither read nor hashed.
static ZEROS: LazyLock<Sum> = LazyLock::new(|| zeros(CHUNK));

/// SHA-256 of a chunk.
pub(super) type Sum = [u8; SUM];

/// A file and the hashes of its chunks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "Written", try_from = "Written")]
pub struct FileSum {
    pub name: String,
    pub bytes: u64,
    pub(super) chunks: Vec<Sum>,
}

/// Files with different names, within the limits of a transfer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Vec<FileSum>")]
pub struct FileList(Vec<FileSum>);

/// Why a list is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ListError {
    #[error("the name {0:?} is not allowed for a transferred file")]
    Name(String),
    #[error("the name {0:?} occurs twice")]
    Twice(String),
    #[error("the file {0:?} does not have one hash for each chunk")]
    Sums(String),
    #[error("it has more than {MAX_FILES} files or {} bytes", MAX_BYTES)]
    TooLarge,
}

/// The wire format: all hashes in hex, concatenated.
#[derive(Serialize, Deserialize)]
struct Written {
    name: String,
    bytes: u64,
    sums: String,
}

impl From<FileSum> for Written {
    fn from(file: FileSum) -> Self {
        Self {
            sums: hex(file.chunks.as_flattened()),
            name: file.name,
            bytes: file.bytes,
        }
    }
}

impl TryFrom<Written> for FileSum {
    type Error = ListError;

    fn try_from(written: Written) -> Result<Self, ListError> {
        let Written { name, bytes, sums } = written;
        if !is_name(&name) {
            return Err(ListError::Name(name.chars().take(MAX_NAME).collect()));
        }
        let chunks = sums_of(&sums).filter(|chunks| chunks.len() as u64 == count(bytes));
        match chunks {
            Some(chunks) if bytes <= MAX_BYTES => Ok(Self {
                name,
                bytes,
                chunks,
            }),
            _ => Err(ListError::Sums(name)),
        }
    }
}

impl TryFrom<Vec<FileSum>> for FileList {
    type Error = ListError;

    fn try_from(files: Vec<FileSum>) -> Result<Self, ListError> {
        let mut names = BTreeSet::new();
        if let Some(file) = files.iter().find(|file| !names.insert(&file.name)) {
            return Err(ListError::Twice(file.name.clone()));
        }
        let bytes = files
            .iter()
            .try_fold(0_u64, |sum, file| sum.checked_add(file.bytes));
        if files.len() > MAX_FILES || bytes.is_none_or(|bytes| bytes > MAX_BYTES) {
            return Err(ListError::TooLarge);
        }
        Ok(Self(files))
    }
}

/// Whether a file of this name may be in a list.
pub(super) fn is_name(name: &str) -> bool {
    let is_plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b"._-".contains(&b);
    let is_draft = name.ends_with(super::fetch::PART);
    (1..=MAX_NAME).contains(&name.len())
        && name.bytes().all(is_plain)
        && !name.starts_with('.')
        && !is_draft
}

fn sums_of(text: &str) -> Option<Vec<Sum>> {
    let digits: Option<Vec<u8>> = text
        .bytes()
        .map(|b| {
            char::from(b)
                .to_digit(16)
                .and_then(|d| u8::try_from(d).ok())
        })
        .collect();
    let bytes: Vec<u8> = digits?
        .chunks(2)
        .map(|pair| pair[0] << 4 | pair.get(1).unwrap_or(&0))
        .collect();
    let (sums, rest) = bytes.as_chunks::<SUM>();
    (rest.is_empty() && text.len().is_multiple_of(2 * SUM)).then(|| sums.to_vec())
}

/// Number of chunks of a file.
fn count(bytes: u64) -> u64 {
    bytes.div_ceil(CHUNK)
}

impl FileList {
    #[must_use]
    pub fn files(&self) -> &[FileSum] {
        &self.0
    }

    #[must_use]
    pub fn get(&self, name: &str) -> Option<&FileSum> {
        self.0.iter().find(|file| file.name == name)
    }

    /// The list without a file that is already here.
    #[must_use]
    pub fn without(mut self, name: &str) -> Self {
        self.0.retain(|file| file.name != name);
        self
    }
}

impl FileSum {
    /// Reads a file and hashes its chunks. Holes are not read.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read, or if its length changes while it is read.
    pub fn of(name: &str, file: &File) -> io::Result<Self> {
        let bytes = file.metadata()?.len();
        let chunks = (0..count(bytes)).map(|at| sum_of_chunk(file, bytes, at));
        let file = Self {
            name: name.to_owned(),
            bytes,
            chunks: chunks.collect::<io::Result<_>>()?,
        };
        Ok(file)
    }

    /// SHA-256 of the file's length and hashes: files with equal content have equal values.
    #[must_use]
    pub fn content(&self) -> String {
        let mut sum = Sha256::new();
        sum.update(self.bytes.to_le_bytes());
        sum.update(self.chunks.as_flattened());
        hex(&sum.finalize())
    }

    #[must_use]
    pub fn size(&self) -> Bytes {
        Bytes(self.bytes)
    }

    /// Start and length of a chunk.
    pub(super) fn range(&self, chunk: usize) -> (u64, usize) {
        range(self.bytes, chunk as u64)
    }

    /// The chunks that contain data.
    pub(super) fn data(&self) -> Vec<usize> {
        let is_data = |at: &usize| {
            let zero = match self.range(*at).1 as u64 {
                CHUNK => *ZEROS,
                len => zeros(len),
            };
            self.chunks[*at] != zero
        };
        (0..self.chunks.len()).filter(is_data).collect()
    }

    /// The chunks of a file of this length whose content differs from the list.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read.
    pub(super) fn wrong_chunks(&self, file: &File) -> io::Result<Vec<usize>> {
        let mut wrong = Vec::new();
        for (at, sum) in self.chunks.iter().enumerate() {
            if sum_of_chunk(file, self.bytes, at as u64)? != *sum {
                wrong.push(at);
            }
        }
        Ok(wrong)
    }
}

pub(super) fn sum_of(bytes: &[u8]) -> Sum {
    Sha256::digest(bytes).into()
}

fn range(bytes: u64, chunk: u64) -> (u64, usize) {
    let begin = chunk * CHUNK;
    // At most `CHUNK`.
    let len = usize::try_from(bytes.saturating_sub(begin).min(CHUNK)).unwrap_or(0);
    (begin, len)
}

fn zeros(len: u64) -> Sum {
    sum_of(&vec![0; usize::try_from(len).unwrap_or(0)])
}

fn sum_of_chunk(file: &File, bytes: u64, chunk: u64) -> io::Result<Sum> {
    let (begin, len) = range(bytes, chunk);
    if len as u64 == CHUNK && is_hole(file, begin, len)? {
        return Ok(*ZEROS);
    }
    let mut bytes = vec![0; len];
    file.read_exact_at(&mut bytes, begin)?;
    Ok(sum_of(&bytes))
}

/// Whether there is no data in a range. A file that has become shorter is an error.
fn is_hole(file: &File, begin: u64, len: usize) -> io::Result<bool> {
    let end = begin + len as u64;
    let is_hole = match lseek(file, begin.cast_signed(), Whence::SeekData) {
        Ok(data) => data.cast_unsigned() >= end,
        Err(Errno::ENXIO) => true,
        Err(why) => return Err(why.into()),
    };
    if is_hole && file.metadata()?.len() < end {
        // A file that has become shorter has no data there either.
        return Err(ErrorKind::UnexpectedEof.into());
    }
    Ok(is_hole)
}

pub(super) fn read_chunk(file: &File, begin: u64, len: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; len];
    file.read_exact_at(&mut bytes, begin)?;
    Ok(bytes)
}
