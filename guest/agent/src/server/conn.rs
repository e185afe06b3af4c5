//! One connection: its buffers, what it is doing, and its socket.
//!
//! The socket is registered edge-triggered; `readable` and `writable` remember what the poller said until
//! the socket says "would block". So a request costs no call that changes interest. Room for output is
//! asked for only once the socket has been full: else every answer that the peer takes would wake a guest
//! that has nothing to do.

use api_types::envd::Framing;
use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

use nix::{errno::Errno, unistd};

use super::{
    codec::Codec,
    events,
    files::{Download, Upload},
    filesystem::Task,
    http::{self, After, Head},
    input::InputStream,
    slots::Key,
    tunnel::Tunnel,
    watch::WatchStream,
};

/// Above this much unsent output nothing more is produced for a connection.
pub(crate) const HIGH_WATER: usize = 64 << 10;
/// Buffers that grew beyond this are given back after use.
const KEEP: usize = 16 << 10;

/// A connection.
pub(crate) struct Conn {
    socket: OwnedFd,
    /// Received and not yet used.
    pub(crate) input: Vec<u8>,
    /// To be sent, from `sent` on.
    pub(crate) out: Vec<u8>,
    sent: usize,
    pub(crate) readable: bool,
    pub(crate) writable: bool,
    /// Whether the poller says when there is room for output.
    pub(crate) watches_room: bool,
    /// The peer is gone, or sends nothing more.
    pub(crate) hangup: bool,
    /// How the present call's messages are written.
    pub(crate) codec: Codec,
    /// Whether the present answer is the last.
    pub(crate) after: After,
    pub(crate) phase: Phase,
    /// When something must be done if nothing happens before.
    pub(crate) wake: Option<Instant>,
    /// When a request last came in or was answered; the most idle one goes when there are too many.
    pub(crate) used: Instant,
}

/// What a connection is doing.
pub(crate) enum Phase {
    /// Between requests, or in a head.
    Head,
    /// Collecting a body that a handler takes in whole.
    Collect {
        head: Box<Head>,
        body: Framing,
        bytes: Vec<u8>,
    },
    /// Writing a body to a file.
    Upload { upload: Upload, body: Framing },
    /// Sending a file.
    Download(Download),
    /// Following a process.
    Follow(Follow),
    /// Watching a directory.
    Watch(Box<WatchStream>),
    /// Waiting for work that is done in turns.
    Task(Box<Task>),
    /// Carrying bytes to and from a port of the guest.
    Tunnel(Box<Tunnel>),
    /// Waiting until that process has taken its input.
    Input(Key),
    /// Reading a stream of input for a process.
    StreamInput(Box<InputStream>),
    /// The last answer is on its way. `Unread` when parts of the request were not read: closing at once
    /// could cost the peer the answer.
    Closing(Rest),
    /// Reading the rest of a refused request into nothing, so many bytes at most.
    Draining { left: usize },
}

/// Whether a request was read to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rest {
    Read,
    Unread,
}

/// A stream of process events.
pub(crate) struct Follow {
    pub(crate) process: Key,
    /// When the stream itself ends: the caller of `Connect` said so.
    pub(crate) deadline: Option<Instant>,
    pub(crate) keepalive: Duration,
    pub(crate) next_keepalive: Instant,
}

/// What reading from a connection led to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Received {
    /// Bytes, now in the input.
    Some,
    /// None at present.
    Nothing,
    /// The peer sends nothing more.
    End,
}

/// The peer is gone for good.
#[derive(Debug)]
pub(crate) struct Gone;

impl Conn {
    pub(crate) fn new(socket: OwnedFd) -> Self {
        Self {
            socket,
            input: Vec::new(),
            out: Vec::new(),
            sent: 0,
            readable: true,
            writable: true,
            watches_room: false,
            hangup: false,
            codec: Codec::Json,
            after: After::KeepAlive,
            phase: Phase::Head,
            wake: None,
            used: Instant::now(),
        }
    }

    /// Bytes to be sent.
    pub(crate) fn backlog(&self) -> usize {
        self.out.len() - self.sent
    }

    /// Whether it waits for a request.
    pub(crate) fn is_idle(&self) -> bool {
        matches!(self.phase, Phase::Head) && self.input.is_empty() && self.backlog() == 0
    }

    /// Sends what the socket takes.
    pub(crate) fn flush(&mut self) -> Result<(), Gone> {
        while self.backlog() > 0 && self.writable {
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
        } else if self.sent > HIGH_WATER {
            self.out.drain(..self.sent);
            self.sent = 0;
        }
        Ok(())
    }

    /// The socket, for the poller.
    pub(crate) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// [`Conn::receive`] for those to whom the peer's end is the end. False when nothing is there now.
    pub(crate) fn fill(&mut self, scratch: &mut [u8]) -> Result<bool, Gone> {
        match self.receive(scratch)? {
            Received::Some => Ok(true),
            Received::Nothing => Ok(false),
            Received::End => Err(Gone),
        }
    }

    /// Reads once into `scratch` and from there to the input: only what was received touches memory.
    pub(crate) fn receive(&mut self, scratch: &mut [u8]) -> Result<Received, Gone> {
        while self.readable {
            match unistd::read(&self.socket, scratch) {
                Ok(0) => return Ok(Received::End),
                Ok(n) => {
                    self.input
                        .extend_from_slice(scratch.get(..n).unwrap_or_default());
                    // A short read has emptied the socket; after a hang-up its end must still be read.
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
    pub(crate) fn consume(&mut self, len: usize) {
        if len == self.input.len() {
            reset(&mut self.input);
        } else {
            self.input.drain(..len);
        }
    }

    /// Answers in whole and ends the request.
    pub(crate) fn answer(&mut self, status: u16, content_type: &str, body: &[u8]) {
        http::push_answer(&mut self.out, status, content_type, body, self.after);
        self.end_request(Rest::Read);
    }

    /// Answers with an error of a plain route and ends the request.
    #[cold]
    #[inline(never)]
    pub(crate) fn error(&mut self, status: u16, message: &str) {
        http::push_error(&mut self.out, status, message, self.after);
        self.end_request(Rest::Read);
    }

    /// Answers with an error although parts of the request are still to come.
    #[cold]
    #[inline(never)]
    pub(crate) fn refuse(&mut self, status: u16, message: &str) {
        self.after = After::Close;
        http::push_error(&mut self.out, status, message, self.after);
        self.end_request(Rest::Unread);
    }

    /// The answer is complete in `out`.
    pub(crate) fn end_request(&mut self, rest: Rest) {
        self.wake = None;
        self.codec = Codec::Json;
        self.used = Instant::now();
        self.phase = match self.after {
            After::KeepAlive => Phase::Head,
            After::Close => Phase::Closing(rest),
        };
    }

    /// Begins an answer that is a stream.
    pub(crate) fn begin_stream(&mut self) {
        http::push_chunked_head(&mut self.out, self.codec.stream_type(), self.after);
    }

    /// Begins an answer that follows a process.
    pub(crate) fn follow(&mut self, follow: Follow) {
        self.begin_stream();
        self.wake = Some(follow.wake());
        self.phase = Phase::Follow(follow);
    }

    /// Ends a stream that never began.
    #[cold]
    #[inline(never)]
    pub(crate) fn refuse_stream(&mut self, error: api_types::envd::ConnectError) {
        self.begin_stream();
        events::push_end_stream(&mut self.out, Some(error));
        self.end_request(Rest::Read);
    }

    /// Whether it follows that process.
    pub(crate) fn follows(&self, key: Key) -> bool {
        matches!(&self.phase, Phase::Follow(follow) if follow.process == key)
    }

    /// Whether the peer, which sends nothing more, would still take something: sending nothing to one that
    /// has closed both ways fails too.
    pub(crate) fn listens(&self) -> bool {
        use nix::sys::socket::{MsgFlags, send};
        use std::os::fd::AsRawFd;
        let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
        matches!(
            send(self.socket.as_raw_fd(), &[], flags),
            Ok(_) | Err(Errno::EAGAIN)
        )
    }

    /// Tells the peer that nothing more comes.
    pub(crate) fn shut_down(&self) {
        use std::os::fd::AsRawFd;
        // Fails only when the peer is gone already.
        let _ =
            nix::sys::socket::shutdown(self.socket.as_raw_fd(), nix::sys::socket::Shutdown::Write);
    }
}

impl Follow {
    /// When it needs attention next.
    pub(crate) fn wake(&self) -> Instant {
        let keepalive = self.next_keepalive;
        self.deadline
            .map_or(keepalive, |deadline| deadline.min(keepalive))
    }
}

/// Empties a buffer, keeping the memory of a small one.
fn reset(buffer: &mut Vec<u8>) {
    if buffer.capacity() > KEEP {
        *buffer = Vec::new()
    } else {
        buffer.clear()
    }
}
