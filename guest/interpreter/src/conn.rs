//! One connection: its buffers and what it is doing.

use std::{
    fs::File,
    io::{self, Read, Write},
    os::fd::{AsFd, BorrowedFd},
    time::{Duration, Instant},
};

use crate::{
    body::Body,
    event::{END, Event},
    http::{self, After, Head},
};

/// Above this much unsent output nothing more is read from the host whose cell is answered.
pub(crate) const HIGH_WATER: usize = 256 << 10;
/// Bytes that a client may send before its answer is complete.
const MAX_AHEAD: usize = 64 << 10;
/// Period of keepalives while a cell runs: also how a client that has silently gone is noticed.
pub(crate) const KEEPALIVE: Duration = Duration::from_secs(5);
/// How long the first line of an answer waits for company.
const CORK: Duration = Duration::from_millis(5);
/// Buffers that grew beyond this are given back after use.
const KEEP: usize = 16 << 10;

/// A connection.
#[derive(Debug)]
pub(crate) struct Conn {
    socket: File,
    /// Received and not yet used.
    pub(crate) input: Vec<u8>,
    /// To be sent, from `sent` on.
    pub(crate) out: Vec<u8>,
    sent: usize,
    pub(crate) after: After,
    pub(crate) phase: Phase,
    /// When something is due if nothing happens before.
    pub(crate) wake: Option<Instant>,
    /// Output waits until then.
    corked: Option<Instant>,
    /// When a request last came in or was answered; the most idle one goes when there are too many.
    pub(crate) used: Instant,
}

/// What a connection is doing.
#[derive(Debug)]
pub(crate) enum Phase {
    /// Between requests, or in a head.
    Head,
    /// In a body.
    Body { head: Head, body: Body },
    /// Being answered with the events of a cell.
    Stream,
    /// Waiting until that context is ready; then this is the answer.
    Await { context: u64, answer: Vec<u8> },
    /// The last answer is on its way.
    Closing,
}

/// The peer is gone.
#[derive(Debug)]
pub(crate) struct Gone;

impl Conn {
    pub(crate) fn new(socket: File, now: Instant) -> Self {
        Self {
            socket,
            input: Vec::new(),
            out: Vec::new(),
            sent: 0,
            after: After::KeepAlive,
            phase: Phase::Head,
            wake: None,
            corked: None,
            used: now,
        }
    }

    pub(crate) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Bytes to be sent.
    pub(crate) fn backlog(&self) -> usize {
        self.out.len() - self.sent
    }

    pub(crate) fn is_idle(&self) -> bool {
        matches!(self.phase, Phase::Head) && self.input.is_empty() && self.backlog() == 0
    }

    /// Whether more input is wanted. While an answer is made this is how its end is noticed.
    pub(crate) fn wants_input(&self) -> bool {
        match self.phase {
            Phase::Head | Phase::Body { .. } => self.backlog() == 0,
            Phase::Stream | Phase::Await { .. } => self.input.len() < MAX_AHEAD,
            Phase::Closing => false,
        }
    }

    /// Whether there is output that may go now.
    pub(crate) fn wants_room(&self) -> bool {
        self.backlog() > 0 && self.corked.is_none()
    }

    /// When it needs attention next.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.wake.into_iter().chain(self.corked).min()
    }

    /// Lets waiting output go when its time has come.
    pub(crate) fn uncork(&mut self, now: Instant) {
        if self.corked.is_some_and(|at| at <= now) {
            self.corked = None;
        }
    }

    /// Reads once; what was received touches memory and no more.
    pub(crate) fn receive(&mut self, scratch: &mut [u8]) -> Result<(), Gone> {
        match self.socket.read(scratch) {
            Ok(0) => Err(Gone),
            Ok(n) => {
                let bytes = scratch.get(..n).unwrap_or_default();
                self.input.extend_from_slice(bytes);
                Ok(())
            }
            Err(error) if is_later(&error) => Ok(()),
            Err(_) => Err(Gone),
        }
    }

    /// Sends what the socket takes.
    pub(crate) fn flush(&mut self) -> Result<(), Gone> {
        while self.wants_room() {
            let rest = self.out.get(self.sent..).unwrap_or_default();
            match self.socket.write(rest) {
                Ok(n) => self.sent += n,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if is_later(&error) => return Ok(()),
                Err(_) => return Err(Gone),
            }
        }
        if self.backlog() == 0 {
            self.sent = 0;
            if self.out.capacity() > KEEP {
                self.out = Vec::new()
            } else {
                self.out.clear()
            }
            if matches!(self.phase, Phase::Closing) {
                return Err(Gone);
            }
        }
        Ok(())
    }

    /// Answers in whole and ends the request.
    pub(crate) fn answer(&mut self, status: u16, content_type: &str, body: &[u8]) {
        http::push_answer(&mut self.out, status, content_type, body, self.after);
        self.end_request();
    }

    /// Answers with an error as the official server words them: plain text.
    pub(crate) fn error(&mut self, status: u16, message: &str) {
        self.answer(status, http::TEXT, message.as_bytes());
    }

    /// Answers although parts of the request are still to come: the connection cannot go on.
    pub(crate) fn refuse(&mut self, status: u16, message: &str) {
        self.after = After::Close;
        self.error(status, message);
    }

    /// Begins an answer made of events.
    pub(crate) fn begin_stream(&mut self, now: Instant) {
        http::push_stream_head(&mut self.out, self.after);
        // One segment for the answer of a short cell instead of two or three.
        self.corked = Some(now + CORK);
        self.wake = Some(now + KEEPALIVE);
        self.phase = Phase::Stream;
    }

    /// Adds a line to an answer made of events. The first, the cell's number, waits for company.
    pub(crate) fn push_line(&mut self, line: &[u8], now: Instant) {
        http::push_chunk(&mut self.out, line);
        self.wake = Some(now + KEEPALIVE);
    }

    /// Lets what was added go at once.
    pub(crate) fn hurry(&mut self) {
        self.corked = None;
    }

    pub(crate) fn push_event(&mut self, event: &Event<'_>, now: Instant) {
        self.push_line(&event.line(), now);
    }

    /// Ends an answer made of events.
    pub(crate) fn end_stream(&mut self) {
        http::push_chunk(&mut self.out, END.as_bytes());
        self.out.extend_from_slice(http::LAST_CHUNK);
        self.corked = None;
        self.end_request();
    }

    fn end_request(&mut self) {
        self.wake = None;
        self.used = Instant::now();
        self.phase = match self.after {
            After::KeepAlive => Phase::Head,
            After::Close => Phase::Closing,
        };
    }
}

fn is_later(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
    )
}
