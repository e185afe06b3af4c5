//! Combines consecutive writes.

use std::{fs::File, io, os::unix::fs::FileExt};

use super::BLOCK;

/// Number of bytes to combine before a write.
const GATHERED: usize = 1 << 20;

/// Writes to ascending offsets of an initially empty file. Short gaps are filled with zeros, long ones left as holes.
pub(super) struct Output<'a> {
    file: &'a File,
    /// File offset of `gathered`.
    offset: u64,
    gathered: Vec<u8>,
}

impl<'a> Output<'a> {
    pub(super) fn new(file: &'a File) -> Self {
        Self {
            file,
            offset: 0,
            gathered: Vec::with_capacity(2 * GATHERED),
        }
    }

    pub(super) fn put(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let end = self.offset + self.gathered.len() as u64;
        match offset.checked_sub(end) {
            Some(gap) if gap < BLOCK => {
                let filled = self.gathered.len() + usize::try_from(gap).unwrap_or(0);
                self.gathered.resize(filled, 0);
            }
            _ => {
                self.flush()?;
                self.offset = offset;
            }
        }
        self.gathered.extend(bytes);
        if self.gathered.len() >= GATHERED {
            self.flush()?;
        }
        Ok(())
    }

    pub(super) fn flush(&mut self) -> io::Result<()> {
        self.file.write_all_at(&self.gathered, self.offset)?;
        self.offset += self.gathered.len() as u64;
        self.gathered.clear();
        Ok(())
    }
}
