//! Warm stock by demand: counts creates, divides the budget, selects the slots beyond a template's share, and loads and
//! unloads templates. [`crate::policy`] makes all decisions.

use std::{collections::BTreeSet, io, path::Path, sync::Arc, time::Duration};

use library::{Library, diff::memory_length, info::TemplateKind, template::Template};
use model::SandboxId;
use tokio::task::spawn_blocking;
use vmm_control::template::LoadedTemplate;

use super::{
    Admission,
    queue::{Pending, Want},
    stock::{self, Memory, Supply},
};
use crate::{
    config::{PoolConfig, WarmMarks},
    driver::{jobs::Jobs, slots::Slots},
    host,
    message::{CopySize, LoadFailed},
    policy::{self, Budget, Claim, Held, Need, Pressure},
    sandbox::Priority,
    slot::Stage,
    stats::{PoolStats, StockStats},
};

/// Minimum interval between two divisions of the budget.
const INTERVAL: Duration = Duration::from_millis(100);
/// Page size of loaded templates, in bytes.
const HUGE_PAGE: u64 = 2 << 20;

/// The addresses of copies.
type CopiesInUse = BTreeSet<*const LoadedTemplate>;

impl Admission {
    /// Counts a create that a warm slot serves or could have served. Refused requests are not counted, because a caller
    /// may repeat them any number of times.
    pub(in crate::driver) fn count_create(&mut self, pending: &Pending) {
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
    pub(in crate::driver) fn template_used(&mut self, library: &Library, id: &str) {
        let now_ns = Some(host::monotonic_ns());
        self.stock.supply_mut(id).used_ns = now_ns;
        let base = library.get(id).and_then(|t| t.base.as_ref());
        if let Some(base) = library.iter().find(|t| Some(&t.dir) == base) {
            self.stock.supply_mut(&base.info.id).diff_used_ns = now_ns;
        }
    }

    /// Records that a slot of a template has become warm. `private` is its memory in bytes, `took` the duration of the
    /// fill.
    pub(in crate::driver) fn became_warm(&mut self, id: &str, private: u64, took: Duration) {
        self.memory.became_warm(id, private);
        let warm = self.stock.len(id);
        let supply = self.stock.supply_mut(id);
        supply.failures = 0;
        supply.creates.filled(took);
        if warm >= supply.marks.high {
            supply.creates.is_full();
        }
    }

    /// Divides the budget of the warm stock, if something has changed since the last division. Returns the slots that
    /// must end.
    pub(in crate::driver) fn divide(
        &mut self,
        slots: &Slots,
        library: &Library,
        now_ns: u64,
    ) -> Vec<SandboxId> {
        let since = now_ns.saturating_sub(self.stock.divided_ns);
        if !self.stock.has_changed || u128::from(since) < INTERVAL.as_nanos() {
            return Vec::new();
        }
        (self.stock.has_changed, self.stock.divided_ns) = (false, now_ns);
        let held = self.held(slots);
        let room = self.room_for(Need::default(), slots, now_ns);
        self.stock.present = match room.pressure {
            Pressure::Calm => self.stock.budget.within(held, room.surplus()),
            Pressure::Tight | Pressure::Full => Budget::default(),
        };
        let in_use = copies_in_use(slots);
        let claims = self.claims(slots, library, &in_use, now_ns);
        // No decision about the warm stock frees these copies.
        let taken = self.copies.taken_by(|copy| in_use.contains(&copy));
        let shares = policy::divide(self.stock.present.beside(taken), &claims);
        let mut give_back = Vec::new();
        for ((template, claim), share) in library.iter().zip(claims).zip(shares) {
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
        let mut ending = Vec::new();
        for (id, wanted, share, is_unused) in give_back {
            self.end_surplus(&id, wanted, share.slots, &mut ending);
            if !share.loads {
                self.unload(slots, &id, is_unused, &mut ending);
            }
        }
        ending
    }

    /// Adds the warm slots of a template beyond its share. `wanted` is its share of an unlimited budget.
    fn end_surplus(&self, id: &str, wanted: u32, share: u32, ending: &mut Vec<SandboxId>) {
        let left = (0..=self.stock.len(id)).rev();
        for (slot, left) in self.stock.surplus(id, share).into_iter().zip(left) {
            let why = if left > wanted {
                "the demand for its template has fallen"
            } else {
                "the budget has no room for it next to slots and templates that are used more"
            };
            tracing::debug!(template = id, sandbox = %slot, why, "ending a warm slot");
            ending.push(slot);
        }
    }

    /// The claim of each template on the budget, in the order of [`Library::iter`].
    fn claims(
        &self,
        slots: &Slots,
        library: &Library,
        in_use: &CopiesInUse,
        now_ns: u64,
    ) -> Vec<Claim> {
        let filling = stock::filling(slots);
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
                slot_bytes: self.slot_bytes(slots, id),
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
        library.iter().map(claim).collect()
    }

    /// Expected memory of one more warm slot of a template.
    pub(super) fn slot_bytes(&self, slots: &Slots, id: &str) -> u64 {
        let warm = self.stock.warm(id).filter_map(|id| slots.get(id)?.private);
        self.memory.need(id).slot(warm)
    }

    /// The part of the budget that the warm stock uses.
    pub(super) fn held(&self, slots: &Slots) -> Held {
        let mut held = Held::default();
        for entry in slots.values() {
            let bytes = match entry.slot.stage {
                Stage::Warm => entry.private.unwrap_or(0),
                Stage::Filling => self.slot_bytes(slots, &entry.record.template.id),
                _ => continue,
            };
            held.slots += 1;
            held.bytes = held.bytes.saturating_add(bytes);
        }
        held.bytes = held.bytes.saturating_add(self.copies.taken());
        held
    }

    /// Starts to copy a template's memory into huge pages. Reuses a copy that VMs still map, if there is one.
    pub(in crate::driver) fn load(&mut self, library: &Library, jobs: &Jobs, id: &str) {
        let Some(template) = library.get(id) else {
            return;
        };
        let supply = self.stock.supply_mut(id);
        if let Some(copy) = supply.copy.upgrade() {
            supply.memory = Memory::Loaded(copy);
            return;
        }
        let begun = self.begin_load(jobs, template);
        self.stock.supply_mut(id).memory = match begun {
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

    fn begin_load(&mut self, jobs: &Jobs, template: &Template) -> io::Result<()> {
        let size = CopySize {
            length: memory_length(&template.dir)?.next_multiple_of(HUGE_PAGE),
            taken: template.loaded_bytes,
        };
        let copies = self.copies.length().saturating_add(size.length);
        jobs.load(template.info.id.clone(), template.dir.clone(), size, copies)?;
        self.copies.begun(size);
        Ok(())
    }

    /// Handles the end of a load of the files in `dir`.
    pub(in crate::driver) fn loaded(
        &mut self,
        library: &Library,
        id: &str,
        dir: &Path,
        size: CopySize,
        loaded: Result<Arc<LoadedTemplate>, LoadFailed>,
    ) {
        self.copies.ended(size, loaded.as_ref().ok());
        match library.get(id).filter(|t| t.dir == dir) {
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

    /// Drops a template's memory in huge pages, and adds the warm slots that have it mapped to those that must end. The
    /// memory is freed when the last sandbox that uses it ends.
    fn unload(&mut self, slots: &Slots, id: &str, is_unused: bool, ending: &mut Vec<SandboxId>) {
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
            let mut stock =
                slots.ids(|e| is_stock(e.slot.stage) && e.loaded.as_ref().is_some_and(maps));
            stock.retain(|id| !ending.contains(id));
            ending.append(&mut stock);
            drop_on_thread(Some(copy));
        }
    }

    /// Adds the metrics of the warm stock.
    pub(super) fn add_stock_stats(&self, slots: &Slots, library: &Library, stats: &mut PoolStats) {
        stats.warm_bytes = self.held(slots).bytes;
        stats.warm_limit = self.stock.budget.slots;
        stats.warm_bytes_limit = self.stock.present.bytes;
        for template in library.iter() {
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

/// The copies of templates' memory that sandboxes have mapped.
fn copies_in_use(slots: &Slots) -> CopiesInUse {
    let is_stock = |stage| matches!(stage, Stage::Warm | Stage::Filling | Stage::Ending);
    let sandboxes = slots.values().filter(|e| !is_stock(e.slot.stage));
    sandboxes
        .filter_map(|e| e.loaded.as_ref().map(Arc::as_ptr))
        .collect()
}

/// Drops a copy on a thread, because freeing huge pages takes time.
pub(in crate::driver) fn drop_on_thread(copy: Option<Arc<LoadedTemplate>>) {
    if copy.is_some() {
        drop(spawn_blocking(move || drop(copy)));
    }
}
