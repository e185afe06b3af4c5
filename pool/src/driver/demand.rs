//! Warm stock by demand: counts creates, divides the budget, ends slots beyond a template's share, and loads and
//! unloads templates. [`crate::policy`] makes all decisions.

use std::{collections::BTreeSet, path::Path, sync::Arc, time::Duration};

use library::{info::TemplateKind, template::Template};
use tokio::task::spawn_blocking;
use vmm_control::template::LoadedTemplate;

use super::{
    Driver,
    queue::{Pending, Want},
    stock::{self, Memory, Supply},
};
use crate::{
    host,
    message::LoadFailed,
    policy::{self, Claim, Held, Need},
    slot::Stage,
    spec::{PoolConfig, PoolStats, Priority, StockStats, WarmMarks},
};

/// Minimum interval between two divisions of the budget.
const INTERVAL: Duration = Duration::from_millis(100);

/// The addresses of copies.
type CopiesInUse = BTreeSet<*const LoadedTemplate>;

impl Driver {
    /// Counts a create that a warm slot serves or could have served. Refused requests are not counted, because a caller
    /// may repeat them any number of times.
    pub(super) fn count_create(&mut self, pending: &Pending) {
        let Want::New {
            spec,
            template,
            fork: None,
            ..
        } = &pending.want
        else {
            return;
        };
        if spec.priority == Priority::Normal {
            let creates = &mut self.stock.supply_mut(template).creates;
            creates.count(pending.accepted_ns, self.config.idle);
            self.stock.has_changed = true;
        }
    }

    /// Records a use of a template, and of its base, whose memory its clones map.
    pub(super) fn template_used(&mut self, id: &str) {
        let now_ns = Some(host::monotonic_ns());
        self.stock.supply_mut(id).used_ns = now_ns;
        let base = self.library.get(id).and_then(|t| t.base.as_ref());
        if let Some(base) = self.library.iter().find(|t| Some(&t.dir) == base) {
            self.stock.supply_mut(&base.info.id).diff_used_ns = now_ns;
        }
    }

    /// Records that a slot of a template has become warm. `private` is its memory in bytes, `took` the duration of the
    /// fill.
    pub(super) fn became_warm(&mut self, id: &str, private: u64, took: Duration) {
        self.memory.became_warm(id, private);
        let warm = self.stock.len(id);
        let supply = self.stock.supply_mut(id);
        supply.failures = 0;
        supply.creates.filled(took);
        if warm >= supply.marks.high {
            supply.creates.is_full();
        }
    }

    /// Divides the budget of the warm stock, if something has changed since the last division.
    pub(super) fn divide(&mut self, now_ns: u64) {
        let since = now_ns.saturating_sub(self.stock.divided_ns);
        if !self.stock.has_changed || u128::from(since) < INTERVAL.as_nanos() {
            return;
        }
        (self.stock.has_changed, self.stock.divided_ns) = (false, now_ns);
        let held = self.held();
        let any = Need::default();
        let room = self.memory.room_for(any, &self.slots, &self.disks, now_ns);
        self.stock.present = self.stock.budget.within(held, room.surplus());
        let in_use = self.copies_in_use();
        let claims = self.claims(&in_use, now_ns);
        // No decision about the warm stock frees these copies.
        let taken = self.jobs.copies.taken_by(|copy| in_use.contains(&copy));
        let shares = policy::divide(self.stock.present.beside(taken), &claims);
        let mut give_back = Vec::new();
        for ((template, claim), share) in self.library.iter().zip(claims).zip(shares) {
            let supply = self.stock.supply_mut(&template.info.id);
            let mut floor = floor(&self.config, template, supply, now_ns);
            floor.low = floor.low.max(spare(&self.config, template).low);
            supply.wanted = claim.most();
            supply.is_spare = claim.floor.max(claim.wanted) == 0;
            supply.marks = policy::marks(floor, claim.wanted, share.slots);
            supply.loads = share.loads;
            let is_unused = claim.is_idle && share.slots == 0;
            give_back.push((template.info.id.clone(), supply.wanted, share, is_unused));
        }
        for (id, wanted, share, is_unused) in give_back {
            self.end_surplus(&id, wanted, share.slots);
            if !share.loads {
                self.unload(&id, is_unused);
            }
        }
    }

    /// Ends the warm slots of a template beyond its share. `wanted` is its share of an unlimited budget.
    fn end_surplus(&mut self, id: &str, wanted: u32, share: u32) {
        for slot in self.stock.surplus(id, share) {
            let why = if self.stock.len(id) > wanted {
                "the demand for its template has fallen"
            } else {
                "the budget has no room for it next to slots and templates that are used more"
            };
            tracing::debug!(template = id, sandbox = %slot, why, "ending a warm slot");
            self.end(&slot);
        }
    }

    /// The claim of each template on the budget, in the order of [`library::Library::iter`].
    fn claims(&self, in_use: &CopiesInUse, now_ns: u64) -> Vec<Claim> {
        let filling = stock::filling(&self.slots);
        let idle = self.config.idle;
        let claim = |template: &Template| {
            let id = template.info.id.as_str();
            let supply = self.stock.supply(id);
            let wanted = match template.info.kind {
                TemplateKind::Disk => 0,
                _ => supply.creates.wanted(now_ns, idle),
            };
            Claim {
                floor: floor(&self.config, template, supply, now_ns).high,
                wanted,
                spare: spare(&self.config, template).high,
                has: self.stock.len(id) + filling.get(id).copied().unwrap_or(0),
                slot_bytes: self.slot_bytes(id),
                load_bytes: if in_use.contains(&supply.copy.as_ptr()) {
                    0
                } else {
                    template.loaded_bytes
                },
                can_load: template.is_loadable() && !matches!(supply.memory, Memory::Unloadable),
                is_loaded: matches!(supply.memory, Memory::Loaded(_) | Memory::Loading),
                recent: supply.creates.recent(now_ns, idle),
                used_ns: supply.memory_used_ns().unwrap_or(0),
                is_idle: supply.is_memory_idle(now_ns, idle),
            }
        };
        self.library.iter().map(claim).collect()
    }

    /// The copies of templates' memory that sandboxes have mapped.
    fn copies_in_use(&self) -> CopiesInUse {
        let is_stock = |stage| matches!(stage, Stage::Warm | Stage::Filling | Stage::Ending);
        let sandboxes = self.slots.values().filter(|e| !is_stock(e.slot.stage));
        sandboxes
            .filter_map(|e| e.loaded.as_ref().map(Arc::as_ptr))
            .collect()
    }

    /// Expected memory of one more warm slot of a template.
    pub(super) fn slot_bytes(&self, id: &str) -> u64 {
        let warm = self
            .stock
            .warm(id)
            .filter_map(|id| self.slots.get(id)?.private);
        self.memory.need(id).slot(warm)
    }

    /// The part of the budget that the warm stock uses.
    pub(super) fn held(&self) -> Held {
        let mut held = Held::default();
        for entry in self.slots.values() {
            let bytes = match entry.slot.stage {
                Stage::Warm => entry.private.unwrap_or(0),
                Stage::Filling => self.slot_bytes(&entry.record.template.id),
                _ => continue,
            };
            held.slots += 1;
            held.bytes = held.bytes.saturating_add(bytes);
        }
        held.bytes = held.bytes.saturating_add(self.jobs.copies.taken());
        held
    }

    /// Starts to copy a template's memory into huge pages. Reuses a copy that VMs still map, if there is one.
    pub(super) fn load(&mut self, id: &str) {
        let Some(template) = self.library.get(id) else {
            return;
        };
        let supply = self.stock.supply_mut(id);
        if let Some(copy) = supply.copy.upgrade() {
            supply.memory = Memory::Loaded(copy);
            return;
        }
        let dir = template.dir.clone();
        supply.memory = match self.jobs.load(id.to_owned(), dir, template.loaded_bytes) {
            Ok(()) => Memory::Loading,
            Err(error) => {
                tracing::error!(
                    template = id,
                    %error,
                    "cannot load the template into huge pages: its clones read it from disk"
                );
                Memory::Unloadable
            }
        };
    }

    /// Handles the end of a load of the files in `dir`.
    pub(super) fn loaded(
        &mut self,
        id: &str,
        dir: &Path,
        loaded: Result<Arc<LoadedTemplate>, LoadFailed>,
    ) {
        match self.library.get(id).filter(|t| t.dir == dir) {
            Some(_) => {
                let supply = self.stock.supply_mut(id);
                supply.memory = match loaded {
                    Ok(copy) => {
                        supply.load_failures = 0;
                        supply.copy = Arc::downgrade(&copy);
                        Memory::Loaded(copy)
                    }
                    Err(LoadFailed::NoSpace(why)) => {
                        let now_ns = host::monotonic_ns();
                        stock::load_failed(supply, now_ns);
                        let pause_ns = supply.load_not_before_ns - now_ns;
                        tracing::warn!(
                            template = id,
                            why,
                            retry_after_ms = pause_ns / 1_000_000,
                            "no disk space to make the template's memory file: its warm slots wait for space"
                        );
                        Memory::OnDisk
                    }
                    Err(LoadFailed::Other(why)) => {
                        tracing::warn!(
                            template = id,
                            why,
                            "no huge pages for the template: its clones read it from the disk"
                        );
                        Memory::Unloadable
                    }
                };
            }
            // The template was removed or rebuilt while it was being loaded.
            None => drop_on_thread(loaded.ok()),
        }
    }

    /// Drops a template's memory in huge pages, and ends the warm slots that have it mapped. The memory is freed when
    /// the last sandbox that uses it ends.
    fn unload(&mut self, id: &str, is_unused: bool) {
        let memory = &mut self.stock.supply_mut(id).memory;
        if let Memory::Loaded(copy) = memory {
            let copy = Arc::clone(copy);
            *memory = Memory::OnDisk;
            let why = if is_unused {
                "neither it nor a diff of it has been used lately"
            } else {
                "the budget has no room for it next to slots and templates that are used more"
            };
            tracing::info!(template = id, why, "unloaded a template's memory");
            let maps = |loaded: &Arc<LoadedTemplate>| Arc::ptr_eq(loaded, &copy);
            let is_stock = |stage| matches!(stage, Stage::Warm | Stage::Filling);
            let stock = self
                .slots
                .ids(|e| is_stock(e.slot.stage) && e.loaded.as_ref().is_some_and(maps));
            for slot in stock {
                self.end(&slot);
            }
            drop_on_thread(Some(copy));
        }
    }

    /// Adds the metrics of the warm stock.
    pub(super) fn add_stock_stats(&self, stats: &mut PoolStats) {
        stats.warm_bytes = self.held().bytes;
        stats.warm_limit = self.stock.budget.slots;
        stats.warm_bytes_limit = self.stock.present.bytes;
        self.add_diff_stats(stats);
        for template in self.library.iter() {
            let (info, supply) = (&template.info, self.stock.supply(&template.info.id));
            let stock = StockStats {
                wanted: supply.wanted,
                target: supply.marks.high,
                warm: self.stock.len(&info.id),
                is_loaded: matches!(supply.memory, Memory::Loaded(_)),
                hits: supply.hits,
                misses: supply.misses,
            };
            stats.templates += 1;
            stats.templates_loaded += u32::from(stock.is_loaded);
            stats.warm_wanted = stats.warm_wanted.saturating_add(stock.wanted);
            stats.warm_target += stock.target;
            if stock != StockStats::default() {
                let name = info.names.first().unwrap_or(&info.id);
                stats.stocks.insert(name.clone(), stock);
            }
        }
    }
}

/// The marks of a template while other templates do not need the room.
fn spare(config: &PoolConfig, template: &Template) -> WarmMarks {
    match template.info.kind {
        TemplateKind::Disk => WarmMarks::default(),
        _ if template.rebuild.is_some() => config.warm_spare,
        _ => WarmMarks::default(),
    }
}

/// The marks that the configuration gives a template.
fn floor(config: &PoolConfig, template: &Template, supply: &Supply, now_ns: u64) -> WarmMarks {
    match template.info.kind {
        TemplateKind::Disk => WarmMarks::default(),
        _ if template.rebuild.is_some() => config.warm,
        _ if supply.is_idle(now_ns, config.idle) => WarmMarks::default(),
        _ => config.warm_in_use,
    }
}

/// Drops a copy on a thread, because freeing huge pages takes time.
pub(super) fn drop_on_thread(copy: Option<Arc<LoadedTemplate>>) {
    if copy.is_some() {
        drop(spawn_blocking(move || drop(copy)));
    }
}
