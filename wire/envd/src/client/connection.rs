//! A stream with deadlines and a limit on the number of received bytes.

use std::io;

use super::{AnswerLimits, ClientError, deadline::Deadline, protocol};
use crate::Transport;

const READ_SIZE: usize = 64 << 10;

/// The stream and its read buffer.
#[derive(Debug)]
pub(super) struct Connection<S> {
    pub(super) stream: S,
    pub(super) limits: AnswerLimits,
    /// Bytes that the current call may still receive.
    allowed: u64,
    /// Whether the last response announced the end of the connection (`Connection: close`).
    pub(super) is_closing: bool,
    /// Received bytes. The bytes from index `at` on have not been used yet.
    held: Vec<u8>,
    at: usize,
}

impl<S: Transport> Connection<S> {
    pub(super) fn over(stream: S) -> Self {
        let limits = AnswerLimits::DATA;
        Self {
            stream,
            limits,
            allowed: limits.received,
            is_closing: false,
            held: Vec::new(),
            at: 0,
        }
    }

    /// Starts a call. The request has not been sent yet, so data that has already arrived is a protocol violation.
    pub(super) fn begin(&mut self) -> Result<(), ClientError> {
        self.allowed = self.limits.received;
        if self.unused().is_empty() {
            Ok(())
        } else {
            Err(protocol("an answer arrived before its request"))
        }
    }

    /// Reads a line and returns it without its line end. Fails once more than `most` bytes have arrived without a line
    /// end.
    pub(super) fn read_line(
        &mut self,
        most: usize,
        doing: &'static str,
        deadline: Deadline,
    ) -> Result<String, ClientError> {
        loop {
            let unused = self.unused();
            if let Some(end) = unused.iter().position(|b| *b == b'\n') {
                let line = unused.get(..end).unwrap_or_default();
                let line = String::from_utf8_lossy(line).into_owned();
                self.use_up(end + 1);
                return Ok(line);
            }
            if unused.len() > most {
                return Err(protocol("a line exceeds its length limit"));
            }
            self.receive(doing, deadline)?;
        }
    }

    /// Writes all parts. If they are small, they are joined and written at once.
    pub(super) fn send(&mut self, parts: &[&[u8]], deadline: Deadline) -> Result<(), ClientError> {
        if parts.iter().map(|p| p.len()).sum::<usize>() <= READ_SIZE {
            return self.send_part(&parts.concat(), deadline);
        }
        parts
            .iter()
            .try_for_each(|part| self.send_part(part, deadline))
    }

    fn send_part(&mut self, mut rest: &[u8], deadline: Deadline) -> Result<(), ClientError> {
        let failed = |source| deadline.failed("sending", source);
        while !rest.is_empty() {
            let left = deadline.left()?;
            self.stream.bound_writes(Some(left)).map_err(failed)?;
            match self.stream.write(rest) {
                Ok(n) => rest = rest.get(n..).unwrap_or_default(),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                // A server may respond and close the connection before it has read the whole request. Its response
                // can still be read.
                Err(e) if e.kind() == io::ErrorKind::BrokenPipe => return Ok(()),
                Err(e) => return Err(failed(e)),
            }
        }
        Ok(())
    }

    pub(super) fn unused(&self) -> &[u8] {
        self.held.get(self.at..).unwrap_or_default()
    }

    /// Marks the next `bytes` bytes as used.
    pub(super) fn use_up(&mut self, bytes: usize) {
        self.at += bytes;
    }

    /// Reads at least one byte, in one system call. End of stream is an error.
    pub(super) fn receive(
        &mut self,
        doing: &'static str,
        deadline: Deadline,
    ) -> Result<(), ClientError> {
        match self.receive_or_end(doing, deadline)? {
            0 => Err(ClientError::NotReachable {
                doing,
                source: io::ErrorKind::UnexpectedEof.into(),
            }),
            _ => Ok(()),
        }
    }

    /// Reads in one system call. Returns 0 at the end of the stream.
    pub(super) fn receive_or_end(
        &mut self,
        doing: &'static str,
        deadline: Deadline,
    ) -> Result<usize, ClientError> {
        self.held.drain(..self.at);
        self.at = 0;
        let size = usize::try_from(self.allowed).map_or(READ_SIZE, |n| n.min(READ_SIZE));
        if size == 0 {
            let most = self.limits.received;
            return Err(protocol(format!("an answer exceeds {most} bytes")));
        }
        let old = self.held.len();
        self.held.resize(old + size, 0);
        let read = self.read_to(old, doing, deadline);
        let n = *read.as_ref().unwrap_or(&0);
        self.held.truncate(old + n);
        self.allowed = self
            .allowed
            .saturating_sub(u64::try_from(n).unwrap_or(u64::MAX));
        read
    }

    fn read_to(
        &mut self,
        from: usize,
        doing: &'static str,
        deadline: Deadline,
    ) -> Result<usize, ClientError> {
        let failed = |source| deadline.failed(doing, source);
        loop {
            let left = deadline.left()?;
            self.stream.bound_reads(Some(left)).map_err(failed)?;
            let room = self.held.get_mut(from..).unwrap_or_default();
            match self.stream.read(room) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                other => return other.map_err(failed),
            }
        }
    }
}
