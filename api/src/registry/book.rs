//! All sandboxes and their deadlines, as data: the driver asks what is to be done and says what came of it.
//! No clock is read here and nothing is performed.

use std::{
    collections::{BTreeSet, HashMap, VecDeque},
    path::PathBuf,
    sync::Arc,
};

use model::SandboxId;
use pool::TemplateInfo;

use super::{
    View,
    lifecycle::{self, Ask, Change, Outcome, Phase, Rest, Verdict},
    note::{Note, UnixMs},
    sample::Sample,
    wakes::Wakes,
};

/// How long an automatic pause that failed is put off.
const RETRY_MS: u64 = 30_000;
/// Samples of one sandbox: half an hour at one each five seconds.
const MAX_SAMPLES: usize = 360;
/// Lines of one sandbox's life.
const MAX_EVENTS: usize = 256;

/// Where a sandbox's VM is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Vm {
    pub(super) vsock: PathBuf,
    pub(super) console: PathBuf,
    /// Counts VMs of this server; no two have the same.
    pub(super) generation: u64,
    pub(super) since: UnixMs,
}

/// Something that happened to a sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LifeEvent {
    /// When.
    pub at: UnixMs,
    /// What, for a person.
    pub what: String,
}

/// A sandbox.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) note: Arc<Note>,
    pub(super) template: Arc<TemplateInfo>,
    /// The last VM; a paused one's socket is dead.
    pub(super) vm: Vm,
    pub(super) samples: VecDeque<Sample>,
    pub(super) events: VecDeque<LifeEvent>,
    /// Resumes of it that failed.
    pub(super) wakes: Wakes,
    phase: Phase,
    /// When its deadline is looked at next: its end, or later if an automatic pause failed.
    due: UnixMs,
}

impl Entry {
    pub(super) fn phase(&self) -> Phase {
        self.phase
    }

    /// Whether clients see it as running: until a change has ended it is what it was.
    pub(super) fn rest(&self) -> Rest {
        match self.phase {
            Phase::At(rest) | Phase::Changing { from: rest, .. } => rest,
        }
    }

    pub(super) fn is_ending(&self) -> bool {
        let Phase::Changing { change, .. } = self.phase else {
            return false;
        };
        change == Change::End
    }

    /// It should have ended or paused, but a copy is being made of it or its automatic pause failed: for
    /// traffic it is over.
    fn is_overdue(&self, now: UnixMs) -> bool {
        let runs = match self.phase {
            Phase::At(rest) => rest == Rest::Running,
            Phase::Changing { change, from } => change == Change::Copy && from == Rest::Running,
        };
        runs && self.note.end_at <= now
    }

    pub(super) fn tell(&mut self, at: UnixMs, what: String) {
        if self.events.len() == MAX_EVENTS {
            self.events.pop_front();
        }
        self.events.push_back(LifeEvent { at, what });
    }

    pub(super) fn sample(&mut self, sample: Sample) {
        if self.samples.len() == MAX_SAMPLES {
            self.samples.pop_front();
        }
        self.samples.push_back(sample);
    }
}

/// All sandboxes.
#[derive(Debug, Default)]
pub(super) struct Book {
    entries: HashMap<SandboxId, Entry>,
    /// Each that is armed: running, nothing under way but a copy.
    deadlines: BTreeSet<(UnixMs, SandboxId)>,
}

impl Book {
    pub(super) fn insert(&mut self, view: View, vm: Vm) {
        let View {
            id,
            note,
            template,
            rest,
        } = view;
        let entry = Entry {
            due: note.end_at,
            note,
            template,
            vm,
            samples: VecDeque::new(),
            events: VecDeque::new(),
            wakes: Wakes::default(),
            phase: Phase::At(rest),
        };
        self.disarm(&id);
        self.entries.insert(id.clone(), entry);
        self.rearm(&id);
    }

    pub(super) fn get(&self, id: &SandboxId) -> Option<&Entry> {
        self.entries.get(id)
    }

    pub(super) fn get_mut(&mut self, id: &SandboxId) -> Option<&mut Entry> {
        self.entries.get_mut(id)
    }

    /// All that are not ending, in no order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&SandboxId, &Entry)> {
        self.entries.iter().filter(|(_, entry)| !entry.is_ending())
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// The verdict on an ask; a change that it starts is under way from here on.
    pub(super) fn ask(&mut self, id: &SandboxId, ask: Ask, now: UnixMs) -> Verdict {
        let Some(entry) = self.entries.get(id) else {
            return Verdict::NotThere;
        };
        if ask == Ask::Reach && entry.is_overdue(now) {
            return Verdict::NotThere;
        }
        let verdict = lifecycle::judge(entry.phase, ask, entry.note.habits());
        if let Verdict::Start(change) = verdict {
            self.start(id, change);
        }
        verdict
    }

    fn start(&mut self, id: &SandboxId, change: Change) {
        self.disarm(id);
        if let Some(entry) = self.entries.get_mut(id)
            && let Phase::At(from) = entry.phase
        {
            entry.phase = Phase::Changing { change, from };
        }
    }

    /// What came of the change under way. False: the sandbox is gone from the book.
    pub(super) fn done(&mut self, id: &SandboxId, outcome: Outcome, now: UnixMs) -> bool {
        let Some(entry) = self.entries.get_mut(id) else {
            return false;
        };
        let Phase::Changing { change, from } = entry.phase else {
            return true;
        };
        match lifecycle::after(change, from, outcome) {
            None => {
                self.remove(id);
                false
            }
            Some(rest) => {
                entry.phase = Phase::At(rest);
                match (rest, change) {
                    (Rest::Paused(_), Change::Pause(_)) => {
                        Arc::make_mut(&mut entry.note).end_at = now
                    }
                    (Rest::Running, Change::Pause(_)) if entry.note.end_at <= now => {
                        entry.due = now + RETRY_MS;
                    }
                    _ => {}
                }
                self.rearm(id);
                true
            }
        }
    }

    pub(super) fn remove(&mut self, id: &SandboxId) -> Option<Entry> {
        self.disarm(id);
        self.entries.remove(id)
    }

    /// Sets the deadline of a running sandbox.
    pub(super) fn set_end(&mut self, id: &SandboxId, end_at: UnixMs, timeout_s: u32) {
        self.disarm(id);
        if let Some(entry) = self.entries.get_mut(id) {
            let note = Arc::make_mut(&mut entry.note);
            note.end_at = end_at;
            note.timeout_s = timeout_s;
            entry.due = end_at;
        }
        self.rearm(id);
    }

    /// Moves the deadline of a running sandbox if that is later than it is. True: it was moved.
    pub(super) fn extend(&mut self, id: &SandboxId, timeout_s: u32, now: UnixMs) -> bool {
        let end_at = end_of(now, timeout_s);
        let is_later = self.get(id).is_some_and(|e| e.note.end_at < end_at);
        if is_later {
            self.set_end(id, end_at, timeout_s);
        }
        is_later
    }

    /// The sandboxes whose deadline has passed.
    pub(super) fn due(&self, now: UnixMs) -> Vec<SandboxId> {
        let passed = self.deadlines.iter().take_while(|(due, _)| *due <= now);
        passed.map(|(_, id)| id.clone()).collect()
    }

    /// When something becomes due.
    pub(super) fn next_due(&self) -> Option<UnixMs> {
        self.deadlines.first().map(|(due, _)| *due)
    }

    fn disarm(&mut self, id: &SandboxId) {
        if let Some(entry) = self.entries.get(id) {
            self.deadlines.remove(&(entry.due, id.clone()));
        }
    }

    fn rearm(&mut self, id: &SandboxId) {
        let Some(entry) = self.entries.get(id) else {
            return;
        };
        if entry.phase == Phase::At(Rest::Running) {
            self.deadlines.insert((entry.due, id.clone()));
        }
    }

    /// What must hold between any two calls.
    #[cfg(test)]
    pub(super) fn check_invariants(&self) {
        for (id, entry) in &self.entries {
            let armed = self.deadlines.contains(&(entry.due, id.clone()));
            let should = entry.phase == Phase::At(Rest::Running);
            assert_eq!(armed, should, "{id} is {:?}", entry.phase);
            assert!(entry.due >= entry.note.end_at || !should, "{id} ends early");
            assert!(entry.samples.len() <= MAX_SAMPLES && entry.events.len() <= MAX_EVENTS);
        }
        let running = self.entries.values();
        let running = running.filter(|e| e.phase == Phase::At(Rest::Running));
        assert_eq!(
            self.deadlines.len(),
            running.count(),
            "a deadline of nobody"
        );
    }
}

/// The end of a sandbox that lives for so long from now.
pub(super) fn end_of(now: UnixMs, timeout_s: u32) -> UnixMs {
    now.saturating_add(u64::from(timeout_s) * 1000)
}

#[cfg(test)]
mod tests;
