//! The console log: the guest's console output in a file of limited size.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// First line of a log that was restarted.
const MARKER: &[u8] = b"[console log was full and restarted]\n";

/// A file with the guest's latest console output. When it reaches its limit it is truncated and restarted with a marker
/// line, so that it always contains the newest bytes.
#[derive(Debug)]
pub struct ConsoleLog {
    file: File,
    limit: u64,
    len: u64,
}

impl ConsoleLog {
    /// Truncates `file` and logs into it. `limit` is the largest size in bytes; a limit shorter than the marker is
    /// raised to the marker's length.
    ///
    /// # Errors
    /// Returns an error if the file cannot be truncated.
    pub fn new(file: File, limit: u64) -> io::Result<Self> {
        file.set_len(0)?;
        let limit = limit.max(MARKER.len().try_into().unwrap_or(u64::MAX));
        let len = 0;
        Ok(Self { file, limit, len })
    }

    /// Appends console output. I/O errors are ignored: a full disk must not stop the VM.
    pub fn write(&mut self, bytes: &[u8]) {
        for piece in bytes.chunks(4096) {
            if self.len + as_u64(piece) > self.limit {
                self.restart();
            }
            self.append(piece);
        }
    }

    fn restart(&mut self) {
        if self.file.set_len(0).is_ok() {
            self.len = 0;
            self.append(MARKER);
        }
    }

    fn append(&mut self, bytes: &[u8]) {
        let room = usize::try_from(self.limit - self.len).unwrap_or(usize::MAX);
        let bytes = &bytes[..bytes.len().min(room)];
        if self.file.write_all_at(bytes, self.len).is_ok() {
            self.len += as_u64(bytes);
        }
    }
}

fn as_u64(bytes: &[u8]) -> u64 {
    u64::try_from(bytes.len()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_log_keeps_the_newest_bytes_within_its_limit() {
        let file = tempfile::tempfile().unwrap();
        let mut log = ConsoleLog::new(file.try_clone().unwrap(), 100).unwrap();
        for line in 0..1000 {
            log.write(format!("line {line}\n").as_bytes());
            assert!(file.metadata().unwrap().len() <= 100);
        }
        let text = {
            let mut bytes = vec![0; usize::try_from(file.metadata().unwrap().len()).unwrap()];
            file.read_exact_at(&mut bytes, 0).unwrap();
            String::from_utf8(bytes).unwrap()
        };
        assert!(text.starts_with("[console log was full"));
        assert!(text.ends_with("line 999\n"));
        log.write(&[b'x'; 10_000]);
        assert!(file.metadata().unwrap().len() <= 100);
    }
}
