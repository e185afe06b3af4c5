//! Pages of a build's log, as requested by clients. Pure.

use rest::{BuildLogEntry, LogLevel};

/// Maximum and default number of entries in one response.
pub const MAX_PAGE: usize = 100;

/// The entries from number `offset` on. A client continues from `offset` plus the number of entries it received. A page
/// with a `level` therefore covers the same range of entries as one without, but omits some.
#[must_use]
pub fn from_offset(
    all: &[BuildLogEntry],
    offset: usize,
    limit: usize,
    level: Option<LogLevel>,
) -> Vec<BuildLogEntry> {
    let page = all.iter().skip(offset).take(limit.min(MAX_PAGE));
    page.filter(|entry| is_of(entry, level)).cloned().collect()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the cursor on, oldest first.
    Forward,
    /// Up to the cursor, newest first.
    Backward,
}

/// The entries from the millisecond `cursor` on. `None` starts at the beginning or the end of the log, depending on the
/// direction.
#[must_use]
pub fn from_time(
    all: &[BuildLogEntry],
    cursor_unix_ms: Option<u64>,
    direction: Direction,
    limit: usize,
    level: Option<LogLevel>,
) -> Vec<BuildLogEntry> {
    let limit = limit.min(MAX_PAGE);
    let at_ms = |entry: &BuildLogEntry| entry.timestamp.unix_ns() / 1_000_000;
    let wanted = |entry: &&BuildLogEntry| is_of(entry, level);
    match direction {
        Direction::Forward => {
            let from = cursor_unix_ms.unwrap_or(0);
            let first = all.partition_point(|entry| at_ms(entry) < from);
            let entries = all[first..].iter().filter(wanted);
            entries.take(limit).cloned().collect()
        }
        Direction::Backward => {
            let to = cursor_unix_ms.unwrap_or(u64::MAX);
            let end = all.partition_point(|entry| at_ms(entry) <= to);
            let entries = all[..end].iter().rev().filter(wanted);
            entries.take(limit).cloned().collect()
        }
    }
}

/// Whether an entry has at least this level.
fn is_of(entry: &BuildLogEntry, level: Option<LogLevel>) -> bool {
    level.is_none_or(|least| entry.level >= least)
}

#[cfg(test)]
mod tests {
    use super::*;
    use envd::Timestamp;
    use proptest::prelude::*;

    /// Entries at these milliseconds; every third is an error.
    fn entries(times_ms: &[u64]) -> Vec<BuildLogEntry> {
        let entries = times_ms
            .iter()
            .enumerate()
            .map(|(number, at)| BuildLogEntry {
                timestamp: Timestamp::from_unix_ns(at * 1_000_000 + 5),
                message: number.to_string(),
                level: match number % 3 {
                    0 => LogLevel::Error,
                    _ => LogLevel::Info,
                },
                step: None,
            });
        entries.collect()
    }

    #[test]
    fn a_level_does_not_shift_offsets() {
        let all = entries(&[0; 6]);
        let errors = |offset| from_offset(&all, offset, 3, Some(LogLevel::Warn));
        assert_eq!(errors(0), [all[0].clone()]);
        assert_eq!(errors(3), [all[3].clone()]);
        assert_eq!(errors(4), []);
        assert_eq!(from_offset(&all, 7, 3, None), []);
        assert_eq!(
            from_offset(&entries(&[0; 200]), 0, 1000, None).len(),
            MAX_PAGE
        );
    }

    #[test]
    fn a_cursor_includes_its_millisecond_in_both_directions() {
        let all = entries(&[1, 2, 2, 3]);
        let of = |cursor, direction| {
            let page = from_time(&all, cursor, direction, 100, None);
            page.iter().map(|e| e.message.clone()).collect::<String>()
        };
        assert_eq!(of(Some(2), Direction::Forward), "123");
        assert_eq!(of(Some(2), Direction::Backward), "210");
        assert_eq!(of(None, Direction::Forward), "0123");
        assert_eq!(of(None, Direction::Backward), "3210");
        let errors = from_time(&all, None, Direction::Backward, 1, Some(LogLevel::Error));
        assert_eq!(errors, [all[3].clone()]);
    }

    proptest! {
        #[test]
        fn a_client_that_advances_by_what_it_got_reads_each_entry_once(count in 0_usize..40, limit in 1_usize..9) {
            let all = entries(&vec![0; count]);
            let mut read = Vec::new();
            loop {
                let page = from_offset(&all, read.len(), limit, None);
                if page.is_empty() {
                    break;
                }
                read.extend(page);
            }
            prop_assert_eq!(read, all);
        }
    }
}
