//! The platform's part of a snapshot.

use serde::{Deserialize, Serialize};

use super::cpu::CpuState;

/// What a snapshot holds of this platform.
#[derive(Debug, Serialize, Deserialize)]
pub struct Ring3State {
    pub(super) ram: u64,
    pub(super) cpu: CpuState,
    /// System time of the guest when it was stopped.
    pub(super) ns: u64,
    /// System time at which it wants its timer.
    pub(super) deadline_ns: Option<u64>,
    /// Whether it was stopped in an idle exit.
    pub(super) idle: bool,
}
