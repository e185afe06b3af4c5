//! `events.jsonl`: each event is written as soon as it arrives, so a crash of the harness loses at most the event in
//! progress. Nothing is synchronized to disk, so a crash of the host can lose more.
//!
//! Each line carries the hash of the line before it, and `manifest.json` holds the hash of the last line:
//!
//! ```text
//! {"prev":"000…","event":{"run_started":…}}
//!      ▲ hash of nothing
//! {"prev":"3f5…","event":{"systems":…}}
//!      ▲ hash of the line above
//! ```
//! An edited, removed or moved line breaks the chain, and readers refuse the record. Rewriting the whole chain changes
//! its last hash, so a published or signed last hash fixes the record.

use std::{
    fs::{self, File},
    io::{self, BufReader, Read, Write},
    path::{Path, PathBuf},
};

use ruzstd::decoding::StreamingDecoder;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::{
    event::{EVENTS_FORMAT, RunEvent, UNCHAINED_FORMAT},
    host::facts::ENVIRONMENT_FILE,
};

/// Name of the event file in the results directory of a run.
pub const EVENTS_FILE: &str = "events.jsonl";
/// Name of the event file of a published run, compressed with zstd.
pub const COMPRESSED_EVENTS_FILE: &str = "events.jsonl.zst";
/// Name of the file that [`Recorder::seal`] writes.
pub const MANIFEST_FILE: &str = "manifest.json";
/// Format of [`RunManifest`].
const MANIFEST_FORMAT: u32 = 1;
/// Hex digits of SHA-256 that a line carries: 128 bits, as a second line with the same hash cannot be found.
const LINK_DIGITS: usize = 32;
/// Beginning of the first line of a chained record.
const CHAINED: &[u8] = b"{\"prev\":";

/// Recorded events that cannot be written or read.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    #[error("cannot read or create {path}")]
    Io {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// A line other than the last is not an event.
    #[error("cannot parse line {line} of {path}")]
    Line {
        path: PathBuf,
        /// Line number from 1.
        line: usize,
        #[source]
        source: serde_json::Error,
    },
    /// The first event is missing, or has a format that this program cannot read.
    #[error(
        "{path} does not start with a recorded run of format {UNCHAINED_FORMAT} or {EVENTS_FORMAT}"
    )]
    Format { path: PathBuf },
    #[error(
        "line {line} of {path} does not carry the hash of the line before it: a line was edited, removed or moved after the run, so use the original record"
    )]
    Chain {
        path: PathBuf,
        /// Line number from 1.
        line: usize,
    },
    #[error(
        "{path} does not end as its {MANIFEST_FILE} says: the last lines were edited or removed after the run, so use the original record"
    )]
    End { path: PathBuf },
    #[error("{path} was changed after the run: use the original record")]
    Environment { path: PathBuf },
}

/// A line of `events.jsonl`.
#[derive(Serialize)]
struct Line<'a> {
    prev: &'a str,
    event: &'a RunEvent,
}

/// The same, read.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RecordedLine {
    prev: String,
    event: RunEvent,
}

/// The number of lines of a record and the hash of the last one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChainEnd {
    pub lines: u64,
    pub last: String,
}

impl Default for ChainEnd {
    fn default() -> Self {
        Self {
            lines: 0,
            last: "0".repeat(LINK_DIGITS),
        }
    }
}

impl ChainEnd {
    /// Adds a line, without its line feed.
    fn extend(&mut self, line: &[u8]) {
        self.lines += 1;
        self.last = sha256(line);
        self.last.truncate(LINK_DIGITS);
    }
}

/// Contents of `manifest.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct RunManifest {
    format: u32,
    /// The end of `events.jsonl`.
    events: ChainEnd,
    /// SHA-256 of `environment.json`; `None` if the run has none.
    environment_sha256: Option<String>,
}

/// The events of a run, and how far they are protected.
#[derive(Clone, Debug)]
pub struct Record {
    pub events: Vec<RunEvent>,
    /// SHA-256 of `events.jsonl`, uncompressed.
    pub sha256: String,
    /// `None` for records of format [`UNCHAINED_FORMAT`], which are not chained.
    pub chain: Option<ChainEnd>,
}

/// SHA-256 in 64 lower-case hex digits.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    model::hex(&Sha256::digest(bytes))
}

/// Appends events to a new `events.jsonl`, and is the only writer of this file.
#[derive(Debug)]
pub struct Recorder {
    dir: PathBuf,
    file: File,
    line: Vec<u8>,
    end: ChainEnd,
}

impl Recorder {
    /// Creates the file.
    ///
    /// # Errors
    /// Returns [`RecordError::Io`] if the file exists or cannot be created.
    pub fn create(dir: &Path) -> Result<Self, RecordError> {
        let path = dir.join(EVENTS_FILE);
        let file = File::create_new(&path).map_err(|source| RecordError::Io { path, source })?;
        Ok(Self {
            dir: dir.to_owned(),
            file,
            line: Vec::new(),
            end: ChainEnd::default(),
        })
    }

    /// Writes one event as a line, without buffering, so that other processes normally see only complete lines.
    ///
    /// # Errors
    /// Returns an error if the write fails, for example because the disk is full.
    pub fn append(&mut self, event: &RunEvent) -> io::Result<()> {
        self.line.clear();
        let line = Line {
            prev: &self.end.last,
            event,
        };
        serde_json::to_writer(&mut self.line, &line)?;
        self.end.extend(&self.line);
        self.line.push(b'\n');
        self.file.write_all(&self.line)
    }

    /// Writes `manifest.json` after the last event.
    ///
    /// # Errors
    /// Returns an error if `environment.json` exists and cannot be read, or if the manifest cannot be written.
    pub fn seal(self) -> io::Result<()> {
        let manifest = RunManifest {
            format: MANIFEST_FORMAT,
            events: self.end,
            environment_sha256: environment_hash(&self.dir)?,
        };
        let text = serde_json::to_string_pretty(&manifest)?;
        fs::write(self.dir.join(MANIFEST_FILE), text + "\n")
    }
}

/// SHA-256 of `environment.json`; `None` if the run has none.
fn environment_hash(dir: &Path) -> io::Result<Option<String>> {
    let text = read_optional(&dir.join(ENVIRONMENT_FILE))?;
    Ok(text.map(|text| sha256(&text)))
}

/// Reads a file; `None` if there is none.
pub(crate) fn read_optional(path: &Path) -> io::Result<Option<Vec<u8>>> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// The events file of a run, plain or compressed; `None` if the directory has neither.
#[must_use]
pub fn events_file(dir: &Path) -> Option<PathBuf> {
    let paths = [EVENTS_FILE, COMPRESSED_EVENTS_FILE].map(|name| dir.join(name));
    paths.into_iter().find(|path| path.exists())
}

/// Reads an events file, which is compressed if its name ends with `.zst`.
fn text_of(path: &Path) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    let mut file = BufReader::new(File::open(path)?);
    if path.extension().is_some_and(|ending| ending == "zst") {
        let mut decoder = StreamingDecoder::new(file).map_err(io::Error::other)?;
        decoder.read_to_end(&mut text)?;
    } else {
        file.read_to_end(&mut text)?;
    }
    Ok(text)
}

/// Reads the events of a run.
///
/// # Errors
/// Returns the errors of [`read_record`].
pub fn read(dir: &Path) -> Result<Vec<RunEvent>, RecordError> {
    Ok(read_record(dir)?.events)
}

/// Reads the events of a run, and verifies their chain. A last line that cannot be parsed is dropped, because a crash
/// can leave an incomplete line.
///
/// # Errors
/// Returns [`RecordError::Io`] if a file cannot be read, [`RecordError::Line`] for a damaged line before the last,
/// [`RecordError::Format`] if the first event is not the start of a run of this format, and [`RecordError::Chain`],
/// [`RecordError::End`] or [`RecordError::Environment`] if the record was changed after the run.
pub fn read_record(dir: &Path) -> Result<Record, RecordError> {
    Ok(read_with_text(dir)?.0)
}

/// Like [`read_record`], with the uncompressed text of `events.jsonl`.
pub(crate) fn read_with_text(dir: &Path) -> Result<(Record, Vec<u8>), RecordError> {
    let path = events_file(dir).unwrap_or_else(|| dir.join(EVENTS_FILE));
    let io_error = |source| RecordError::Io {
        path: path.clone(),
        source,
    };
    let text = text_of(&path).map_err(io_error)?;
    let record = parse(&text, &path)?;
    let Some(manifest) = read_manifest(dir)? else {
        return Ok((record, text));
    };
    if record.chain.as_ref() != Some(&manifest.events) {
        return Err(RecordError::End { path });
    }
    let path = dir.join(ENVIRONMENT_FILE);
    if environment_hash(dir).map_err(io_error)? != manifest.environment_sha256 {
        return Err(RecordError::Environment { path });
    }
    Ok((record, text))
}

/// `None` without a manifest: the run was killed, or is older than manifests.
fn read_manifest(dir: &Path) -> Result<Option<RunManifest>, RecordError> {
    let path = dir.join(MANIFEST_FILE);
    let read = || {
        let Some(text) = read_optional(&path)? else {
            return Ok(None);
        };
        let manifest: RunManifest = serde_json::from_slice(&text)?;
        if manifest.format != MANIFEST_FORMAT {
            let why = format!("format {} instead of {MANIFEST_FORMAT}", manifest.format);
            return Err(io::Error::other(why));
        }
        Ok(Some(manifest))
    };
    read().map_err(|source| RecordError::Io {
        path: path.clone(),
        source,
    })
}

/// Parses the text of an `events.jsonl`. `path` is for errors.
fn parse(text: &[u8], path: &Path) -> Result<Record, RecordError> {
    let path = || path.to_owned();
    let mut chain = text.starts_with(CHAINED).then(ChainEnd::default);
    let lines = text.strip_suffix(b"\n").unwrap_or(text);
    let lines: Vec<&[u8]> = lines.split(|byte| *byte == b'\n').collect();
    let mut events = Vec::with_capacity(lines.len());
    for (line, bytes) in (1..).zip(&lines) {
        let parsed = match &chain {
            None => serde_json::from_slice(bytes).map(|event| (event, None)),
            Some(_) => serde_json::from_slice::<RecordedLine>(bytes)
                .map(|recorded| (recorded.event, Some(recorded.prev))),
        };
        let (event, prev) = match parsed {
            Ok(parsed) => parsed,
            Err(_) if line == lines.len() => break,
            Err(source) => {
                let path = path();
                return Err(RecordError::Line { path, line, source });
            }
        };
        if let Some(chain) = &mut chain {
            if prev.as_ref() != Some(&chain.last) {
                let path = path();
                return Err(RecordError::Chain { path, line });
            }
            chain.extend(bytes);
        }
        events.push(event);
    }
    let format = match &chain {
        Some(_) => EVENTS_FORMAT,
        None => UNCHAINED_FORMAT,
    };
    match events.first() {
        Some(RunEvent::RunStarted(started)) if started.format == format => Ok(Record {
            events,
            sha256: sha256(text),
            chain,
        }),
        _ => Err(RecordError::Format { path: path() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        event::{EndReason, RunStarted},
        scenario,
    };

    fn started(format: u32) -> RunEvent {
        RunEvent::RunStarted(Box::new(RunStarted {
            format,
            scenario: scenario::parse("t", "").unwrap(),
            reproduce: "cube-bench run t.toml".into(),
            started_unix_ms: 0,
            at_ns: 1,
        }))
    }

    fn ended(at_ns: u64) -> RunEvent {
        RunEvent::RunEnded {
            why: EndReason::Complete,
            at_ns,
        }
    }

    /// A sealed record of five lines in a new directory.
    fn recorded() -> (tempfile::TempDir, Vec<String>) {
        let dir = tempfile::tempdir().unwrap();
        let mut recorder = Recorder::create(dir.path()).unwrap();
        recorder.append(&started(EVENTS_FORMAT)).unwrap();
        for at_ns in 2..6 {
            recorder.append(&ended(at_ns)).unwrap();
        }
        recorder.seal().unwrap();
        let text = fs::read_to_string(dir.path().join(EVENTS_FILE)).unwrap();
        let lines = text.lines().map(str::to_owned).collect();
        (dir, lines)
    }

    #[test]
    fn events_read_back_and_an_incomplete_last_line_is_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let mut recorder = Recorder::create(dir.path()).unwrap();
        recorder.append(&started(EVENTS_FORMAT)).unwrap();
        recorder.append(&ended(2)).unwrap();
        recorder
            .file
            .write_all(b"{\"prev\":\"0\",\"event\":{\"rou")
            .unwrap();
        let events = [started(EVENTS_FORMAT), ended(2)];
        assert_eq!(read(dir.path()).unwrap(), events);
        assert!(Recorder::create(dir.path()).is_err());
    }

    #[test]
    fn an_edited_removed_or_moved_line_is_found() {
        let (dir, lines) = recorded();
        assert_eq!((lines.len(), read(dir.path()).unwrap().len()), (5, 5));
        let fault = |change: &dyn Fn(&mut Vec<String>)| {
            let mut changed = lines.clone();
            change(&mut changed);
            fs::write(dir.path().join(EVENTS_FILE), changed.join("\n") + "\n").unwrap();
            match read(dir.path()) {
                Err(RecordError::Chain { line, .. }) => line,
                Err(RecordError::End { .. }) => 0,
                other => panic!("not found: {other:?}"),
            }
        };
        let edited = lines[2].replace("\"at_ns\":3", "\"at_ns\":9");
        assert_ne!(edited, lines[2]);
        assert_eq!(fault(&|l| l[2].clone_from(&edited)), 4);
        assert_eq!(fault(&|l| drop(l.remove(2))), 3);
        assert_eq!(fault(&|l| l.swap(2, 3)), 3);
        assert_eq!(fault(&|l| l.insert(3, lines[2].clone())), 4);
        // Only the manifest shows changes of the end.
        let last = lines[4].replace("\"at_ns\":5", "\"at_ns\":9");
        assert_eq!(fault(&|l| l[4].clone_from(&last)), 0);
        assert_eq!(fault(&|l| drop(l.pop())), 0);
        // Without hashes, a record is not the one that was sealed.
        let bare = serde_json::to_string(&started(UNCHAINED_FORMAT)).unwrap();
        assert_eq!(fault(&|l| *l = vec![bare.clone()]), 0);
        fs::write(dir.path().join(EVENTS_FILE), lines.join("\n") + "\n").unwrap();
        assert_eq!(read(dir.path()).unwrap().len(), 5, "the original");
        fs::write(dir.path().join(ENVIRONMENT_FILE), "{}").unwrap();
        let changed = read(dir.path());
        assert!(matches!(changed, Err(RecordError::Environment { .. })));
    }

    #[test]
    fn records_of_the_format_without_hashes_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let line = |format| serde_json::to_string(&started(format)).unwrap() + "\n";
        let path = dir.path().join(EVENTS_FILE);
        fs::write(&path, line(UNCHAINED_FORMAT)).unwrap();
        let record = read_record(dir.path()).unwrap();
        assert_eq!(record.events, [started(UNCHAINED_FORMAT)]);
        assert_eq!((record.chain, record.sha256.len()), (None, 64));
        // The hashes cannot be removed from a record.
        fs::write(&path, line(EVENTS_FORMAT)).unwrap();
        assert!(matches!(read(dir.path()), Err(RecordError::Format { .. })));
    }

    #[test]
    fn compressed_events_read_back_and_a_cut_file_is_an_error() {
        let (dir, lines) = recorded();
        fs::remove_file(dir.path().join(EVENTS_FILE)).unwrap();
        let level = ruzstd::encoding::CompressionLevel::Fastest;
        let text = lines.join("\n") + "\n";
        let compressed = ruzstd::encoding::compress_to_vec(text.as_bytes(), level);
        let path = dir.path().join(COMPRESSED_EVENTS_FILE);
        fs::write(&path, &compressed).unwrap();
        assert_eq!(read(dir.path()).unwrap().len(), 5);
        fs::write(&path, &compressed[..compressed.len() / 2]).unwrap();
        assert!(matches!(read(dir.path()), Err(RecordError::Io { .. })));
    }

    #[test]
    fn a_damaged_line_before_the_last_is_an_error_with_its_number() {
        let dir = tempfile::tempdir().unwrap();
        let first = serde_json::to_string(&started(UNCHAINED_FORMAT)).unwrap();
        let text = format!("{first}\nnonsense\n{first}\n");
        fs::write(dir.path().join(EVENTS_FILE), text).unwrap();
        assert!(matches!(
            read(dir.path()),
            Err(RecordError::Line { line: 2, .. })
        ));
        fs::write(dir.path().join(EVENTS_FILE), "").unwrap();
        assert!(matches!(read(dir.path()), Err(RecordError::Format { .. })));
    }
}
