//! Starts the clones in which this suite makes its attempts, except those in the pool of a server.

use std::{
    cell::Cell,
    fs::{self, File},
    os::fd::AsFd,
    path::{Path, PathBuf},
    time::Duration,
};

use model::{RestoreSpec, WorkingSetPrefault};
use vmm_control::{ControlError, VmProcess};

use testbed::world;

use crate::setup::{VerifyError, at};

/// Timeout of a request to a VMM, long enough for an emulated host.
const TIMEOUT: Duration = Duration::from_secs(90);
/// TAP of the VM under test. The kernel removes it when the VMM ends.
const TAP: &str = "cubeconf0";

#[derive(Debug)]
pub(super) struct Cloner {
    pub(super) vmm: PathBuf,
    pub(super) template: PathBuf,
    started: Cell<u32>,
}

/// A clone. Dropping it ends the VMM and removes its directory.
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

    /// Starts a clone with a network device, and resumes its guest.
    pub(super) fn start(&self, dir: &Path) -> Result<Clone, VerifyError> {
        let tap = world::open_tap(TAP).map_err(at(Path::new("/dev/net/tun")))?;
        let mut clone = self.restore(dir, Some(tap.as_fd()))?;
        let resumed = clone.process.control.resume();
        resumed.map_err(VerifyError::Vmm)?;
        Ok(clone)
    }

    /// Starts a clone without a network device. Its guest is restored, but not resumed.
    pub(super) fn start_paused(&self, dir: &Path) -> Result<Clone, VerifyError> {
        self.restore(dir, None)
    }

    fn restore(
        &self,
        dir: &Path,
        tap: Option<std::os::fd::BorrowedFd<'_>>,
    ) -> Result<Clone, VerifyError> {
        self.started.set(self.started.get() + 1);
        let dir = dir.join(format!("clone-{}", self.started.get()));
        fs::create_dir(&dir).map_err(at(&dir))?;
        let log = File::create(dir.join("vmm.stderr")).map_err(at(&dir))?;
        let mut process =
            VmProcess::spawn(&self.vmm, Some(log), Some(TIMEOUT)).map_err(VerifyError::Vmm)?;
        let spec = RestoreSpec {
            template: self.template.clone(),
            base: None,
            root: None,
            vsock: dir.join("vsock.sock"),
            console: Some(dir.join("console.log")),
            layer_limit: None,
            prefault: WorkingSetPrefault::Off,
        };
        let restored = process.control.restore(spec, tap);
        restored.map_err(|error: ControlError| VerifyError::Vmm(error))?;
        Ok(Clone { process, dir })
    }
}

impl Clone {
    pub(super) fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Socket of its vsock device.
    pub(super) fn vsock(&self) -> PathBuf {
        self.dir.join("vsock.sock")
    }

    pub(super) fn is_alive(&self) -> bool {
        super::process::is_alive(self.pid())
    }
}

impl Drop for Clone {
    fn drop(&mut self) {
        // Files that cannot be removed now are removed with the directory of the scene.
        let _ = fs::remove_dir_all(&self.dir);
    }
}
