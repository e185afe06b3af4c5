//! Space on the two disks that sandboxes write to: the disk of the state directory, which holds snapshots, and the disk
//! of the layers. Both can be the same disk.

use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::Duration,
};

use library::account::{Account, SetAside};
use model::SandboxId;

use crate::driver::{entry::Entry, slots::Slots};
use crate::{
    config::PoolConfig,
    host,
    policy::{Sizes, Space, UNKNOWN, margin},
    slot::Stage,
    state::PauseMode,
    state_dir::SCRATCH,
};

/// Bytes that a save writes in addition to pages and blocks: state files, lists, manifest, record.
const BESIDES: u64 = 8 << 20;

/// The parts of a running sandbox that a save writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::driver) enum Saving {
    /// The difference from its template.
    Diff,
    /// Its whole layer.
    Disk,
    /// All of its memory, and its whole layer.
    Whole,
}

impl From<PauseMode> for Saving {
    fn from(mode: PauseMode) -> Self {
        match mode {
            PauseMode::Memory => Self::Diff,
            PauseMode::FilesystemOnly => Self::Disk,
        }
    }
}

#[derive(Debug)]
pub(in crate::driver) struct Disks {
    state: PathBuf,
    /// Whether state directory and layers are on the same disk.
    is_one: bool,
    reserve: u64,
    /// Maximum number of bytes that are set aside for the growth of one layer.
    most: u64,
    /// The measured sizes of the layers of all sandboxes. Like memory, a layer is expected to have the mean of its age.
    sizes: Sizes,
    /// Number of standard deviations by which the promised space exceeds the expected sum, and their bytes.
    margin: u32,
    margin_bytes: u64,
    /// Space that is set aside for files that jobs write into the state directory.
    pub(in crate::driver) account: Account,
    /// Whether a disk was below its reserve at the last check.
    is_low: bool,
}

impl Disks {
    pub(in crate::driver) fn new(config: &PoolConfig) -> Self {
        let device = |dir: &Path| fs::metadata(dir).map(|meta| meta.dev()).ok();
        Self {
            state: config.state.clone(),
            is_one: device(&config.state) == device(Path::new(SCRATCH)),
            reserve: config.disk_reserve.0,
            most: config
                .limits
                .layer
                .map_or(UNKNOWN, |limit| limit.0.min(UNKNOWN)),
            sizes: Sizes::default(),
            margin: config.memory_margin,
            margin_bytes: 0,
            account: Account::default(),
            is_low: false,
        }
    }

    /// Bytes that one more sandbox is expected to need on the disk of the layers.
    pub(in crate::driver) fn layer_share(&self) -> u64 {
        self.sizes.at(Duration::ZERO).mean.min(self.most)
    }

    /// Measures the layers of some running sandboxes.
    pub(in crate::driver) fn measure(&mut self, slots: &mut Slots, ids: &[SandboxId]) {
        let now = slots.clock.now();
        let mut sizes = Vec::new();
        for id in ids {
            let Some(entry) = slots.get_mut(id) else {
                continue;
            };
            let pid = entry.record.vmm.map_or(0, |vmm| vmm.pid);
            entry.written = host::unlinked_bytes(pid).unwrap_or(entry.written);
            sizes.push((entry.age(now), entry.written));
        }
        self.sizes.count(&sizes);
        let writing = slots.values().filter(|e| writes(e));
        let variance = writing.map(|e| self.sizes.at(e.age(now)).variance).sum();
        self.margin_bytes = margin(self.margin, variance);
    }

    /// The disk of the layers.
    pub(in crate::driver) fn layers(&self, slots: &Slots) -> Space {
        let saved = |entry: &Entry| if self.is_one { to_save(entry) } else { 0 };
        let saved = slots.values().map(saved).sum::<u64>();
        let aside = if self.is_one { self.account.aside() } else { 0 };
        let promised = self.to_grow(slots) + saved.saturating_add(aside);
        self.space(Path::new(SCRATCH), promised)
    }

    /// The disk of snapshots and records. `aside` is the number of bytes set aside on it.
    fn snapshots(&self, slots: &Slots, aside: u64) -> Space {
        let promised = self.promised(slots).saturating_add(aside);
        self.space(&self.state, promised)
    }

    /// Bytes that sandboxes may yet write to the disk of snapshots.
    fn promised(&self, slots: &Slots) -> u64 {
        let grown = if self.is_one { self.to_grow(slots) } else { 0 };
        slots.values().map(to_save).sum::<u64>() + grown
    }

    /// Tells jobs how much space to leave for sandboxes.
    pub(in crate::driver) fn publish(&self, slots: &Slots) {
        self.account.publish(self.promised(slots));
    }

    fn space(&self, dir: &Path, promised: u64) -> Space {
        Space {
            available: host::disk_free(dir).unwrap_or(0),
            reserve: self.reserve,
            promised,
        }
    }

    /// Bytes that are set aside for the growth of all layers.
    fn to_grow(&self, slots: &Slots) -> u64 {
        let now = slots.clock.now();
        let (mut lacks, mut most) = (self.margin_bytes, 0);
        for entry in slots.values().filter(|e| writes(e)) {
            let expected = self.sizes.at(entry.age(now)).mean;
            lacks += expected.saturating_sub(entry.written);
            most += self.most;
        }
        lacks.min(most)
    }

    /// Returns the number of bytes to set aside for saving a running sandbox. `layer` is the size of its template's
    /// layer in bytes.
    ///
    /// # Errors
    /// Returns a description of the shortage if that many bytes are not free.
    pub(in crate::driver) fn room_to_save(
        &self,
        slots: &Slots,
        entry: &Entry,
        saving: Saving,
        layer: u64,
    ) -> Result<u64, String> {
        let pid = entry.record.vmm.map_or(0, |vmm| vmm.pid);
        let template = &entry.record.template;
        let private = || host::private_bytes(pid).unwrap_or(template.memory.0);
        let shared = match saving {
            Saving::Diff => private(),
            Saving::Disk => layer,
            Saving::Whole => private()
                .saturating_add(template.bytes.0)
                .saturating_add(layer),
        };
        let written = host::unlinked_bytes(pid).unwrap_or(0);
        let need = shared.saturating_add(written).saturating_add(BESIDES);
        self.room_for(slots, need, self.account.aside())
            .map(|()| need)
    }

    /// Sets space aside for files that a job writes into the state directory.
    ///
    /// # Errors
    /// Returns a description of the shortage if that many bytes are not free.
    pub(in crate::driver) fn set_aside(
        &self,
        slots: &Slots,
        bytes: u64,
    ) -> Result<SetAside, String> {
        let check = |aside| self.room_for(slots, bytes, aside);
        self.account.take(bytes, check)
    }

    fn room_for(&self, slots: &Slots, need: u64, aside: u64) -> Result<(), String> {
        match self.snapshots(slots, aside).short_of(need) {
            Some(short) => Err(format!("{short} at {}", self.state.display())),
            None => Ok(()),
        }
    }

    /// Logs once when a disk falls below its reserve, and once when both disks are above it again.
    pub(in crate::driver) fn watch(&mut self, slots: &Slots) {
        let spaces = [
            self.snapshots(slots, self.account.aside()),
            self.layers(slots),
        ];
        let is_low = spaces.iter().any(Space::is_low);
        if is_low == self.is_low {
            return;
        }
        self.is_low = is_low;
        let [state_mib, layers_mib] = spaces.map(|space| space.available >> 20);
        let reserve_mib = self.reserve >> 20;
        if is_low {
            tracing::error!(
                state = %self.state.display(),
                state_mib,
                layers = SCRATCH,
                layers_mib,
                reserve_mib,
                "a disk is down to its reserve: new sandboxes, pauses, snapshots and forks are refused with status \
                 507 and running sandboxes go on, with I/O errors in guests once it is full; delete paused \
                 sandboxes and snapshots that are not needed, end running sandboxes, or give the disk more room"
            );
        } else {
            tracing::info!(
                state_mib,
                layers_mib,
                reserve_mib,
                "free space on the disks is above the reserve again"
            );
        }
    }
}

/// Whether the slot has a VM, or will have one, that writes to its layer.
fn writes(entry: &Entry) -> bool {
    matches!(
        entry.slot.stage,
        Stage::Running | Stage::Starting | Stage::Resuming(_) | Stage::Adopting
    )
}

/// Bytes that are set aside for the save under way.
fn to_save(entry: &Entry) -> u64 {
    match entry.slot.stage {
        Stage::Pausing(_) | Stage::Snapshotting => entry.save,
        _ => 0,
    }
}
