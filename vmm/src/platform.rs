//! CPU platforms: how guest code is set up, entered, interrupted and saved. Everything else of the VMM is
//! the same on all of them.
//!
//! What a platform gives the machine is the set of methods of [`PlatformVm`]: build from a kernel or from
//! saved state, run until an [`Exit`], raise device interrupts, save.

pub mod hvm;
pub mod probe;
pub mod ring3;
mod vm;

use std::time::Duration;

pub use vm::{PlatformError, PlatformState, PlatformVm, kernel_parameters};

/// Why the vCPU is out of the guest.
#[derive(Debug)]
pub enum Exit {
    /// Nothing to run until an interrupt or, if given, for so long.
    Idle(Option<Duration>),
    /// The guest wrote `bytes[..len]` at an offset of the register page.
    DeviceWrite {
        /// Offset into the page.
        offset: u64,
        /// The bytes.
        bytes: [u8; 8],
        /// How many of them.
        len: usize,
    },
    /// The guest touched memory that KVM did not know yet; it does now.
    Memory,
    /// A kick, or something the platform has dealt with itself.
    Resume,
    /// The guest is over.
    Ended(EndReason),
}

/// How a guest ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EndReason {
    /// It powered off.
    PowerOff,
    /// It asked for a reboot.
    Reboot,
    /// Its kernel gave up.
    Crash,
    /// The VMM or KVM cannot go on.
    Failed(String),
}

impl std::fmt::Display for EndReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::PowerOff => f.write_str("the guest powered off"),
            Self::Reboot => f.write_str("the guest asked for a reboot"),
            Self::Crash => f.write_str("the guest kernel crashed (its console says why)"),
            Self::Failed(why) => f.write_str(why),
        }
    }
}
