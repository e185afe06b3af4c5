//! The VMM of a sandbox, and the TAP that it has open.

mod sys;

use std::{
    fs, io,
    os::fd::{OwnedFd, RawFd},
};

use nix::{net::if_::if_nametoindex, unistd::Pid};

use super::outcome::ScriptError;
use crate::sandbox::Sandbox;

#[derive(Debug)]
pub(super) struct Vmm {
    pub(super) pid: Pid,
    pub(super) device: String,
    pub(super) ifindex: u32,
    /// The VMM's descriptor of the device.
    descriptor: RawFd,
}

impl Vmm {
    /// Finds the process whose standard error is a file in the sandbox's directory.
    pub(super) fn of(guest: &Sandbox) -> Result<Self, ScriptError> {
        let processes = fs::read_dir("/proc")?.flatten();
        let mut pids = processes.filter_map(|p| p.file_name().to_str()?.parse().ok());
        let found = pids.find_map(|pid| Self::of_process(pid, guest.id()));
        found.ok_or_else(|| {
            let id = guest.id();
            ScriptError::Failed(format!("cannot find the VMM of sandbox {id} and its TAP"))
        })
    }

    fn of_process(pid: i32, sandbox: &str) -> Option<Self> {
        let log = fs::read_link(format!("/proc/{pid}/fd/2")).ok()?;
        log.to_str()?.contains(sandbox).then_some(())?;
        let entries = fs::read_dir(format!("/proc/{pid}/fdinfo")).ok()?;
        // The fdinfo of a TAP's descriptor names the device.
        let (descriptor, device) = entries.flatten().find_map(|entry| {
            let text = fs::read_to_string(entry.path()).ok()?;
            let line = text.lines().find_map(|line| line.strip_prefix("iff:"))?;
            let descriptor = entry.file_name().to_str()?.parse().ok()?;
            Some((descriptor, line.trim().to_owned()))
        })?;
        let ifindex = if_nametoindex(device.as_str()).ok()?;
        Some(Self {
            pid: Pid::from_raw(pid),
            device,
            ifindex,
            descriptor,
        })
    }

    /// Copies the descriptor of the TAP, as code that has taken over the VMM could use it.
    pub(super) fn take_tap(&self) -> io::Result<OwnedFd> {
        sys::copy_descriptor(self.pid, self.descriptor)
    }
}
