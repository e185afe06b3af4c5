//! The table of all slots, their ordered deadlines, and the user ids of VMs.

use std::collections::{BTreeSet, HashMap, VecDeque};

use model::SandboxId;
use vmm_control::VmUser;

use super::entry::Entry;
use crate::{
    clock::Clock,
    error::PoolError,
    host,
    lifetime::UnixMs,
    message::SandboxRequest,
    slot::{Effects, Event, Stage, Unexpected, transition},
};

#[derive(Debug)]
pub(super) struct Slots {
    entries: HashMap<SandboxId, Entry>,
    /// The deadlines that [`crate::slot::Slot::due`] returns.
    deadlines: BTreeSet<(UnixMs, SandboxId)>,
    /// The user id at which the search for a free one begins.
    next_user: u32,
    /// Requests that waited for a change and must be decided again.
    ready: VecDeque<(SandboxId, SandboxRequest)>,
    /// The time to which deadlines refer.
    pub(super) clock: Clock,
    /// Number of times that a sandbox got a VM from this server, including adopted VMs.
    generations: u64,
}

/// A transition that was applied.
pub(super) struct Moved {
    pub(super) from: Stage,
    pub(super) to: Stage,
    pub(super) effects: Effects,
}

impl Slots {
    pub(super) fn new(found: Vec<(SandboxId, Entry)>, clock: Clock) -> Self {
        let random = host::random().map_or(0, u32::from_ne_bytes);
        let users = VmUser::POOL.end - VmUser::POOL.start;
        let mut slots = Self {
            generations: u64::try_from(found.len()).unwrap_or(u64::MAX),
            entries: HashMap::new(),
            deadlines: BTreeSet::new(),
            ready: VecDeque::new(),
            clock,
            // Random, so that another server on this host is unlikely to use the same user ids.
            next_user: VmUser::POOL.start + random % users,
        };
        for (id, entry) in found {
            slots.insert(id, entry);
        }
        slots
    }

    pub(super) fn insert(&mut self, id: SandboxId, entry: Entry) {
        if let Some(due) = entry.slot.due() {
            self.deadlines.insert((due, id.clone()));
        }
        self.entries.insert(id, entry);
    }

    pub(super) fn get(&self, id: &SandboxId) -> Option<&Entry> {
        self.entries.get(id)
    }

    /// For changes that affect neither the slot's stage nor its deadline. For others, see [`Slots::update`] and
    /// [`Slots::apply`].
    pub(super) fn get_mut(&mut self, id: &SandboxId) -> Option<&mut Entry> {
        self.entries.get_mut(id)
    }

    /// The entry of a slot that is a caller's sandbox. Returns [`PoolError::Refused`] with `NotFound` for any other
    /// slot.
    pub(super) fn leased(&self, id: &SandboxId) -> Result<&Entry, PoolError> {
        let entry = self.entries.get(id).filter(|e| e.slot.is_leased());
        entry.ok_or_else(|| PoolError::not_found(id))
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&SandboxId, &Entry)> {
        self.entries.iter()
    }

    pub(super) fn values(&self) -> impl Iterator<Item = &Entry> {
        self.entries.values()
    }

    /// Ids of the slots that `wanted` selects.
    pub(super) fn ids(&self, wanted: impl Fn(&Entry) -> bool) -> Vec<SandboxId> {
        let of = |(id, entry): (&SandboxId, &Entry)| wanted(entry).then(|| id.clone());
        self.entries.iter().filter_map(of).collect()
    }

    /// Counts the slots whose stage `wanted` selects.
    pub(super) fn count(&self, wanted: impl Fn(Stage) -> bool) -> u32 {
        let count = self.values().filter(|e| wanted(e.slot.stage)).count();
        u32::try_from(count).unwrap_or(u32::MAX)
    }

    pub(super) fn remove(&mut self, id: &SandboxId) -> Option<Entry> {
        let entry = self.entries.remove(id)?;
        if let Some(due) = entry.slot.due() {
            self.deadlines.remove(&(due, id.clone()));
        }
        Some(entry)
    }

    /// Changes an entry and updates the table of deadlines accordingly.
    pub(super) fn update<T>(
        &mut self,
        id: &SandboxId,
        change: impl FnOnce(&mut Entry) -> T,
    ) -> Option<T> {
        let entry = self.entries.get_mut(id)?;
        let before = entry.slot.due();
        let result = change(entry);
        let after = entry.slot.due();
        if before != after {
            if let Some(due) = before {
                self.deadlines.remove(&(due, id.clone()));
            }
            if let Some(due) = after {
                self.deadlines.insert((due, id.clone()));
            }
        }
        Some(result)
    }

    /// Applies an event to a slot.
    ///
    /// # Errors
    /// Returns [`Unexpected`] if the slot does not exist or its stage does not accept the event.
    pub(super) fn apply(&mut self, id: &SandboxId, event: Event) -> Result<Moved, Unexpected> {
        let now = self.clock.now();
        let moved = self.update(id, |entry| {
            let from = entry.slot.stage;
            let (slot, effects) = transition(entry.slot, event, now)?;
            entry.slot = slot;
            let to = slot.stage;
            Ok(Moved { from, to, effects })
        });
        moved.unwrap_or(Err(Unexpected))
    }

    /// Queues the requests that waited for a change of this slot.
    pub(super) fn stop_waiting(&mut self, id: &SandboxId) {
        if let Some(entry) = self.entries.get_mut(id) {
            let waiting = entry.waiting.drain(..);
            self.ready
                .extend(waiting.map(|request| (id.clone(), request)));
        }
    }

    /// The next request that must be decided again.
    pub(super) fn next_ready(&mut self) -> Option<(SandboxId, SandboxRequest)> {
        self.ready.pop_front()
    }

    /// Adds a life event to a sandbox.
    pub(super) fn add_event(&mut self, id: &SandboxId, what: impl Into<String>) {
        let now = self.clock.now();
        if let Some(entry) = self.entries.get_mut(id) {
            entry.add_event(now, what);
        }
    }

    /// Ids of the sandboxes whose deadline has expired.
    pub(super) fn due(&self) -> Vec<SandboxId> {
        let now = self.clock.now();
        let passed = self.deadlines.iter().take_while(|(due, _)| *due <= now);
        passed.map(|(_, id)| id.clone()).collect()
    }

    /// The earliest deadline.
    pub(super) fn next_due(&self) -> Option<UnixMs> {
        self.deadlines.first().map(|(due, _)| *due)
    }

    /// Records that the slot's VM now serves a sandbox, and gives it the next generation number.
    pub(super) fn has_new_vm(&mut self, id: &SandboxId) {
        self.generations += 1;
        let now = self.clock.now();
        if let Some(entry) = self.entries.get_mut(id) {
            entry.has_new_vm(self.generations, now);
        }
    }

    /// Returns an unused user id. Ids are assigned in turn.
    pub(super) fn free_user(&mut self) -> u32 {
        loop {
            let user = self.next_user;
            self.next_user = match user + 1 {
                next if next < VmUser::POOL.end => next,
                _ => VmUser::POOL.start,
            };
            if self.entries.values().all(|e| e.record.user != Some(user)) {
                return user;
            }
        }
    }
}
