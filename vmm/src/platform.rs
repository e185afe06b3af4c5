//! CPU platforms: how guest code is initialized, run, interrupted and saved. The rest of the VMM is the same on all
//! platforms.
//!
//! [`PlatformVm`] is the interface to the machine: build from a kernel or from saved state, run until an [`Exit`],
//! raise device interrupts, save.

mod features;
pub mod hvm;
pub mod probe;
pub mod ring3;
mod vm;

use std::time::Duration;

pub use vm::{PlatformError, PlatformState, PlatformVm, kernel_parameters};

/// Reason why a vCPU left the guest.
#[derive(Debug)]
pub enum Exit {
    /// The guest is idle until an interrupt arrives or, if given, this time has passed.
    Idle(Option<Duration>),
    /// The guest wrote `bytes[..len]` to the register page.
    DeviceWrite {
        /// Offset in the register page.
        offset: u64,
        bytes: [u8; 8],
        len: usize,
    },
    /// The guest accessed memory without a KVM slot. The platform has registered a slot for it.
    Memory,
    /// A kick, or an exit that the platform has handled itself.
    Resume,
    /// The guest has ended.
    Ended(EndReason),
}

/// How a guest ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EndReason {
    PowerOff,
    Reboot,
    /// The guest kernel panicked.
    Crash,
    /// The VMM or KVM cannot continue.
    Failed(String),
}

impl std::fmt::Display for EndReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::PowerOff => f.write_str("the guest powered off"),
            Self::Reboot => f.write_str("the guest requested a reboot"),
            Self::Crash => f.write_str("the guest kernel crashed (see the console for the reason)"),
            Self::Failed(why) => f.write_str(why),
        }
    }
}
