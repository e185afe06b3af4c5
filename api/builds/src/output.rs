//! Output of commands in the guest.

use envd::{Blob, ProcessEvent};
use rest::LogLevel;

use super::{guest::CommandError, log::BuildLog, plan::At};

/// Longest line in bytes. Longer lines are logged in parts.
const MAX_LINE: usize = 4096;
/// Maximum captured output of a builder's command, both streams together.
const MAX_CAPTURED: usize = 256 << 10;

/// Stream names in the log, indexed like [`Lines::begun`].
const STREAMS: [&str; 2] = ["stdout", "stderr"];
const STDERR: usize = 1;

/// Writes the lines of a command's output to the log of its build.
#[derive(Debug)]
pub(super) struct Lines {
    log: BuildLog,
    level: LogLevel,
    at: At,
    /// The part of the build that each line names: `builder 1/2`.
    prefix: String,
    /// Incomplete lines of standard output and standard error.
    begun: [Vec<u8>; 2],
}

impl Lines {
    pub(super) fn new(log: &BuildLog, level: LogLevel, at: At, prefix: &str) -> Self {
        Self {
            log: log.clone(),
            level,
            at,
            prefix: prefix.to_owned(),
            begun: [Vec::new(), Vec::new()],
        }
    }

    pub(super) fn add(&mut self, event: &ProcessEvent) {
        let Some(data) = &event.data else {
            return;
        };
        for (stream, bytes) in [&data.stdout, &data.stderr].into_iter().enumerate() {
            if let Some(Blob(bytes)) = bytes {
                self.add_bytes(stream, bytes);
            }
        }
    }

    pub(super) fn add_stderr(&mut self, bytes: &[u8]) {
        self.add_bytes(STDERR, bytes);
    }

    fn add_bytes(&mut self, stream: usize, bytes: &[u8]) {
        for piece in bytes.split_inclusive(|byte| matches!(byte, b'\n' | b'\r')) {
            for part in piece.chunks(MAX_LINE) {
                self.begun[stream].extend(part);
                let is_whole = matches!(part.last(), Some(b'\n' | b'\r'));
                if is_whole || self.begun[stream].len() >= MAX_LINE {
                    self.flush(stream);
                }
            }
        }
    }

    fn flush(&mut self, stream: usize) {
        let line = std::mem::take(&mut self.begun[stream]);
        let line = String::from_utf8_lossy(&line);
        let line = line.trim();
        if !line.is_empty() {
            let name = STREAMS[stream];
            let text = format!("[{}] [{name}]: {line}", self.prefix);
            self.log.push(self.level, self.at, &text);
        }
    }
}

impl Drop for Lines {
    fn drop(&mut self) {
        for stream in [0, 1] {
            self.flush(stream);
        }
    }
}

/// Captured output of a builder's command.
#[derive(Debug, Default)]
pub(super) struct Captured {
    pub(super) stdout: Vec<u8>,
    pub(super) stderr: Vec<u8>,
}

impl Captured {
    pub(super) fn add(&mut self, event: &ProcessEvent) -> Result<(), CommandError> {
        let Some(data) = &event.data else {
            return Ok(());
        };
        let parts = [
            (&mut self.stdout, &data.stdout),
            (&mut self.stderr, &data.stderr),
        ];
        for (kept, bytes) in parts {
            kept.extend(bytes.iter().flat_map(|Blob(bytes)| bytes));
        }
        if self.stdout.len() + self.stderr.len() > MAX_CAPTURED {
            return Err(CommandError::Output("its output is too long"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use envd::DataEvent;
    use proptest::prelude::*;

    use super::*;

    fn output(stdout: &[u8], stderr: &[u8]) -> ProcessEvent {
        let blob = |bytes: &[u8]| Some(Blob(bytes.to_vec())).filter(|b| !b.0.is_empty());
        ProcessEvent {
            data: Some(DataEvent {
                stdout: blob(stdout),
                stderr: blob(stderr),
                ..DataEvent::default()
            }),
            ..ProcessEvent::default()
        }
    }

    fn messages(log: &BuildLog) -> Vec<String> {
        log.read(|all| all.iter().map(|entry| entry.message.clone()).collect())
    }

    #[test]
    fn lines_name_their_step_and_stream_and_are_whole() {
        let log = BuildLog::default();
        let mut lines = Lines::new(&log, LogLevel::Info, At::Step(1), "builder 1/2");
        lines.add(&output(b"one\ntw", b""));
        lines.add(&output(b"", b"error"));
        lines.add(&output(b"o\n\n  three", b""));
        drop(lines);
        assert_eq!(
            messages(&log),
            [
                "[builder 1/2] [stdout]: one",
                "[builder 1/2] [stdout]: two",
                "[builder 1/2] [stdout]: three",
                "[builder 1/2] [stderr]: error",
            ]
        );
    }

    #[test]
    fn output_of_the_builders_own_commands_is_limited() {
        let mut captured = Captured::default();
        let half = vec![0; MAX_CAPTURED / 2];
        captured.add(&output(&half, &half)).unwrap();
        assert!(captured.add(&output(b"", b"x")).is_err());
    }

    proptest! {
        #[test]
        fn a_line_is_logged_the_same_in_any_pieces(
            text in "[a-c\n]{0,40}", cuts in proptest::collection::vec(1_usize..6, 0..30),
        ) {
            let log = BuildLog::default();
            let mut lines = Lines::new(&log, LogLevel::Info, At::Base, "x");
            let mut rest = text.as_bytes();
            for cut in cuts {
                let (piece, after) = rest.split_at(cut.min(rest.len()));
                lines.add(&output(piece, b""));
                rest = after;
            }
            lines.add(&output(rest, b""));
            drop(lines);
            let expected = text.lines().filter(|line| !line.is_empty());
            let expected: Vec<_> = expected.map(|line| format!("[x] [stdout]: {line}")).collect();
            prop_assert_eq!(messages(&log), expected);
        }

        #[test]
        fn held_bytes_are_bounded(len in 0_usize..3 * MAX_LINE) {
            let log = BuildLog::default();
            let mut lines = Lines::new(&log, LogLevel::Info, At::Base, "x");
            lines.add(&output(&vec![b'y'; len], b""));
            prop_assert!(lines.begun[0].len() <= MAX_LINE);
        }
    }
}
