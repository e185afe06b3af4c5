//! The event log: segments of JSON lines in the state directory, `events/<first>.jsonl`, named after the number of
//! their first entry. Each starts with the sandboxes that were alive before its first entry, so the newest segment
//! alone is enough to continue. An incomplete last line, which a crash may leave, is cut off when the log is opened.
//!
//! Entries are not synced: they survive a crash of the server. After a crash of the host, the last ones may be missing.
//! The comparison of [`super::ledger`] recovers those that changed a sandbox's state.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, BufRead, BufReader, Read, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use pool::durable::private_dir;
use rest::LifecycleEvent;
use serde::{Deserialize, Serialize};

use super::ledger::{Alive, AliveMap};

const FORMAT: u32 = 1;
/// Maximum size of a segment before a new one starts, and the number and age beyond which the oldest segments are
/// removed.
const SEGMENT: u64 = 8 << 20;
const SEGMENTS: usize = 8;
const AGE: Duration = Duration::from_secs(7 * 24 * 3600);
/// Maximum length of a line that is read.
const MAX_LINE: u64 = 64 << 20;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Entry {
    /// Counts all entries, from 1.
    pub(super) number: u64,
    pub(super) event: LifecycleEvent,
    /// The sandbox after the event; `None` after its end.
    pub(super) alive: Option<Alive>,
}

#[derive(Serialize, Deserialize)]
struct Header {
    format: u32,
    alive: AliveMap,
}

#[derive(Debug)]
pub(super) struct Log {
    dir: PathBuf,
    file: File,
    size: u64,
    next: u64,
}

/// The past according to the log.
#[derive(Debug, Default)]
pub(super) struct Past {
    pub(super) alive: AliveMap,
    /// The latest entries, oldest first.
    pub(super) latest: Vec<Entry>,
}

impl Log {
    /// Opens the log and returns at most `most` of its latest entries. A segment that cannot be read is set aside, and
    /// the log continues without it.
    ///
    /// # Errors
    /// Returns an error if the directory cannot be read or written.
    pub(super) fn open(dir: &Path, most: usize) -> io::Result<(Self, Past)> {
        private_dir(dir)?;
        let (mut past, mut number, mut newest) = (Past::default(), 0, None);
        let mut latest = Vec::new();
        for path in segments(dir)? {
            let (header, entries, end) = match read(&path) {
                Ok(read) => read,
                Err(error) => {
                    tracing::error!(path = %path.display(), %error, "cannot read events: setting the file aside");
                    fs::rename(&path, path.with_extension("unreadable"))?;
                    continue;
                }
            };
            past.alive = header.alive;
            for entry in entries {
                number = number.max(entry.number);
                let id = entry.event.sandbox_id.clone();
                match entry.alive.clone() {
                    Some(alive) => past.alive.insert(id, alive),
                    None => past.alive.remove(&id),
                };
                latest.push(entry);
            }
            let excess = latest.len().saturating_sub(most);
            latest.drain(..excess);
            newest = Some((path, end));
        }
        past.latest = latest;
        let log = match newest {
            Some((path, end)) => {
                let file = OpenOptions::new().append(true).open(&path)?;
                file.set_len(end)?;
                Self {
                    dir: dir.to_owned(),
                    file,
                    size: end,
                    next: number + 1,
                }
            }
            None => Self::begin(dir, 1, &past.alive)?,
        };
        Ok((log, past))
    }

    fn begin(dir: &Path, next: u64, alive: &AliveMap) -> io::Result<Self> {
        let header = Header {
            format: FORMAT,
            alive: alive.clone(),
        };
        let mut line = serde_json::to_vec(&header)?;
        line.push(b'\n');
        let path = dir.join(format!("{next:020}.jsonl"));
        let mut file = OpenOptions::new()
            .append(true)
            .create(true)
            .mode(0o600)
            .open(path)?;
        // After a crash between the two steps, an empty file of this name may exist.
        file.set_len(0)?;
        file.write_all(&line)?;
        Ok(Self {
            dir: dir.to_owned(),
            file,
            size: line.len() as u64,
            next,
        })
    }

    /// The number of the next entry.
    pub(super) fn next(&self) -> u64 {
        self.next
    }

    /// Starts a new segment if the current one is full. `alive` are the current sandboxes. Call this before changing
    /// them, so that a crash before the entry is written is noticed.
    ///
    /// # Errors
    /// Returns an error if it cannot be written. The log then continues in the current segment.
    pub(super) fn roll(&mut self, alive: &AliveMap) -> io::Result<()> {
        if self.size < SEGMENT {
            return Ok(());
        }
        *self = Self::begin(&self.dir, self.next, alive)?;
        self.trim()
    }

    /// Writes an entry with the number [`Log::next`].
    ///
    /// # Errors
    /// Returns an error if it cannot be written. The log is then unchanged.
    pub(super) fn append(&mut self, entry: &Entry) -> io::Result<()> {
        let mut line = serde_json::to_vec(entry)?;
        line.push(b'\n');
        if let Err(error) = self.file.write_all(&line) {
            // Frees the space of an incomplete line, because the disk may be full.
            self.file.set_len(self.size)?;
            return Err(error);
        }
        self.size += line.len() as u64;
        self.next += 1;
        Ok(())
    }

    /// Removes the oldest segments if there are too many or if they are too old.
    fn trim(&self) -> io::Result<()> {
        let mut all = segments(&self.dir)?;
        all.pop();
        let excess = all.len().saturating_sub(SEGMENTS - 1);
        let now = SystemTime::now();
        for (at, path) in all.iter().enumerate() {
            let written = fs::metadata(path)?.modified()?;
            let is_old = now.duration_since(written).unwrap_or_default() > AGE;
            if at < excess || is_old {
                fs::remove_file(path)?;
            }
        }
        Ok(())
    }
}

/// Filter of entries to list.
#[derive(Clone, Debug)]
pub(super) struct Listing<'a> {
    pub(super) sandbox: Option<&'a str>,
    /// Empty: [`super::Kind::E2B`].
    pub(super) kinds: &'a [String],
    pub(super) offset: usize,
    pub(super) limit: usize,
    pub(super) is_ascending: bool,
    /// Unix nanoseconds. Older entries are not listed.
    pub(super) since_ns: u64,
}

/// Lists entries of the log in a directory, even while it is being written.
///
/// # Errors
/// Returns an error if the directory cannot be read.
pub(super) fn list(dir: &Path, listing: &Listing<'_>) -> io::Result<Vec<LifecycleEvent>> {
    let (mut found, mut skipped) = (Vec::new(), 0);
    let mut paths = segments(dir)?;
    if !listing.is_ascending {
        paths.reverse();
    }
    for path in paths {
        // A segment may be removed in the meantime.
        let Ok((_, mut entries, _)) = read_of(&path, listing.sandbox) else {
            continue;
        };
        if !listing.is_ascending {
            entries.reverse();
        }
        for Entry { event, .. } in entries {
            let is_of = listing.sandbox.is_none_or(|id| event.sandbox_id == id);
            let is_kind = if listing.kinds.is_empty() {
                super::Kind::of(&event.kind).is_some_and(super::Kind::is_e2b)
            } else {
                listing.kinds.contains(&event.kind)
            };
            if !is_of || !is_kind || event.timestamp.unix_ns() < listing.since_ns {
                continue;
            }
            if skipped < listing.offset {
                skipped += 1;
            } else if found.len() < listing.limit {
                found.push(event);
            } else {
                return Ok(found);
            }
        }
    }
    Ok(found)
}

/// The time of the oldest event that is still listed.
pub(super) fn kept_since_ns(now: SystemTime) -> u64 {
    let oldest = now.checked_sub(AGE).unwrap_or(SystemTime::UNIX_EPOCH);
    let since = oldest.duration_since(SystemTime::UNIX_EPOCH);
    u64::try_from(since.unwrap_or_default().as_nanos()).unwrap_or(u64::MAX)
}

/// The segments, oldest first.
fn segments(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.extension().is_some_and(|e| e == "jsonl") {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

fn read(path: &Path) -> io::Result<(Header, Vec<Entry>, u64)> {
    read_of(path, None)
}

/// The header, the entries whose lines contain a text, and the length of the complete lines.
fn read_of(path: &Path, text: Option<&str>) -> io::Result<(Header, Vec<Entry>, u64)> {
    let mut reader = BufReader::new(File::open(path)?);
    let (mut line, mut end) = (String::new(), 0);
    let mut next = |line: &mut String| -> io::Result<bool> {
        line.clear();
        (&mut reader).take(MAX_LINE).read_line(line)?;
        if !line.ends_with('\n') {
            return Ok(false);
        }
        end += line.len() as u64;
        Ok(true)
    };
    if !next(&mut line)? {
        return Err(io::Error::other("the header is incomplete"));
    }
    let header: Header = serde_json::from_str(&line)?;
    if header.format != FORMAT {
        let format = header.format;
        return Err(io::Error::other(format!("the file has format {format}")));
    }
    let mut entries = Vec::new();
    while next(&mut line)? {
        if text.is_none_or(|text| line.contains(text)) {
            entries.push(serde_json::from_str(&line)?);
        }
    }
    Ok((header, entries, end))
}
