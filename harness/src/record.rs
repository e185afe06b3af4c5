//! `events.jsonl`: appended and flushed event by event, so that a crash keeps what was measured.

use std::{
    fs::File,
    io::{self, BufRead, BufReader, Write},
    path::{Path, PathBuf},
};

use crate::event::{EVENTS_FORMAT, RunEvent};

/// Name of the file in a run's directory.
pub const EVENTS_FILE: &str = "events.jsonl";

/// Why events cannot be read back.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// The file cannot be read or written.
    #[error("cannot use {path}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// A line other than the last is no event.
    #[error("{path}, line {line}: not an event")]
    Line {
        /// The file.
        path: PathBuf,
        /// From 1.
        line: usize,
        /// The cause.
        #[source]
        source: serde_json::Error,
    },
    /// The first event does not say what was run, or says another format.
    #[error("{path} does not begin with a run of format {EVENTS_FORMAT}")]
    Format {
        /// The file.
        path: PathBuf,
    },
}

/// Appends events. The only writer of its file.
#[derive(Debug)]
pub struct Recorder {
    file: File,
    line: Vec<u8>,
}

impl Recorder {
    /// Creates the file; an existing one is an error.
    ///
    /// # Errors
    /// The file exists or cannot be made.
    pub fn create(dir: &Path) -> Result<Self, RecordError> {
        let path = dir.join(EVENTS_FILE);
        let file = File::create_new(&path).map_err(|source| RecordError::Io { path, source })?;
        Ok(Self {
            file,
            line: Vec::new(),
        })
    }

    /// Writes one line with one system call, so that it is either in the file or not.
    ///
    /// # Errors
    /// The disk is full or gone.
    pub fn append(&mut self, event: &RunEvent) -> io::Result<()> {
        self.line.clear();
        serde_json::to_writer(&mut self.line, event)?;
        self.line.push(b'\n');
        self.file.write_all(&self.line)
    }
}

/// Reads a run back. A torn last line, as a crash leaves it, is dropped.
///
/// # Errors
/// See [`RecordError`].
pub fn read(dir: &Path) -> Result<Vec<RunEvent>, RecordError> {
    let path = dir.join(EVENTS_FILE);
    let io_error = |source| RecordError::Io {
        path: path.clone(),
        source,
    };
    let file = File::open(&path).map_err(io_error)?;
    let lines: Vec<String> = BufReader::new(file)
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
    fn what_is_written_reads_back_and_a_torn_line_is_dropped() {
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
    fn a_broken_line_in_the_middle_is_named() {
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
