//! The platform's part of a snapshot.

use serde::{Deserialize, Serialize};

use super::cpu::CpuState;

/// The platform's state in a snapshot.
#[derive(Debug, Serialize, Deserialize)]
pub struct Ring3State {
    pub(super) ram: u64,
    pub(super) cpu: CpuState,
    /// System time of the guest when it was paused, in nanoseconds.
    pub(super) ns: u64,
    /// System time of the guest's next timer interrupt; `None` if no timer is set.
    pub(super) deadline_ns: Option<u64>,
    /// Whether the guest was paused in an idle exit.
    pub(super) idle: bool,
}
