//! Starting the VMs of a proof: the one place that a change of how VMMs are started touches.

use std::{
    cell::Cell,
    fs::{self, File},
    os::fd::AsFd,
    path::{Path, PathBuf},
    time::Duration,
};

use model::{RestoreSpec, WorkingSetPrefault};
use vmm_control::{ControlError, VmProcess};

use super::{ConfinementError, at};
use testbed::world;

/// For any single answer, also on an emulated host.
const PATIENCE: Duration = Duration::from_secs(90);
/// The device of the VM that is tried; its end goes with it.
const TAP: &str = "cubeconf0";

/// Starts clones of one template.
#[derive(Debug)]
pub(super) struct Cloner {
    pub(super) vmm: PathBuf,
    pub(super) template: PathBuf,
    started: Cell<u32>,
}

/// A clone and its directory.
#[derive(Debug)]
pub(super) struct Clone {
    process: VmProcess,
    dir: PathBuf,
}

impl Cloner {
    pub(super) fn new(vmm: PathBuf, template: PathBuf) -> Self {
        Self {
            vmm,
            template,
            started: Cell::new(0),
        }
    }

    /// One whose guest runs, with a network device.
    pub(super) fn start(&self, dir: &Path) -> Result<Clone, ConfinementError> {
        let tap = world::open_tap(TAP).map_err(at(Path::new("/dev/net/tun")))?;
        let mut clone = self.restore(dir, Some(tap.as_fd()))?;
        let resumed = clone.process.control.resume();
        resumed.map_err(ConfinementError::Vmm)?;
        Ok(clone)
    }

    /// One whose guest stands still.
    pub(super) fn start_paused(&self, dir: &Path) -> Result<Clone, ConfinementError> {
        self.restore(dir, None)
    }

    fn restore(
        &self,
        dir: &Path,
        tap: Option<std::os::fd::BorrowedFd<'_>>,
    ) -> Result<Clone, ConfinementError> {
        self.started.set(self.started.get() + 1);
        let dir = dir.join(format!("clone-{}", self.started.get()));
        fs::create_dir(&dir).map_err(at(&dir))?;
        let log = File::create(dir.join("vmm.stderr")).map_err(at(&dir))?;
        let mut process = VmProcess::spawn(&self.vmm, Some(log), Some(PATIENCE))
            .map_err(ConfinementError::Vmm)?;
        let spec = RestoreSpec {
            template: self.template.clone(),
            base: None,
            vsock: dir.join("vsock.sock"),
            console: Some(dir.join("console.log")),
            layer_limit: None,
            prefault: WorkingSetPrefault::Off,
        };
        let restored = process.control.restore(spec, tap);
        restored.map_err(|error: ControlError| ConfinementError::Vmm(error))?;
        Ok(Clone { process, dir })
    }
}

impl Clone {
    pub(super) fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Where its agent is reached.
    pub(super) fn vsock(&self) -> PathBuf {
        self.dir.join("vsock.sock")
    }

    /// Whether the process is there and not a zombie.
    pub(super) fn is_alive(&self) -> bool {
        super::witness::state(self.pid()).is_some_and(|state| !matches!(state, 'Z' | 'X'))
    }
}

impl Drop for Clone {
    fn drop(&mut self) {
        // What cannot be removed now goes with the scene.
        let _ = fs::remove_dir_all(&self.dir);
    }
}
