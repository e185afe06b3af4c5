//! `events.jsonl`: each event is written as soon as it arrives, so a crash of the harness loses at most the event in
//! progress. Nothing is synchronized to disk, so a crash of the host can lose more.

use std::{
    fs::File,
    io::{self, BufRead, BufReader, Read, Write},
    path::{Path, PathBuf},
};

use ruzstd::decoding::StreamingDecoder;

use crate::event::{EVENTS_FORMAT, RunEvent};

/// Name of the event file in the results directory of a run.
pub const EVENTS_FILE: &str = "events.jsonl";
/// Name of the event file of a published run, compressed with zstd.
pub const COMPRESSED_EVENTS_FILE: &str = "events.jsonl.zst";

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
    #[error("{path} does not start with a recorded run of format {EVENTS_FORMAT}")]
    Format { path: PathBuf },
}

/// Appends events to a new `events.jsonl`, and is the only writer of this file.
#[derive(Debug)]
pub struct Recorder {
    file: File,
    line: Vec<u8>,
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
            file,
            line: Vec::new(),
        })
    }

    /// Writes one event as a line, without buffering, so that other processes normally see only complete lines.
    ///
    /// # Errors
    /// Returns an error if the write fails, for example because the disk is full.
    pub fn append(&mut self, event: &RunEvent) -> io::Result<()> {
        self.line.clear();
        serde_json::to_writer(&mut self.line, event)?;
        self.line.push(b'\n');
        self.file.write_all(&self.line)
    }
}

/// The events file of a run, plain or compressed; `None` if the directory has neither.
#[must_use]
pub fn events_file(dir: &Path) -> Option<PathBuf> {
    let paths = [EVENTS_FILE, COMPRESSED_EVENTS_FILE].map(|name| dir.join(name));
    paths.into_iter().find(|path| path.exists())
}

/// Opens an events file. Its name tells whether it is compressed.
fn open(path: &Path) -> io::Result<Box<dyn Read>> {
    let file = BufReader::new(File::open(path)?);
    if path.extension().is_some_and(|ending| ending == "zst") {
        let decoder = StreamingDecoder::new(file).map_err(io::Error::other)?;
        return Ok(Box::new(decoder));
    }
    Ok(Box::new(file))
}

/// Reads the events of a run. A last line that cannot be parsed is dropped, because a crash can leave an incomplete
/// line.
///
/// # Errors
/// Returns [`RecordError::Io`] if the file cannot be read, [`RecordError::Line`] for a damaged line before the
/// last, and [`RecordError::Format`] if the first event is not the start of a run of this format.
pub fn read(dir: &Path) -> Result<Vec<RunEvent>, RecordError> {
    let path = events_file(dir).unwrap_or_else(|| dir.join(EVENTS_FILE));
    let io_error = |source| RecordError::Io {
        path: path.clone(),
        source,
    };
    let events = open(&path).map_err(io_error)?;
    let lines: Vec<String> = BufReader::new(events)
        .lines()
        .collect::<Result<_, _>>()
        .map_err(io_error)?;
    let mut events = Vec::with_capacity(lines.len());
    for (index, line) in lines.iter().enumerate() {
        match serde_json::from_str(line) {
            Ok(event) => events.push(event),
            Err(_) if index + 1 == lines.len() => break,
            Err(source) => {
                return Err(RecordError::Line {
                    path,
                    line: index + 1,
                    source,
                });
            }
        }
    }
    match events.first() {
        Some(RunEvent::RunStarted(started)) if started.format == EVENTS_FORMAT => Ok(events),
        _ => Err(RecordError::Format { path }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        event::{EndReason, RunStarted},
        scenario,
    };

    fn started() -> RunEvent {
        RunEvent::RunStarted(Box::new(RunStarted {
            format: EVENTS_FORMAT,
            scenario: scenario::parse("t", "").unwrap(),
            reproduce: "cube-bench run t.toml".into(),
            started_unix_ms: 0,
            at_ns: 1,
        }))
    }

    #[test]
    fn events_read_back_and_an_incomplete_last_line_is_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let mut recorder = Recorder::create(dir.path()).unwrap();
        let ended = RunEvent::RunEnded {
            why: EndReason::Complete,
            at_ns: 2,
        };
        recorder.append(&started()).unwrap();
        recorder.append(&ended).unwrap();
        recorder.file.write_all(b"{\"attempt\":{\"rou").unwrap();
        assert_eq!(read(dir.path()).unwrap(), [started(), ended]);
        assert!(Recorder::create(dir.path()).is_err());
    }

    #[test]
    fn compressed_events_read_back_and_a_cut_file_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let line = serde_json::to_string(&started()).unwrap() + "\n";
        let level = ruzstd::encoding::CompressionLevel::Fastest;
        let compressed = ruzstd::encoding::compress_to_vec(line.as_bytes(), level);
        let path = dir.path().join(COMPRESSED_EVENTS_FILE);
        std::fs::write(&path, &compressed).unwrap();
        assert_eq!(read(dir.path()).unwrap(), [started()]);
        std::fs::write(&path, &compressed[..compressed.len() / 2]).unwrap();
        assert!(matches!(read(dir.path()), Err(RecordError::Io { .. })));
    }

    #[test]
    fn a_damaged_line_before_the_last_is_an_error_with_its_number() {
        let dir = tempfile::tempdir().unwrap();
        let first = serde_json::to_string(&started()).unwrap();
        let text = format!("{first}\nnonsense\n{first}\n");
        std::fs::write(dir.path().join(EVENTS_FILE), text).unwrap();
        assert!(matches!(
            read(dir.path()),
            Err(RecordError::Line { line: 2, .. })
        ));
        std::fs::write(dir.path().join(EVENTS_FILE), "").unwrap();
        assert!(matches!(read(dir.path()), Err(RecordError::Format { .. })));
    }
}
