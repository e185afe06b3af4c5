//! Finds in the log of a server that the run started why its pool stays empty.

use std::{
    fs::File,
    io::{BufRead, BufReader, Read},
    path::Path,
};

use envd::guest_text;

/// Maximum bytes of a line; a longer line counts as several.
const LINE: u64 = 64 << 10;
/// The server will not retry.
const REFUSED: &str = "cannot use an installed template";
/// The server retries with growing pauses.
const FAILED: [&str; 2] = ["cannot make a warm slot", "a job failed"];
/// Consecutive failed attempts after which the pool is considered impossible to fill.
const MOST_FAILED: u32 = 3;

/// Warnings and errors in a log. Each line is read once. Lines that appear during a wait are printed to standard
/// error.
#[derive(Debug, Default)]
pub struct Complaints {
    /// Positioned at the first unread byte.
    log: Option<BufReader<File>>,
    /// Beginning of a line that is not complete yet.
    rest: Vec<u8>,
    refused: Option<String>,
    failed: u32,
    last: Option<String>,
    /// Whether the lines being read were written during the current wait, so that they are printed.
    are_new: bool,
}

impl Complaints {
    /// Opens the log. If it cannot be opened, there are no complaints.
    pub(crate) fn of(log: &Path) -> Self {
        Self {
            log: File::open(log).ok().map(BufReader::new),
            ..Self::default()
        }
    }

    /// Begins a wait. An older refusal still counts; failed attempts count only from now on.
    pub(super) fn begin_wait(&mut self) {
        self.are_new = false;
        self.read();
        self.failed = 0;
        self.are_new = true;
    }

    /// Reads all lines completed since the last call.
    pub(super) fn read(&mut self) {
        while let Some(line) = self.next_line() {
            self.line(String::from_utf8_lossy(&line).trim_end());
        }
    }

    /// `None` at the end of the log and after an error; the next call reads the rest.
    fn next_line(&mut self) -> Option<Vec<u8>> {
        let log = self.log.as_mut()?;
        let room = LINE.saturating_sub(self.rest.len() as u64);
        let read = log.take(room).read_until(b'\n', &mut self.rest).ok()?;
        let is_complete = self.rest.ends_with(b"\n") || read as u64 == room;
        is_complete.then(|| std::mem::take(&mut self.rest))
    }

    fn line(&mut self, line: &str) {
        let level = [" WARN ", " ERROR "]
            .iter()
            .find(|level| line.contains(**level));
        let Some((_, text)) = level.and_then(|level| line.split_once(level)) else {
            return;
        };
        let text = guest_text(text);
        if self.are_new && self.last.as_ref() != Some(&text) {
            eprintln!("cube-bench: cube-api: {text}");
        }
        if text.contains(REFUSED) {
            self.refused = Some(text.clone());
        }
        self.failed += u32::from(FAILED.iter().any(|what| text.contains(what)));
        self.last = Some(text);
    }

    /// Why the pool will not fill. `warm` is the number of ready sandboxes: if it is not 0, the complaint concerns
    /// another template.
    pub(super) fn refusal(&self, warm: u32) -> Option<String> {
        if warm > 0 {
            return None;
        }
        if let Some(why) = &self.refused {
            return Some(format!("the server refuses the template: {why}"));
        }
        let why = self.last.as_ref().filter(|_| self.failed >= MOST_FAILED)?;
        Some(format!(
            "the server failed {} times to make a warm sandbox: {why}",
            self.failed
        ))
    }

    /// The last complaint as a suffix for an error; empty if there is none.
    pub(super) fn last(&self) -> String {
        let last = self.last.as_ref();
        last.map_or(String::new(), |text| {
            format!("; the server's last warning: {text}")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn a_refusal_is_found_as_soon_as_its_line_is_complete() {
        let mut log = tempfile::NamedTempFile::new().unwrap();
        let mut complaints = Complaints::of(log.path());
        complaints.begin_wait();
        write!(log, "2026-11-24T12:00:00Z  INFO pool: open\n2026 ERROR pool: no TAP\n2026 WARN pool: {REFUSED} te").unwrap();
        complaints.read();
        assert_eq!(complaints.refusal(0), None);
        assert_eq!(
            complaints.last(),
            "; the server's last warning: pool: no TAP"
        );
        writeln!(log, "mplate=\"base\" why=\"the memory is \u{1b}[31mshort\"").unwrap();
        complaints.read();
        let why = complaints.refusal(0).unwrap();
        assert!(
            why.contains("refuses the template") && why.contains("the memory is"),
            "{why}"
        );
        assert!(!why.contains('\u{1b}'), "{why}");
        assert_eq!(complaints.refusal(1), None);
        let mut failing = Complaints::default();
        for _ in 0..MOST_FAILED {
            assert_eq!(failing.refusal(0), None);
            failing.line("2026 WARN pool: a job failed error=\"no memory\"");
        }
        let why = failing.refusal(0).unwrap();
        assert!(
            why.contains("failed 3 times") && why.contains("no memory"),
            "{why}"
        );
        assert_eq!(failing.refusal(1), None);
        let mut none = Complaints::default();
        none.read();
        assert_eq!((none.refusal(0), none.last()), (None, String::new()));
    }

    #[test]
    fn each_line_is_read_once_and_those_before_a_wait_are_not_failures_of_it() {
        let mut log = tempfile::NamedTempFile::new().unwrap();
        let mut complaints = Complaints::of(log.path());
        let info = "2026 INFO pool: a sandbox was created\n".repeat(10_000);
        let failed = "2026 WARN pool: a job failed error=\"old\"\n".repeat(9);
        for n in 0..10 {
            // More lines per round than fit in a few buffers, with the reason at the end.
            write!(log, "{info}{failed}").unwrap();
            complaints.begin_wait();
            assert_eq!(complaints.failed, 0, "{n}: failures before the wait");
            complaints.read();
            assert_eq!(complaints.failed, 0, "{n}: old lines are not new later");
            let long = "x".repeat(1 << 20);
            write!(log, "{long}\n2026 WARN pool: a job failed {n}\n").unwrap();
            complaints.read();
            assert_eq!(complaints.failed, 1, "{n}: read to the end");
            assert!(complaints.last().ends_with(&format!("a job failed {n}")));
            complaints.read();
            assert_eq!(complaints.failed, 1, "{n}: once");
        }
        let all = log.as_file().metadata().unwrap().len();
        let mut at = complaints.log.unwrap();
        assert_eq!(std::io::Seek::stream_position(&mut at).unwrap(), all);
    }
}
