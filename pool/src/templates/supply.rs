//! What the warm stock has recorded about a template, and decided for it.

use crate::{WarmMarks, policy::Creates};

#[derive(Debug, Default)]
pub(crate) struct Supply {
    pub(crate) creates: Creates,
    /// When a caller last got a sandbox of the template or of a diff of it, in CLOCK_MONOTONIC; `None` if none did since
    /// the pool was opened.
    pub(crate) used_ns: Option<u64>,
    /// Slots that configuration and demand ask for, before the budget is divided.
    pub(crate) wanted: u32,
    /// The marks of its stock, within the budget.
    pub(crate) marks: WarmMarks,
    /// Whether its memory may be loaded, within the budget.
    pub(crate) loads: bool,
    /// See [`crate::policy::Stock::refilling`].
    pub(crate) refilling: bool,
    /// Number of consecutive failed fills.
    pub(crate) failures: u32,
    /// No fill begins before this time (CLOCK_MONOTONIC).
    pub(crate) not_before_ns: u64,
    /// Creates that a warm slot served, and creates for which a VM was made.
    pub(crate) hits: u64,
    pub(crate) misses: u64,
}
