//! Headers of virtio-vsock packets (virtio 1.2, 5.10.6).

/// Length of a header in bytes.
pub(super) const HEADER: usize = 44;
/// The guest's address (CID). All VMs use the same CID, because each has its own vsock socket on the host.
pub(super) const GUEST_CID: u64 = 3;
/// The host's address (CID).
pub(super) const HOST_CID: u64 = 2;
/// The only supported socket type.
const STREAM: u16 = 1;

/// Shutdown flag: the sender will not receive any more data.
pub(super) const SHUTDOWN_RECEIVE: u32 = 1;
/// Shutdown flag: the sender will not send any more data.
pub(super) const SHUTDOWN_SEND: u32 = 2;
pub(super) const SHUTDOWN_BOTH: u32 = SHUTDOWN_RECEIVE | SHUTDOWN_SEND;

/// Operation of a packet (virtio 1.2, 5.10.6.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Op {
    Request,
    Response,
    Reset,
    Shutdown,
    Data,
    CreditUpdate,
    CreditRequest,
}

impl Op {
    fn code(self) -> u16 {
        match self {
            Op::Request => 1,
            Op::Response => 2,
            Op::Reset => 3,
            Op::Shutdown => 4,
            Op::Data => 5,
            Op::CreditUpdate => 6,
            Op::CreditRequest => 7,
        }
    }

    fn from_code(code: u16) -> Option<Self> {
        Some(match code {
            1 => Op::Request,
            2 => Op::Response,
            3 => Op::Reset,
            4 => Op::Shutdown,
            5 => Op::Data,
            6 => Op::CreditUpdate,
            7 => Op::CreditRequest,
            _ => return None,
        })
    }
}

/// The two ends of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) host_port: u32,
    pub(super) guest_port: u32,
}

/// Flow-control state of one side (virtio 1.2, 5.10.6.3).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Credit {
    /// Size of the receive buffer in bytes.
    pub(super) buf_alloc: u32,
    /// Bytes that the receiver has consumed, modulo 2^32.
    pub(super) fwd_cnt: u32,
}

/// The header of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Packet {
    pub(super) key: Key,
    pub(super) op: Op,
    /// Length of the payload in bytes.
    pub(super) len: u32,
    pub(super) flags: u32,
    pub(super) credit: Credit,
}

impl Packet {
    /// Encodes a header from the host to the guest.
    pub(super) fn encode(&self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        bytes[0..8].copy_from_slice(&HOST_CID.to_le_bytes());
        bytes[8..16].copy_from_slice(&GUEST_CID.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.key.host_port.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.key.guest_port.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.len.to_le_bytes());
        bytes[28..30].copy_from_slice(&STREAM.to_le_bytes());
        bytes[30..32].copy_from_slice(&self.op.code().to_le_bytes());
        bytes[32..36].copy_from_slice(&self.flags.to_le_bytes());
        bytes[36..40].copy_from_slice(&self.credit.buf_alloc.to_le_bytes());
        bytes[40..44].copy_from_slice(&self.credit.fwd_cnt.to_le_bytes());
        bytes
    }

    /// Decodes a header from the guest to the host. Returns `None` for other addresses, socket types and operations.
    pub(super) fn decode(bytes: &[u8; HEADER]) -> Option<Self> {
        let source = u64::from_le_bytes(field(bytes, 0));
        let target = u64::from_le_bytes(field(bytes, 8));
        let kind = u16::from_le_bytes(field(bytes, 28));
        if source != GUEST_CID || target != HOST_CID || kind != STREAM {
            return None;
        }
        Some(Self {
            key: Key {
                guest_port: u32::from_le_bytes(field(bytes, 16)),
                host_port: u32::from_le_bytes(field(bytes, 20)),
            },
            len: u32::from_le_bytes(field(bytes, 24)),
            op: Op::from_code(u16::from_le_bytes(field(bytes, 30)))?,
            flags: u32::from_le_bytes(field(bytes, 32)),
            credit: Credit {
                buf_alloc: u32::from_le_bytes(field(bytes, 36)),
                fwd_cnt: u32::from_le_bytes(field(bytes, 40)),
            },
        })
    }
}

fn field<const N: usize>(bytes: &[u8; HEADER], at: usize) -> [u8; N] {
    let mut field = [0; N];
    field.copy_from_slice(&bytes[at..at + N]);
    field
}
