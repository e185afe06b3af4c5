//! Queues that were not empty when their turn ended. Each gets another turn after the machine's thread has served
//! everything else that is ready.

use std::io::{self, PipeReader, PipeWriter, Read, Write};

use super::slots::Slot;
use crate::watch::{DeviceToken, Interest, Token, Watch};

/// The waiting queues, and a pipe that holds one byte while there are any. A pipe, unlike an eventfd, also ends a
/// running `KVM_RUN` (see [`Watch`]).
#[derive(Debug)]
pub(super) struct Backlog {
    /// Slot and index of each queue.
    queues: Vec<(Slot, usize)>,
    reader: PipeReader,
    writer: PipeWriter,
}

impl Backlog {
    pub(super) fn new(watch: &mut Watch) -> io::Result<Self> {
        let (reader, writer) = io::pipe()?;
        let token = Token::Device(DeviceToken::Backlog);
        watch.add(&reader, token, Interest::Read)?;
        Ok(Self {
            queues: Vec::new(),
            reader,
            writer,
        })
    }

    /// Adds a queue unless it is already waiting.
    pub(super) fn put(&mut self, slot: Slot, queue: usize) {
        if self.queues.contains(&(slot, queue)) {
            return;
        }
        if self.queues.is_empty() {
            // The pipe is empty, so one byte always fits.
            let _written = self.writer.write(&[0]);
        }
        self.queues.push((slot, queue));
    }

    /// Removes and returns the waiting queues. The caller puts back those that still have work after their turn.
    pub(super) fn take(&mut self) -> Vec<(Slot, usize)> {
        if !self.queues.is_empty() {
            // The pipe holds one byte, so this does not block.
            let _read = self.reader.read(&mut [0]);
        }
        std::mem::take(&mut self.queues)
    }
}
