//! Readiness of descriptors for a thread that spends its time inside `KVM_RUN`.
//!
//! A [`Watch`] is an epoll set with a twist: each descriptor in it also sends [`KICK_SIGNAL`] to the thread
//! that added it (`O_ASYNC`), so that readiness ends a running `KVM_RUN`. The owner of the vCPU installs
//! the handler, which sets `kvm_run.immediate_exit`, **before** it adds the first descriptor: the default
//! action of the signal ends the process.
//!
//! The signal is sent when something *becomes* ready and never repeated, and descriptors of some kinds
//! (timerfd, eventfd, regular files) never send it. Who starts to care about a descriptor late therefore
//! tries the operation once instead of waiting for a notice.

mod sys;

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};

/// The signal that readiness sends. A standard signal, so that a burst of readiness is one signal and
/// none can overflow a queue.
pub const KICK_SIGNAL: i32 = nix::libc::SIGIO;

/// What to report about a descriptor. An end-of-file or an error is always reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interest {
    /// Readable, repeated by every wait for as long as it holds.
    Read,
    /// Newly readable or half-closed: reported once per change, so the owner reads until it would block.
    ReadEdge,
    /// As [`Interest::ReadEdge`], and newly writable.
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

/// The tokens that one wait reported. Kept by the caller and reused, so that a wait allocates nothing.
#[derive(Debug)]
pub struct Events {
    raw: [EpollEvent; 32],
    filled: usize,
}

impl Default for Events {
    fn default() -> Self {
        Self {
            raw: [EpollEvent::empty(); 32],
            filled: 0,
        }
    }
}

impl Events {
    /// Tokens of the descriptors that became ready, each once.
    pub fn tokens(&self) -> impl Iterator<Item = u64> + '_ {
        self.raw[..self.filled].iter().map(|event| event.data())
    }

    /// How many descriptors became ready.
    #[must_use]
    pub fn len(&self) -> usize {
        self.filled
    }

    /// Whether the wait ended without a ready descriptor: its time was over or a signal came.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.filled == 0
    }
}

/// The descriptors of one VMM. All methods are for the thread that runs the vCPU.
#[derive(Debug)]
pub struct Watch {
    epoll: Epoll,
}

impl Watch {
    /// An empty set.
    ///
    /// # Errors
    /// The kernel's, when it has no descriptor left.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            epoll: Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?,
        })
    }

    /// Starts to watch `fd` under `token` and has its readiness signal the calling thread.
    ///
    /// # Errors
    /// The kernel's: the descriptor is of a kind that cannot be polled, or is in the set already.
    pub fn add(&mut self, fd: impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        let event = EpollEvent::new(interest.flags(), token);
        self.epoll.add(&fd, event)?;
        sys::signal_this_thread(fd.as_fd())
    }

    /// Changes what is reported about a watched `fd`.
    ///
    /// # Errors
    /// The kernel's: the descriptor is not in the set.
    pub fn modify(&mut self, fd: impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        let mut event = EpollEvent::new(interest.flags(), token);
        Ok(self.epoll.modify(&fd, &mut event)?)
    }

    /// Stops watching `fd`; closing the only copy of a descriptor does the same.
    ///
    /// # Errors
    /// The kernel's: the descriptor is not in the set.
    pub fn remove(&mut self, fd: impl AsFd) -> io::Result<()> {
        Ok(self.epoll.delete(&fd)?)
    }

    /// Waits until a descriptor is ready, `timeout` has passed (`None`: for ever) or a signal came.
    /// A zero timeout polls. A signal leaves `events` empty and is no error.
    ///
    /// # Errors
    /// The kernel's, for anything but a signal.
    pub fn wait(&mut self, events: &mut Events, timeout: Option<Duration>) -> io::Result<()> {
        events.filled = 0;
        match sys::wait(&self.epoll, &mut events.raw, timeout) {
            Ok(filled) => events.filled = filled,
            Err(error) if error.raw_os_error() == Some(Errno::EINTR as i32) => {}
            Err(error) => return Err(error),
        }
        Ok(())
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

    /// A watch with the handler that its users owe it.
    pub(crate) fn test_watch() -> Watch {
        vmm_sys_util::signal::register_signal_handler(KICK_SIGNAL, count_kick).unwrap();
        Watch::new().unwrap()
    }

    #[test]
    fn readiness_is_reported_and_signals_the_thread() {
        let mut watch = test_watch();
        let (mut near, far) = UnixStream::pair().unwrap();
        watch.add(&far, 7, Interest::ReadEdge).unwrap();
        let mut events = Events::default();
        watch.wait(&mut events, Some(Duration::ZERO)).unwrap();
        assert!(events.is_empty());

        let before = KICKS.get();
        near.write_all(b"x").unwrap();
        assert!(KICKS.get() > before, "no signal came");
        watch.wait(&mut events, None).unwrap();
        assert_eq!(events.tokens().collect::<Vec<_>>(), [7]);
        watch.wait(&mut events, Some(Duration::ZERO)).unwrap();
        assert!(events.is_empty(), "an edge is reported once");
    }

    #[test]
    fn a_wait_without_events_lasts_as_long_as_asked() {
        let mut watch = test_watch();
        let mut events = Events::default();
        let start = std::time::Instant::now();
        let timeout = Duration::from_micros(300);
        watch.wait(&mut events, Some(timeout)).unwrap();
        assert!(events.is_empty());
        assert!(start.elapsed() >= timeout);
    }
}
