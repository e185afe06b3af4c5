//! A TAP for one VMM after the other.
//!
//! When the process of a VMM is gone, nobody but this server has its TAP: the VMM could neither send the descriptor
//! away nor leave a process behind, and of the requests that change a device it had one (`confine` of `vmm`). What the
//! two sandboxes must not share is undone here: the frames that wait, and what the VMM set. Whatever else can be read
//! of the device is compared with what it was when it was made.

mod sys;

use std::{
    fs, io,
    os::fd::{AsFd, OwnedFd},
};

use nix::{
    errno::Errno,
    fcntl::{FcntlArg, OFlag, fcntl},
    libc,
};

use crate::device::{self, Device};

/// Frames that can wait: a TAP has a queue of 1000 (`tx_queue_len`), and nobody puts more into it meanwhile.
const MOST_FRAMES: usize = 2000;

/// A TAP and what it was when it was made.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) device: Device,
    made: Traits,
}

/// What can be read of a TAP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Traits {
    flags: libc::c_int,
    tap_flags: libc::c_short,
    mac: [u8; 6],
    mtu: u32,
    queue: u32,
    header_len: libc::c_int,
    send_buffer: libc::c_int,
}

impl Held {
    /// Of a TAP that is up and that no VMM had.
    pub(crate) fn new(device: Device) -> io::Result<Self> {
        let made = Traits::of(&device)?;
        Ok(Self { device, made })
    }

    /// For a VMM.
    pub(crate) fn descriptor(&self) -> io::Result<OwnedFd> {
        self.device.fd.try_clone()
    }

    /// Makes it as it was when it was made. Only after [`await_programs`], which comes after its entries deny all.
    ///
    /// # Errors
    /// It cannot be made so. It has to go then.
    pub(crate) fn renew(&self) -> io::Result<()> {
        let tap = self.device.fd.as_fd();
        sys::set_header_len(tap, self.made.header_len)?;
        sys::set_no_offloads(tap)?;
        self.drain()?;
        match Traits::of(&self.device)? {
            found if found == self.made => Ok(()),
            found => Err(io::Error::other(format!(
                "it is {found:?} and not {:?}",
                self.made
            ))),
        }
    }

    /// Throws away the frames that wait. Nobody is signalled of readiness any more, either.
    fn drain(&self) -> io::Result<()> {
        let tap = &self.device.fd;
        fcntl(tap, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        for _ in 0..=MOST_FRAMES {
            // What of a frame does not fit is thrown away with it.
            match nix::unistd::read(tap, &mut [0; 64]) {
                Ok(_) | Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => {
                    fcntl(tap, FcntlArg::F_SETFL(OFlag::empty()))?;
                    return Ok(());
                }
                Err(error) => return Err(error.into()),
            }
        }
        Err(io::Error::other("frames go on coming"))
    }
}

impl Traits {
    fn of(device: &Device) -> io::Result<Self> {
        let (name, tap) = (&device.name, device.fd.as_fd());
        Ok(Self {
            // Its carrier is told late.
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

/// Waits until every program that began before has ended, and what it let pass has arrived: a frame is judged and put
/// into the queue of a TAP in one read-side section of RCU, because there is no queueing discipline in between
/// (`device::bypass_queueing`). Takes ten milliseconds and more, with no lock of the kernel held.
///
/// # Errors
/// The kernel does not offer it (`nohz_full`), or spreads frames over CPUs before their program sees them.
pub(crate) fn await_programs() -> io::Result<()> {
    let spread = fs::read_to_string("/proc/sys/net/core/rps_default_mask").unwrap_or_default();
    if spread.contains(|c: char| c.is_ascii_hexdigit() && c != '0') {
        return Err(io::Error::other("net.core.rps_default_mask is set"));
    }
    sys::await_readers()
}
