//! What a server that the run started writes to its log while its pool is not full: the reason why it stays empty.

use std::{fs::File, io::Read, path::Path};

use api_types::guest_text;

/// Bytes that are read at once; a server that writes more is read the next time.
const CHUNK: u64 = 1 << 20;
/// The server will not try again.
const REFUSED: &str = "cannot use an installed template";
/// The server tries again, after longer and longer pauses.
const FAILED: [&str; 2] = ["cannot make a warm slot", "a job failed"];
/// Failed attempts in a row after which the pool will not be filled.
const MOST_FAILED: u32 = 3;

/// Warnings and errors of a log. Those that appear during a wait are printed to standard error.
pub(super) struct Complaints {
    log: Option<File>,
    /// The start of a line whose end is not written yet.
    rest: String,
    refused: Option<String>,
    failed: u32,
    last: Option<String>,
    /// Whether lines are of this wait, and are printed.
    are_new: bool,
}

impl Complaints {
    /// Begins a wait. A refusal may be older than it; of failed attempts, only those from now on count.
    pub(super) fn of(log: Option<&Path>) -> Self {
        let mut complaints = Self {
            log: log.and_then(|log| File::open(log).ok()),
            rest: String::new(),
            refused: None,
            failed: 0,
            last: None,
            are_new: false,
        };
        complaints.read();
        complaints.failed = 0;
        complaints.are_new = true;
        complaints
    }

    /// Reads what was written since the last time.
    pub(super) fn read(&mut self) {
        let Some(log) = &mut self.log else { return };
        let mut bytes = Vec::new();
        // After an error, the rest is read the next time.
        let _ = log.take(CHUNK).read_to_end(&mut bytes);
        self.rest.push_str(&String::from_utf8_lossy(&bytes));
        while let Some((line, rest)) = self.rest.split_once('\n') {
            let (line, rest) = (line.to_owned(), rest.to_owned());
            self.rest = rest;
            self.line(&line);
        }
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

    /// Why the pool will not be filled. `warm` is the number of sandboxes that are ready: with some, another template is
    /// meant.
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

    /// The last complaint, as a suffix of an error; empty without one.
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
        let mut complaints = Complaints::of(Some(log.path()));
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
        let mut failing = Complaints::of(None);
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
        writeln!(
            log,
            "{}",
            "2026 WARN pool: a job failed error=\"old\"\n".repeat(9)
        )
        .unwrap();
        let mut later = Complaints::of(Some(log.path()));
        later.refused = None;
        assert_eq!(
            later.refusal(0),
            None,
            "failures before the wait do not count"
        );
        let mut none = Complaints::of(None);
        none.read();
        assert_eq!((none.refusal(0), none.last()), (None, String::new()));
    }
}
