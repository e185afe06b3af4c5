//! Adopts a sandbox of the previous server. A running sandbox is verified before its first request is served: its
//! network enforces the recorded policy, and its VMM responds. For a paused sandbox, a leftover process or cgroup is
//! removed.

use std::{fs, sync::Arc, time::Duration};

use envd::guest_text;
use model::{SandboxId, chain};
use netisolation::{Isolation, Policy, TapIndex};
use vmm_control::{ControlClient, VmPhase};

use crate::{
    cgroup::Groups,
    host,
    leftovers::{end, sweep_group},
    record::SlotDir,
    vm::Vm,
};

/// The adoption of a running sandbox.
#[derive(Debug)]
pub(crate) struct AdoptPlan {
    pub(crate) id: SandboxId,
    pub(crate) dir: SlotDir,
    /// Process id of the VMM.
    pub(crate) pid: u32,
    pub(crate) tap: Option<TapIndex>,
    pub(crate) policy: Policy,
    pub(crate) network: Option<Isolation>,
    /// Limit for each response of the VMM. On a busy host or a slow disk, a response can take more than half a minute.
    pub(crate) patience: Duration,
}

/// A VMM that must respond before its sandbox is adopted. It holds nothing that the next server needs.
#[derive(Debug)]
pub(crate) struct Asking {
    dir: SlotDir,
    pid: u32,
    patience: Duration,
}

impl AdoptPlan {
    /// Does everything except contacting the VMM.
    ///
    /// # Errors
    /// Returns why the sandbox cannot continue, like [`Asking::run`].
    pub(crate) fn prepare(self) -> Result<Asking, String> {
        self.adopt_tap()?;
        // These files belong to an unfinished pause, or to one that was resumed. The record says that the sandbox runs,
        // so the sandbox ends if its VMM does not respond.
        if let Err(error) = self.dir.forget_pause() {
            tracing::error!(
                dir = %self.dir.path().display(),
                %error,
                "cannot remove the files of an obsolete pause"
            );
        }
        remove_drafts(&self.dir);
        Ok(Asking {
            dir: self.dir,
            pid: self.pid,
            patience: self.patience,
        })
    }

    /// Applies the record's policy to the TAP and reads it back.
    fn adopt_tap(&self) -> Result<(), String> {
        match (self.tap, &self.network) {
            (None, _) => Ok(()),
            (Some(_), None) => {
                Err("it has a network, but this server is configured without one".to_owned())
            }
            (Some(tap), Some(network)) => network
                .adopt(tap, &self.id, &self.policy)
                .map_err(|e| chain(&e)),
        }
    }
}

impl Asking {
    /// Returns the VMM's private memory in bytes, or `None` if it cannot be read.
    ///
    /// # Errors
    /// Returns why the sandbox cannot continue. The driver must then end it, because its traffic may be unfiltered or
    /// its VM out of control.
    pub(crate) fn run(self) -> Result<Option<u64>, String> {
        self.go_on()?;
        Ok(host::private_bytes(self.pid))
    }

    /// Resumes the VM if it is paused, because the previous server may have been killed while it wrote a snapshot.
    /// Returns an error if the VMM does not respond or its guest has exited.
    fn go_on(&self) -> Result<(), String> {
        let mut control = ControlClient::connect(&self.dir.control(), Some(self.patience))
            .map_err(|e| format!("cannot connect to its VMM: {e}"))?;
        let answer = |e| format!("its VMM does not respond: {}", guest_text(&chain(&e)));
        let stats = control.stats().map_err(answer)?;
        match stats.phase {
            VmPhase::Running => Ok(()),
            VmPhase::Paused => control.resume().map_err(answer),
            VmPhase::Empty | VmPhase::Exited => Err("its guest exited".to_owned()),
        }
    }
}

/// Removes incomplete snapshots of the previous server. No other server can be writing one, because this server holds
/// the lock of the state directory.
fn remove_drafts(dir: &SlotDir) {
    for entry in fs::read_dir(dir.path()).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with(".pause.") {
            // If this fails, the files are removed with the sandbox's directory.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// Adoption of a paused sandbox for which the previous server left a process or a cgroup.
#[derive(Debug)]
pub(crate) struct AdoptPausedPlan {
    pub(crate) id: SandboxId,
    pub(crate) dir: SlotDir,
    /// The recorded VMM, if it still runs.
    pub(crate) vm: Option<Vm>,
    pub(crate) groups: Arc<Groups>,
    /// Limit for the response of a VMM that is not recorded.
    pub(crate) patience: Duration,
}

impl AdoptPausedPlan {
    /// Ends the process and removes the cgroup, so that a resume finds neither. Failures are logged.
    pub(crate) fn run(self) {
        end(&self.dir, self.vm.as_ref(), self.patience);
        sweep_group(&self.groups, self.id.as_str());
    }
}
