//! Pages and ranges of guest memory.

/// Bytes of a page.
pub const PAGE: u64 = 4096;
pub(super) const PAGE_BYTES: usize = 4096;

/// (offset, bytes) ranges of whole pages.
pub type Ranges = Vec<(u64, u64)>;

/// What a clone has touched since it was made.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WorkingSet {
    /// Pages that are its own.
    pub own: Ranges,
    /// Blocks of 2 MiB with a page that it wrote or read, or the host brought in with one.
    pub touched: Ranges,
}

/// Ranges that together say the same, in order and apart.
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
