//! Searches for texts in files and in the memory of processes.

use std::{
    fs::{self, File},
    io,
    ops::Range,
    os::{fd::AsFd, unix::fs::FileExt},
    path::{Path, PathBuf},
};

use base64::{Engine, engine::general_purpose::STANDARD_NO_PAD};
use memchr::memmem;
use nix::unistd::{Whence, lseek64};

use crate::process;

const CHUNK: usize = 4 << 20;

/// The texts to search for. All begin with the same prefix, so one pass finds all of them.
#[derive(Clone, Debug)]
pub(super) struct Needles {
    prefix: String,
    pub(super) secret: String,
    /// Planted in guest memory, on the disk, in metadata, in a name, and in the environment of the server.
    pub(super) canaries: [String; 5],
    /// The secret in base64, at each of the three alignments, and in hexadecimal.
    encoded: Vec<String>,
}

/// The forms of the secret to search for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Forms {
    /// Only unencoded: for gigabytes of memory and disk images.
    Plain,
    /// Also in base64 and hexadecimal.
    All,
}

/// Number of occurrences of each text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Hits {
    pub(super) secret: u64,
    pub(super) canaries: [u64; 5],
    /// The prefix, followed by other bytes.
    pub(super) other: u64,
}

impl Needles {
    /// `random` consists of hexadecimal digits that occur nowhere else.
    pub(super) fn new(random: &str) -> Self {
        // Valid as a label of a host name, as a header value, and as a file name.
        let prefix = format!("n{random}");
        let canary = |kind: &str| format!("{prefix}-{kind}");
        let secret = format!("{prefix}-secret");
        let hex = secret.bytes().map(|byte| format!("{byte:02x}")).collect();
        let encoded = [0, 1, 2].map(|before| in_base64(&secret, before));
        Self {
            encoded: encoded.into_iter().chain([hex]).collect(),
            secret,
            canaries: ["memory", "disk", "note", "name", "env"].map(canary),
            prefix,
        }
    }

    pub(super) fn count(&self, bytes: &[u8], hits: &mut Hits) {
        self.count_before(Forms::All, bytes, bytes.len(), hits);
    }

    /// Counts the texts that begin before `end`.
    fn count_before(&self, forms: Forms, bytes: &[u8], end: usize, hits: &mut Hits) {
        for at in memmem::find_iter(bytes, &self.prefix).take_while(|at| *at < end) {
            let rest = &bytes[at..];
            let is = |text: &String| rest.starts_with(text.as_bytes());
            if is(&self.secret) {
                hits.secret += 1;
            } else if let Some(kind) = self.canaries.iter().position(is) {
                hits.canaries[kind] += 1;
            } else {
                hits.other += 1;
            }
        }
        let encoded = match forms {
            Forms::Plain => &[][..],
            Forms::All => &self.encoded,
        };
        for text in encoded {
            let found = memmem::find_iter(bytes, text).take_while(|at| *at < end);
            hits.secret += found.count() as u64;
        }
    }

    fn longest(&self) -> usize {
        let texts = self
            .canaries
            .iter()
            .chain(&self.encoded)
            .chain([&self.secret]);
        let lengths = texts.map(String::len);
        lengths.max().unwrap_or(0)
    }

    /// Counts in a range of a file. Stops at the end of the file and at unreadable parts.
    fn count_range(&self, forms: Forms, file: &File, from: u64, to: u64, hits: &mut Hits) {
        let (mut buffer, mut filled, mut at) = (vec![0; CHUNK], 0, from);
        while at < to {
            let room = usize::try_from(to - at).unwrap_or(CHUNK);
            let room = room.min(CHUNK - filled);
            let Ok(read @ 1..) = file.read_at(&mut buffer[filled..filled + room], at) else {
                break;
            };
            at += read as u64;
            filled += read;
            // A text that begins near the end may continue in the next part.
            let counted = filled.saturating_sub(self.longest());
            self.count_before(forms, &buffer[..filled], counted, hits);
            buffer.copy_within(counted..filled, 0);
            filled -= counted;
        }
        self.count_before(forms, &buffer[..filled], filled, hits);
    }

    /// Counts in a file, skipping its holes.
    pub(super) fn count_file(&self, forms: Forms, path: &Path, hits: &mut Hits) -> io::Result<()> {
        let file = File::open(path)?;
        let length = i64::try_from(file.metadata()?.len()).map_err(io::Error::other)?;
        let mut at = 0;
        while at < length {
            // ENXIO: the rest is a hole.
            let Ok(data) = lseek64(file.as_fd(), at, Whence::SeekData) else {
                break;
            };
            let hole = lseek64(file.as_fd(), data, Whence::SeekHole).unwrap_or(length);
            let bound = |offset: i64| u64::try_from(offset).unwrap_or(0);
            self.count_range(forms, &file, bound(data), bound(hole), hits);
            at = hole;
        }
        Ok(())
    }

    /// Counts in all memory that a dump of the process would contain.
    pub(super) fn count_memory(&self, pid: u32, hits: &mut Hits) -> io::Result<()> {
        let memory = File::open(format!("/proc/{pid}/mem"))?;
        for mapping in process::mappings(pid)? {
            if mapping.rights.starts_with('r') {
                let Range { start, end } = mapping.range;
                self.count_range(Forms::Plain, &memory, start, end, hits);
            }
        }
        Ok(())
    }
}

/// The characters that the text alone determines in the base64 form of a message, if `before` bytes (modulo 3)
/// precede it.
fn in_base64(text: &str, before: usize) -> String {
    let message = [&vec![0; before], text.as_bytes()].concat();
    let encoded = STANDARD_NO_PAD.encode(&message);
    let (first, last) = ((before * 8).div_ceil(6), message.len() * 8 / 6);
    encoded[first..last].to_owned()
}

/// All files below a directory. A file removed in the meantime is skipped.
pub(super) fn files_below(dir: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    let mut dirs = vec![dir.to_owned()];
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => dirs.push(entry.path()),
                Ok(kind) if kind.is_file() => files.push(entry.path()),
                _ => {}
            }
        }
    }
    files
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_found_in_files_across_parts_and_in_memory() {
        let needles = Needles::new("0123456789abcdef0123");
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a").join("memory");
        fs::create_dir(path.parent().unwrap()).unwrap();
        let file = File::create(&path).unwrap();
        // Across the end of the first part, after a hole, and at the end of the file.
        let places = [0, CHUNK - 7, CHUNK + 100, 64 << 20];
        for place in places {
            file.write_at(needles.secret.as_bytes(), place as u64)
                .unwrap();
        }
        file.write_at(needles.canaries[1].as_bytes(), (65 << 20) + 3)
            .unwrap();
        let mut hits = Hits::default();
        for file in files_below(dir.path()) {
            needles.count_file(Forms::All, &file, &mut hits).unwrap();
        }
        assert_eq!(
            (hits.secret, hits.canaries, hits.other),
            (4, [0, 1, 0, 0, 0], 0)
        );
        let mut hits = Hits::default();
        needles.count(b"n0123456789abcdef0123-other", &mut hits);
        assert_eq!(hits.other, 1);
        for before in ["", "a", "ab", "abc"] {
            let mut hits = Hits::default();
            let message = format!("{before}{}, and more", needles.secret);
            needles.count(STANDARD_NO_PAD.encode(message).as_bytes(), &mut hits);
            assert_eq!((hits.secret, hits.other), (1, 0), "{before:?}");
        }
        let mut hits = Hits::default();
        needles.count_memory(std::process::id(), &mut hits).unwrap();
        assert!(hits.secret > 0);
    }
}
