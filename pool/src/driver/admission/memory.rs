//! The memory ledger: the measured needs of sandboxes, and the free memory of the host.

use std::{collections::BTreeMap, time::Duration};

use library::Library;
use model::SandboxId;

use super::space::Disks;
use crate::driver::slots::Slots;
use crate::{
    config::PoolConfig,
    host,
    policy::{Need, Room},
    slot::Stage,
};

/// Maximum age of a MemAvailable reading.
const FRESH: Duration = Duration::from_millis(20);
/// Maximum number of sandboxes that are measured per tick.
const MEASURED_AT_ONCE: usize = 64;

#[derive(Debug)]
pub(in crate::driver) struct MemoryLedger {
    reserve: u64,
    max_slots: u32,
    /// Expected need of each template whose sandboxes or warm slots have been measured.
    needs: BTreeMap<String, Need>,
    /// MemAvailable in bytes, and the time of the reading (CLOCK_MONOTONIC).
    available: u64,
    read_at_ns: u64,
    /// The last sandbox measured in this round. The next tick continues after it. `None` starts a new round.
    measured_up_to: Option<SandboxId>,
}

impl MemoryLedger {
    pub(in crate::driver) fn new(config: &PoolConfig) -> Self {
        Self {
            reserve: config.memory_reserve.0,
            max_slots: config.max_sandboxes,
            needs: BTreeMap::new(),
            available: 0,
            read_at_ns: 0,
            measured_up_to: None,
        }
    }

    /// Expected memory of a sandbox of this template.
    pub(in crate::driver) fn need(&self, template: &str) -> Need {
        self.needs.get(template).copied().unwrap_or_default()
    }

    /// The largest need of any template, in bytes.
    pub(in crate::driver) fn largest_need(&self) -> u64 {
        let needs = self.needs.values().map(|need| need.expected);
        needs.max().unwrap_or(Need::default().expected)
    }

    /// Updates the need of a template from a slot that has become warm with `private` bytes.
    pub(in crate::driver) fn became_warm(&mut self, template: &str, private: u64) {
        let need = self.needs.entry(template.to_owned()).or_default();
        need.warm(private);
    }

    /// Host resources available to one more sandbox with this need.
    pub(in crate::driver) fn room_for(
        &mut self,
        need: Need,
        slots: &Slots,
        disks: &Disks,
        now_ns: u64,
    ) -> Room {
        if u128::from(now_ns.saturating_sub(self.read_at_ns)) > FRESH.as_nanos() {
            self.available = host::meminfo("MemAvailable").unwrap_or(0);
            self.read_at_ns = now_ns;
        }
        let mut promised = 0_u64;
        let mut count = 0_u32;
        for entry in slots.values().filter(|e| e.slot.takes_memory()) {
            count += 1;
            let own = self.need(&entry.record.template.id);
            let has = match entry.slot.stage {
                // A slot does not grow in these stages, so no memory is set aside for it.
                Stage::Warm | Stage::Ending | Stage::Pausing(_) | Stage::Stopping(_) => continue,
                Stage::Filling => own.expected.saturating_sub(own.warm_has),
                _ => entry.private.unwrap_or(0),
            };
            promised = promised.saturating_add(own.expected.saturating_sub(has));
        }
        Room {
            available: self.available,
            reserve: self.reserve,
            expected: need.expected,
            warm_has: need.warm_has,
            promised,
            slots: count,
            max: self.max_slots,
            disk: disks.layers(slots),
            layer: disks.layer_share(),
        }
    }

    /// Measures some of the running sandboxes, and updates the templates' needs from the latest measurements of all.
    pub(in crate::driver) fn measure(&mut self, slots: &mut Slots, library: &Library) {
        let mut running = slots.ids(|e| e.slot.stage == Stage::Running);
        running.sort_unstable();
        let last = self.measured_up_to.take();
        let from = last.map_or(0, |last| running.partition_point(|id| *id <= last));
        let round = running.iter().skip(from).take(MEASURED_AT_ONCE);
        for id in round {
            if let Some(entry) = slots.get_mut(id) {
                let pid = entry.record.vmm.map_or(0, |vmm| vmm.pid);
                entry.private = host::private_bytes(pid).or(entry.private);
            }
        }
        if from + MEASURED_AT_ONCE < running.len() {
            self.measured_up_to = running.get(from + MEASURED_AT_ONCE - 1).cloned();
        }
        self.estimate(slots, library);
    }

    fn estimate(&mut self, slots: &Slots, library: &Library) {
        let mut sizes: BTreeMap<String, Vec<u64>> = BTreeMap::new();
        for entry in slots.values().filter(|e| e.slot.stage == Stage::Running) {
            let of_template = sizes.entry(entry.record.template.id.clone()).or_default();
            of_template.extend(entry.private);
        }
        // The need of a removed template is dropped when its last sandbox has stopped running.
        self.needs
            .retain(|id, _| library.get(id).is_some() || sizes.contains_key(id));
        for (id, sizes) in sizes {
            self.needs.entry(id).or_default().leased(&sizes);
        }
    }
}
