//! One stream between a unix socket on the host and a port of the guest.
//!
//! ```text
//! NotSent ── REQUEST sent ──► Requested ── RESPONSE received ──► Open
//! Open    socket ── bytes, up to the guest's credit ──► guest
//!         guest ── bytes, up to the host's credit ──► socket, or `unsent` while the socket is full
//! end     end-of-file on the socket: SHUTDOWN is sent
//!         SHUTDOWN of both directions received and all bytes written: RST is sent, the stream is removed
//!         RST received: the stream is removed
//! ```
//! Both directions have back-pressure. Without credit the socket is not read. Bytes that the socket does not accept
//! stay in `unsent`, at most [`BUF_ALLOC`] of them, and the guest gets no new credit for them.

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

/// Limit, per stream, on bytes that the guest has sent and the host has not yet written to the socket.
pub(super) const BUF_ALLOC: u32 = 256 << 10;
/// The guest gets a credit update after this many bytes were written to the socket. The guest stops at
/// [`BUF_ALLOC`] bytes in flight, so updates must come earlier.
const CREDIT_STEP: u32 = 64 << 10;
/// Longest payload of a packet in bytes.
const PAYLOAD_MAX: usize = 64 << 10;

/// The progress of the handshake with the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The REQUEST waits for a receive buffer of the guest.
    NotSent,
    /// The REQUEST was sent.
    Requested,
    Open,
}

/// Whether the client receives an `OK <host port>` line when the guest accepts the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Greeting {
    Line,
    None,
}

/// The action that a stream requires of its owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StreamAction {
    Keep,
    /// Remove the stream. The guest has ended it.
    Remove,
    /// Remove the stream and send a reset to the guest.
    Reset,
}

/// A stream and its unix socket.
#[derive(Debug)]
pub(super) struct Stream {
    pub(super) key: Key,
    pub(super) socket: UnixStream,
    greeting: Greeting,
    phase: Phase,
    credit_due: bool,
    /// Shutdown flags that the guest has not received yet.
    shutdown_due: u32,
    /// The socket may hold bytes or end-of-file. Kept here because the socket is watched edge-triggered: epoll reports
    /// each change once.
    readable: bool,
    /// The socket is at end-of-file or has failed: there are no more bytes for the guest.
    ended: bool,
    /// Directions that the guest has shut down.
    guest_shut: u32,
    /// The guest's receive buffer, as of its last packet.
    guest_credit: Credit,
    /// Bytes sent to the guest, modulo 2^32.
    sent: u32,
    /// Bytes received from the guest, modulo 2^32.
    received: u32,
    /// Number of the received bytes that were written to the socket, modulo 2^32.
    written: u32,
    /// The value of `written` in the last packet to the guest.
    announced: u32,
    /// Bytes from the guest that wait for room in the socket.
    unsent: VecDeque<u8>,
    /// The client has closed the socket. Only the guest's response to the shutdown is missing.
    gone: bool,
}

impl Stream {
    /// A stream that the host opens. `socket` must be non-blocking.
    pub(super) fn new(key: Key, socket: UnixStream, greeting: Greeting) -> Self {
        Self {
            key,
            socket,
            greeting,
            phase: Phase::NotSent,
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

    /// Whether the stream's REQUEST was sent to the guest.
    pub(super) fn known_to_guest(&self) -> bool {
        self.phase != Phase::NotSent
    }

    /// Whether the client has closed the stream and only the guest's response is missing.
    pub(super) fn gone(&self) -> bool {
        self.gone
    }

    /// Whether bytes wait for the socket to become writable.
    pub(super) fn congested(&self) -> bool {
        !self.unsent.is_empty()
    }

    /// Whether there may be a packet for the guest.
    pub(super) fn has_packet(&self) -> bool {
        match self.phase {
            Phase::NotSent => true,
            Phase::Requested => false,
            Phase::Open => self.credit_due || self.shutdown_due != 0 || self.can_send(),
        }
    }

    fn can_send(&self) -> bool {
        self.readable && !self.ended && self.guest_reads() && self.credit() > 0
    }

    fn guest_reads(&self) -> bool {
        self.guest_shut & SHUTDOWN_RECEIVE == 0
    }

    /// Number of bytes that the guest's buffer has room for; 0 if the guest's numbers are impossible.
    fn credit(&self) -> usize {
        let in_flight = self.sent.wrapping_sub(self.guest_credit.fwd_cnt);
        let left = self.guest_credit.buf_alloc.saturating_sub(in_flight);
        usize::try_from(left).unwrap_or(0)
    }

    /// Writes the next packet for the guest: its header to `header`, which must have room for it, and its data to
    /// `payload`. Returns the length of the payload in bytes, or `None` if there is no packet.
    pub(super) fn next_packet(
        &mut self,
        header: &Buffers<'_>,
        payload: Buffers<'_>,
    ) -> Option<u32> {
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
        header.write(&packet.encode());
        Some(len)
    }

    fn next_op(&mut self, payload: Buffers<'_>) -> Option<(Op, u32, u32)> {
        if self.phase == Phase::NotSent {
            self.phase = Phase::Requested;
            return Some((Op::Request, 0, 0));
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

    /// Handles end-of-file or a read error: the client has shut down its writing side, or closed the socket.
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

    /// Handles readiness of the socket: it has bytes, room or end-of-file.
    pub(super) fn socket_ready(&mut self) -> StreamAction {
        if self.ended {
            self.note_gone();
        } else {
            self.readable = true;
        }
        self.flush()
    }

    /// Handles a packet from the guest. `payload` must be exactly as long as the packet's header says.
    pub(super) fn take(&mut self, packet: &Packet, payload: Buffers<'_>) -> StreamAction {
        self.guest_credit = packet.credit;
        match packet.op {
            Op::Response => self.open(),
            Op::Data => self.receive(packet.len, payload),
            Op::Shutdown => {
                self.guest_shut |= packet.flags & SHUTDOWN_BOTH;
                self.flush()
            }
            Op::Reset => StreamAction::Remove,
            Op::CreditRequest => {
                self.credit_due = true;
                StreamAction::Keep
            }
            Op::CreditUpdate => StreamAction::Keep,
            Op::Request => StreamAction::Reset,
        }
    }

    fn open(&mut self) -> StreamAction {
        if self.phase != Phase::Requested {
            return StreamAction::Reset;
        }
        self.phase = Phase::Open;
        if self.greeting == Greeting::Line {
            let line = format!("OK {}\n", self.key.host_port);
            if self.socket.write_all(line.as_bytes()).is_err() {
                return StreamAction::Reset;
            }
        }
        StreamAction::Keep
    }

    fn receive(&mut self, len: u32, mut payload: Buffers<'_>) -> StreamAction {
        self.received = self.received.wrapping_add(len);
        let in_flight = self.received.wrapping_sub(self.written);
        let after_end = self.guest_shut & SHUTDOWN_SEND != 0;
        if self.phase != Phase::Open || len.max(in_flight) > BUF_ALLOC || after_end {
            return StreamAction::Reset;
        }
        if !self.congested() && payload.len() > 0 {
            match sys::writev(self.socket.as_fd(), payload.slices()) {
                Ok(done) => {
                    self.note_written(done);
                    payload.split_front(done);
                }
                Err(error) if is_busy(&error) => {}
                Err(_) => return StreamAction::Reset,
            }
        }
        let mut rest = vec![0; payload.len()];
        payload.read(&mut rest);
        self.unsent.extend(rest);
        StreamAction::Keep
    }

    /// Writes `unsent` to the socket. Once `unsent` is empty, passes a shutdown by the guest on to the socket.
    fn flush(&mut self) -> StreamAction {
        while self.congested() {
            match self.socket.write(self.unsent.as_slices().0) {
                Ok(done) => {
                    self.unsent.drain(..done);
                    self.note_written(done);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if is_busy(&error) => return StreamAction::Keep,
                Err(_) => return StreamAction::Reset,
            }
        }
        self.unsent.shrink_to_fit();
        if self.guest_shut == SHUTDOWN_BOTH {
            return StreamAction::Reset;
        }
        if self.guest_shut & SHUTDOWN_SEND != 0 {
            let _gone = self.socket.shutdown(Shutdown::Write);
        }
        StreamAction::Keep
    }

    fn note_written(&mut self, len: usize) {
        self.written = self.written.wrapping_add(u32::try_from(len).unwrap_or(0));
        self.credit_due |= self.written.wrapping_sub(self.announced) >= CREDIT_STEP;
    }
}

/// Smallest receive buffer that is used, in bytes. Without room for a payload the socket could not be read, so the
/// guest would receive neither a stream's bytes nor its end.
pub(super) const ROOM_MIN: usize = HEADER + 1;

fn is_busy(error: &io::Error) -> bool {
    let kind = error.kind();
    kind == io::ErrorKind::WouldBlock || kind == io::ErrorKind::Interrupted
}
