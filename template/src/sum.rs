//! Checksums of the files from which templates are made.

use std::{
    fs::File,
    io::{self, Read},
    os::unix::fs::FileExt,
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
};

use model::hex;
use nix::{
    errno::Errno,
    unistd::{Whence, lseek},
};
use sha2::{Digest, Sha256};

/// Block size in which sparse files are hashed.
const BLOCK: usize = 64 << 10;

/// SHA-256 of a file, in hex.
///
/// # Errors
/// Returns an error if the file cannot be read.
pub fn file_sum(path: &Path) -> io::Result<String> {
    sum(path).map_err(|e| cannot_read(path, &e))
}

fn cannot_read(path: &Path, why: &io::Error) -> io::Error {
    io::Error::new(why.kind(), format!("cannot read {}: {why}", path.display()))
}

fn sum(path: &Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        let n = file.read(&mut buffer)?;
        if n == 0 {
            return Ok(hex(&hash.finalize()));
        }
        hash.update(&buffer[..n]);
    }
}

/// SHA-256 over the length of a file and the offsets and contents of its blocks that are not zero. A layer has
/// gigabytes of holes; hashing their zeros would take longer than all other work.
///
/// # Errors
/// Returns an error if the file cannot be read.
pub fn sparse_sum(path: &Path) -> io::Result<String> {
    sparse_sum_unless(path, &AtomicBool::new(false))
}

/// Like [`sparse_sum`], but stops when `stop` is set, because a root image may take many seconds.
///
/// # Errors
/// Returns an error if the file cannot be read, and [`io::ErrorKind::Interrupted`] once `stop` is set.
pub fn sparse_sum_unless(path: &Path, stop: &AtomicBool) -> io::Result<String> {
    sum_of_data(path, stop).map_err(|e| cannot_read(path, &e))
}

fn sum_of_data(path: &Path, stop: &AtomicBool) -> io::Result<String> {
    let file = File::open(path)?;
    let length = file.metadata()?.len();
    let mut hash = Sha256::new();
    hash.update(length.to_le_bytes());
    let mut block = vec![0; BLOCK];
    let mut at = 0;
    while let Some(data) = next_data(&file, at)? {
        if stop.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::Interrupted.into());
        }
        at = data - data % BLOCK as u64;
        let n = file.read_at(&mut block, at)?;
        if block[..n].iter().any(|byte| *byte != 0) {
            hash.update(at.to_le_bytes());
            hash.update(&block[..n]);
        }
        at += BLOCK as u64;
    }
    Ok(hex(&hash.finalize()))
}

/// The offset of the next data at or after `at`. `None` if only a hole follows.
fn next_data(file: &File, at: u64) -> io::Result<Option<u64>> {
    let at = i64::try_from(at).map_err(io::Error::other)?;
    match lseek(file, at, Whence::SeekData) {
        Ok(data) => Ok(Some(u64::try_from(data).map_err(io::Error::other)?)),
        Err(Errno::ENXIO) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sparse_sum_depends_on_data_and_length_but_not_on_holes() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let sum = || sparse_sum(file.path()).unwrap();
        file.as_file().set_len(1 << 30).unwrap();
        let empty = sum();
        file.as_file().write_at(&[0; 4096], 1 << 20).unwrap();
        assert_eq!(sum(), empty);
        file.as_file().write_at(b"x", 5 << 20).unwrap();
        let one = sum();
        let stopped = sparse_sum_unless(file.path(), &AtomicBool::new(true)).unwrap_err();
        assert_eq!(stopped.kind(), io::ErrorKind::Interrupted);
        file.as_file().set_len(1 << 31).unwrap();
        let longer = sum();
        assert!(empty != one && one != longer);
    }
}
