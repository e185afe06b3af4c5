//! One connection: its buffers, its socket and the state of its current request.
//!
//! The socket is polled edge-triggered; `readable` and `writable` hold what the poller last reported, until a
//! call returns `EAGAIN`. So a request costs no call that changes interest. `EPOLLOUT` is added only once the
//! socket has been full: otherwise every answer that the peer reads would wake a guest that has nothing to do.

use std::{
    any::Any,
    os::fd::{AsFd, AsRawFd, OwnedFd},
    time::Instant,
};

use api_types::envd::Framing;
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

/// Buffers with more capacity than this are freed after use.
const KEEP: usize = 16 << 10;
/// Bytes that were sent from the front of a backlog before the rest is moved there.
const COMPACT: usize = 64 << 10;

/// A connection.
pub struct Conn<S: Service> {
    socket: OwnedFd,
    /// Received bytes that are not yet used.
    pub input: Vec<u8>,
    /// Bytes to be sent; the first `sent` have been sent.
    pub out: Vec<u8>,
    sent: usize,
    pub(crate) readable: bool,
    pub(crate) writable: bool,
    /// Whether the poller reports room for output.
    pub(crate) watches_room: bool,
    /// Output is held back, so that further output leaves with it.
    pub corked: bool,
    /// The peer has closed the connection or its sending side.
    pub hangup: bool,
    /// The service's state of the current request.
    pub call: S::Call,
    /// Whether the connection is closed after the current answer.
    pub after: After,
    /// When the connection needs attention if no event occurs before.
    pub wake: Option<Instant>,
    /// When a request last ended; of too many connections, the one idle longest is closed.
    pub(crate) used: Instant,
    pub(crate) phase: Phase<S>,
}

/// The connections of a server.
pub type Conns<S> = Slots<Conn<S>>;

/// The state of a connection.
pub(crate) enum Phase<S: Service> {
    /// Between requests, or in a head.
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
    /// Absent while one of its methods runs.
    Exchange(Option<Box<dyn Exchange<S>>>),
    /// The last answer is being sent.
    Closing(Rest),
    /// Discarding the rest of a refused request, at most `left` bytes.
    Draining { left: usize },
}

/// Whether a request was read to its end. After an unread one the connection is drained before it is closed: closing it
/// with unread input would make the kernel discard the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rest {
    Read,
    Unread,
}

/// The result of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// Bytes, now in the input.
    Some,
    /// Nothing at present.
    Nothing,
    /// The peer has closed its sending side.
    End,
}

/// The connection is to be closed, usually because the peer is gone.
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

    /// Whether the connection waits for the first byte of a request.
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

    /// Sends as much as the socket takes.
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

    /// Sends now; a broken socket is noticed when the connection is next pumped.
    pub fn push_out(&mut self) {
        self.hangup |= self.flush().is_err();
    }

    /// Has the poller report when a full socket has room again.
    pub(crate) fn watch_room(&mut self, key: Key, reactor: &Reactor) -> Result<(), Gone> {
        let flags = CONN_EVENTS | EpollFlags::EPOLLOUT;
        let watched = reactor.modify(self.socket.as_fd(), Token::Conn(key), flags);
        watched.map_err(|_| Gone)?;
        self.watches_room = true;
        Ok(())
    }

    /// As [`Conn::receive`], where the peer's end closes the connection. False if nothing has arrived.
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
                    // A short read has emptied the socket; after a hang-up the end must still be read.
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

    /// Sends a complete answer and ends the request.
    pub fn answer(&mut self, status: u16, content_type: &str, body: &[u8]) {
        http::push_answer(&mut self.out, status, content_type, body, self.after);
        self.end_request(Rest::Read);
    }

    /// Sends an error answer and ends the request.
    #[cold]
    #[inline(never)]
    pub fn error(&mut self, status: u16, message: &str) {
        S::push_error(&mut self.out, status, message, self.after);
        self.end_request(Rest::Read);
    }

    /// Sends an error answer although parts of the request are still to come.
    #[cold]
    #[inline(never)]
    pub fn refuse(&mut self, status: u16, message: &str) {
        self.after = After::Close;
        S::push_error(&mut self.out, status, message, self.after);
        self.end_request(Rest::Unread);
    }

    /// Ends the request, whose answer is complete in `out`.
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

    /// The current exchange, if it has that type.
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

    /// Asks the client for the body if it waits for that (`Expect: 100-continue`).
    pub fn invite_body(&mut self, head: &Head<S::Fields>) {
        if head.expects_continue && self.input.is_empty() {
            self.out.extend_from_slice(http::CONTINUE);
        }
    }

    /// Waits for events. Output that is already queued is still sent after a hang-up.
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

    /// Whether a peer that has closed its sending side still receives. Sending zero bytes fails if it has closed both.
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

/// Empties a buffer and frees a large one.
fn reset(buffer: &mut Vec<u8>) {
    if buffer.capacity() > KEEP {
        *buffer = Vec::new();
    } else {
        buffer.clear();
    }
}
