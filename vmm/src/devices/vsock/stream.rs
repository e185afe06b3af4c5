//! One stream between a unix socket of the host and a port of the guest.
//!
//! ```text
//! host opens    Asking ── RESPONSE ──► Open
//! Open          socket ── bytes, within the guest's credit ──► guest
//!               guest ── bytes, within our credit ──► socket, or `unsent` when the socket is full
//! the end       socket at its end ─► SHUTDOWN; guest's SHUTDOWN of both ways, all written ─► RST; RST ─► gone
//! ```
//! Both ways have back-pressure: without credit the socket is not read; what the socket does not take
//! stays in `unsent`, at most [`BUF_ALLOC`] bytes, and the guest gets no credit for it.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::packet::{
    Credit, HEADER, Key, Op, Packet, SHUTDOWN_BOTH, SHUTDOWN_RECEIVE, SHUTDOWN_SEND,
};
use crate::devices::buffers::Buffers;
use crate::devices::sys;

/// What a guest may have in flight to the host, per stream.
pub(super) const BUF_ALLOC: u32 = 256 << 10;
/// Bytes written to the socket after which the guest is told. It stops at its own 256 KiB, so that it must
/// hear earlier.
const CREDIT_STEP: u32 = 64 << 10;
/// Longest payload of a packet.
const PAYLOAD_MAX: usize = 64 << 10;

/// Whether the guest has agreed to the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The request has yet to be sent.
    ToAsk,
    /// The guest has the request.
    Asking,
    Open,
}

/// Whether the client waits for a line that says that the guest has answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Greeting {
    Line,
    None,
}

/// What the caller has to do with a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It goes on.
    Keep,
    /// Remove it; the guest does not know it (any more).
    Forget,
    /// Remove it and reset it towards the guest.
    Reset,
}

/// A stream and its unix socket.
#[derive(Debug)]
pub(super) struct Stream {
    pub(super) key: Key,
    pub(super) socket: UnixStream,
    greeting: Greeting,
    phase: Phase,
    response_due: bool,
    credit_due: bool,
    /// Shutdown flags that the guest has yet to hear.
    shutdown_due: u32,
    /// The socket may hold bytes or its end: readiness is told once per change.
    readable: bool,
    /// The socket has ended: no more bytes for the guest.
    ended: bool,
    /// Directions that the guest has shut down.
    guest_shut: u32,
    /// The guest's buffer, and bytes sent into it.
    guest_credit: Credit,
    sent: u32,
    /// Bytes that the guest has sent, that the socket has taken, and that the guest knows to be taken.
    received: u32,
    written: u32,
    announced: u32,
    unsent: VecDeque<u8>,
    /// Whether the client is gone, so that only the guest's answer is awaited.
    gone: bool,
}

impl Stream {
    /// A stream that the host opens. `socket` does not block.
    pub(super) fn asked_by_host(key: Key, socket: UnixStream, greeting: Greeting) -> Self {
        Self::new(key, socket, greeting, Phase::ToAsk)
    }

    fn new(key: Key, socket: UnixStream, greeting: Greeting, phase: Phase) -> Self {
        Self {
            key,
            socket,
            greeting,
            phase,
            response_due: false,
            credit_due: false,
            shutdown_due: 0,
            readable: true,
            ended: false,
            guest_shut: 0,
            guest_credit: Credit::default(),
            sent: 0,
            received: 0,
            written: 0,
            announced: 0,
            unsent: VecDeque::new(),
            gone: false,
        }
    }

    /// Whether the guest has heard of the stream.
    pub(super) fn known_to_guest(&self) -> bool {
        self.phase != Phase::ToAsk
    }

    /// Whether only the guest's last word is missing.
    pub(super) fn is_over(&self) -> bool {
        self.gone
    }

    /// Whether bytes wait for the socket to become writable.
    pub(super) fn congested(&self) -> bool {
        !self.unsent.is_empty()
    }

    /// Whether there may be a packet for the guest.
    pub(super) fn has_packet(&self) -> bool {
        match self.phase {
            Phase::ToAsk => true,
            Phase::Asking => false,
            Phase::Open => {
                self.response_due || self.credit_due || self.shutdown_due != 0 || self.can_send()
            }
        }
    }

    fn can_send(&self) -> bool {
        self.readable && !self.ended && self.guest_reads() && self.credit() > 0
    }

    fn guest_reads(&self) -> bool {
        self.guest_shut & SHUTDOWN_RECEIVE == 0
    }

    /// Bytes that the guest can take. A guest that claims nonsense gets nothing.
    fn credit(&self) -> usize {
        let in_flight = self.sent.wrapping_sub(self.guest_credit.fwd_cnt);
        let left = self.guest_credit.buf_alloc.saturating_sub(in_flight);
        usize::try_from(left).unwrap_or(0)
    }

    /// The next packet for the guest, its payload in `into` behind the room for the header. `into` has
    /// that room at least.
    pub(super) fn next_packet(&mut self, into: &Buffers<'_>, payload: Buffers<'_>) -> Option<u32> {
        let (op, len, flags) = self.next_op(payload)?;
        let credit = Credit {
            buf_alloc: BUF_ALLOC,
            fwd_cnt: self.written,
        };
        self.announced = self.written;
        self.credit_due = false;
        let key = self.key;
        let packet = Packet {
            key,
            op,
            len,
            flags,
            credit,
        };
        into.write(&packet.encode());
        Some(len)
    }

    fn next_op(&mut self, payload: Buffers<'_>) -> Option<(Op, u32, u32)> {
        if self.phase == Phase::ToAsk {
            self.phase = Phase::Asking;
            return Some((Op::Request, 0, 0));
        }
        if std::mem::take(&mut self.response_due) {
            return Some((Op::Response, 0, 0));
        }
        if let Some(len) = self.read_socket(payload) {
            return Some((Op::Data, len, 0));
        }
        match std::mem::take(&mut self.shutdown_due) {
            0 if self.credit_due => Some((Op::CreditUpdate, 0, 0)),
            0 => None,
            flags => Some((Op::Shutdown, 0, flags)),
        }
    }

    fn read_socket(&mut self, mut payload: Buffers<'_>) -> Option<u32> {
        let len = payload.len().min(PAYLOAD_MAX).min(self.credit());
        payload.split_off(len)?;
        if !self.can_send() || len == 0 {
            return None;
        }
        match sys::readv(self.socket.as_fd(), payload.slices()) {
            Ok(0) => self.end(),
            Ok(done) => {
                let done = u32::try_from(done).unwrap_or(0);
                self.sent = self.sent.wrapping_add(done);
                return Some(done);
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.readable = false,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => self.end(),
        }
        None
    }

    /// Notes the socket's end: the client has shut down its writing side, or both when it is gone.
    fn end(&mut self) {
        self.ended = true;
        self.readable = false;
        self.shutdown_due = SHUTDOWN_SEND;
        self.note_gone();
    }

    fn note_gone(&mut self) {
        if !self.gone && self.hung_up() {
            self.gone = true;
            self.shutdown_due = SHUTDOWN_BOTH;
        }
    }

    fn hung_up(&self) -> bool {
        let mut fds = [PollFd::new(self.socket.as_fd(), PollFlags::empty())];
        match poll(&mut fds, PollTimeout::ZERO) {
            Ok(_) => fds[0].any().unwrap_or(true),
            Err(_) => false,
        }
    }

    /// The socket became ready: bytes, room or its end.
    pub(super) fn socket_ready(&mut self) -> Verdict {
        if self.ended {
            self.note_gone()
        } else {
            self.readable = true
        }
        self.flush()
    }

    /// Takes a packet of the guest. `payload` is what the packet's chain holds behind the header, at least
    /// as long as the header says.
    pub(super) fn take(&mut self, packet: &Packet, payload: Buffers<'_>) -> Verdict {
        self.guest_credit = packet.credit;
        match packet.op {
            Op::Response => self.open(),
            Op::Data => self.receive(packet.len, payload),
            Op::Shutdown => {
                self.guest_shut |= packet.flags & SHUTDOWN_BOTH;
                self.flush()
            }
            Op::Reset => Verdict::Forget,
            Op::CreditRequest => {
                self.credit_due = true;
                Verdict::Keep
            }
            Op::CreditUpdate => Verdict::Keep,
            Op::Request => Verdict::Reset,
        }
    }

    fn open(&mut self) -> Verdict {
        if self.phase != Phase::Asking {
            return Verdict::Reset;
        }
        self.phase = Phase::Open;
        if self.greeting == Greeting::Line {
            let line = format!("OK {}\n", self.key.host_port);
            if self.socket.write_all(line.as_bytes()).is_err() {
                return Verdict::Reset;
            }
        }
        Verdict::Keep
    }

    fn receive(&mut self, len: u32, mut payload: Buffers<'_>) -> Verdict {
        self.received = self.received.wrapping_add(len);
        let in_flight = self.received.wrapping_sub(self.written);
        let after_end = self.guest_shut & SHUTDOWN_SEND != 0;
        if self.phase != Phase::Open || len.max(in_flight) > BUF_ALLOC || after_end {
            return Verdict::Reset;
        }
        if !self.congested() && payload.len() > 0 {
            match sys::writev(self.socket.as_fd(), payload.slices()) {
                Ok(done) => {
                    self.note_written(done);
                    payload.split_front(done);
                }
                Err(error) if is_busy(&error) => {}
                Err(_) => return Verdict::Reset,
            }
        }
        let mut rest = vec![0; payload.len()];
        payload.read(&mut rest);
        self.unsent.extend(rest);
        Verdict::Keep
    }

    /// Writes what waits for the socket, and ends what the guest has ended.
    fn flush(&mut self) -> Verdict {
        while self.congested() {
            match self.socket.write(self.unsent.as_slices().0) {
                Ok(done) => {
                    self.unsent.drain(..done);
                    self.note_written(done);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if is_busy(&error) => return Verdict::Keep,
                Err(_) => return Verdict::Reset,
            }
        }
        self.unsent.shrink_to_fit();
        if self.guest_shut == SHUTDOWN_BOTH {
            return Verdict::Reset;
        }
        if self.guest_shut & SHUTDOWN_SEND != 0 {
            let _gone = self.socket.shutdown(Shutdown::Write);
        }
        Verdict::Keep
    }

    fn note_written(&mut self, len: usize) {
        self.written = self.written.wrapping_add(u32::try_from(len).unwrap_or(0));
        self.credit_due |= self.written.wrapping_sub(self.announced) >= CREDIT_STEP;
    }
}

/// Room that a chain for the guest must have: with none for a payload, a stream with bytes could neither
/// speak nor be silent.
pub(super) const ROOM_MIN: usize = HEADER + 1;

fn is_busy(error: &io::Error) -> bool {
    let kind = error.kind();
    kind == io::ErrorKind::WouldBlock || kind == io::ErrorKind::Interrupted
}
