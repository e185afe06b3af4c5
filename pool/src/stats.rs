//! Metrics of a pool.

use std::collections::BTreeMap;

use library::{rebuilt::RebuildState, vmms::VmmId};
use netisolation::Counters;

/// Gauges, and counters since the pool was opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// Gauge: sandboxes that run.
    pub running: u32,
    /// Gauge: sandboxes that are on disk.
    pub paused: u32,
    /// Gauge: warm slots.
    pub warm: u32,
    /// Gauge: slots that are being filled.
    pub filling: u32,
    /// Gauge: slots that configuration and demand require, for all templates.
    pub warm_wanted: u32,
    /// Gauge: slots to which the stock is filled, for all templates. Less than `warm_wanted` if the budget is
    /// exhausted.
    pub warm_target: u32,
    /// Gauge: memory of warm slots and loaded templates, in bytes.
    pub warm_bytes: u64,
    /// Gauges: [`PoolConfig::warm_slots`], and the current limit on `warm_bytes`, which is lower while sandboxes need
    /// the memory.
    pub warm_limit: u32,
    pub warm_bytes_limit: u64,
    /// Gauges: all templates, and those whose memory is loaded.
    pub templates: u32,
    pub templates_loaded: u32,
    /// Gauges: number of templates whose memory is stored as a diff, disk space of these diffs in bytes, and size of
    /// the memory that they represent.
    pub memory_diffs: u32,
    pub memory_diff_bytes: u64,
    pub memory_diff_memory_bytes: u64,
    /// Templates that were used since the pool was opened, or have warm slots or loaded memory, by name, or by id if
    /// they have no name.
    pub stocks: BTreeMap<String, StockStats>,
    /// Creates served by a warm slot.
    pub warm_hits: u64,
    /// Creates for which a VM was made.
    pub warm_misses: u64,
    /// Creates, resumes, pauses, snapshots and forks that were refused for lack of memory, slots or disk space, or
    /// because of [`PoolConfig::max_saved`].
    pub refused: u64,
    /// The part of `refused` for lack of memory.
    pub refused_for_memory: u64,
    /// Resumes by traffic that waited for room on a full host.
    pub wakes_waited: u64,
    /// Failed jobs, by the part that failed.
    pub failed: BTreeMap<&'static str, u64>,
    /// Sandboxes whose VM exited on its own.
    pub died: u64,
    /// Gauge: memory in bytes that one more sandbox of the template with the largest need is expected to take.
    pub expected_bytes: u64,
    /// Gauges, in bytes: private memory of the running sandboxes as last measured, and memory that all slots are
    /// promised in addition to what they have.
    pub measured_bytes: u64,
    pub promised_bytes: u64,
    /// Gauge: memory for further sandboxes, in bytes. Zero while the host is short of memory.
    pub available_bytes: u64,
    /// Gauge: 0 if creates are admitted, 1 if the host is short of memory, 2 if sandboxes that grow are also stopped.
    pub pressure: u32,
    /// Gauge: sandboxes that are stopped until the host has memory.
    pub stopped: u32,
    /// Totals over the TAPs of all sandboxes since the pool was opened.
    pub network: Counters,
    /// Gauges: the uses of each kept VMM, including the current one.
    pub vmms: BTreeMap<VmmId, VmmUse>,
    /// Gauge: directories of `images`, one for each installed template and each old version of one that is in use.
    pub images: u32,
    /// Gauges: the installed templates, by name.
    pub installed: BTreeMap<String, Installed>,
    /// Templates that were rebuilt.
    pub rebuilt: u64,
    /// Rebuilds that failed.
    pub rebuilds_failed: u64,
}

/// The warm stock of one template: gauges, and counters since the pool was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StockStats {
    /// Slots that configuration and demand require.
    pub wanted: u32,
    /// Slots to which the stock is filled.
    pub target: u32,
    pub warm: u32,
    pub is_loaded: bool,
    /// Creates served by a warm slot.
    pub hits: u64,
    /// Creates for which a VM was made.
    pub misses: u64,
}

/// An installed template: the VMM of its new sandboxes, and whether it has been rebuilt with the current one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Installed {
    pub vmm: VmmId,
    pub state: RebuildState,
}

/// The uses of one VMM: VMs and files that must end or be migrated before the host is free of a bug in this VMM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VmmUse {
    /// Whether it is the VMM that the server was configured with.
    pub is_present: bool,
    /// VMs that run in it, warm slots included.
    pub running: u32,
    /// Sandboxes that are paused with their memory.
    pub paused: u32,
    /// Installed templates and snapshots.
    pub templates: u32,
}
