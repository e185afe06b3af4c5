//! A VM of either platform, with the operations that the machine needs.

use kvm_ioctls::{Kvm, VcpuFd};
use model::Platform;
use serde::{Deserialize, Serialize};

use super::{
    Exit,
    hvm::{self, Hvm, HvmError, HvmState},
    ring3::{BootFiles, Ring3, Ring3Error, Ring3State},
};
use crate::{
    devices::{Interrupts, PAGE_BYTES},
    memory::{Hole, Memory},
};

/// Reasons why an operation of the platform failed.
#[derive(Debug, thiserror::Error)]
pub enum PlatformError {
    #[error(transparent)]
    Ring3(#[from] Ring3Error),
    #[error(transparent)]
    Hvm(#[from] HvmError),
}

/// The platform's part of a snapshot.
#[derive(Debug, Serialize, Deserialize)]
pub enum PlatformState {
    Ring3(Box<Ring3State>),
    Hvm(Box<HvmState>),
}

impl PlatformState {
    /// The range of guest-physical addresses without RAM.
    #[must_use]
    pub fn hole(&self) -> Option<Hole> {
        match self {
            Self::Ring3(_) => None,
            Self::Hvm(_) => Some(hvm::HOLE),
        }
    }
}

/// Parameters of a guest whose kernel has one CPU and stops its tick at once (docs/develop/guest.md, "The tick of an
/// idle guest"). A thread calls RCU callbacks, so that they do not keep the tick. After its first check, a grace period
/// is checked every ten ticks, 40 ms, which must stay below the 50 ms of the rule for quiet templates. Waits for a
/// grace period are expedited.
const QUIET_RCU: &str = "rcu_nocbs=all rcutree.jiffies_till_next_fqs=10 rcupdate.rcu_expedited=1";

/// Bytes of a file that a page fault maps at once, where the page cache has them; the kernel's default is 64 KiB. A fault
/// costs a guest more than many entries of a page table do (results/notes-develop.md, "Page faults of files").
const FAULT_AROUND: &str = "cube.fault_around=1048576";

/// Kernel parameters that the platform needs.
#[must_use]
pub fn kernel_parameters(platform: Platform, ram: u64, devices: usize) -> String {
    match platform {
        Platform::Ring3 => {
            let devices = Ring3::device_parameters(ram, devices);
            format!("console=hvc0 clocksource=xen {QUIET_RCU} {FAULT_AROUND} {devices}")
        }
        Platform::Hvm => hvm::PARAMETERS.to_owned(),
    }
}

#[derive(Debug)]
pub enum PlatformVm {
    Ring3(Box<Ring3>),
    Hvm(Box<Hvm>),
}

impl PlatformVm {
    /// Builds a VM with `ram` bytes of RAM that will start the kernel.
    ///
    /// # Errors
    /// Returns the platform's error.
    pub fn boot(
        platform: Platform,
        kvm: &Kvm,
        (ram, vcpus): (u64, u8),
        devices: usize,
        files: BootFiles<'_>,
    ) -> Result<Self, PlatformError> {
        Ok(match platform {
            Platform::Ring3 => Self::Ring3(Box::new(Ring3::boot(kvm, ram, devices, files)?)),
            Platform::Hvm => Self::Hvm(Box::new(Hvm::boot(kvm, ram, vcpus, devices, files)?)),
        })
    }

    /// Builds a clone on the template's memory. The guest does not run yet.
    ///
    /// # Errors
    /// Returns the platform's error.
    pub fn restore(
        kvm: &Kvm,
        memory: Memory,
        devices: usize,
        state: &PlatformState,
    ) -> Result<Self, PlatformError> {
        Ok(match state {
            PlatformState::Ring3(state) => {
                Self::Ring3(Box::new(Ring3::restore(kvm, memory, devices, state)?))
            }
            PlatformState::Hvm(state) => {
                Self::Hvm(Box::new(Hvm::restore(kvm, memory, devices, state)?))
            }
        })
    }

    #[must_use]
    pub fn platform(&self) -> Platform {
        match self {
            Self::Ring3(_) => Platform::Ring3,
            Self::Hvm(_) => Platform::Hvm,
        }
    }

    /// The vCPU that runs on the machine's thread, to install the kick.
    pub fn vcpu(&mut self) -> &mut VcpuFd {
        match self {
            Self::Ring3(vm) => vm.vcpu(),
            Self::Hvm(vm) => vm.vcpu(),
        }
    }

    #[must_use]
    pub fn memory(&self) -> &Memory {
        match self {
            Self::Ring3(vm) => vm.memory(),
            Self::Hvm(vm) => vm.memory(),
        }
    }

    /// Replaces the content of the register page.
    pub fn show_registers(&self, page: &[u8; PAGE_BYTES]) {
        match self {
            Self::Ring3(vm) => vm.show_registers(page),
            Self::Hvm(vm) => vm.show_registers(page),
        }
    }

    /// Runs the guest until it exits.
    ///
    /// # Errors
    /// Returns the platform's error.
    pub fn run(&mut self) -> Result<Exit, PlatformError> {
        match self {
            Self::Ring3(vm) => Ok(vm.run()?),
            Self::Hvm(vm) => Ok(vm.run()?),
        }
    }

    /// Clears the request to leave KVM_RUN that a kick set.
    pub fn clear_kick(&mut self) {
        match self {
            Self::Ring3(vm) => vm.clear_kick(),
            Self::Hvm(vm) => vm.clear_kick(),
        }
    }

    /// Stops the guest's clock, and takes vCPUs on other threads out of the guest until the next [`PlatformVm::run`].
    ///
    /// # Errors
    /// Returns the platform's error.
    pub fn pause(&mut self) -> Result<(), PlatformError> {
        match self {
            Self::Ring3(vm) => vm.pause(),
            Self::Hvm(vm) => vm.pause()?,
        }
        Ok(())
    }

    /// Continues the guest's clock where the pause stopped it. The guest's clock does not include the pause, so no
    /// watchdog fires and no timer is late. The guest's wall clock is behind until it is set again.
    ///
    /// # Errors
    /// Returns the platform's error.
    pub fn resume(&mut self) -> Result<(), PlatformError> {
        match self {
            Self::Ring3(vm) => Ok(vm.resume()?),
            Self::Hvm(vm) => Ok(vm.resume()?),
        }
    }

    /// Raises device interrupts.
    ///
    /// # Errors
    /// Returns the platform's error.
    pub fn raise(&mut self, interrupts: Interrupts) -> Result<(), PlatformError> {
        match self {
            Self::Ring3(vm) => Ok(vm.raise(interrupts)?),
            Self::Hvm(vm) => Ok(vm.raise(interrupts)?),
        }
    }

    /// Returns the console output since the last call.
    ///
    /// # Errors
    /// Returns the platform's error.
    pub fn take_log(&mut self) -> Result<Vec<u8>, PlatformError> {
        match self {
            Self::Ring3(vm) => Ok(vm.take_log()?),
            Self::Hvm(vm) => Ok(vm.take_log()),
        }
    }

    /// Changes for a saved copy of guest memory: (offset, value) of 8-byte words.
    ///
    /// # Errors
    /// Returns the platform's error.
    pub fn memory_fixups(&self) -> Result<Vec<(u64, u64)>, PlatformError> {
        match self {
            Self::Ring3(vm) => Ok(vm.memory_fixups()?),
            Self::Hvm(_) => Ok(Vec::new()),
        }
    }

    /// Reads the state of a paused VM.
    ///
    /// # Errors
    /// Returns the platform's error.
    pub fn save(&mut self) -> Result<PlatformState, PlatformError> {
        Ok(match self {
            Self::Ring3(vm) => PlatformState::Ring3(Box::new(vm.save()?)),
            Self::Hvm(vm) => PlatformState::Hvm(Box::new(vm.save()?)),
        })
    }
}
