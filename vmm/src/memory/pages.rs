//! Pages and ranges of guest memory.

/// Size of a page in bytes.
pub const PAGE: u64 = 4096;
pub(super) const PAGE_BYTES: usize = 4096;

/// Ranges of whole pages, each (offset, bytes).
pub type Ranges = Vec<(u64, u64)>;

/// The pages that a clone has touched since it was created.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WorkingSet {
    /// Pages that are private to the clone.
    pub own: Ranges,
    /// Blocks of 2 MiB with at least one page that the clone wrote or read, or that the host mapped with such a page.
    pub touched: Ranges,
}

/// Sorts the ranges and merges those that overlap or adjoin.
pub(super) fn united(mut ranges: Vec<(u64, u64)>) -> Vec<(u64, u64)> {
    ranges.sort_unstable();
    let mut united: Vec<(u64, u64)> = Vec::with_capacity(ranges.len());
    for (at, bytes) in ranges {
        match united.last_mut() {
            Some((start, n)) if *start + *n >= at => *n = (*n).max(at + bytes - *start),
            _ => united.push((at, bytes)),
        }
    }
    united
}

pub(super) fn extend(ranges: &mut Vec<(u64, u64)>, page: u64) {
    match ranges.last_mut() {
        Some((at, n)) if *at + *n == page => *n += PAGE,
        _ => ranges.push((page, PAGE)),
    }
}
