//! The log file: JSON Lines, rotated by size.

use std::{
    collections::HashMap,
    ffi::OsString,
    fs::{self, File, OpenOptions, Permissions},
    io::{self, Write},
    os::unix::fs::{OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
};

use model::SandboxId;

/// A file is full at this size. There are at most two files.
const MAX_BYTES: u64 = 16 << 20;
/// A sandbox that has filled this fraction of a file writes no more to it, so that it cannot displace the events of
/// others.
const MAX_SHARE_DIVISOR: u64 = 16;
/// The file contains the names and addresses of sandboxes' peers.
const MODE: u32 = 0o600;

/// A file to which lines about sandboxes are appended.
#[derive(Debug)]
pub(crate) struct LogFile {
    path: PathBuf,
    file: File,
    bytes: u64,
    max_bytes: u64,
    /// Number of bytes that this process wrote to the current file, by sandbox.
    of_sandboxes: HashMap<SandboxId, u64>,
}

impl LogFile {
    /// Opens or creates the file, with mode 0600.
    ///
    /// # Errors
    /// Returns the errors of opening it.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        Self::with_limit(path, MAX_BYTES)
    }

    fn with_limit(path: &Path, max_bytes: u64) -> io::Result<Self> {
        let file = append_to(path)?;
        Ok(Self {
            bytes: file.metadata()?.len(),
            path: path.into(),
            file,
            max_bytes,
            of_sandboxes: HashMap::new(),
        })
    }

    /// Appends a complete line about a sandbox, or nothing. `line` has no newline.
    ///
    /// # Errors
    /// Returns `QuotaExceeded` if the sandbox has used its share of this file, or an error if writing or rotating
    /// fails.
    pub(crate) fn append(&mut self, sandbox: &SandboxId, mut line: Vec<u8>) -> io::Result<()> {
        line.push(b'\n');
        let length = u64::try_from(line.len()).unwrap_or(u64::MAX);
        if self.bytes > 0 && self.bytes.saturating_add(length) > self.max_bytes {
            self.rotate()?;
        }
        let used = self.of_sandboxes.get(sandbox).copied().unwrap_or(0);
        if used > 0 && used >= self.max_bytes / MAX_SHARE_DIVISOR {
            return Err(io::ErrorKind::QuotaExceeded.into());
        }
        if let Err(error) = self.file.write_all(&line) {
            // Removes the part of the line that was written before the error, for example on a full disk.
            self.file.set_len(self.bytes)?;
            return Err(error);
        }
        self.bytes += length;
        *self.of_sandboxes.entry(sandbox.clone()).or_default() += length;
        Ok(())
    }

    fn rotate(&mut self) -> io::Result<()> {
        let mut older = OsString::from(&self.path);
        older.push(".1");
        match fs::rename(&self.path, older) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            Ok(()) | Err(_) => {}
        }
        self.file = append_to(&self.path)?;
        self.bytes = 0;
        self.of_sandboxes.clear();
        Ok(())
    }
}

fn append_to(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new()
        .append(true)
        .create(true)
        .mode(MODE)
        .open(path)?;
    file.set_permissions(Permissions::from_mode(MODE))?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::tests::sandbox;

    /// A line of about 80 bytes that ends with a number.
    fn line(n: u16) -> Vec<u8> {
        format!("{:>80} {n}", "an event").into_bytes()
    }

    fn append(log: &mut LogFile, of: u16, n: u16) -> io::Result<()> {
        log.append(&sandbox(of), line(n))
    }

    #[test]
    fn a_full_file_is_renamed_and_logging_continues_after_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let (path, older) = (dir.path().join("log"), dir.path().join("log.1"));
        fs::write(&path, "").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        for n in 100..200 {
            let mut log = LogFile::with_limit(&path, 500).unwrap();
            append(&mut log, 1, n).unwrap();
        }
        let read = |path: &Path| fs::read_to_string(path).unwrap();
        assert!(read(&path).len() <= 500 && read(&older).len() <= 500);
        let both = read(&older) + &read(&path);
        let numbers = both
            .lines()
            .map(|line| line.split_whitespace().last().unwrap());
        let numbers: Vec<u16> = numbers.map(|n| n.parse().unwrap()).collect();
        let first = 200 - u16::try_from(numbers.len()).unwrap();
        assert!(
            numbers.len() > 4 && numbers == (first..200).collect::<Vec<_>>(),
            "{numbers:?}"
        );
        let mode = |path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&path), mode(&older)), (0o600, 0o600));
    }

    #[test]
    fn a_flood_from_one_sandbox_leaves_room_for_others() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let mut log = LogFile::with_limit(&path, 64_000).unwrap();
        append(&mut log, 1, 1).unwrap();
        let written = (0..10_000).filter(|n| append(&mut log, 2, *n).is_ok());
        let written = written.count();
        append(&mut log, 3, 30_003).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        assert_eq!(text.lines().count(), written + 2);
        assert!(text.ends_with(" 30003\n"));
        assert!(written > 10 && text.len() < 64_000 / 10, "{written}");
        // In the next file every sandbox has its share again.
        for n in 4..1000 {
            append(&mut log, n, n).unwrap();
        }
        append(&mut log, 2, 2).unwrap();
    }

    #[test]
    fn a_removed_directory_that_is_created_again_gets_a_new_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("below").join("log");
        let below = path.parent().unwrap();
        fs::create_dir(below).unwrap();
        let mut log = LogFile::with_limit(&path, 10).unwrap();
        append(&mut log, 1, 1).unwrap();
        fs::remove_dir_all(below).unwrap();
        assert!(append(&mut log, 1, 2).is_err());
        fs::create_dir(below).unwrap();
        append(&mut log, 1, 3).unwrap();
        assert!(fs::read_to_string(&path).unwrap().ends_with(" 3\n"));
    }
}
