//! virtio-blk (virtio 1.2, 5.2): one queue with reads, writes, discards, flushes and GET_ID.

use virtio_bindings::virtio_blk as spec;

use super::buffers::Buffers;
use super::device::{Io, VirtioDevice};
use super::layer::{Access, Disk};
use super::queue::Chain;
use super::registers::{COMMON_FEATURES, Identity, feature};

const DEVICE_ID: u32 = 2;
const QUEUE: u16 = 128;
/// Limit on data segments per request: a full queue without header and status.
const SEG_MAX: u32 = 126;
const SIZE_MAX: u32 = 64 << 10;
/// Longest request that a driver within the limits above can make, in bytes.
const REQUEST_MAX: usize = 126 * (64 << 10);
const SECTOR: u64 = 512;
/// Sectors per discard (64 MiB). The limit bounds the time that the file system needs to free scattered blocks.
const DISCARD_SECTORS_MAX: u32 = (64 << 20) / 512;
/// Sectors in a block of the layer, the smallest unit of a discard.
const DISCARD_ALIGNMENT: u32 = 8;
/// Length of the response to GET_ID in bytes.
const ID_BYTES: usize = 20;

/// The result of a request, which the driver receives as a status byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Done,
    Failed,
    Unsupported,
}

impl Outcome {
    fn status(self) -> u8 {
        let code = match self {
            Outcome::Done => spec::VIRTIO_BLK_S_OK,
            Outcome::Failed => spec::VIRTIO_BLK_S_IOERR,
            Outcome::Unsupported => spec::VIRTIO_BLK_S_UNSUPP,
        };
        code.to_le_bytes()[0]
    }
}

/// A block device over a [`Disk`].
#[derive(Debug)]
pub(super) struct Block {
    disk: Disk,
    serial: &'static str,
}

impl Block {
    pub(super) fn new(disk: Disk, serial: &'static str) -> Self {
        Self { disk, serial }
    }

    pub(super) fn disk(&self) -> &Disk {
        &self.disk
    }

    pub(super) fn sectors(&self) -> u64 {
        self.disk.len() / SECTOR
    }

    pub(super) fn identity(&self) -> Identity {
        let mut features = COMMON_FEATURES
            | feature(spec::VIRTIO_BLK_F_SIZE_MAX)
            | feature(spec::VIRTIO_BLK_F_SEG_MAX)
            | feature(spec::VIRTIO_BLK_F_BLK_SIZE)
            | feature(spec::VIRTIO_BLK_F_TOPOLOGY)
            | feature(spec::VIRTIO_BLK_F_FLUSH);
        features |= match self.disk.access() {
            Access::ReadOnly => feature(spec::VIRTIO_BLK_F_RO),
            Access::CopyOnWrite => feature(spec::VIRTIO_BLK_F_DISCARD),
        };
        Identity {
            device_id: DEVICE_ID,
            features,
            queue_sizes: &[QUEUE],
            config: self.config(),
        }
    }

    /// `struct virtio_blk_config` up to and including the discard limits. Logical blocks are 512 bytes; physical blocks
    /// are 4 KiB, so that the guest aligns its writes with the layer's blocks.
    fn config(&self) -> Vec<u8> {
        let mut config = Vec::with_capacity(60);
        config.extend(self.sectors().to_le_bytes());
        config.extend(SIZE_MAX.to_le_bytes());
        config.extend(SEG_MAX.to_le_bytes());
        config.extend([0; 4]); // geometry: not offered
        config.extend(512_u32.to_le_bytes());
        config.extend([3, 0]); // physical block exponent, alignment offset
        config.extend(8_u16.to_le_bytes()); // smallest good I/O, in logical blocks
        config.extend(0_u32.to_le_bytes()); // optimal I/O size: unknown
        config.extend([0; 4]); // write-back mode, queues: not offered
        config.extend(DISCARD_SECTORS_MAX.to_le_bytes());
        config.extend(1_u32.to_le_bytes()); // ranges of one discard
        config.extend(DISCARD_ALIGNMENT.to_le_bytes());
        config.resize(60, 0);
        config
    }

    /// Serves one request. Returns the number of bytes written to guest memory, and the outcome.
    fn serve(&mut self, chain: Chain<'_>) -> (u32, Outcome) {
        let Chain {
            mut readable,
            mut writable,
            ..
        } = chain;
        let Some(status) = writable
            .len()
            .checked_sub(1)
            .and_then(|at| writable.split_off(at))
        else {
            return (0, Outcome::Failed);
        };
        let room = writable.len();
        let mut header = [0; 16];
        let outcome = match readable.split_front(header.len()) {
            Some(front) if room <= REQUEST_MAX && readable.len() <= REQUEST_MAX => {
                front.read(&mut header);
                self.perform(header, readable, writable)
            }
            _ => Outcome::Failed,
        };
        status.write(&[outcome.status()]);
        // The status byte is last, so all bytes before it count as written, whatever their content.
        (u32::try_from(room + 1).unwrap_or(0), outcome)
    }

    fn perform(&mut self, header: [u8; 16], data: Buffers<'_>, into: Buffers<'_>) -> Outcome {
        let [k0, k1, k2, k3, _, _, _, _, sector @ ..] = header;
        let offset = u64::from_le_bytes(sector).checked_mul(SECTOR);
        let done = match (u32::from_le_bytes([k0, k1, k2, k3]), offset) {
            (spec::VIRTIO_BLK_T_IN, Some(offset)) => self.disk.read(offset, into),
            (spec::VIRTIO_BLK_T_OUT, Some(offset)) => self.disk.write(offset, data),
            (spec::VIRTIO_BLK_T_DISCARD, _) => return self.discard(&data),
            // Nothing to do: written data is lost when the VM ends unless a snapshot saves it, and a snapshot reads it
            // through the page cache.
            (spec::VIRTIO_BLK_T_FLUSH, _) => Ok(()),
            (spec::VIRTIO_BLK_T_GET_ID, _) => {
                let mut id = [0; ID_BYTES];
                id[..self.serial.len()].copy_from_slice(self.serial.as_bytes());
                into.write(&id);
                Ok(())
            }
            (spec::VIRTIO_BLK_T_IN | spec::VIRTIO_BLK_T_OUT, None) => {
                return Outcome::Failed;
            }
            _ => return Outcome::Unsupported,
        };
        outcome(&done)
    }

    /// Performs a discard. A discard with flags is unsupported: the only defined flag belongs to write-zeroes requests
    /// (virtio 1.2, 5.2.6.2).
    fn discard(&mut self, data: &Buffers<'_>) -> Outcome {
        match discarded(data) {
            Some((offset, len, 0)) => outcome(&self.disk.discard(offset, len)),
            Some(_) => Outcome::Unsupported,
            None => Outcome::Failed,
        }
    }
}

fn outcome(done: &std::io::Result<()>) -> Outcome {
    match done {
        Ok(()) => Outcome::Done,
        Err(_) => Outcome::Failed,
    }
}

/// The range of a discard (`struct virtio_blk_discard_write_zeroes`): byte offset, bytes, flags. Returns `None` unless
/// there is exactly one range, at most [`DISCARD_SECTORS_MAX`] long, whose byte offset fits 64 bits.
fn discarded(data: &Buffers<'_>) -> Option<(u64, u64, u32)> {
    let mut bytes = [0; 16];
    if data.len() != bytes.len() {
        return None;
    }
    data.read(&mut bytes);
    let [sector @ .., c0, c1, c2, c3, f0, f1, f2, f3] = bytes;
    let offset = u64::from_le_bytes(sector).checked_mul(SECTOR)?;
    let sectors = u32::from_le_bytes([c0, c1, c2, c3]);
    let flags = u32::from_le_bytes([f0, f1, f2, f3]);
    (sectors <= DISCARD_SECTORS_MAX).then_some((offset, u64::from(sectors) * SECTOR, flags))
}

impl VirtioDevice for Block {
    fn notify(&mut self, _queue: usize, io: &mut Io<'_>) {
        let Some(queue) = io.queues.first_mut() else {
            return;
        };
        loop {
            while let Some(chain) = queue.pop(io.ram) {
                let head = chain.head;
                let (len, outcome) = self.serve(chain);
                queue.complete(io.ram, head, len);
                // On a full host disk, a failing request is slow (ext4 first commits its journal, possibly several
                // times), so a failure ends the turn.
                if outcome == Outcome::Failed {
                    queue.end_turn();
                }
            }
            if !queue.await_kick(io.ram) {
                return;
            }
        }
    }
}
