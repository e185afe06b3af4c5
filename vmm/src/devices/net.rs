//! virtio-net (virtio 1.2, 5.1) over a TAP: one pair of queues, offloads, merged receive buffers.
//!
//! A frame for the guest is first read into this process, because the number of receive buffers that it needs depends
//! on its length. A frame from the guest goes to the TAP directly from guest memory, except for its first bytes, which
//! contain the headers. They are copied once, checked, and sent after a new virtio-net header ([`offload`]), so a
//! driver that concurrently rewrites them in guest memory does not affect the checked copy.

mod offload;

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::libc;
use virtio_bindings::virtio_net as spec;
use vmm_control::LostFrames;

use self::offload::{HEADER, HEADERS_MAX};
use super::backend::DeviceError;
use super::buffers::Buffers;
use super::device::{Io, VirtioDevice};
use super::queue::{Chain, Virtqueue};
use super::ram::Ram;
use super::registers::{COMMON_FEATURES, Identity, feature};
use super::sys;
use crate::watch::{DeviceToken, Interest, Token, Watch};

const DEVICE_ID: u32 = 1;
const RX: usize = 0;
const TX: usize = 1;
/// Position of `num_buffers` in the header: the number of receive buffers that the frame takes.
const HEADER_BUFFERS: std::ops::Range<usize> = 10..12;
/// Longest frame in bytes: the virtio-net header, an Ethernet header and the largest IP packet.
const FRAME_MAX: usize = HEADER + 14 + 65_536;
/// Limit on receive buffers per frame. The largest frame takes 44 of the smallest buffers that Linux uses (1.5 KiB).
const MERGE_MAX: usize = 128;
/// Checksum and segmentation offloads in both directions.
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
    /// The TAP may hold frames. Kept here because the TAP is watched edge-triggered: epoll reports each change once.
    readable: bool,
    /// Holds the frame that waits for receive buffers. Allocated when the first frame arrives.
    frame: Vec<u8>,
    /// Length of the frame in `frame`, including its header. 0 if none waits.
    waiting: usize,
    lost: LostFrames,
}

/// Whether a frame may take several receive buffers (`VIRTIO_NET_F_MRG_RXBUF`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Merge {
    Single,
    Several,
}

/// Whether a frame for the guest is done.
enum Delivery {
    /// The frame was delivered or dropped.
    Done,
    /// The driver has not offered enough buffers yet.
    NoBuffers,
}

/// The result of sending a frame from the guest.
enum Sent {
    Accepted,
    /// The frame or its offload header is invalid.
    Refused,
    /// There is no TAP, or the TAP did not accept the frame.
    Lost,
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
            lost: LostFrames::default(),
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

    pub(super) fn lost_frames(&self) -> LostFrames {
        self.lost
    }

    /// Moves frames from the TAP to the guest while there are both frames and receive buffers.
    fn receive(&mut self, queue: &mut Virtqueue, ram: &Ram) {
        while self.waiting > 0 || self.read_frame() {
            match self.deliver(queue, ram) {
                Delivery::Done => self.waiting = 0,
                Delivery::NoBuffers if queue.await_kick(ram) => {}
                Delivery::NoBuffers => return,
            }
        }
    }

    /// Reads the next frame from the TAP. Returns whether there was one.
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

    /// Copies the waiting frame into as many receive buffers as it needs. If the driver has offered too few, none is
    /// used and the frame keeps waiting. A frame that does not fit the permitted number of buffers is dropped, and
    /// those buffers are returned empty.
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
                return Delivery::NoBuffers;
            };
            room += chain.writable.len();
            chains.push(chain);
        }
        let fits = room >= self.waiting;
        self.lost.to_guest += u64::from(!fits);
        let count = u16::try_from(chains.len()).unwrap_or(0);
        self.frame[HEADER_BUFFERS].copy_from_slice(&count.to_le_bytes());
        let mut rest = &self.frame[..self.waiting];
        for chain in &chains {
            let done = if fits { chain.writable.write(rest) } else { 0 };
            rest = &rest[done..];
            queue.complete(ram, chain.head, u32::try_from(done).unwrap_or(0));
        }
        Delivery::Done
    }

    /// Sends the guest's frames to the TAP. A frame that is invalid, or that the TAP does not accept, is dropped and
    /// counted.
    fn transmit(&mut self, queue: &mut Virtqueue, ram: &Ram) {
        loop {
            while let Some(mut chain) = queue.pop(ram) {
                match self.send(&mut chain.readable) {
                    Sent::Accepted => {}
                    Sent::Refused => self.lost.refused += 1,
                    Sent::Lost => self.lost.from_guest += 1,
                }
                queue.complete(ram, chain.head, 0);
            }
            if !queue.await_kick(ram) {
                return;
            }
        }
    }

    /// Sends one frame with a new virtio-net header in place of the driver's.
    fn send(&self, readable: &mut Buffers<'_>) -> Sent {
        let len = readable.len();
        if len <= HEADER || len > FRAME_MAX {
            return Sent::Refused;
        }
        let Some(tap) = &self.tap else {
            return Sent::Lost;
        };
        let mut start = [0; HEADER + HEADERS_MAX];
        let copied = len.min(start.len());
        let Some(front) = readable.split_front(copied) else {
            return Sent::Refused;
        };
        front.read(&mut start[..copied]);
        let (driver, headers) = start.split_at_mut(HEADER);
        let Ok(asked) = <[u8; HEADER]>::try_from(&*driver) else {
            return Sent::Refused;
        };
        let headers = &headers[..copied - HEADER];
        let Some(made) = offload::header(asked, headers, len - HEADER) else {
            return Sent::Refused;
        };
        driver.copy_from_slice(&made);
        match sys::write_behind(tap.as_fd(), &start[..copied], readable.slices()) {
            Ok(_) => Sent::Accepted,
            Err(_) => Sent::Lost,
        }
    }

    /// Sets which checksums and segmentations the TAP may leave to the driver, from the features that it accepted.
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
        // Only a TAP that does not support checksum offload refuses this, and it delivers complete frames anyway.
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
        self.lost.to_guest += u64::from(self.waiting > 0);
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

    fn ready(&mut self, _token: DeviceToken, io: &mut Io<'_>) {
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
        .add(tap, Token::Device(DeviceToken::Tap), Interest::ReadEdge)
        .map_err(failed)
}
