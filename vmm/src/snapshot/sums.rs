//! Lengths and SHA-256 checksums of a template's files.

use std::{
    fs::File,
    io::{self, Write},
    os::unix::fs::FileExt,
    path::Path,
};

use model::{FileSum, hex};
use sha2::{Digest, Sha256};

use super::error::{SnapshotError, at};
use crate::sys::length;

const BLOCK: u64 = 64 << 10;
const BLOCK_BYTES: usize = 64 << 10;

/// Length and SHA-256 of a file. `path` is for messages.
///
/// # Errors
/// Returns [`SnapshotError::File`] if the file cannot be read.
pub fn sum(file: &File, path: &Path) -> Result<FileSum, SnapshotError> {
    let mut hash = Sha256::new();
    let bytes = for_each_block(file, path, Holes::Read, |_, block| hash.update(block))?;
    Ok(FileSum {
        bytes,
        sha256: hex(&hash.finalize()),
    })
}

/// Length and checksum of a sparse file: SHA-256 over each 64 KiB block that is not all zero, preceded by its index
/// (little-endian u64). Holes are not read, and the checksum does not depend on how the file system stores zeros.
///
/// # Errors
/// Returns [`SnapshotError::File`] if the file cannot be read.
pub fn sparse_sum(file: &File, path: &Path) -> Result<FileSum, SnapshotError> {
    let mut hash = Sha256::new();
    let bytes = for_each_block(file, path, Holes::Skip, |index, block| {
        update(&mut hash, index, block);
    })?;
    Ok(FileSum {
        bytes,
        sha256: hex(&hash.finalize()),
    })
}

fn update(hash: &mut Sha256, index: u64, block: &[u8]) {
    if block.iter().any(|byte| *byte != 0) {
        hash.update(index.to_le_bytes());
        hash.update(block);
    }
}

/// A file that is hashed while it is written. The result equals the result of [`sparse_sum`].
#[derive(Debug)]
pub struct SummedFile {
    file: File,
    block: Vec<u8>,
    blocks: u64,
    hash: Sha256,
}

impl SummedFile {
    /// `file` must be empty.
    #[must_use]
    pub fn new(file: File) -> Self {
        Self {
            file,
            block: Vec::with_capacity(BLOCK_BYTES),
            blocks: 0,
            hash: Sha256::new(),
        }
    }

    /// Writes the last block and returns length and checksum.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub fn finish(mut self) -> io::Result<FileSum> {
        let bytes = self.blocks * BLOCK + self.block.len() as u64;
        self.write_block()?;
        Ok(FileSum {
            bytes,
            sha256: hex(&self.hash.finalize()),
        })
    }

    fn write_block(&mut self) -> io::Result<()> {
        update(&mut self.hash, self.blocks, &self.block);
        self.file.write_all(&self.block)?;
        self.blocks += 1;
        self.block.clear();
        Ok(())
    }
}

impl Write for SummedFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = bytes.len().min(BLOCK_BYTES - self.block.len());
        self.block.extend_from_slice(&bytes[..n]);
        if self.block.len() == BLOCK_BYTES {
            self.write_block()?;
        }
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[derive(PartialEq, Eq)]
enum Holes {
    Read,
    Skip,
}

/// Length and SHA-256 of a file with this content.
#[must_use]
pub fn sum_of(bytes: &[u8]) -> FileSum {
    FileSum {
        bytes: bytes.len() as u64,
        sha256: hex(&Sha256::digest(bytes)),
    }
}

/// Passes each block of 64 KiB with its index to `act`; the last block can be shorter. Returns the length of the file.
fn for_each_block(
    file: &File,
    path: &Path,
    holes: Holes,
    mut act: impl FnMut(u64, &[u8]),
) -> Result<u64, SnapshotError> {
    let bytes = length(file).map_err(at("read", path))?;
    let mut buffer = vec![0; BLOCK_BYTES];
    let mut index = 0;
    while index * BLOCK < bytes {
        if holes == Holes::Skip {
            match next_data(file, index * BLOCK).map_err(at("read", path))? {
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

/// Offset of the first data at or after `from`; `None` if only a hole follows.
fn next_data(file: &File, from: u64) -> io::Result<Option<u64>> {
    use nix::unistd::{Whence, lseek};
    match lseek(file, from.cast_signed(), Whence::SeekData) {
        Ok(at) => Ok(Some(at.cast_unsigned())),
        Err(nix::errno::Errno::ENXIO) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

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
        let of = |path| sparse_sum(&File::open(path).unwrap(), path).unwrap();
        assert_eq!(of(&full), of(&holes));
        bytes[700_001] = 1;
        fs::write(&full, &bytes).unwrap();
        assert_ne!(of(&full), of(&holes));
    }

    #[test]
    fn the_sum_while_writing_equals_the_sum_of_the_file() {
        let dir = tempfile::tempdir().unwrap();
        for len in [0, 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES, 200_000] {
            let path = dir.path().join(len.to_string());
            let mut bytes: Vec<_> = (0..len).map(|i| i.to_le_bytes()[1]).collect();
            // One block in the middle is all zero.
            bytes
                .iter_mut()
                .skip(BLOCK_BYTES)
                .take(BLOCK_BYTES)
                .for_each(|b| *b = 0);
            let mut file = SummedFile::new(File::create(&path).unwrap());
            for piece in bytes.chunks(4096) {
                file.write_all(piece).unwrap();
            }
            let written = File::open(&path).unwrap();
            assert_eq!(file.finish().unwrap(), sparse_sum(&written, &path).unwrap());
            assert_eq!(fs::read(&path).unwrap(), bytes);
        }
    }
}
