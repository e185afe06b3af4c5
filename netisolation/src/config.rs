//! The operator's configuration of isolation, and its checks.

use std::path::PathBuf;

use ranges::ForbiddenAddresses;

use crate::error::{IsolationError, unsuitable};

/// Maximum number of TAPs of one server. The resolver identifies each TAP by an address in the server's /18 block of
/// 198.18.0.0/15, so the limit must be below 16382.
pub const MAX_TAPS: u32 = 16_000;

#[derive(Clone, Debug)]
pub struct IsolationConfig {
    /// Name of this installation, derived from its state directory: lower-case letters and digits. Each instance has
    /// its own subdirectory of `pins`.
    pub instance: String,
    /// Directory in a bpffs (`/sys/fs/bpf/cube`). Programs and maps pinned there outlive this process.
    pub pins: PathBuf,
    /// Interfaces through which packets may leave the host.
    pub uplinks: Uplinks,
    /// Addresses that no policy opens.
    pub forbidden: ForbiddenAddresses,
    /// Number of TAPs to keep ready.
    pub stock: u32,
    /// Maximum number of TAPs at a time, including ready TAPs and released ones whose entries are not yet removed: at
    /// most [`MAX_TAPS`].
    pub max_taps: u32,
    /// Maximum number of open flows per sandbox.
    pub max_flows: u32,
    /// Bandwidth limit per sandbox in bytes per second, for each direction; a policy can only lower it. `None`:
    /// unlimited.
    pub bytes_per_s: Option<u64>,
    /// Whether TCP flows to ports 80 and 443 that only a name allows, or whose name has header rules, go to a proxy
    /// ([`crate::Isolation::proxy_listener`]) instead of an uplink. Without a proxy that accepts them, they wait or
    /// fail.
    pub proxy: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Uplinks {
    /// The interfaces of the default routes at startup.
    DefaultRoutes,
    /// Interfaces by name.
    Named(Vec<String>),
}

impl IsolationConfig {
    /// # Errors
    /// Returns [`IsolationError::Unsuitable`] if the instance name or a limit is out of range.
    pub(crate) fn check(&self) -> Result<(), IsolationError> {
        let name = &self.instance;
        let is_allowed = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
        if name.is_empty() || !name.bytes().all(is_allowed) {
            return Err(unsuitable(
                format!("the instance name {name:?} is not valid"),
                "use lower-case letters and digits",
            ));
        }
        for (name, value, most) in [
            ("max_taps", self.max_taps, MAX_TAPS),
            ("max_flows", self.max_flows, u32::MAX),
        ] {
            if !(1..=most).contains(&value) {
                return Err(unsuitable(
                    format!("{name} = {value} is out of range"),
                    format!("set {name} to 1 to {most}"),
                ));
            }
        }
        Ok(())
    }
}
