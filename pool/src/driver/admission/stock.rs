//! The warm stock: the warm slots, what each template needs and has, and the time of the next fill.

mod supply;

pub(crate) use supply::{Memory, Supply};

use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

use library::{Library, template::Template};
use model::SandboxId;

use crate::driver::slots::Slots;
use crate::{
    config::PoolConfig,
    host,
    policy::{self, Budget, Callers, Foreground},
    sandbox::Priority,
    slot::Stage,
};

/// How often to check whether a fill has become possible without a report, for example because disk space was freed.
const POLL: Duration = Duration::from_millis(300);
/// Delay of a template's next fill after its first failed fill. It doubles with each further failure.
const BACKOFF: Duration = Duration::from_millis(500);
const LONGEST_BACKOFF: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub(in crate::driver) struct Stock {
    /// The configured budget.
    pub(in crate::driver) budget: Budget,
    /// The budget that is divided now. It is lower while sandboxes need the memory.
    pub(in crate::driver) present: Budget,
    /// Maximum number of concurrent fills.
    parallel: u32,
    /// The warm slots of each template, oldest first.
    warm: BTreeMap<String, VecDeque<SandboxId>>,
    /// By template.
    supplies: BTreeMap<String, Supply>,
    /// The supply of every other template.
    new: Supply,
    /// The callers that fills yield to.
    pub(in crate::driver) callers: Callers,
    last_fill_ns: u64,
    /// Whether the budget must be divided again.
    pub(in crate::driver) has_changed: bool,
    /// Time of the last division of the budget, in CLOCK_MONOTONIC nanoseconds.
    pub(in crate::driver) divided_ns: u64,
}

impl Stock {
    pub(in crate::driver) fn new(config: &PoolConfig, parallel: u32) -> Self {
        let half = || host::meminfo("MemTotal").unwrap_or(0) / 2;
        Self {
            budget: Budget {
                slots: config.warm_slots,
                bytes: config.warm_memory.map_or_else(half, |bytes| bytes.0),
            },
            present: Budget::default(),
            parallel,
            warm: BTreeMap::new(),
            supplies: BTreeMap::new(),
            new: Supply::default(),
            callers: Callers::new(parallel),
            last_fill_ns: 0,
            has_changed: true,
            divided_ns: 0,
        }
    }

    pub(in crate::driver) fn supply(&self, template: &str) -> &Supply {
        self.supplies.get(template).unwrap_or(&self.new)
    }

    pub(in crate::driver) fn supply_mut(&mut self, template: &str) -> &mut Supply {
        self.supplies.entry(template.to_owned()).or_default()
    }

    /// Removes the supply of a template that is being removed.
    pub(in crate::driver) fn forget(&mut self, template: &str) -> Option<Supply> {
        self.supplies.remove(template)
    }

    pub(in crate::driver) fn add(&mut self, template: &str, id: SandboxId) {
        let warm = self.warm.entry(template.to_owned()).or_default();
        warm.push_back(id);
    }

    pub(in crate::driver) fn remove(&mut self, id: &SandboxId) {
        for ids in self.warm.values_mut() {
            ids.retain(|other| other != id);
        }
        self.warm.retain(|_, ids| !ids.is_empty());
    }

    /// The warm slots of a template.
    pub(in crate::driver) fn warm(&self, template: &str) -> impl Iterator<Item = &SandboxId> {
        self.warm.get(template).into_iter().flatten()
    }

    pub(in crate::driver) fn oldest(&self, template: &str) -> Option<&SandboxId> {
        self.warm.get(template)?.front()
    }

    /// The slot to end if room is needed: the oldest warm slot of the template with the most warm slots.
    pub(in crate::driver) fn to_evict(&self) -> Option<&SandboxId> {
        self.warm.values().max_by_key(|ids| ids.len())?.front()
    }

    pub(in crate::driver) fn len(&self, template: &str) -> u32 {
        let warm = self.warm.get(template).map_or(0, VecDeque::len);
        u32::try_from(warm).unwrap_or(u32::MAX)
    }

    /// The warm slots that a template has beyond `most`, oldest first.
    pub(in crate::driver) fn surplus(&self, template: &str, most: u32) -> Vec<SandboxId> {
        let surplus = self.len(template).saturating_sub(most);
        self.warm(template)
            .take(usize::try_from(surplus).unwrap_or(0))
            .cloned()
            .collect()
    }

    /// Whether any template's warm stock is being refilled, or may have to be.
    pub(in crate::driver) fn wants_fills(&self) -> bool {
        self.has_changed || self.supplies.values().any(|supply| supply.refilling)
    }

    /// Decides for each template whether its warm stock must be refilled.
    pub(in crate::driver) fn review(&mut self, library: &Library, slots: &Slots) {
        let filling = filling(slots);
        // A job may have reported on a template after its removal.
        self.supplies.retain(|id, _| library.get(id).is_some());
        for (id, supply) in &mut self.supplies {
            let warm = self.warm.get(id).map_or(0, VecDeque::len);
            let stock = policy::Stock {
                warm: u32::try_from(warm).unwrap_or(u32::MAX),
                filling: filling.get(id.as_str()).copied().unwrap_or(0),
                low: supply.marks.low,
                high: supply.marks.high,
                refilling: supply.refilling,
            };
            supply.refilling = policy::refilling(&stock);
        }
    }

    /// The templates to fill next: those that are being refilled and are not backing off, the fewest warm slots first
    /// and spare slots last. Templates are loaded one at a time (`is_loading` if one is). Others that must be loaded
    /// wait, even after a load failed for lack of disk space, because clones that start from the disk would not share
    /// the huge pages.
    pub(in crate::driver) fn next_fills<'a>(
        &self,
        library: &'a Library,
        is_loading: bool,
        now_ns: u64,
    ) -> Vec<&'a Template> {
        let waits = |supply: &Supply| match supply.memory {
            Memory::Loading => true,
            Memory::OnDisk => supply.loads && (is_loading || now_ns < supply.load_not_before_ns),
            Memory::Loaded(_) | Memory::Unloadable => false,
        };
        let of = |template: &Template| self.supply(&template.info.id);
        let is_due =
            |supply: &Supply| supply.refilling && now_ns >= supply.not_before_ns && !waits(supply);
        let mut due: Vec<_> = library.iter().filter(|t| is_due(of(t))).collect();
        due.sort_by_key(|t| (of(t).is_spare, self.len(&t.info.id)));
        due
    }

    /// Whether a fill may begin, if there is room for it. `is_queued` is true if callers' requests are in the queue. A
    /// build does not count as a caller: its VM boots and is saved for seconds, at a low CPU weight, while users take
    /// slots.
    pub(in crate::driver) fn may_fill(&self, slots: &Slots, is_queued: bool, now_ns: u64) -> bool {
        let is_busy = slots.values().any(|entry| {
            let is_changing = matches!(
                entry.slot.stage,
                Stage::Starting | Stage::Resuming(_) | Stage::Pausing(_) | Stage::Snapshotting
            );
            is_changing && entry.record.priority == Priority::Normal
        });
        let since = |ns: u64| Duration::from_nanos(now_ns.saturating_sub(ns));
        let foreground = Foreground {
            waiting: is_busy || is_queued,
            busy_for: self.callers.busy_for(now_ns),
            since_fill: since(self.last_fill_ns),
            filling: slots.count(|stage| stage == Stage::Filling),
            max_filling: self.parallel,
        };
        policy::may_fill(&foreground)
    }

    /// Delay after which a fill may become possible without a report.
    pub(in crate::driver) fn look_again_in(&self, now_ns: u64) -> Duration {
        match self.callers.busy_for(now_ns) {
            Duration::ZERO => POLL,
            busy => busy.min(POLL),
        }
    }

    pub(in crate::driver) fn fill_begun(&mut self, now_ns: u64) {
        self.last_fill_ns = now_ns;
    }
}

/// Counts a failed fill of a template and delays its next fill. The delay grows with each failure.
pub(in crate::driver) fn fill_failed(supply: &mut Supply, now_ns: u64) {
    supply.not_before_ns = back_off(&mut supply.failures, now_ns);
}

/// Counts a load that failed for lack of disk space, and delays the template's next load. The delay grows with each
/// failure.
pub(in crate::driver) fn load_failed(supply: &mut Supply, now_ns: u64) {
    supply.load_not_before_ns = back_off(&mut supply.load_failures, now_ns);
}

fn back_off(failures: &mut u32, now_ns: u64) -> u64 {
    let delay = BACKOFF
        .saturating_mul(1 << (*failures).min(10))
        .min(LONGEST_BACKOFF);
    *failures += 1;
    now_ns + u64::try_from(delay.as_nanos()).unwrap_or(u64::MAX)
}

/// Counts the slots that are being filled, by template.
pub(in crate::driver) fn filling(slots: &Slots) -> BTreeMap<&str, u32> {
    let mut filling = BTreeMap::new();
    for entry in slots.values().filter(|e| e.slot.stage == Stage::Filling) {
        *filling
            .entry(entry.record.template.id.as_str())
            .or_default() += 1;
    }
    filling
}
