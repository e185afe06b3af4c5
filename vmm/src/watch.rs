//! Readiness of descriptors for a thread that spends its time inside `KVM_RUN`.
//!
//! A [`Watch`] is an epoll set whose descriptors also send [`KICK_SIGNAL`] to the thread that added them (`O_ASYNC`),
//! so that readiness ends a running `KVM_RUN`. The owner of the vCPU must install the signal handler, which sets
//! `kvm_run.immediate_exit`, **before** it adds the first descriptor: the default action of the signal terminates the
//! process.
//!
//! The kernel sends the signal once, when a descriptor *becomes* ready, and never for timerfds, eventfds and regular
//! files. Code that starts to need a descriptor later must therefore try the operation once before it waits.

mod sys;
mod token;

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};

pub use token::{DeviceToken, Token};

/// The signal that readiness sends. It is a standard signal: pending signals merge into one, so no burst of readiness
/// overflows a signal queue.
pub const KICK_SIGNAL: i32 = nix::libc::SIGIO;

/// Limit on the events that one wait returns; the kernel returns the others at the next wait.
const EVENTS_MAX: usize = 32;

/// The changes of a descriptor to report. End-of-file and errors are always reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interest {
    /// Readable. Reported by every wait until the descriptor is drained.
    Read,
    /// Newly readable or half-closed. Reported once per change, so the owner must read until the read would block.
    ReadEdge,
    /// Like [`Interest::ReadEdge`], and newly writable.
    ReadWriteEdge,
}

impl Interest {
    fn flags(self) -> EpollFlags {
        let edge = EpollFlags::EPOLLIN | EpollFlags::EPOLLRDHUP | EpollFlags::EPOLLET;
        match self {
            Interest::Read => EpollFlags::EPOLLIN,
            Interest::ReadEdge => edge,
            Interest::ReadWriteEdge => edge | EpollFlags::EPOLLOUT,
        }
    }
}

/// The tokens that one wait returned. The caller reuses the value for every wait, so that a wait allocates nothing.
#[derive(Debug)]
pub struct Events {
    raw: [EpollEvent; EVENTS_MAX],
    filled: usize,
}

impl Default for Events {
    fn default() -> Self {
        Self {
            raw: [EpollEvent::empty(); EVENTS_MAX],
            filled: 0,
        }
    }
}

impl Events {
    /// The token of each ready descriptor. Events with unknown tokens are left out; [`Watch::unknown_events`] counts
    /// them.
    pub fn tokens(&self) -> impl Iterator<Item = Token> + '_ {
        let raw = self.raw[..self.filled].iter();
        raw.filter_map(|event| Token::from_raw(event.data()))
    }

    /// Number of ready descriptors, including those with unknown tokens.
    #[must_use]
    pub fn len(&self) -> usize {
        self.filled
    }

    /// Whether the wait ended without a ready descriptor, by its timeout or a signal.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.filled == 0
    }
}

/// The watched descriptors of one VMM. Only the thread that runs vCPU 0 may call its methods.
#[derive(Debug)]
pub struct Watch {
    epoll: Epoll,
    unknown_events: u64,
}

impl Watch {
    /// An empty set.
    ///
    /// # Errors
    /// Returns an error if `epoll_create1` fails, for example because no descriptor is free.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            epoll: Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?,
            unknown_events: 0,
        })
    }

    /// Starts to watch `fd` under `token`. Readiness of `fd` also signals the calling thread.
    ///
    /// # Errors
    /// Returns the kernel's error if the descriptor cannot be polled or is already in the set.
    pub fn add(&mut self, fd: impl AsFd, token: Token, interest: Interest) -> io::Result<()> {
        let event = EpollEvent::new(interest.flags(), token.to_raw());
        self.epoll.add(&fd, event)?;
        sys::signal_this_thread(fd.as_fd())
    }

    /// Changes which events of a watched `fd` are reported.
    ///
    /// # Errors
    /// Returns the kernel's error if the descriptor is not in the set.
    pub fn modify(&mut self, fd: impl AsFd, token: Token, interest: Interest) -> io::Result<()> {
        let mut event = EpollEvent::new(interest.flags(), token.to_raw());
        Ok(self.epoll.modify(&fd, &mut event)?)
    }

    /// Stops reporting events of `fd`. Its readiness still signals the thread. Closing the last copy of a descriptor
    /// also removes the descriptor from the set.
    ///
    /// # Errors
    /// Returns the kernel's error if the descriptor is not in the set.
    pub fn remove(&mut self, fd: impl AsFd) -> io::Result<()> {
        Ok(self.epoll.delete(&fd)?)
    }

    /// Waits until a descriptor is ready, `timeout` has passed (`None`: no limit) or a signal arrives. A zero timeout
    /// polls. After a signal `events` is empty; that is not an error.
    ///
    /// # Errors
    /// Returns any error of `epoll_pwait2` other than `EINTR`.
    pub fn wait(&mut self, events: &mut Events, timeout: Option<Duration>) -> io::Result<()> {
        events.filled = 0;
        match sys::wait(&self.epoll, &mut events.raw, timeout) {
            Ok(filled) => events.filled = filled,
            Err(error) if error.raw_os_error() == Some(Errno::EINTR as i32) => {}
            Err(error) => return Err(error),
        }
        let unknown = events.filled - events.tokens().count();
        self.unknown_events += unknown as u64;
        Ok(())
    }

    /// Number of events that were ignored because their token is not a [`Token`]. Above zero only after a bug.
    #[must_use]
    pub fn unknown_events(&self) -> u64 {
        self.unknown_events
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::cell::Cell;
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    thread_local! {
        static KICKS: Cell<usize> = const { Cell::new(0) };
    }

    extern "C" fn count_kick(_: i32, _: *mut nix::libc::siginfo_t, _: *mut nix::libc::c_void) {
        KICKS.set(KICKS.get() + 1);
    }

    /// Installs a signal handler that counts kicks, and creates a watch.
    pub(crate) fn test_watch() -> Watch {
        vmm_sys_util::signal::register_signal_handler(KICK_SIGNAL, count_kick).unwrap();
        Watch::new().unwrap()
    }

    #[test]
    fn readiness_is_reported_once_and_signals_the_thread() {
        let mut watch = test_watch();
        let (mut near, far) = UnixStream::pair().unwrap();
        watch.add(&far, Token::Agent, Interest::ReadEdge).unwrap();
        let mut events = Events::default();
        watch.wait(&mut events, Some(Duration::ZERO)).unwrap();
        assert!(events.is_empty());

        let before = KICKS.get();
        near.write_all(b"x").unwrap();
        assert!(KICKS.get() > before, "no signal arrived");
        watch.wait(&mut events, None).unwrap();
        assert_eq!(events.tokens().collect::<Vec<_>>(), [Token::Agent]);
        watch.wait(&mut events, Some(Duration::ZERO)).unwrap();
        assert!(events.is_empty(), "an edge is reported once");
    }

    #[test]
    fn a_wait_without_events_lasts_until_its_timeout() {
        let mut watch = test_watch();
        let mut events = Events::default();
        let start = std::time::Instant::now();
        let timeout = Duration::from_micros(300);
        watch.wait(&mut events, Some(timeout)).unwrap();
        assert!(events.is_empty());
        assert!(start.elapsed() >= timeout);
    }

    #[test]
    fn an_event_with_an_unknown_token_is_ignored_and_counted() {
        let mut watch = test_watch();
        let (mut near, far) = UnixStream::pair().unwrap();
        let event = EpollEvent::new(EpollFlags::EPOLLIN, 99);
        watch.epoll.add(&far, event).unwrap();
        near.write_all(b"x").unwrap();
        let mut events = Events::default();
        watch.wait(&mut events, None).unwrap();
        assert_eq!(events.tokens().count(), 0);
        assert_eq!(watch.unknown_events(), 1);
    }
}
