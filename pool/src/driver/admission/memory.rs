//! The memory ledger: the measured needs of sandboxes, and the free memory of the host.

use std::{collections::BTreeMap, time::Duration};

use library::Library;
use model::SandboxId;

use super::space::Disks;
use crate::driver::slots::Slots;
use crate::{
    config::PoolConfig,
    host,
    policy::{
        self, Decision, Estimate, HostMemory, KERNEL, Marks, Need, Pressure, Room, Sizes, UNKNOWN,
        margin,
    },
    slot::Stage,
    stats::PoolStats,
};

/// Maximum age of a MemAvailable reading for an admission.
const FRESH: Duration = Duration::from_millis(20);
/// Time until MemAvailable is read again if it cannot be read, in nanoseconds. Until then, nothing is admitted or stopped.
const UNREADABLE_NS: u64 = 100_000_000;
/// Maximum number of sandboxes that are measured per tick.
const MEASURED_AT_ONCE: usize = 64;
/// The same per reading while sandboxes that grow are stopped: about 2 ms.
const MEASURED_WHEN_FULL: usize = 256;
/// A sandbox that has grown by less than this since it was last measured is not growing, in bytes.
const GROWTH: u64 = 256 << 10;
/// The largest growth fades by this part per tick: half of it remains after six minutes.
const GROWTH_FADES: u64 = 512;
/// The largest growth counts as at most this part of the host's memory, so that one sandbox cannot close the host.
const GROWTH_PART: u64 = 16;

#[derive(Debug)]
pub(in crate::driver) struct MemoryLedger {
    reserve: u64,
    margin: u32,
    max_slots: u32,
    total: u64,
    marks: Marks,
    /// The measured sizes of each template whose sandboxes or warm slots have been measured.
    sizes: BTreeMap<String, Sizes>,
    /// The largest growth of one sandbox between two measurements, in bytes.
    largest_growth: u64,
    pub(in crate::driver) pressure: Pressure,
    /// Time of the next decision on the pressure (CLOCK_MONOTONIC).
    decide_at_ns: u64,
    /// MemAvailable in bytes, `None` if it cannot be read, and the time of the reading (CLOCK_MONOTONIC).
    available: Option<u64>,
    read_at_ns: u64,
    /// The last sandbox measured in this round. The next tick continues after it. `None` starts a new round.
    measured_up_to: Option<SandboxId>,
}

impl MemoryLedger {
    pub(in crate::driver) fn new(config: &PoolConfig, cpus: u32) -> Self {
        let (reserve, total) = (config.memory_reserve.0, host::meminfo("MemTotal"));
        let total = total.unwrap_or(0);
        Self {
            reserve,
            margin: config.memory_margin,
            max_slots: config.max_sandboxes,
            total,
            marks: Marks::new(reserve, total, cpus, config.memory_stalls),
            sizes: BTreeMap::new(),
            largest_growth: 0,
            pressure: Pressure::default(),
            decide_at_ns: 0,
            available: None,
            read_at_ns: 0,
            measured_up_to: None,
        }
    }

    /// Expected memory of a sandbox of this template.
    pub(in crate::driver) fn need(&self, template: &str) -> Need {
        self.sizes
            .get(template)
            .map(Sizes::need)
            .unwrap_or_default()
    }

    /// Updates the size of a template's warm slots from one that has become warm with `private` bytes.
    pub(in crate::driver) fn became_warm(&mut self, template: &str, private: u64) {
        let sizes = self.sizes.entry(template.to_owned()).or_default();
        sizes.warm(private);
    }

    fn read(&mut self, now_ns: u64) {
        self.available = host::meminfo("MemAvailable");
        self.read_at_ns = now_ns;
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
            self.read(now_ns);
        }
        let now = slots.clock.now();
        let unknown = Sizes::default();
        let (mut growth, mut variance, mut count) = (self.largest_growth(), 0_u128, 0_u32);
        for entry in slots.values().filter(|e| e.slot.takes_memory()) {
            count += 1;
            let sizes = self.sizes.get(&entry.record.template.id);
            let sizes = sizes.unwrap_or(&unknown);
            let expected = match entry.slot.stage {
                // A slot does not grow in these stages, so no memory is set aside for it.
                Stage::Warm | Stage::Ending | Stage::Pausing(_) | Stage::Stopping(_) => continue,
                Stage::Filling => Estimate {
                    mean: sizes.need().slot(std::iter::empty()),
                    variance: 0,
                },
                _ => sizes.at(entry.age(now)),
            };
            let lacks = match entry.private {
                Some(has) => expected.mean.saturating_sub(has),
                None => expected.mean.saturating_add(KERNEL),
            };
            growth = growth.saturating_add(lacks);
            variance = variance.saturating_add(expected.variance);
        }
        let room = Room {
            available: self.available.unwrap_or(0),
            reserve: self.reserve,
            pressure: self.pressure,
            promised: growth.saturating_add(margin(self.margin, variance)),
            variance,
            margin: self.margin,
            slots: count,
            max: self.max_slots,
            disk: disks.layers(slots),
            layer: disks.layer_share(),
            ..Room::default()
        };
        room.of(need)
    }

    fn largest_growth(&self) -> u64 {
        self.largest_growth.min(self.total / GROWTH_PART)
    }

    /// Decides how the host is defended, if it is time to.
    pub(in crate::driver) fn defend(&mut self, slots: &Slots, now_ns: u64) -> Option<Decision> {
        if now_ns < self.decide_at_ns {
            return None;
        }
        self.read(now_ns);
        self.decide_at_ns = now_ns + UNREADABLE_NS;
        let memory = HostMemory {
            available: self.available?,
            stalls: host::memory_stalls(),
            has_stopped: slots.values().any(|e| e.is_stopped),
        };
        let marks = self.marks.with_growth(self.largest_growth());
        let decision = policy::defend(self.pressure, &marks, memory);
        let again_ns = u64::try_from(decision.again.as_nanos()).unwrap_or(u64::MAX);
        self.decide_at_ns = now_ns.saturating_add(again_ns);
        Some(decision)
    }

    /// The time until the next decision.
    pub(in crate::driver) fn defend_in(&self, now_ns: u64) -> Duration {
        Duration::from_nanos(self.decide_at_ns.saturating_sub(now_ns))
    }

    /// Measures some of the running sandboxes, updates the sizes of their templates, and returns them.
    pub(in crate::driver) fn measure(
        &mut self,
        slots: &mut Slots,
        library: &Library,
    ) -> Vec<SandboxId> {
        self.largest_growth -= self.largest_growth.div_ceil(GROWTH_FADES);
        let measured = self.measure_next(slots, MEASURED_AT_ONCE, 0);
        let measured: Vec<_> = measured.into_iter().map(|(id, _)| id).collect();
        // What sandboxes take during the shortage must not become their promise: it would let them grow on.
        if self.pressure != Pressure::Full {
            self.estimate(slots, library, &measured);
        }
        measured
    }

    /// Measures more of the running sandboxes, and returns those that grow beyond what they were promised.
    pub(in crate::driver) fn growing(&mut self, slots: &mut Slots) -> Vec<SandboxId> {
        let now = slots.clock.now();
        let mut measured = self.measure_next(slots, MEASURED_WHEN_FULL, GROWTH);
        measured.retain(|(id, growth)| {
            *growth >= GROWTH
                && slots.get(id).is_some_and(|entry| {
                    let sizes = self.sizes.get(&entry.record.template.id);
                    let promised = sizes.map_or(UNKNOWN, |sizes| sizes.at(entry.age(now)).mean);
                    entry.private > Some(promised)
                })
        });
        measured.into_iter().map(|(id, _)| id).collect()
    }

    /// Measures at most `most` of the running sandboxes, and returns them with their growth. A growth of less than
    /// `least` is not recorded, so that it adds up.
    fn measure_next(
        &mut self,
        slots: &mut Slots,
        most: usize,
        least: u64,
    ) -> Vec<(SandboxId, u64)> {
        let mut running = slots.ids(|e| e.slot.stage == Stage::Running && !e.is_stopped);
        running.sort_unstable();
        let last = self.measured_up_to.take();
        let from = last.map_or(0, |last| running.partition_point(|id| *id <= last));
        let mut measured = Vec::new();
        for id in running.iter().skip(from).take(most) {
            let Some(entry) = slots.get_mut(id) else {
                continue;
            };
            let pid = entry.record.vmm.map_or(0, |vmm| vmm.pid);
            let Some(size) = host::private_bytes(pid) else {
                continue;
            };
            let growth = size.saturating_sub(entry.private.unwrap_or(size));
            if growth >= least {
                entry.private = Some(size);
            }
            self.largest_growth = self.largest_growth.max(growth);
            measured.push((id.clone(), growth));
        }
        if from + most < running.len() {
            self.measured_up_to = running.get(from + most - 1).cloned();
        }
        measured
    }

    /// Counts the sandboxes that have just been measured.
    fn estimate(&mut self, slots: &Slots, library: &Library, measured: &[SandboxId]) {
        let now = slots.clock.now();
        let running = slots.values().filter(|e| e.slot.stage == Stage::Running);
        let mut by_template: BTreeMap<&str, Vec<(Duration, u64)>> = running
            .map(|entry| (entry.record.template.id.as_str(), Vec::new()))
            .collect();
        for entry in measured.iter().filter_map(|id| slots.get(id)) {
            let sandboxes = by_template.entry(&entry.record.template.id).or_default();
            sandboxes.extend(entry.private.map(|size| (entry.age(now), size)));
        }
        // The sizes of a removed template are dropped when its last sandbox has stopped running.
        self.sizes
            .retain(|id, _| library.get(id).is_some() || by_template.contains_key(id.as_str()));
        for (id, sandboxes) in by_template {
            let sizes = self.sizes.entry(id.to_owned()).or_default();
            sizes.count(&sandboxes);
        }
    }

    /// Adds the metrics of the host's memory, given the room for another sandbox.
    pub(in crate::driver) fn add_stats(&self, room: &Room, slots: &Slots, stats: &mut PoolStats) {
        let needs = self.sizes.values().map(|sizes| sizes.need().expected);
        stats.expected_bytes = needs.max().unwrap_or(Need::default().expected);
        let running = slots.values().filter(|e| e.slot.stage == Stage::Running);
        stats.measured_bytes = running.filter_map(|e| e.private).sum();
        stats.promised_bytes = room.promised;
        stats.available_bytes = match room.pressure {
            Pressure::Calm => room.free(),
            Pressure::Tight | Pressure::Full => 0,
        };
        stats.pressure = match room.pressure {
            Pressure::Calm => 0,
            Pressure::Tight => 1,
            Pressure::Full => 2,
        };
        let stopped = slots.values().filter(|e| e.is_stopped).count();
        stats.stopped = u32::try_from(stopped).unwrap_or(u32::MAX);
    }
}
