//! The answer to `GET /metrics`.

use serde::{Deserialize, Serialize};

/// What a sandbox uses at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Metrics {
    /// Wall-clock time in seconds since 1970.
    pub ts: u64,
    /// Processors.
    pub cpu_count: u32,
    /// Their use since the last answer, or since boot for the first one: 0 to 100, all processors together.
    pub cpu_used_pct: f32,
    /// Memory in bytes.
    pub mem_total: u64,
    /// Memory in bytes that is neither free nor could be at once.
    pub mem_used: u64,
    /// Memory in bytes that holds file content.
    pub mem_cache: u64,
    /// `mem_total` in MiB, rounded down.
    pub mem_total_mib: u64,
    /// `mem_used` in MiB, rounded down.
    pub mem_used_mib: u64,
    /// Bytes used on the root file system.
    pub disk_used: u64,
    /// Bytes of the root file system.
    pub disk_total: u64,
}
