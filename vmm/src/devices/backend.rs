//! The host files and sockets that the devices use, and the errors of setting devices up.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;

use thiserror::Error;

use super::layer::LayerDiff;
use super::state::DeviceStateError;

/// The host files and sockets that the devices use. The control client opened all of them.
#[derive(Debug)]
pub struct BackendSpec {
    /// The root image, opened for reading.
    pub root: File,
    /// The initial content of the writable layer, opened for reading.
    pub layer_base: File,
    /// The diff's blocks, which take precedence over `layer_base`; `None` unless the VM is restored from a diff.
    pub layer_diff: Option<LayerDiff>,
    /// A TAP with `IFF_TAP | IFF_NO_PI | IFF_VNET_HDR`. `None`: the guest's network card drops every frame.
    pub tap: Option<OwnedFd>,
    /// The listening unix socket through which host processes connect to guest ports.
    pub vsock: OwnedFd,
    /// An empty, unlinked file that receives the guest's disk writes. It should be on a disk: on a tmpfs the
    /// writes would use the host's memory.
    pub scratch: File,
    /// Limit on the bytes that `scratch` may occupy, rounded down to whole 4 KiB blocks. A write that would exceed it
    /// is an I/O error in the guest. `None`: only the size of the layer limits `scratch`.
    pub layer_limit: Option<u64>,
}

/// Reasons why the devices could not be set up.
#[derive(Debug, Error)]
pub enum DeviceError {
    #[error("cannot determine the size of the {disk} disk")]
    Disk {
        /// `root` or `layer`.
        disk: &'static str,
        #[source]
        source: io::Error,
    },
    #[error("cannot use the network descriptor as a TAP")]
    Tap {
        #[source]
        source: io::Error,
    },
    /// A required flag is missing. Without `IFF_VNET_HDR`, for example, frames lack the header that describes offloads.
    #[error("TAP has flags {flags:#x}: IFF_TAP, IFF_NO_PI and IFF_VNET_HDR must be set")]
    TapFlags {
        /// The `IFF_…` flags that the TAP has.
        flags: i32,
    },
    #[error("cannot accept vsock clients on the socket that was handed over")]
    Listen {
        #[source]
        source: io::Error,
    },
    #[error("cannot create the pipe that reschedules queues")]
    Backlog {
        #[source]
        source: io::Error,
    },
    /// The device state of a snapshot is invalid.
    #[error(transparent)]
    State(#[from] DeviceStateError),
}
