//! The process that runs a sandbox, and the TAP that it has open.

mod sys;

use std::{
    fs, io,
    os::fd::{OwnedFd, RawFd},
};

use nix::{net::if_::if_nametoindex, unistd::Pid};

use super::ScriptError;
use crate::isolation::sandbox::Guest;

/// A sandbox's VMM, and the device that it has open.
#[derive(Debug)]
pub(super) struct Vmm {
    pub(super) pid: Pid,
    pub(super) device: String,
    pub(super) ifindex: u32,
    /// Number of the device's descriptor.
    number: RawFd,
}

impl Vmm {
    /// Found by its log, which is in the directory of its sandbox.
    pub(super) fn of(guest: &Guest) -> Result<Self, ScriptError> {
        let processes = fs::read_dir("/proc")?.flatten();
        let mut numbers = processes.filter_map(|p| p.file_name().to_str()?.parse().ok());
        let found = numbers.find_map(|pid| Self::of_process(pid, &guest.id));
        found.ok_or_else(|| ScriptError::Stuck("its VMM and the device are not found".to_owned()))
    }

    fn of_process(pid: i32, sandbox: &str) -> Option<Self> {
        let log = fs::read_link(format!("/proc/{pid}/fd/2")).ok()?;
        log.to_str()?.contains(sandbox).then_some(())?;
        let entries = fs::read_dir(format!("/proc/{pid}/fdinfo")).ok()?;
        // Of a TAP's descriptor the kernel tells the device.
        let (number, device) = entries.flatten().find_map(|entry| {
            let text = fs::read_to_string(entry.path()).ok()?;
            let line = text.lines().find_map(|line| line.strip_prefix("iff:"))?;
            let number = entry.file_name().to_str()?.parse().ok()?;
            Some((number, line.trim().to_owned()))
        })?;
        let ifindex = if_nametoindex(device.as_str()).ok()?;
        Some(Self {
            pid: Pid::from_raw(pid),
            device,
            ifindex,
            number,
        })
    }

    /// A copy of the descriptor of the TAP: what whoever takes the VMM over has.
    pub(super) fn take_tap(&self) -> io::Result<OwnedFd> {
        sys::copy_descriptor(self.pid, self.number)
    }
}
