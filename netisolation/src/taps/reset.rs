//! Resets a TAP so that another sandbox can use it.
//!
//! After a VMM's process has ended, only this server holds a descriptor of its TAP: the VMM's confinement (`confine` in
//! the `vmm` crate) prevents it from passing the descriptor on or leaving a process behind, and allows one ioctl that
//! changes the device. The reset discards queued frames and undoes that ioctl, so that no state passes from one sandbox
//! to the next. Every other readable property must be the same as when the device was created.

pub(crate) mod sys;

use std::{
    fs, io,
    os::fd::{AsFd, OwnedFd},
};

use nix::{
    errno::Errno,
    fcntl::{FcntlArg, OFlag, fcntl},
    libc,
};

use crate::taps::device::{self, Device};

/// More frames than a TAP can queue (`tx_queue_len` is 1000). If a reset finds more, frames are still arriving.
const MAX_FRAMES: usize = 2000;

/// A TAP with its properties at creation. This server holds a descriptor. Dropping it removes the device unless a VMM
/// holds a descriptor as well.
///
/// A TAP in the stock is persistent. When the server is killed, the kernel then need not remove the stock, which would
/// delay the end of the process by seconds, and the next server takes it over. While a VM uses the TAP, it is not
/// persistent, so that the kernel removes it with the VM.
#[derive(Debug)]
pub(crate) struct OwnedTap {
    pub(crate) device: Device,
    created: Properties,
    is_kept: bool,
}

/// The readable properties of a TAP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Properties {
    flags: libc::c_int,
    tap_flags: libc::c_short,
    mac: [u8; 6],
    mtu: u32,
    queue: u32,
    header_len: libc::c_int,
    send_buffer: libc::c_int,
}

impl OwnedTap {
    /// Records the properties of a new TAP, which must be up.
    pub(crate) fn new(device: Device) -> io::Result<Self> {
        let created = Properties::of(&device)?;
        let is_kept = false;
        Ok(Self {
            device,
            created,
            is_kept,
        })
    }

    /// Takes over a TAP from a previous server's stock. Discards queued frames.
    ///
    /// # Errors
    /// Returns an error if a system call fails. The device is then removed.
    pub(crate) fn take_over(device: Device) -> io::Result<Self> {
        device::set_persistent(device.fd.as_fd(), false)?;
        let tap = Self::new(device)?;
        tap.reset()?;
        tap.persist()?;
        Ok(tap)
    }

    /// Makes the device outlive this process, for a TAP in the stock.
    pub(crate) fn persist(&self) -> io::Result<()> {
        device::set_persistent(self.device.fd.as_fd(), true)
    }

    /// Closes the descriptor and keeps a persistent device.
    pub(crate) fn keep(mut self) {
        self.is_kept = true;
    }

    /// Duplicates the descriptor for a VMM.
    pub(crate) fn descriptor(&self) -> io::Result<OwnedFd> {
        self.device.fd.try_clone()
    }

    /// Resets the device to its state at creation. Before this call, the TAP's map entry must deny all traffic, and
    /// then [`wait_for_running_programs`] must have returned.
    ///
    /// # Errors
    /// Returns an error if a system call fails or a property has changed. The device must then be removed.
    pub(crate) fn reset(&self) -> io::Result<()> {
        let tap = self.device.fd.as_fd();
        sys::set_header_len(tap, self.created.header_len)?;
        sys::set_no_offloads(tap)?;
        self.discard_frames()?;
        match Properties::of(&self.device)? {
            found if found == self.created => Ok(()),
            found => Err(io::Error::other(format!(
                "the TAP's properties are {found:?}, expected {:?}",
                self.created
            ))),
        }
    }

    /// Discards the queued frames, and clears all file status flags that F_SETFL can change, including O_ASYNC.
    fn discard_frames(&self) -> io::Result<()> {
        let tap = &self.device.fd;
        fcntl(tap, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        for _ in 0..=MAX_FRAMES {
            // A read consumes the whole frame, whatever the size of the buffer.
            match nix::unistd::read(tap, &mut [0; 64]) {
                Ok(_) | Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => {
                    fcntl(tap, FcntlArg::F_SETFL(OFlag::empty()))?;
                    return Ok(());
                }
                Err(error) => return Err(error.into()),
            }
        }
        Err(io::Error::other("frames keep arriving"))
    }
}

impl Drop for OwnedTap {
    fn drop(&mut self) {
        if !self.is_kept {
            // If this fails, the device stays until the next server takes it over.
            let _stays = device::set_persistent(self.device.fd.as_fd(), false);
        }
    }
}

impl Properties {
    fn of(device: &Device) -> io::Result<Self> {
        let (name, tap) = (&device.name, device.fd.as_fd());
        Ok(Self {
            // IFF_RUNNING follows the carrier with a delay.
            flags: device::flags(name)? & !libc::IFF_RUNNING,
            tap_flags: sys::tap_flags(tap)?,
            mac: device::hardware_address(name)?,
            mtu: device::mtu(name)?,
            queue: device::queue(name)?,
            header_len: sys::header_len(tap)?,
            send_buffer: sys::send_buffer(tap)?,
        })
    }
}

/// Waits until all eBPF programs that are running now have ended and the frames that they passed are in the TAPs'
/// queues. A program evaluates a frame and queues it on a TAP within one RCU read-side critical section, because no
/// queueing discipline lies in between (`device::bypass_queueing`). Takes 10 ms or more; holds no kernel lock.
///
/// # Errors
/// Returns an error if the kernel does not support MEMBARRIER_CMD_GLOBAL (`nohz_full`), or if RPS moves frames to other
/// CPUs before the program sees them.
pub(crate) fn wait_for_running_programs() -> io::Result<()> {
    let spread = fs::read_to_string("/proc/sys/net/core/rps_default_mask").unwrap_or_default();
    if spread.contains(|c: char| c.is_ascii_hexdigit() && c != '0') {
        return Err(io::Error::other(
            "net.core.rps_default_mask is set, so frames may still be in flight",
        ));
    }
    sys::wait_for_rcu_readers()
}
