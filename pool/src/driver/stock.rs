//! The warm stock: which slots are warm, and when the next one is made.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

use model::SandboxId;

use super::slots::Slots;
use crate::{
    WarmMarks,
    policy::{self, Foreground, Room},
    slot::Stage,
    templates::{Template, Templates},
};

/// Delay of a template's next fill after a first failed fill; it doubles with each further failure.
const BACKOFF: Duration = Duration::from_millis(500);
const LONGEST_BACKOFF: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub(super) struct Stock {
    marks: WarmMarks,
    /// Maximum number of fills at the same time.
    parallel: u32,
    /// The warm slots of each template, oldest first.
    warm: BTreeMap<String, VecDeque<SandboxId>>,
    /// When a caller last requested or got a sandbox, in CLOCK_MONOTONIC.
    last_foreground_ns: u64,
    last_fill_ns: u64,
}

impl Stock {
    pub(super) fn new(marks: WarmMarks, parallel: u32) -> Self {
        Self {
            marks,
            parallel,
            warm: BTreeMap::new(),
            last_foreground_ns: 0,
            last_fill_ns: 0,
        }
    }

    pub(super) fn add(&mut self, template: &str, id: SandboxId) {
        let warm = self.warm.entry(template.to_owned()).or_default();
        warm.push_back(id);
    }

    pub(super) fn remove(&mut self, id: &SandboxId) {
        for ids in self.warm.values_mut() {
            ids.retain(|other| other != id);
        }
        self.warm.retain(|_, ids| !ids.is_empty());
    }

    pub(super) fn oldest(&self, template: &str) -> Option<&SandboxId> {
        self.warm.get(template)?.front()
    }

    /// The slot to end if room is needed: the oldest warm slot of the template that has the most.
    pub(super) fn to_evict(&self) -> Option<&SandboxId> {
        self.warm.values().max_by_key(|ids| ids.len())?.front()
    }

    pub(super) fn len(&self, template: &str) -> u32 {
        let warm = self.warm.get(template).map_or(0, VecDeque::len);
        u32::try_from(warm).unwrap_or(u32::MAX)
    }

    /// Records that a caller requested or got a sandbox. Fills then wait for a quiet moment.
    pub(super) fn yield_to_callers(&mut self, now_ns: u64) {
        self.last_foreground_ns = now_ns;
    }

    /// Whether any template's stock is being refilled.
    pub(super) fn wants_fills(&self, templates: &Templates) -> bool {
        templates.iter().any(|t| t.refilling)
    }

    /// Decides for every template whether its stock must be refilled.
    pub(super) fn review(&self, templates: &mut Templates, slots: &Slots) {
        if self.marks.high == 0 {
            return;
        }
        for id in templates.ids() {
            let stock = |refilling| policy::Stock {
                warm: self.len(&id),
                filling: filling(slots, Some(&id)),
                low: self.marks.low,
                high: self.marks.high,
                refilling,
            };
            if let Some(template) = templates.get_mut(&id).filter(|t| t.wanted) {
                template.refilling = policy::refilling(&stock(template.refilling));
            }
        }
    }

    /// The template to fill next: of those whose stock is being refilled and whose back-off is over, the one with the
    /// fewest warm slots.
    pub(super) fn next_fill<'a>(
        &self,
        templates: &'a Templates,
        now_ns: u64,
    ) -> Option<&'a Template> {
        let due = |t: &&Template| t.refilling && now_ns >= t.not_before_ns;
        templates
            .iter()
            .filter(due)
            .min_by_key(|t| self.len(&t.info.id))
    }

    /// Whether a fill may begin. `is_queued` is true if requests are in the queue.
    pub(super) fn may_fill(
        &self,
        room: &Room,
        slots: &Slots,
        is_queued: bool,
        now_ns: u64,
    ) -> bool {
        let is_busy = slots.count(|stage| {
            matches!(
                stage,
                Stage::Starting | Stage::Resuming(_) | Stage::Pausing(_) | Stage::Snapshotting
            )
        }) > 0;
        let since = |ns: u64| Duration::from_nanos(now_ns.saturating_sub(ns));
        let foreground = Foreground {
            waiting: is_busy || is_queued,
            quiet_for: since(self.last_foreground_ns),
            since_fill: since(self.last_fill_ns),
            filling: filling(slots, None),
            max_filling: self.parallel,
        };
        policy::may_fill(room, &foreground)
    }

    pub(super) fn fill_begun(&mut self, now_ns: u64) {
        self.last_fill_ns = now_ns;
    }
}

/// Counts a failed fill of a template and delays its next fill, longer after each failure.
pub(super) fn fill_failed(template: &mut Template, now_ns: u64) {
    let delay = BACKOFF
        .saturating_mul(1 << template.failures.min(10))
        .min(LONGEST_BACKOFF);
    template.failures += 1;
    template.not_before_ns = now_ns + u64::try_from(delay.as_nanos()).unwrap_or(u64::MAX);
}

/// Counts the slots that are being filled, of one template or of all.
fn filling(slots: &Slots, template: Option<&str>) -> u32 {
    let is_of = |id: &str| template.is_none_or(|wanted| wanted == id);
    let filling = slots
        .values()
        .filter(|e| e.slot.stage == Stage::Filling && is_of(&e.record.template.id));
    u32::try_from(filling.count()).unwrap_or(u32::MAX)
}
