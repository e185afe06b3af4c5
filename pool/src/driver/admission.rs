//! Admission: what the host, the quotas and the budget of the warm stock still have room for. [`crate::policy`] decides;
//! this owner measures, and keeps what is queued, promised and loaded.
//!
//! ```text
//! queue                    creates, forks and resumes that wait for a start
//! stock ◄── demand         warm slots; what each template needs and has, and its share of the budget
//! memory, copies           memory that sandboxes are expected to need; templates' memory in huge pages
//! space                    the two disks that sandboxes write to
//! ```

mod copies;
pub(super) mod demand;
mod memory;
pub(super) mod queue;
pub(super) mod space;
pub(super) mod stock;

use std::sync::Arc;

use library::{
    Library,
    account::{Account, SetAside},
    info::TemplateKind,
    template::Template,
};
use model::SandboxId;

use super::{entry::Serving, slots::Slots};
use crate::{
    config::PoolConfig,
    error::PoolError,
    host,
    message::SandboxRequest,
    policy::{self, Demand, Lack, Need, Placement, Room, Short, Supplied},
    sandbox::Priority,
    slot::Stage,
    stats::PoolStats,
};
use copies::Copies;
use memory::MemoryLedger;
use queue::{Pending, Queue, Want};
use space::{Disks, Saving};
use stock::{Memory, Stock};

#[derive(Debug)]
pub(super) struct Admission {
    config: Arc<PoolConfig>,
    pub(super) queue: Queue,
    pub(super) stock: Stock,
    pub(super) memory: MemoryLedger,
    disks: Disks,
    /// All of them are charged to the server's cgroup.
    copies: Copies,
    /// Number of requests that were refused for lack of room, and the part for lack of memory.
    refused: u64,
    refused_for_memory: u64,
}

impl Admission {
    /// `cores` limits the starts and fills at the same time.
    pub(super) fn new(config: &Arc<PoolConfig>, cores: u32) -> Self {
        Self {
            config: Arc::clone(config),
            queue: Queue::new(cores),
            stock: Stock::new(config, cores),
            memory: MemoryLedger::new(config, cores),
            disks: Disks::new(config),
            copies: Copies::default(),
            refused: 0,
            refused_for_memory: 0,
        }
    }

    /// The space that jobs set aside.
    pub(super) fn account(&self) -> &Account {
        &self.disks.account
    }

    /// Tells jobs how much disk space to leave for sandboxes.
    pub(super) fn publish(&self, slots: &Slots) {
        self.disks.publish(slots);
    }

    /// Measures sandboxes and disks.
    pub(super) fn measure(&mut self, slots: &mut Slots, library: &Library) {
        let measured = self.memory.measure(slots, library);
        self.disks.measure(slots, &measured);
        self.disks.watch(slots);
        // Demand decays over time, and free memory may have changed.
        self.stock.has_changed = true;
    }

    /// Counts a refusal for lack of disk space, and returns its error.
    pub(super) fn refuse(&mut self, short: String) -> PoolError {
        self.refused += 1;
        PoolError::NoSpace(short)
    }

    /// Counts the refusal of a start.
    pub(super) fn count_refused(&mut self, short: Short) {
        self.refused += 1;
        let is_memory = matches!(short, Short::Memory { .. } | Short::Pressure { .. });
        self.refused_for_memory += u64::from(is_memory);
    }

    /// Decides on a queued request.
    pub(super) fn placement(&mut self, pending: &Pending, slots: &Slots, now_ns: u64) -> Placement {
        let (template, has_layer) = match &pending.want {
            Want::New { template, .. } => (template.clone(), false),
            Want::Resume(id, _) => {
                let template = slots.get(id).map(|e| e.record.template.id.clone());
                (template.unwrap_or_default(), true)
            }
        };
        let demand = Demand {
            warm: self.warm_slot_for(&pending.want).is_some(),
            has_layer,
            other_warm: self.stock.to_evict().is_some(),
            ending: slots
                .values()
                .any(|e| e.slot.stage == Stage::Ending && e.slot.vm),
            place: self.queue.places(slots).has_one_for(pending.start_for()),
        };
        let need = self.memory.need(&template);
        policy::place(&self.room_for(need, slots, now_ns), &demand)
    }

    pub(super) fn warm_slot_for(&self, want: &Want) -> Option<&SandboxId> {
        match want {
            Want::New {
                template,
                fork: None,
                spec,
                ..
            } if spec.priority == Priority::Normal => self.stock.oldest(template),
            Want::New { .. } | Want::Resume(..) => None,
        }
    }

    fn room_for(&mut self, need: Need, slots: &Slots, now_ns: u64) -> Room {
        self.memory.room_for(need, slots, &self.disks, now_ns)
    }

    /// The template to load or to fill next, if one needs it and there is room for it. [`Admission::divide`] must precede
    /// it.
    pub(super) fn next_supply(
        &mut self,
        slots: &Slots,
        library: &Library,
        now_ns: u64,
    ) -> Option<(String, Supplied)> {
        self.stock.review(library, slots);
        let is_queued = self.queue.has_callers();
        if !self.stock.may_fill(slots, is_queued, now_ns) {
            return None;
        }
        let is_loading = self.copies.is_loading();
        let due = self.stock.next_fills(library, is_loading, now_ns);
        if due.is_empty() {
            return None;
        }
        let room = self.room_for(Need::default(), slots, now_ns);
        let lacks = due.into_iter().map(|t| (&t.info.id, self.lack(slots, t)));
        let first = policy::supply_first(self.stock.present, self.held(slots), &room, lacks);
        first.map(|(id, supplied)| (id.clone(), supplied))
    }

    fn lack(&self, slots: &Slots, template: &Template) -> Lack {
        let id = &template.info.id;
        let supply = self.stock.supply(id);
        let loads = matches!(supply.memory, Memory::OnDisk) && supply.loads;
        Lack {
            need: self.memory.need(id),
            slot_bytes: self.slot_bytes(slots, id),
            // An existing copy is already part of the warm stock.
            load_bytes: loads.then_some(match supply.copy.strong_count() {
                0 => template.loaded_bytes,
                _ => 0,
            }),
        }
    }

    /// Sets disk space aside for the rebuild of a template that may take this many bytes of memory and as many of the
    /// disk. `None` if there is not enough of both.
    pub(super) fn room_for_rebuild(
        &mut self,
        template: &str,
        bytes: u64,
        slots: &Slots,
        now_ns: u64,
    ) -> Option<SetAside> {
        let room = self.room_for(self.memory.need(template), slots, now_ns);
        if room.free() < bytes {
            return None;
        }
        self.set_aside(slots, bytes).ok()
    }

    /// Sets space aside for files that a job writes into the state directory.
    ///
    /// # Errors
    /// Returns a description of the shortage if that many bytes are not free.
    pub(super) fn set_aside(&self, slots: &Slots, bytes: u64) -> Result<SetAside, String> {
        self.disks.set_aside(slots, bytes)
    }

    /// Checks that the disk has room to save a running sandbox, and reserves that space for the save.
    pub(super) fn set_space_aside(
        &mut self,
        slots: &mut Slots,
        library: &Library,
        id: &SandboxId,
        saving: Saving,
    ) -> Result<(), PoolError> {
        let entry = slots.leased(id)?;
        let info = &entry.record.template;
        let layer = library
            .get(&info.id)
            .map_or(info.bytes.0, |t| t.layer_bytes);
        let room = self.disks.room_to_save(slots, entry, saving, layer);
        let need = room.map_err(|short| self.refuse(short))?;
        if let Some(entry) = slots.get_mut(id) {
            entry.save = need;
        }
        Ok(())
    }

    /// Checks that a template of this sandbox, whose space is already set aside, stays within the quota of templates.
    pub(super) fn check_quota(
        &mut self,
        slots: &Slots,
        library: &Library,
        id: &SandboxId,
    ) -> Result<(), PoolError> {
        let entry = slots.leased(id)?;
        let need = match entry.slot.stage {
            Stage::Running => entry.save,
            _ => 0,
        };
        self.check_quota_of(slots, library, need)
    }

    /// Checks that another template of `need` bytes stays within the quota of templates.
    pub(super) fn check_quota_of(
        &mut self,
        slots: &Slots,
        library: &Library,
        need: u64,
    ) -> Result<(), PoolError> {
        let Some(quota) = self.config.template_quota else {
            return Ok(());
        };
        let is_counted = |kind| matches!(kind, TemplateKind::Snapshot | TemplateKind::Built);
        let templates = library.iter().filter(|t| is_counted(t.info.kind));
        let under_way = slots.values().filter(|e| {
            matches!(
                e.serving,
                Some(Serving::Request(
                    SandboxRequest::Snapshot(..) | SandboxRequest::Publish(..)
                ))
            )
        });
        let taken =
            templates.map(|t| t.info.bytes.0).sum::<u64>() + under_way.map(|e| e.save).sum::<u64>();
        if taken < quota.0 && taken.saturating_add(need) <= quota.0 {
            return Ok(());
        }
        self.refused += 1;
        Err(PoolError::TemplateQuota {
            taken,
            need,
            quota: quota.0,
        })
    }

    /// Checks that one more paused sandbox or snapshot may be kept. Snapshots of forks are temporary and are not
    /// counted.
    pub(super) fn may_save(&mut self, slots: &Slots, library: &Library) -> Result<(), PoolError> {
        let kinds = library.iter().map(|t| t.info.kind);
        let mut saved = kinds.filter(|kind| *kind == TemplateKind::Snapshot).count();
        for entry in slots.values() {
            let becomes_template = matches!(
                entry.serving,
                Some(Serving::Request(SandboxRequest::Snapshot(..)))
            );
            saved += usize::from(entry.slot.is_saved()) + usize::from(becomes_template);
        }
        let max = self.config.max_saved;
        if u32::try_from(saved).is_ok_and(|saved| saved < max) {
            return Ok(());
        }
        self.refused += 1;
        Err(PoolError::TooManySaved(max))
    }

    /// Adds the metrics of admission and of the warm stock.
    pub(super) fn add_stats(&mut self, slots: &Slots, library: &Library, stats: &mut PoolStats) {
        let room = self.room_for(Need::default(), slots, host::monotonic_ns());
        stats.refused = self.refused;
        stats.refused_for_memory = self.refused_for_memory;
        self.memory.add_stats(&room, slots, stats);
        self.add_stock_stats(slots, library, stats);
    }
}
