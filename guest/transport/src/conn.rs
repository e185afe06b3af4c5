//! One connection: its buffers, its socket and the state of its current request.
//!
//! The socket is polled edge-triggered. `readable` and `writable` stay set from a poller event until a system call
//! shows that the socket is empty or full, so serving a request needs no `epoll_ctl`. `EPOLLOUT` is requested only
//! after the socket has been full once: otherwise every response that the peer reads would wake an idle guest.

use std::{
    any::Any,
    os::fd::{AsFd, AsRawFd, OwnedFd},
    time::Instant,
};

use envd::Framing;
use nix::{
    errno::Errno,
    sys::{
        epoll::EpollFlags,
        socket::{MsgFlags, Shutdown, send, shutdown},
    },
    unistd,
};

use crate::{
    http::{self, After, Head},
    reactor::{CONN_EVENTS, Reactor, Token},
    service::{Exchange, Service, Sink, Step},
    slots::{Key, Slots},
};

/// Buffers whose capacity exceeds this many bytes are freed once they are empty.
const KEEP: usize = 16 << 10;
/// Once more than this many bytes at the front of the output have been sent, they are removed from the buffer.
const COMPACT: usize = 64 << 10;

/// A connection.
pub struct Conn<S: Service> {
    socket: OwnedFd,
    /// Received bytes that have not been consumed yet.
    pub input: Vec<u8>,
    /// Bytes to be sent; the first `sent` have been sent.
    pub out: Vec<u8>,
    sent: usize,
    pub(crate) readable: bool,
    pub(crate) writable: bool,
    /// Whether the poller reports room for output.
    pub(crate) watches_room: bool,
    /// While this is set, [`Conn::flush`] sends nothing, so that pending output is sent together with the output that
    /// follows.
    pub corked: bool,
    /// The peer has closed the connection or its sending side, or a write has failed.
    pub hangup: bool,
    /// The service's state of the current request.
    pub call: S::Call,
    /// Whether the connection is closed after the current response.
    pub after: After,
    /// The deadline of the current phase. When it passes, the server answers 408, closes the connection or calls
    /// [`Exchange::expire`], depending on the phase.
    pub wake: Option<Instant>,
    /// When the last request ended, or the connection was accepted. At the connection limit, the connection that has
    /// been idle longest is closed.
    pub(crate) used: Instant,
    pub(crate) phase: Phase<S>,
}

/// The connections of a server.
pub type Conns<S> = Slots<Conn<S>>;

/// The state of a connection.
pub(crate) enum Phase<S: Service> {
    /// Between requests, or reading the head of one.
    Head,
    /// Collecting a body for [`Service::handle`].
    Collect {
        head: Box<Head<S::Fields>>,
        body: Framing,
        bytes: Vec<u8>,
    },
    /// Passing a body to a sink.
    Receive {
        sink: Box<dyn Sink<S>>,
        body: Framing,
    },
    /// Running an exchange, which is `None` only while one of its methods runs.
    Exchange(Option<Box<dyn Exchange<S>>>),
    /// Sending the last response before the connection is closed.
    Closing(Rest),
    /// Discarding the rest of a rejected request, at most `left` bytes.
    Draining { left: usize },
}

/// Whether the whole request was read. If not, the connection is drained before it is closed: closing a socket with
/// unread input would make the kernel discard the response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rest {
    Read,
    Unread,
}

/// The result of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// Bytes were received and appended to the input.
    Some,
    /// Nothing has arrived.
    Nothing,
    /// The peer has closed its sending side.
    End,
}

/// The connection must be closed, usually because the peer has closed it or the socket is broken.
#[derive(Debug)]
pub struct Gone;

impl<S: Service> Conn<S> {
    pub(crate) fn new(socket: OwnedFd) -> Self {
        Self {
            socket,
            input: Vec::new(),
            out: Vec::new(),
            sent: 0,
            readable: true,
            writable: true,
            watches_room: false,
            corked: false,
            hangup: false,
            call: S::Call::default(),
            after: After::KeepAlive,
            wake: None,
            used: Instant::now(),
            phase: Phase::Head,
        }
    }

    /// Bytes that are not yet sent.
    #[must_use]
    pub fn backlog(&self) -> usize {
        self.out.len() - self.sent
    }

    /// Whether the connection has sent all output and waits for the first byte of a request.
    pub(crate) fn is_idle(&self) -> bool {
        matches!(self.phase, Phase::Head) && self.input.is_empty() && self.backlog() == 0
    }

    /// Records what the poller reported.
    pub(crate) fn mark(&mut self, flags: EpollFlags) {
        let gone = EpollFlags::EPOLLHUP | EpollFlags::EPOLLERR;
        self.hangup |= flags.intersects(gone | EpollFlags::EPOLLRDHUP);
        self.readable |= self.hangup || flags.contains(EpollFlags::EPOLLIN);
        self.writable |= flags.intersects(gone | EpollFlags::EPOLLOUT);
    }

    /// Sends as much output as the socket accepts, but nothing while the connection is corked.
    ///
    /// # Errors
    /// Returns [`Gone`] if the socket is broken.
    pub fn flush(&mut self) -> Result<(), Gone> {
        while self.backlog() > 0 && self.writable && !self.corked {
            let rest = self.out.get(self.sent..).unwrap_or_default();
            match unistd::write(&self.socket, rest) {
                Ok(n) => self.sent += n,
                Err(Errno::EAGAIN) => self.writable = false,
                Err(Errno::EINTR) => {}
                Err(_) => return Err(Gone),
            }
        }
        if self.backlog() == 0 {
            self.sent = 0;
            reset(&mut self.out);
        } else if self.sent > COMPACT {
            self.out.drain(..self.sent);
            self.sent = 0;
        }
        Ok(())
    }

    /// Flushes the output now. If the socket is broken, sets `hangup`, so that the connection is closed when it is next
    /// pumped.
    pub fn push_out(&mut self) {
        self.hangup |= self.flush().is_err();
    }

    /// Makes the poller report when the full socket has room again.
    pub(crate) fn watch_room(&mut self, key: Key, reactor: &Reactor) -> Result<(), Gone> {
        let flags = CONN_EVENTS | EpollFlags::EPOLLOUT;
        let watched = reactor.modify(self.socket.as_fd(), Token::Conn(key), flags);
        watched.map_err(|_| Gone)?;
        self.watches_room = true;
        Ok(())
    }

    /// Like [`Conn::receive`], but the end of input counts as [`Gone`]. Returns false if nothing has arrived.
    ///
    /// # Errors
    /// Returns [`Gone`] if the peer has closed its sending side or the socket is broken.
    pub fn fill(&mut self, scratch: &mut [u8]) -> Result<bool, Gone> {
        match self.receive(scratch)? {
            Received::Some => Ok(true),
            Received::Nothing => Ok(false),
            Received::End => Err(Gone),
        }
    }

    /// Reads once into `scratch` and appends what was received to the input.
    ///
    /// # Errors
    /// Returns [`Gone`] if the socket is broken.
    pub fn receive(&mut self, scratch: &mut [u8]) -> Result<Received, Gone> {
        while self.readable {
            match unistd::read(&self.socket, scratch) {
                Ok(0) => return Ok(Received::End),
                Ok(n) => {
                    self.input
                        .extend_from_slice(scratch.get(..n).unwrap_or_default());
                    // A short read has emptied the socket. After a hang-up, a further read must still return the end of
                    // input.
                    self.readable = n == scratch.len() || self.hangup;
                    return Ok(Received::Some);
                }
                Err(Errno::EAGAIN) => self.readable = false,
                Err(Errno::EINTR) => {}
                Err(_) => return Err(Gone),
            }
        }
        Ok(Received::Nothing)
    }

    /// Drops bytes from the front of the input.
    pub fn consume(&mut self, len: usize) {
        if len == self.input.len() {
            reset(&mut self.input);
        } else {
            self.input.drain(..len);
        }
    }

    /// Queues a complete response and ends the request.
    pub fn answer(&mut self, status: u16, content_type: &str, body: &[u8]) {
        http::push_answer(&mut self.out, status, content_type, body, self.after);
        self.end_request(Rest::Read);
    }

    /// Queues an error response and ends the request.
    #[cold]
    #[inline(never)]
    pub fn error(&mut self, status: u16, message: &str) {
        S::push_error(&mut self.out, status, message, self.after);
        self.end_request(Rest::Read);
    }

    /// Queues an error response before the whole request has been read. The connection is closed after it.
    #[cold]
    #[inline(never)]
    pub fn refuse(&mut self, status: u16, message: &str) {
        self.after = After::Close;
        S::push_error(&mut self.out, status, message, self.after);
        self.end_request(Rest::Unread);
    }

    /// Ends the request. Its complete response must already be in `out`.
    pub fn end_request(&mut self, rest: Rest) {
        self.wake = None;
        self.corked = false;
        self.call = S::Call::default();
        self.used = Instant::now();
        self.phase = match self.after {
            After::KeepAlive => Phase::Head,
            After::Close => Phase::Closing(rest),
        };
    }

    /// Begins an exchange, which replaces the current one.
    pub fn begin(&mut self, exchange: impl Exchange<S>) {
        self.phase = Phase::Exchange(Some(Box::new(exchange)));
    }

    /// The current exchange, if it is of type `E`.
    pub fn exchange<E: Exchange<S>>(&mut self) -> Option<&mut E> {
        match &mut self.phase {
            Phase::Exchange(Some(exchange)) => {
                let exchange: &mut dyn Any = exchange.as_mut();
                exchange.downcast_mut()
            }
            _ => None,
        }
    }

    /// Puts the exchange back after one of its methods has run, unless the request has ended or another exchange has
    /// begun.
    pub(crate) fn put_back(&mut self, exchange: Box<dyn Exchange<S>>) {
        if let Phase::Exchange(place @ None) = &mut self.phase {
            *place = Some(exchange);
        }
    }

    /// Queues the interim response 100 if the client waits for it before it sends the body (`Expect:
    /// 100-continue`).
    pub fn invite_body(&mut self, head: &Head<S::Fields>) {
        if head.expects_continue && self.input.is_empty() {
            self.out.extend_from_slice(http::CONTINUE);
        }
    }

    /// The result of a step that has nothing to do until the next event. Output is flushed before each step, so a
    /// hang-up loses only output that the socket did not accept.
    ///
    /// # Errors
    /// Returns [`Gone`] if the peer has hung up.
    pub fn wait(&self) -> Result<Step, Gone> {
        if self.hangup {
            Err(Gone)
        } else {
            Ok(Step::Wait)
        }
    }

    /// Whether a peer that has closed its sending side can still receive. Sending zero bytes fails if it has closed
    /// both sides.
    #[must_use]
    pub fn is_peer_receiving(&self) -> bool {
        let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
        matches!(
            send(self.socket.as_raw_fd(), &[], flags),
            Ok(_) | Err(Errno::EAGAIN)
        )
    }

    /// Closes the sending side.
    pub fn shut_down(&self) {
        // Fails only if the peer is gone already.
        let _ = shutdown(self.socket.as_raw_fd(), Shutdown::Write);
    }
}

/// Empties a buffer, and frees its memory if the capacity exceeds [`KEEP`].
fn reset(buffer: &mut Vec<u8>) {
    if buffer.capacity() > KEEP {
        *buffer = Vec::new();
    } else {
        buffer.clear();
    }
}
