//! Bytes over one stream, both ways, within a deadline and a number.

use std::io;

use super::{AnswerLimits, ClientError, deadline::Deadline, protocol};
use crate::envd::Transport;

const READ_SIZE: usize = 64 << 10;

/// The stream, and what has arrived.
#[derive(Debug)]
pub(super) struct Connection<S> {
    pub(super) stream: S,
    pub(super) limits: AnswerLimits,
    /// Bytes that this call may still receive.
    allowed: u64,
    /// Bytes received and not yet used: those from `at` on.
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
            held: Vec::new(),
            at: 0,
        }
    }

    /// A new call: nothing of its answer can be there yet.
    pub(super) fn begin(&mut self) -> Result<(), ClientError> {
        self.allowed = self.limits.received;
        if self.unused().is_empty() {
            Ok(())
        } else {
            Err(protocol("there is an answer before a question"))
        }
    }

    /// The next line without its end, of at most so many bytes.
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
                return Err(protocol("a line without end"));
            }
            self.receive(doing, deadline)?;
        }
    }

    /// Writes the parts, small ones in one system call.
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
                // A server that refuses early answers and closes; the answer can still be read.
                Err(e) if e.kind() == io::ErrorKind::BrokenPipe => return Ok(()),
                Err(e) => return Err(failed(e)),
            }
        }
        Ok(())
    }

    pub(super) fn unused(&self) -> &[u8] {
        self.held.get(self.at..).unwrap_or_default()
    }

    /// So many of the unused bytes were used.
    pub(super) fn use_up(&mut self, bytes: usize) {
        self.at += bytes;
    }

    /// Reads once, at least one byte.
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

    /// Reads once; zero bytes mean that the peer has closed.
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
            return Err(protocol(format!("an answer above {most} bytes")));
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
