//! Queues that had more to serve when their turn was over. They go on when the machine's thread has served
//! everything else that is ready: their token is ready as long as there is one.

use std::io::{self, PipeReader, PipeWriter, Read, Write};

use super::FIRST_TOKEN;
use crate::watch::{Interest, Watch};

/// The pipe's token in the watch.
pub(super) const TOKEN: u64 = FIRST_TOKEN + 2;

/// The queues, by slot and index, and a pipe that holds one byte while there are any: unlike an eventfd, a pipe
/// also ends a running `KVM_RUN` (see [`Watch`]).
#[derive(Debug)]
pub(super) struct Leftover {
    queues: Vec<(usize, usize)>,
    reader: PipeReader,
    writer: PipeWriter,
}

impl Leftover {
    pub(super) fn new(watch: &mut Watch) -> io::Result<Self> {
        let (reader, writer) = io::pipe()?;
        watch.add(&reader, TOKEN, Interest::Read)?;
        Ok(Self {
            queues: Vec::new(),
            reader,
            writer,
        })
    }

    pub(super) fn put(&mut self, slot: usize, queue: usize) {
        if self.queues.contains(&(slot, queue)) {
            return;
        }
        if self.queues.is_empty() {
            // One byte always fits: it is the only one.
            let _written = self.writer.write(&[0]);
        }
        self.queues.push((slot, queue));
    }

    /// The queues that wait; they have to be put again if they still have more afterwards.
    pub(super) fn take(&mut self) -> Vec<(usize, usize)> {
        if !self.queues.is_empty() {
            // There is one byte, so this does not wait.
            let _read = self.reader.read(&mut [0]);
        }
        std::mem::take(&mut self.queues)
    }
}
