//! The order in which streams and resets send packets to the guest. A stream is in the queue at most once.

use std::collections::{HashSet, VecDeque};

use super::packet::Key;

/// The source of the next packet for the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PacketSource {
    /// The stream with this id may have a packet.
    Stream(u64),
    /// The guest still has the stream with this key but the host does not: the packet is a reset.
    Reset(Key),
}

/// The queue. Its length is bounded by the number of streams plus the limit on resets, whatever the guest does.
#[derive(Debug, Default)]
pub(super) struct PacketQueue {
    sources: VecDeque<PacketSource>,
    /// Ids of the streams in `sources`.
    streams: HashSet<u64>,
    /// Number of resets in `sources`.
    resets: usize,
}

impl PacketQueue {
    /// Appends a stream unless it is already in the queue.
    pub(super) fn push_stream(&mut self, id: u64) {
        if self.streams.insert(id) {
            self.sources.push_back(PacketSource::Stream(id));
        }
    }

    /// Appends a reset unless the queue already holds `limit` resets.
    pub(super) fn push_reset(&mut self, key: Key, limit: usize) {
        if self.resets < limit {
            self.resets += 1;
            self.sources.push_back(PacketSource::Reset(key));
        }
    }

    /// Removes and returns the first source.
    pub(super) fn pop(&mut self) -> Option<PacketSource> {
        let source = self.sources.pop_front()?;
        match source {
            PacketSource::Stream(id) => {
                self.streams.remove(&id);
            }
            PacketSource::Reset(_) => self.resets -= 1,
        }
        Some(source)
    }

    /// Returns a popped source to the front of the queue.
    pub(super) fn put_back(&mut self, source: PacketSource) {
        match source {
            PacketSource::Stream(id) => {
                self.streams.insert(id);
            }
            PacketSource::Reset(_) => self.resets += 1,
        }
        self.sources.push_front(source);
    }

    /// Removes a stream.
    pub(super) fn remove_stream(&mut self, id: u64) {
        if self.streams.remove(&id) {
            self.sources
                .retain(|source| *source != PacketSource::Stream(id));
        }
    }

    /// Removes all resets.
    pub(super) fn remove_resets(&mut self) {
        self.sources
            .retain(|source| matches!(source, PacketSource::Stream(_)));
        self.resets = 0;
    }

    /// The resets in the queue, in order.
    pub(super) fn resets(&self) -> impl Iterator<Item = Key> + '_ {
        self.sources.iter().filter_map(|source| match source {
            PacketSource::Reset(key) => Some(*key),
            PacketSource::Stream(_) => None,
        })
    }
}
