//! From the initramfs to the root file system.
//!
//! ```text
//! initramfs: proc, sysfs, devtmpfs ─► modules ─► block devices appear
//!   cube.root  (erofs, read-only) ──┐
//!   cube.layer (ext4) upper, work ──┴─► overlay ─► moved to /, initramfs emptied
//! root: proc, sys, cgroup2, dev, pts, shm, run ─► identity files ─► loopback up, card quiet
//! ```
//! If `/modules/order` does not exist, the kernel has mounted the root itself, and only the steps in the last line of
//! the drawing are done. Any failure ends the guest: an incomplete root must never be served.
//!
//! /tmp stays on the layer, as in E2B's sandboxes: large builds go there, and a tmpfs would hold them in memory.

mod cmdline;
mod modules;
mod root;
mod system;

use std::{
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    time::Duration,
};

use nix::errno::Errno;

use crate::{identity::Machine, network};
use cmdline::CommandLine;

/// A failed boot.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BootError {
    #[error("cannot mount {source_name} ({fstype}) on {target}")]
    Mount {
        source_name: String,
        fstype: String,
        target: PathBuf,
        #[source]
        source: Errno,
    },
    #[error("cannot load module {name} with parameters {parameters:?}")]
    Module {
        name: String,
        parameters: String,
        #[source]
        source: Errno,
    },
    #[error("{device} did not appear within {within:?}")]
    NoDevice { device: PathBuf, within: Duration },
    #[error("cannot {what}")]
    System {
        what: String,
        #[source]
        source: std::io::Error,
    },
}

/// An error of the form "cannot `what`", for `map_err`.
fn cannot<E: Into<std::io::Error>>(what: impl Into<String>) -> impl FnOnce(E) -> BootError {
    let what = what.into();
    move |source| BootError::System {
        what,
        source: source.into(),
    }
}

/// Assembles the root, mounts kernel file systems and sets up devices. Returns the machine, to which the server
/// gives an identity.
pub(crate) fn run() -> Result<Machine, BootError> {
    system::set_signals()?;
    let layer = if Path::new(modules::ORDER).exists() {
        from_initramfs()?
    } else {
        None
    };
    system::mount_all()?;
    system::open_console();
    system::loopback_up()?;
    network::quieten().map_err(cannot("disable autoconfiguration of the network card"))?;
    system::machine(layer)
}

/// Runs the initramfs stage. Returns the layer's directory, kept open so that shutdown can freeze the layer.
fn from_initramfs() -> Result<Option<OwnedFd>, BootError> {
    system::mount_early()?;
    system::open_console();
    let cmdline = std::fs::read_to_string("/proc/cmdline").map_err(cannot("read /proc/cmdline"))?;
    let cmdline = CommandLine::parse(&cmdline);
    modules::load_all(&cmdline)?;
    if let Some(bytes) = cmdline.value("cube.fault_around") {
        system::set_fault_around(bytes);
    }
    let layer = root::assemble(
        Path::new(cmdline.value("cube.root").unwrap_or("/dev/vda")),
        Path::new(cmdline.value("cube.layer").unwrap_or("/dev/vdb")),
    )?;
    root::switch()?;
    Ok(Some(layer))
}
