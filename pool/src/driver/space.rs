//! The disks that sandboxes write to: that of the state directory, where snapshots are, and that of the layers.

use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use model::SandboxId;

use super::{Driver, Entry, entry::Waiter};
use crate::{
    PauseMode, PoolError, host,
    policy::{Short, Space},
    slot::Stage,
};

/// What a running sandbox is taken to write to its layer beyond what it has.
const LAYER: u64 = 32 << 20;
/// What a save writes besides pages and blocks: states, lists, manifest, record.
const BESIDES: u64 = 8 << 20;

/// Which disks there are.
#[derive(Debug)]
pub(super) struct Disks {
    state: PathBuf,
    /// Both directories are on the same one.
    one: bool,
    /// Only the reserve is left, and the log says so.
    low: bool,
}

impl Disks {
    pub(super) fn of(state: &Path) -> Self {
        let device = |dir: &Path| fs::metadata(dir).map(|meta| meta.dev()).ok();
        Self {
            state: state.to_owned(),
            one: device(state) == device(Path::new(crate::SCRATCH)),
            low: false,
        }
    }
}

impl Driver {
    /// What one sandbox is taken to need of the layers' disk.
    pub(super) fn layer_share(&self) -> u64 {
        let limit = self.config.limits.layer;
        limit.map_or(LAYER, |limit| limit.0.min(LAYER))
    }

    /// The disk of the layers.
    pub(super) fn layer_space(&self) -> Space {
        self.space(Path::new(crate::SCRATCH), true, self.disks.one)
    }

    /// The disk of snapshots and records.
    fn state_space(&self) -> Space {
        self.space(&self.disks.state, self.disks.one, true)
    }

    fn space(&self, dir: &Path, layers: bool, saves: bool) -> Space {
        let share = self.layer_share();
        let promised = self.slots.values().map(|entry| match entry.slot.stage {
            Stage::Pausing(_) | Stage::Saving if saves => entry.save,
            Stage::Running | Stage::Starting | Stage::Resuming(_) if layers => share,
            _ => 0,
        });
        Space {
            available: host::disk_free(dir).unwrap_or(0),
            reserve: self.config.disk_reserve.0,
            promised: promised.sum(),
        }
    }

    /// Whether a running sandbox can be written to disk; what it may take is set aside for as long as that lasts.
    pub(super) fn room_to_save(
        &mut self,
        id: &SandboxId,
        mode: PauseMode,
    ) -> Result<(), PoolError> {
        let Some(entry) = self.slots.get(id) else {
            return Err(PoolError::NoSandbox(id.clone()));
        };
        let pid = entry.record.vmm.map_or(0, |vmm| vmm.pid);
        let memory = match mode {
            PauseMode::Memory => host::private_bytes(pid).unwrap_or(entry.record.template.memory.0),
            PauseMode::FilesystemOnly => 0,
        };
        let layer = host::unlinked_bytes(pid).unwrap_or(0);
        let need = memory.saturating_add(layer).saturating_add(BESIDES);
        if let Some(short) = self.state_space().short_of(need) {
            self.counters.refused += 1;
            return Err(self.no_space(short));
        }
        if let Some(entry) = self.slots.get_mut(id) {
            entry.save = need;
        }
        Ok(())
    }

    /// Whether one more paused sandbox or snapshot may be kept. A snapshot for forks is not kept.
    pub(super) fn may_save(&mut self) -> Result<(), PoolError> {
        let kept = |entry: &Entry| {
            let becomes_template = matches!(entry.waiter, Some(Waiter::Template { .. }));
            usize::from(entry.slot.is_saved()) + usize::from(becomes_template)
        };
        let slots: usize = self.slots.values().map(kept).sum();
        let snapshots = self.templates.iter().filter(|t| t.info.is_snapshot);
        let max = self.config.max_saved;
        if u32::try_from(slots + snapshots.count()).is_ok_and(|saved| saved < max) {
            return Ok(());
        }
        self.counters.refused += 1;
        Err(PoolError::TooManySaved(max))
    }

    fn no_space(&self, short: Short) -> PoolError {
        PoolError::NoSpace(format!("{short} at {}", self.disks.state.display()))
    }

    /// Says once when a disk is down to its reserve, and once when it is not any more.
    pub(super) fn watch_disks(&mut self) {
        let spaces = [self.state_space(), self.layer_space()];
        let low = spaces.iter().any(Space::is_low);
        if low == self.disks.low {
            return;
        }
        self.disks.low = low;
        let [state_mib, layers_mib] = spaces.map(|space| space.available >> 20);
        let reserve_mib = self.config.disk_reserve.0 >> 20;
        if low {
            tracing::error!(
                state = %self.disks.state.display(),
                state_mib,
                layers = crate::SCRATCH,
                layers_mib,
                reserve_mib,
                "a disk is down to its reserve: new sandboxes, pauses, snapshots and forks are refused with status \
                 507 and running sandboxes go on, with I/O errors in guests once it is full; delete paused \
                 sandboxes and snapshots that are not needed, end running sandboxes, or give the disk more room"
            )
        } else {
            tracing::info!(
                state_mib,
                layers_mib,
                reserve_mib,
                "the disks have room beyond their reserve again"
            )
        }
    }
}
