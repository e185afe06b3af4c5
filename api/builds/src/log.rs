//! Build logs, written by the executor and read by clients while the build runs.
//!
//! An entry keeps its number for ever, because clients continue from the number of the last entry they have. A full log
//! therefore drops new entries, not old ones. The last part of its space is reserved for warnings and errors. A closed
//! log never changes.

use std::{
    io::{self, BufRead, Write},
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use envd::Timestamp;
use model::clock;
use rest::{BuildLogEntry, LogLevel};

use super::{
    plan::At,
    text::{MAX_MESSAGE, plain},
};

/// Limits for entries of all levels.
const MOST: Size = Size {
    entries: 50_000,
    bytes: 8 << 20,
};
/// Limits for warnings and errors.
const MOST_SEVERE: Size = Size {
    entries: MOST.entries + 1000,
    bytes: MOST.bytes + (1 << 20),
};
/// Estimated size of an entry without its message.
const OVERHEAD: usize = 64;
const FULL: &str = "the log of this build is full: only warnings and errors follow";

/// A handle to a log. Clones share the log.
#[derive(Clone, Debug, Default)]
pub struct BuildLog(Arc<Mutex<Entries>>);

#[derive(Debug, Default)]
struct Entries {
    all: Vec<BuildLogEntry>,
    size: Size,
    is_full: bool,
    is_closed: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Size {
    entries: usize,
    bytes: usize,
}

impl BuildLog {
    /// Adds an entry for each line of `message`, without control characters. Empty lines are left out. Does nothing if
    /// the log is closed or full.
    pub fn push(&self, level: LogLevel, at: At, message: &str) {
        let now = clock::unix_ns();
        let mut entries = self.entries();
        // Lines also end at a carriage return: progress bars overwrite their line.
        for line in message.split(['\n', '\r']) {
            let line = plain(line, MAX_MESSAGE);
            if !line.trim().is_empty() {
                entries.add(level, at, line, now);
            }
        }
    }

    /// Refuses entries from now on. Must be called before clients can see that the build has ended.
    pub fn close(&self) {
        self.entries().is_closed = true;
    }

    /// Runs `read` on all entries, oldest first.
    pub fn read<T>(&self, read: impl FnOnce(&[BuildLogEntry]) -> T) -> T {
        read(&self.entries().all)
    }

    /// The last `most` entries of a part of the build, oldest first.
    #[must_use]
    pub fn last_of(&self, at: At, most: usize) -> Vec<BuildLogEntry> {
        let step = at.to_string();
        let entries = self.entries();
        let of_part = entries
            .all
            .iter()
            .filter(|e| e.step.as_ref() == Some(&step));
        let skipped = of_part.clone().count().saturating_sub(most);
        of_part.skip(skipped).cloned().collect()
    }

    /// Writes the entries as lines of JSON.
    ///
    /// # Errors
    /// Returns the errors of `to`.
    pub fn write(&self, to: &mut impl Write) -> io::Result<()> {
        // A copy, so that pushes do not wait for the disk.
        for entry in self.read(<[_]>::to_vec) {
            serde_json::to_writer(&mut *to, &entry)?;
            to.write_all(b"\n")?;
        }
        to.flush()
    }

    /// Reads a closed log that [`BuildLog::write`] wrote. An incomplete last line is left out.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read.
    pub fn load(path: &Path) -> io::Result<Self> {
        let file = io::BufReader::new(std::fs::File::open(path)?);
        let mut entries = Entries::default();
        for line in file.lines() {
            let Ok(entry) = serde_json::from_str(&line?) else {
                break;
            };
            entries.all.push(entry);
        }
        entries.is_closed = true;
        Ok(Self(Arc::new(Mutex::new(entries))))
    }

    fn entries(&self) -> MutexGuard<'_, Entries> {
        // Entries are consistent after each statement that can panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entries {
    fn add(&mut self, level: LogLevel, at: At, message: String, unix_ns: u64) {
        let is_severe = level >= LogLevel::Warn;
        let limit = if is_severe { MOST_SEVERE } else { MOST };
        let after = Size {
            entries: self.size.entries + 1,
            bytes: self.size.bytes + message.len() + OVERHEAD,
        };
        if self.is_closed || (self.is_full && !is_severe) {
            return;
        }
        if after.entries > limit.entries || after.bytes > limit.bytes {
            if !self.is_full {
                self.is_full = true;
                self.add(LogLevel::Warn, at, FULL.to_owned(), unix_ns);
            }
            return;
        }
        self.size = after;
        // Times never go back, even if the clock is set, because readers can also continue from a time.
        let last = self.all.last().map_or(0, |last| last.timestamp.unix_ns());
        self.all.push(BuildLogEntry {
            timestamp: Timestamp::from_unix_ns(unix_ns.max(last)),
            message,
            level,
            step: Some(at.to_string()),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(log: &BuildLog) -> Vec<String> {
        log.read(|all| all.iter().map(|e| e.message.clone()).collect())
    }

    #[test]
    fn each_line_is_an_entry_of_its_step() {
        let log = BuildLog::default();
        log.push(
            LogLevel::Info,
            At::Step(2),
            "one\n\n\x1b[31mtwo\x1b[0m\rthree",
        );
        assert_eq!(messages(&log), ["one", "two", "three"]);
        assert!(log.read(|all| all.iter().all(|e| e.step.as_deref() == Some("2"))));
        log.push(LogLevel::Info, At::Finalize, "end");
        let last: Vec<_> = log.last_of(At::Step(2), 2);
        let last: Vec<_> = last.iter().map(|e| e.message.as_str()).collect();
        assert_eq!(last, ["two", "three"]);
    }

    #[test]
    fn a_closed_log_never_changes() {
        let log = BuildLog::default();
        log.push(LogLevel::Info, At::Base, "before");
        log.close();
        log.push(LogLevel::Error, At::Base, "after");
        assert_eq!(messages(&log), ["before"]);
    }

    #[test]
    fn a_full_log_keeps_its_entries_and_has_room_for_errors() {
        let log = BuildLog::default();
        let line = "x".repeat(MAX_MESSAGE);
        for _ in 0..=MOST.bytes / MAX_MESSAGE {
            log.push(LogLevel::Info, At::Base, &line);
        }
        let full = log.read(<[_]>::len);
        assert_eq!(log.read(|all| all[full - 1].message.clone()), FULL);
        log.push(LogLevel::Info, At::Base, "lost");
        log.push(LogLevel::Error, At::Base, "kept");
        assert_eq!(log.read(<[_]>::len), full + 1);
        for _ in 0..=(MOST_SEVERE.bytes - MOST.bytes) / MAX_MESSAGE {
            log.push(LogLevel::Error, At::Base, &line);
        }
        let bytes: usize = log.read(|all| all.iter().map(|e| e.message.len()).sum());
        assert!(bytes <= MOST_SEVERE.bytes + MAX_MESSAGE, "{bytes}");
    }

    #[test]
    fn a_log_is_the_same_after_a_restart() {
        let log = BuildLog::default();
        log.push(LogLevel::Warn, At::Step(1), "one");
        log.push(LogLevel::Info, At::Finalize, "two");
        let file = tempfile::NamedTempFile::new().unwrap();
        log.write(&mut file.as_file()).unwrap();
        file.as_file().write_all(b"{\"timestamp\":\"20").unwrap();
        let loaded = BuildLog::load(file.path()).unwrap();
        assert_eq!(loaded.read(<[_]>::to_vec), log.read(<[_]>::to_vec));
        loaded.push(LogLevel::Info, At::Base, "late");
        assert_eq!(loaded.read(<[_]>::len), 2);
    }

    #[test]
    fn times_never_go_back() {
        let mut entries = Entries::default();
        entries.add(LogLevel::Info, At::Base, "late".to_owned(), 2_000);
        entries.add(LogLevel::Info, At::Base, "early".to_owned(), 1_000);
        assert_eq!(entries.all[1].timestamp.unix_ns(), 2_000);
    }
}
