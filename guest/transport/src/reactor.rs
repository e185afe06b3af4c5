//! The poller, the work queue and the read buffer, which connections and services share.

use std::{collections::VecDeque, os::fd::AsFd};

use nix::{
    errno::Errno,
    sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout},
};

use crate::slots::{self, Key};

/// Events requested for every connection. `EPOLLOUT` is added once the socket has been full.
pub(crate) const CONN_EVENTS: EpollFlags = EpollFlags::EPOLLIN.union(EpollFlags::EPOLLRDHUP);

/// The poller, the work queue and the read buffer.
#[derive(Debug)]
pub struct Reactor {
    poller: Epoll,
    work: VecDeque<Work>,
    /// The buffer for all reads. Received bytes are copied out of it, so that a connection's own buffers hold, and
    /// touch, only as much memory as has arrived.
    pub scratch: Vec<u8>,
}

/// A queued step. It must not block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    Conn(Key),
    /// Passed to [`crate::Service::work`]. The service defines the meaning of the number.
    Service(u8, Key),
}

/// The owner of a polled descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Token {
    /// A listening socket, by its index in the server's list.
    Listener(u8),
    /// The socket of a connection.
    Conn(Key),
    /// A further descriptor of the connection's exchange: see [`crate::Exchange::ready`].
    Exchange(Key),
    /// A descriptor of the service: see [`crate::Service::ready`]. The number must be at most [`Token::MAX_SOURCE`].
    Service(u8, Key),
}

impl Token {
    /// The largest number that [`Token::Service`] may contain.
    pub const MAX_SOURCE: u8 = 252;

    fn to_bits(self) -> u64 {
        let (kind, key) = match self {
            Self::Listener(index) => (0, u64::from(index)),
            Self::Conn(key) => (1, key.to_bits()),
            Self::Exchange(key) => (2, key.to_bits()),
            Self::Service(source, key) => (3 + u64::from(source), key.to_bits()),
        };
        kind << (2 * slots::BITS) | key
    }

    pub(crate) fn from_bits(bits: u64) -> Self {
        let key = Key::from_bits(bits);
        match u8::try_from(bits >> (2 * slots::BITS)).unwrap_or(u8::MAX) {
            0 => Self::Listener(u8::try_from(bits).unwrap_or(u8::MAX)),
            1 => Self::Conn(key),
            2 => Self::Exchange(key),
            source => Self::Service(source - 3, key),
        }
    }
}

impl Reactor {
    /// Creates an epoll instance and a read buffer of `scratch` bytes.
    ///
    /// # Errors
    /// Returns an error if `epoll_create1` fails.
    pub fn new(scratch: usize) -> Result<Self, Errno> {
        Ok(Self {
            poller: Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?,
            work: VecDeque::new(),
            scratch: vec![0; scratch],
        })
    }

    /// Adds a descriptor to the poller, edge-triggered. It stays there until its last duplicate is closed.
    ///
    /// # Errors
    /// Returns an error if `epoll_ctl` fails.
    pub fn watch(&self, fd: impl AsFd, token: Token, flags: EpollFlags) -> Result<(), Errno> {
        let event = EpollEvent::new(flags | EpollFlags::EPOLLET, token.to_bits());
        self.poller.add(fd, event)
    }

    /// Adds a descriptor to the poller, level-triggered: it is reported in every turn in which it is ready.
    pub(crate) fn watch_level(&self, fd: impl AsFd, token: Token) -> Result<(), Errno> {
        let event = EpollEvent::new(EpollFlags::EPOLLIN, token.to_bits());
        self.poller.add(fd, event)
    }

    /// Replaces the events and the token of a polled descriptor, edge-triggered. A condition that already holds is
    /// reported at once.
    ///
    /// # Errors
    /// Returns an error if `epoll_ctl` fails.
    #[inline(never)]
    pub fn modify(&self, fd: impl AsFd, token: Token, flags: EpollFlags) -> Result<(), Errno> {
        let mut event = EpollEvent::new(flags | EpollFlags::EPOLLET, token.to_bits());
        self.poller.modify(fd, &mut event)
    }

    /// Queues a step, unless it is queued already. Steps that are queued by other steps run in the next turn.
    pub fn enqueue(&mut self, work: Work) {
        if !self.work.contains(&work) {
            self.work.push_back(work);
        }
    }

    pub(crate) fn wait(
        &self,
        events: &mut [EpollEvent],
        timeout: EpollTimeout,
    ) -> Result<usize, Errno> {
        self.poller.wait(events, timeout)
    }

    /// The number of queued steps.
    pub(crate) fn pending(&self) -> usize {
        self.work.len()
    }

    pub(crate) fn next(&mut self) -> Option<Work> {
        self.work.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_survive_the_poller() {
        let key = Key::from_bits(12 << slots::BITS | 34);
        for token in [
            Token::Listener(0),
            Token::Listener(255),
            Token::Conn(key),
            Token::Exchange(key),
            Token::Service(0, key),
            Token::Service(Token::MAX_SOURCE, key),
        ] {
            assert_eq!(Token::from_bits(token.to_bits()), token);
        }
    }
}
