//! Who speaks to the guest next: streams and resets stand in line, a stream at most once.

use std::collections::{HashSet, VecDeque};

use super::packet::Key;

/// What the next packet for the guest is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// The stream with this token may have a packet.
    Stream(u64),
    /// A stream that is gone here is to be reset there.
    Reset(Key),
}

/// The line. It is as long as there are streams and resets at most, whatever the guest does.
#[derive(Debug, Default)]
pub(super) struct TurnLine {
    turns: VecDeque<Turn>,
    streams: HashSet<u64>,
    resets: usize,
}

impl TurnLine {
    /// Adds a stream at the end unless it stands in line already.
    pub(super) fn push_stream(&mut self, token: u64) {
        if self.streams.insert(token) {
            self.turns.push_back(Turn::Stream(token));
        }
    }

    /// Adds a reset at the end; whether there was room, of `limit` for all resets.
    pub(super) fn push_reset(&mut self, key: Key, limit: usize) -> bool {
        let room = self.resets < limit;
        if room {
            self.resets += 1;
            self.turns.push_back(Turn::Reset(key));
        }
        room
    }

    /// Takes the first turn.
    pub(super) fn pop(&mut self) -> Option<Turn> {
        let turn = self.turns.pop_front()?;
        match turn {
            Turn::Stream(token) => {
                self.streams.remove(&token);
            }
            Turn::Reset(_) => self.resets -= 1,
        }
        Some(turn)
    }

    /// Puts a turn that `pop` gave back to the front.
    pub(super) fn put_back(&mut self, turn: Turn) {
        match turn {
            Turn::Stream(token) => {
                self.streams.insert(token);
            }
            Turn::Reset(_) => self.resets += 1,
        }
        self.turns.push_front(turn);
    }

    /// Takes a stream out of the line.
    pub(super) fn forget_stream(&mut self, token: u64) {
        if self.streams.remove(&token) {
            self.turns.retain(|turn| *turn != Turn::Stream(token));
        }
    }

    /// Takes all resets out of the line.
    pub(super) fn forget_resets(&mut self) {
        self.turns.retain(|turn| matches!(turn, Turn::Stream(_)));
        self.resets = 0;
    }

    /// The resets in line, in order.
    pub(super) fn resets(&self) -> impl Iterator<Item = Key> + '_ {
        self.turns.iter().filter_map(|turn| match turn {
            Turn::Reset(key) => Some(*key),
            Turn::Stream(_) => None,
        })
    }
}
