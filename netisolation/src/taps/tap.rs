//! TAPs as callers see them.

use std::os::fd::OwnedFd;

use serde::{Deserialize, Serialize};

/// Number of a TAP: 1 to [`crate::IsolationConfig::max_taps`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct TapIndex(pub u32);

/// A TAP to hand to a VMM.
#[derive(Debug)]
pub struct Tap {
    pub index: TapIndex,
    /// Opened with IFF_VNET_HDR.
    pub fd: OwnedFd,
}
