//! The console log: what the guest printed, bounded.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Put at the start of a log that began anew.
const MARKER: &[u8] = b"[console log was full and began anew]\n";

/// A file that keeps the guest's last words and never more than its limit. When it is full it starts
/// again with a marker line, so that the newest bytes are always there.
#[derive(Debug)]
pub struct ConsoleLog {
    file: File,
    limit: u64,
    len: u64,
}

impl ConsoleLog {
    /// Logs into `file`, which is emptied, at most `limit` bytes; less than the marker is taken as the
    /// marker's length.
    ///
    /// # Errors
    /// The file cannot be truncated.
    pub fn new(file: File, limit: u64) -> io::Result<Self> {
        file.set_len(0)?;
        let limit = limit.max(MARKER.len().try_into().unwrap_or(u64::MAX));
        let len = 0;
        Ok(Self { file, limit, len })
    }

    /// Appends what the guest printed. An error of the file is dropped: a full disk must not stop a VM.
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
