//! Access to the bytes of an unpacked layer.

use std::{fs::File, io, ops::Range, os::unix::fs::FileExt};

use nix::{
    errno::Errno,
    unistd::{Whence, lseek},
};

/// An unpacked layer with random access and a list of its holes.
pub trait Source {
    /// Size in bytes.
    fn size(&self) -> u64;

    /// Fills `buffer` from `offset`.
    ///
    /// # Errors
    /// Returns an error if the source ends before `buffer` is full.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;

    /// The parts of `range` that may contain non-zero bytes, sorted.
    ///
    /// # Errors
    /// Returns the errors of the file system.
    fn data(&self, range: Range<u64>) -> io::Result<Vec<Range<u64>>>;
}

impl Source for &[u8] {
    fn size(&self) -> u64 {
        self.len() as u64
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let begin = usize::try_from(offset).unwrap_or(usize::MAX);
        let bytes = begin
            .checked_add(buffer.len())
            .and_then(|end| self.get(begin..end));
        buffer.copy_from_slice(bytes.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn data(&self, range: Range<u64>) -> io::Result<Vec<Range<u64>>> {
        Ok(vec![range])
    }
}

/// A layer in a file whose size does not change.
#[derive(Debug)]
pub struct Unpacked {
    file: File,
    size: u64,
}

impl Unpacked {
    /// # Errors
    /// Returns an error if the size cannot be read.
    pub fn new(file: File) -> io::Result<Self> {
        let size = file.metadata()?.len();
        Ok(Self { file, size })
    }
}

impl Source for Unpacked {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.file.read_exact_at(buffer, offset)
    }

    fn data(&self, range: Range<u64>) -> io::Result<Vec<Range<u64>>> {
        let seek = |offset: u64, whence| {
            let offset = i64::try_from(offset).map_err(|_| Errno::EOVERFLOW)?;
            match lseek(&self.file, offset, whence) {
                Ok(found) => Ok(u64::try_from(found).unwrap_or(0)),
                // Only a hole up to the end of the file.
                Err(Errno::ENXIO) => Ok(self.size),
                Err(error) => Err(error),
            }
        };
        let (mut found, mut position) = (Vec::new(), range.start);
        while position < range.end {
            let begin = seek(position, Whence::SeekData)?;
            if begin >= range.end {
                break;
            }
            let end = seek(begin, Whence::SeekHole)?.min(range.end);
            found.push(begin..end);
            position = end;
        }
        Ok(found)
    }
}
