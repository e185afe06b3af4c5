//! The VM inside a machine, and its origin.

use std::{fs::File, path::PathBuf};

use model::{FileSum, HypercallPath};
use vmm_control::VmPhase;

use crate::{
    agent::IdentityTask,
    devices::{ConsoleLog, DeviceBus},
    error::MachineError,
    platform::{EndReason, PlatformVm},
    snapshot::Ancestor,
};

/// The origin of the VM, for the manifest of a snapshot.
#[derive(Debug)]
pub(super) struct Origin {
    pub(super) ram: u64,
    pub(super) vcpus: u8,
    pub(super) hypercalls: HypercallPath,
    pub(super) root: PathBuf,
    pub(super) root_sum: Option<FileSum>,
    pub(super) kernel: KernelOrigin,
    /// The template with which a diff compares the VM; `None` for a booted VM.
    pub(super) ancestor: Option<Ancestry>,
}

#[derive(Debug)]
pub(super) struct Ancestry {
    pub(super) template: Ancestor,
    pub(super) memory: File,
}

#[derive(Debug)]
pub(super) enum KernelOrigin {
    File(PathBuf, File),
    Sum(FileSum),
}

#[derive(Debug)]
pub(super) struct Vm {
    pub(super) platform: PlatformVm,
    pub(super) bus: DeviceBus,
    pub(super) console: Option<ConsoleLog>,
    pub(super) origin: Origin,
    pub(super) phase: VmPhase,
    pub(super) end: Option<EndReason>,
    pub(super) identity: Option<IdentityTask>,
}

impl Vm {
    pub(super) fn show_registers(&mut self) {
        if self.bus.take_page_changed() {
            self.platform.show_registers(self.bus.registers());
        }
    }

    pub(super) fn drain_console(&mut self) -> Result<(), MachineError> {
        let bytes = self.platform.take_log()?;
        if let Some(console) = &mut self.console
            && !bytes.is_empty()
        {
            console.write(&bytes);
        }
        Ok(())
    }
}
