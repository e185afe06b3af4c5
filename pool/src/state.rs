//! The state of a sandbox as clients see it.

use serde::{Deserialize, Serialize};

/// The state of a sandbox as clients see it. While a pause or resume is under way, this is still the old state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SandboxState {
    Running,
    Paused(PauseMode),
}

/// The part of the state that a pause keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PauseMode {
    /// Memory, CPU and disk: a resume continues where the sandbox was paused.
    Memory,
    /// The disk: a resume is a cold boot.
    FilesystemOnly,
}
