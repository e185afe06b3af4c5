//! The response to `GET /metrics`.

use serde::{Deserialize, Serialize};

/// Resource usage of a sandbox.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Metrics {
    /// Wall-clock time in seconds since 1970.
    pub ts: u64,
    pub cpu_count: u32,
    /// CPU usage since the previous request, or since boot for the first one: 0 to 100 for all vCPUs together.
    pub cpu_used_pct: f32,
    /// In bytes.
    pub mem_total: u64,
    /// In bytes, excluding memory that the kernel can reclaim immediately.
    pub mem_used: u64,
    /// Page cache in bytes.
    pub mem_cache: u64,
    /// `mem_total` in MiB, rounded down.
    pub mem_total_mib: u64,
    /// `mem_used` in MiB, rounded down.
    pub mem_used_mib: u64,
    /// Used bytes of the root file system.
    pub disk_used: u64,
    /// Size of the root file system in bytes.
    pub disk_total: u64,
}
