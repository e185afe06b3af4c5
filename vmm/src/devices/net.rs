//! virtio-net (virtio 1.2, 5.1) over a TAP: one pair of queues, offloads, merged receive buffers.
//!
//! A frame on its way to the guest is read into this process first, because only then its length tells how
//! many of the guest's buffers it takes; a frame from the guest goes to the TAP from where it lies, but
//! for its headers. Those are copied once, and the header before the frame is made from them ([`offload`]):
//! a driver that rewrites them meanwhile changes nothing that was looked at.

mod offload;

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::libc;
use virtio_bindings::virtio_net as spec;

use self::offload::{HEADER, HEADERS_MAX};
use super::buffers::Buffers;
use super::queue::{Chain, Virtqueue};
use super::registers::{COMMON_FEATURES, Identity, feature};
use super::{DeviceError, FIRST_TOKEN, Io, Ram, VirtioDevice, sys};
use crate::watch::{Interest, Watch};

/// The TAP's token in the watch.
pub(super) const TAP_TOKEN: u64 = FIRST_TOKEN;

const DEVICE_ID: u32 = 1;
const RX: usize = 0;
const TX: usize = 1;
/// Of [`HEADER`]: it counts the buffers of a frame.
const HEADER_BUFFERS: std::ops::Range<usize> = 10..12;
/// A header, an Ethernet header and the largest IP packet.
const FRAME_MAX: usize = HEADER + 14 + 65_536;
/// Buffers that one frame may take: the driver's smallest ones, 1.5 KiB, need 44.
const MERGE_MAX: usize = 128;
/// What the driver may leave to the TAP, and the TAP to the driver.
const OFFLOADS: u64 = feature(spec::VIRTIO_NET_F_CSUM)
    | feature(spec::VIRTIO_NET_F_HOST_TSO4)
    | feature(spec::VIRTIO_NET_F_HOST_TSO6)
    | feature(spec::VIRTIO_NET_F_GUEST_CSUM)
    | feature(spec::VIRTIO_NET_F_GUEST_TSO4)
    | feature(spec::VIRTIO_NET_F_GUEST_TSO6);

/// The network device.
#[derive(Debug)]
pub(super) struct Net {
    tap: Option<OwnedFd>,
    merge: Merge,
    /// Whether the TAP may hold frames: its readiness is told once per change.
    readable: bool,
    /// Room for one frame, made when the first arrives, and the bytes of it that wait for buffers.
    frame: Vec<u8>,
    waiting: usize,
}

/// Whether a frame may spread over several chains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Merge {
    Single,
    Several,
}

/// What became of a frame.
enum Delivery {
    Over,
    NoRoom,
}

impl Net {
    pub(super) fn new(tap: Option<OwnedFd>, watch: &mut Watch) -> Result<Self, DeviceError> {
        if let Some(tap) = &tap {
            prepare(tap, watch)?;
        }
        Ok(Self {
            tap,
            merge: Merge::Single,
            readable: true,
            frame: Vec::new(),
            waiting: 0,
        })
    }

    pub(super) fn identity() -> Identity {
        Identity {
            device_id: DEVICE_ID,
            features: COMMON_FEATURES
                | OFFLOADS
                | feature(spec::VIRTIO_NET_F_MAC)
                | feature(spec::VIRTIO_NET_F_MRG_RXBUF),
            queue_sizes: &[256, 256],
            config: model::guest::MAC.to_vec(),
        }
    }

    /// Moves frames from the TAP to the guest while there are frames and buffers.
    fn receive(&mut self, queue: &mut Virtqueue, ram: &Ram) {
        while self.waiting > 0 || self.read_frame() {
            match self.deliver(queue, ram) {
                Delivery::Over => self.waiting = 0,
                Delivery::NoRoom if queue.await_kick(ram) => {}
                Delivery::NoRoom => return,
            }
        }
    }

    /// Whether a frame now waits.
    fn read_frame(&mut self) -> bool {
        let Some(tap) = self.tap.as_ref().filter(|_| self.readable) else {
            return false;
        };
        self.frame.resize(FRAME_MAX, 0);
        self.waiting = match nix::unistd::read(tap, &mut self.frame) {
            Ok(len) if len > HEADER => len,
            _ => 0,
        };
        self.readable = self.waiting > 0;
        self.readable
    }

    /// Copies the waiting frame into as many buffers as it takes. Buffers are given back untouched when
    /// there are not enough yet.
    fn deliver(&mut self, queue: &mut Virtqueue, ram: &Ram) -> Delivery {
        let limit = match self.merge {
            Merge::Single => 1,
            Merge::Several => MERGE_MAX,
        };
        let mut chains: Vec<Chain<'_>> = Vec::with_capacity(1);
        let mut room = 0;
        while room < self.waiting && chains.len() < limit {
            let Some(chain) = queue.pop(ram) else {
                chains.iter().for_each(|_| queue.undo_pop());
                return Delivery::NoRoom;
            };
            room += chain.writable.len();
            chains.push(chain);
        }
        let fits = room >= self.waiting;
        let count = u16::try_from(chains.len()).unwrap_or(0);
        self.frame[HEADER_BUFFERS].copy_from_slice(&count.to_le_bytes());
        let mut rest = &self.frame[..self.waiting];
        for chain in &chains {
            let done = if fits { chain.writable.write(rest) } else { 0 };
            rest = &rest[done..];
            queue.complete(ram, chain.head, u32::try_from(done).unwrap_or(0));
        }
        Delivery::Over
    }

    /// Hands the guest's frames to the TAP. One that the TAP does not take is lost, as on any wire.
    fn transmit(&self, queue: &mut Virtqueue, ram: &Ram) {
        loop {
            while let Some(mut chain) = queue.pop(ram) {
                self.send(&mut chain.readable);
                queue.complete(ram, chain.head, 0);
            }
            if !queue.await_kick(ram) {
                return;
            }
        }
    }

    /// Sends a frame behind the driver's header, unless the driver leaves to the host what is not the
    /// frame's own.
    fn send(&self, readable: &mut Buffers<'_>) {
        let len = readable.len();
        let Some(tap) = self
            .tap
            .as_ref()
            .filter(|_| len > HEADER && len <= FRAME_MAX)
        else {
            return;
        };
        let mut start = [0; HEADER + HEADERS_MAX];
        let copied = len.min(start.len());
        let Some(front) = readable.split_front(copied) else {
            return;
        };
        front.read(&mut start[..copied]);
        let (driver, headers) = start.split_at_mut(HEADER);
        let Ok(asked) = <[u8; HEADER]>::try_from(&*driver) else {
            return;
        };
        let headers = &headers[..copied - HEADER];
        if let Some(made) = offload::header(asked, headers, len - HEADER) {
            driver.copy_from_slice(&made);
            let _lost = sys::write_behind(tap.as_fd(), &start[..copied], readable.slices());
        }
    }

    /// Tells the TAP which frames the driver can take.
    fn apply_offloads(&self, features: u64) {
        let Some(tap) = &self.tap else {
            return;
        };
        let wanted = [
            (spec::VIRTIO_NET_F_GUEST_CSUM, libc::TUN_F_CSUM),
            (spec::VIRTIO_NET_F_GUEST_TSO4, libc::TUN_F_TSO4),
            (spec::VIRTIO_NET_F_GUEST_TSO6, libc::TUN_F_TSO6),
        ];
        let taken = wanted
            .iter()
            .filter(|(bit, _)| features & feature(*bit) != 0);
        let offloads = taken.fold(0, |all, (_, flag)| all | flag);
        // Only a TAP without checksum offload refuses, and then it sends whole frames anyway.
        let _refused = sys::set_tap_offloads(tap.as_fd(), offloads);
    }
}

impl VirtioDevice for Net {
    fn activate(&mut self, features: u64, io: &mut Io<'_>) {
        self.merge = match features & feature(spec::VIRTIO_NET_F_MRG_RXBUF) {
            0 => Merge::Single,
            _ => Merge::Several,
        };
        self.apply_offloads(features);
        self.notify(RX, io);
    }

    fn reset(&mut self, _watch: &mut Watch) {
        self.waiting = 0;
        self.apply_offloads(0);
    }

    fn notify(&mut self, queue: usize, io: &mut Io<'_>) {
        match (queue, io.queues.get_mut(queue)) {
            (RX, Some(rx)) => self.receive(rx, io.ram),
            (TX, Some(tx)) => self.transmit(tx, io.ram),
            _ => {}
        }
    }

    fn ready(&mut self, _token: u64, io: &mut Io<'_>) {
        self.readable = true;
        self.notify(RX, io);
    }
}

fn prepare(tap: &OwnedFd, watch: &mut Watch) -> Result<(), DeviceError> {
    let failed = |source: io::Error| DeviceError::Tap { source };
    let flags = sys::tap_flags(tap.as_fd()).map_err(failed)?;
    let needed = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    if flags & needed != needed {
        return Err(DeviceError::TapFlags { flags });
    }
    fcntl(tap, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).map_err(|errno| failed(errno.into()))?;
    watch
        .add(tap, TAP_TOKEN, Interest::ReadEdge)
        .map_err(failed)
}
