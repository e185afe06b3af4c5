//! The server of the data plane: HTTP/1.1 on vsock, one thread, one epoll loop.
//!
//! Written by hand over `httparse` instead of on an async runtime, because every clone of a snapshot pays
//! for each page that its first requests touch: a request here touches one connection, one scratch buffer
//! and a few pages of the heap; there are no wakers, task queues, timers or second stacks. What a runtime
//! would give is not needed: all work is short, and what waits is a file descriptor.
//!
//! ```text
//! poller ─► mark ready (conn, pipe, signal) ─► work queue ─► pump_conn     request ─► route ─► handler
//!                                                       └──► pump_process  pipes ─► followers' output
//! ```
//! What starting a command does not need is kept out of its functions (`#[cold]`, `#[inline(never)]`): code
//! that is only near what is run costs a page as well.
//!
//! [`Server`] owns everything. A handler gets [`Core`] (what all requests share) and its connection; it
//! reaches other connections only through the work queue. A further service is a route and a handler.
//!
//! What must never happen: waiting anywhere but in the poller; reading output that a follower has no room
//! for; answering anything but `/health` and `/init` before the guest has its identity.

mod codec;
mod conn;
mod events;
mod files;
mod filesystem;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod http;
mod input;
mod listener;
mod metrics;
mod process;
mod request;
mod route;
mod rpc;
mod slots;
mod start;
mod terminal;
mod tunnel;
mod watch;

use std::{
    collections::{BTreeMap, VecDeque},
    os::fd::{AsFd, OwnedFd},
    time::{Duration, Instant},
};

use api_types::envd::{ConnectCode, ConnectError};
use nix::{
    errno::Errno,
    sys::{
        epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout},
        resource::{Resource, getrlimit, setrlimit},
        signal::{SigSet, Signal},
        signalfd::{SfdFlags, SignalFd},
    },
};

pub(crate) use listener::Listener;

use crate::{
    identity::Duties,
    shutdown,
    sys::{self, Spawner},
    users::UserDb,
};
use conn::{Conn, HIGH_WATER, Phase};
use metrics::Meter;
use process::{Process, Written};
use slots::{Key, Slots};
use watch::Watcher;

/// Connections at once; the most idle one makes room for another.
const MAX_CONNS: usize = 1024;
/// Running processes at once.
const MAX_RUNNING: usize = 1024;
/// Ends that are remembered at most; beyond it the oldest is forgotten early.
const MAX_ENDED: usize = 1024;
/// Events taken from the poller at once.
const EVENTS: usize = 32;
/// Steps of one connection or process before the others get a turn.
const ROUNDS: usize = 16;

/// What is asked of the poller for each connection; see [`Core::watch_room`].
const CONN_EVENTS: EpollFlags = EpollFlags::EPOLLIN.union(EpollFlags::EPOLLRDHUP);

/// The server cannot go on.
#[derive(Debug, thiserror::Error)]
#[error("cannot {what}")]
pub(crate) struct ServerError {
    what: &'static str,
    #[source]
    source: Errno,
}

fn cannot(what: &'static str) -> impl FnOnce(Errno) -> ServerError {
    move |source| ServerError { what, source }
}

/// The server.
pub(crate) struct Server {
    listener: Listener,
    signals: SignalFd,
    conns: Slots<Conn>,
    core: Core,
    ending: bool,
}

/// What all requests share.
pub(crate) struct Core {
    poller: Epoll,
    processes: Slots<Process>,
    watchers: Slots<Watcher>,
    users: UserDb,
    spawner: Spawner,
    settings: Settings,
    duties: Duties,
    work: VecDeque<Work>,
    /// Everything is read through this, so that only what arrives touches memory.
    scratch: Vec<u8>,
    null: Option<OwnedFd>,
    meter: Meter,
}

/// What `/init` has said.
#[derive(Default)]
pub(crate) struct Settings {
    /// Whether it has said anything yet.
    initialised: bool,
    access_token: String,
    env_vars: BTreeMap<String, String>,
    default_user: String,
    default_workdir: String,
}

/// Something that can go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    Conn(Key),
    Process(Key),
    Watch(Key),
}

/// What a descriptor in the poller belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Token {
    Listener,
    Signals,
    Conn(Key),
    Stdin(Key),
    /// By its place in [`Process::outputs`].
    Output(Key, usize),
    /// The guest's side of a connection's tunnel.
    Tunnel(Key),
    Watch(Key),
}

impl Token {
    fn to_bits(self) -> u64 {
        let (kind, key) = match self {
            Self::Listener => (0, 0),
            Self::Signals => (1, 0),
            Self::Conn(key) => (2, key.to_bits()),
            Self::Stdin(key) => (3, key.to_bits()),
            Self::Output(key, 0) => (4, key.to_bits()),
            Self::Output(key, _) => (5, key.to_bits()),
            Self::Tunnel(key) => (6, key.to_bits()),
            Self::Watch(key) => (7, key.to_bits()),
        };
        kind << (2 * slots::BITS) | key
    }

    fn from_bits(bits: u64) -> Option<Self> {
        let key = Key::from_bits(bits);
        match bits >> (2 * slots::BITS) {
            0 => Some(Self::Listener),
            1 => Some(Self::Signals),
            2 => Some(Self::Conn(key)),
            3 => Some(Self::Stdin(key)),
            4 => Some(Self::Output(key, 0)),
            5 => Some(Self::Output(key, 1)),
            6 => Some(Self::Tunnel(key)),
            7 => Some(Self::Watch(key)),
            _ => None,
        }
    }
}

impl Core {
    fn watch(&self, fd: impl AsFd, token: Token, flags: EpollFlags) -> Result<(), Errno> {
        let event = EpollEvent::new(flags | EpollFlags::EPOLLET, token.to_bits());
        self.poller.add(fd, event)
    }

    /// Has the poller say when a full socket has room again. It does so at once if there is room by now.
    #[inline(never)]
    pub(crate) fn watch_room(&self, key: Key, conn: &mut Conn) -> Result<(), Errno> {
        let flags = CONN_EVENTS | EpollFlags::EPOLLOUT | EpollFlags::EPOLLET;
        let mut event = EpollEvent::new(flags, Token::Conn(key).to_bits());
        self.poller.modify(conn.socket(), &mut event)?;
        conn.watches_room = true;
        Ok(())
    }

    pub(crate) fn enqueue(&mut self, work: Work) {
        if !self.work.contains(&work) {
            self.work.push_back(work);
        }
    }
}

impl Server {
    pub(crate) fn new(listener: Listener, duties: Duties) -> Result<Self, ServerError> {
        let mut mask = SigSet::empty();
        for signal in [Signal::SIGCHLD, Signal::SIGTERM, Signal::SIGINT] {
            mask.add(signal);
        }
        mask.thread_block().map_err(cannot("block signals"))?;
        let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
        let signals = SignalFd::with_flags(&mask, flags).map_err(cannot("watch signals"))?;
        let poller =
            Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(cannot("make a poller"))?;
        sys::adopt_orphans().map_err(cannot("adopt orphans"))?;
        let mut users = UserDb::system();
        let default_user = match &duties {
            Duties::Machine(_) => "user".to_owned(),
            Duties::None => users.name_of(nix::unistd::geteuid().as_raw()),
        };
        let core = Core {
            poller,
            processes: Slots::new(),
            watchers: Slots::new(),
            users,
            spawner: Spawner::new(raise_file_limit()),
            settings: Settings {
                default_user,
                ..Settings::default()
            },
            duties,
            work: VecDeque::new(),
            scratch: vec![0; events::PIECE],
            null: None,
            meter: Meter::default(),
        };
        // Level-triggered: see `Server::accept`.
        let waiting = EpollEvent::new(EpollFlags::EPOLLIN, Token::Listener.to_bits());
        let watched = core
            .poller
            .add(listener.fd(), waiting)
            .and_then(|()| core.watch(&signals, Token::Signals, EpollFlags::EPOLLIN));
        watched.map_err(cannot("watch the listener"))?;
        Ok(Self {
            listener,
            signals,
            conns: Slots::new(),
            core,
            ending: false,
        })
    }

    /// Serves until a signal asks for the end.
    pub(crate) fn run(&mut self) -> Result<(), ServerError> {
        let mut events = [EpollEvent::empty(); EVENTS];
        while !self.ending {
            let timeout = self.timeout();
            let count = match self.core.poller.wait(&mut events, timeout) {
                Ok(count) => count,
                Err(Errno::EINTR) => 0,
                Err(source) => return Err(cannot("wait for events")(source)),
            };
            for event in events.iter().take(count) {
                if let Some(token) = Token::from_bits(event.data()) {
                    self.mark(token, event.events());
                }
            }
            if timeout != EpollTimeout::NONE {
                self.fire_deadlines(Instant::now());
            }
            for _ in 0..self.core.work.len() {
                match self.core.work.pop_front() {
                    Some(Work::Conn(key)) => self.pump_conn(key),
                    Some(Work::Process(key)) => self.pump_process(key),
                    Some(Work::Watch(key)) => self.pump_watch(key),
                    None => break,
                }
            }
        }
        Ok(())
    }

    /// Kills what was started here.
    pub(crate) fn end_processes(&mut self) {
        let keys: Vec<Key> = self.core.processes.iter().map(|(key, _)| key).collect();
        for key in keys {
            if let Some(process) = self.core.processes.get_mut(key) {
                // One that is gone already needs nothing.
                let _ = process.signal(Signal::SIGKILL);
            }
        }
    }

    /// Ends everything in the guest; only the power is still on.
    pub(crate) fn end_machine(&self) {
        if let Duties::Machine(machine) = &self.core.duties {
            shutdown::end_machine(machine.layer());
        }
    }

    /// Until the next deadline; not at all when there is work, for ever when there is no deadline.
    fn timeout(&self) -> EpollTimeout {
        if !self.core.work.is_empty() {
            return EpollTimeout::ZERO;
        }
        let conns = self.conns.iter().filter_map(|(_, conn)| conn.wake);
        let processes = self.core.processes.iter().filter_map(|(_, p)| p.deadline);
        let Some(next) = conns.chain(processes).min() else {
            return EpollTimeout::NONE;
        };
        // Rounded up, so that the deadline has come when the poller returns.
        let left = next.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
        let day = Duration::from_secs(86_400);
        EpollTimeout::try_from(left.min(day)).unwrap_or(EpollTimeout::ZERO)
    }

    /// Notes that something is ready.
    fn mark(&mut self, token: Token, flags: EpollFlags) {
        let gone = EpollFlags::EPOLLHUP | EpollFlags::EPOLLERR;
        match token {
            Token::Listener => self.accept(),
            Token::Signals => self.read_signals(),
            Token::Conn(key) => {
                let Some(conn) = self.conns.get_mut(key) else {
                    return;
                };
                conn.hangup |= flags.intersects(gone | EpollFlags::EPOLLRDHUP);
                conn.readable |= conn.hangup || flags.contains(EpollFlags::EPOLLIN);
                conn.writable |= flags.intersects(gone | EpollFlags::EPOLLOUT);
                self.core.enqueue(Work::Conn(key));
            }
            Token::Watch(key) => {
                if let Some(watcher) = self.core.watchers.get_mut(key) {
                    watcher.readable = true;
                    self.core.enqueue(Work::Watch(key));
                }
            }
            Token::Tunnel(key) => {
                let Some(conn) = self.conns.get_mut(key) else {
                    return;
                };
                if let Phase::Tunnel(tunnel) = &mut conn.phase {
                    tunnel.mark(flags);
                }
                self.core.enqueue(Work::Conn(key));
            }
            Token::Stdin(key) => {
                let Some(process) = self.core.processes.get_mut(key) else {
                    return;
                };
                process.stdin.writable = true;
                self.core.enqueue(Work::Process(key));
            }
            Token::Output(key, place) => {
                let Some(process) = self.core.processes.get_mut(key) else {
                    return;
                };
                if let Some(output) = process.outputs.get_mut(place) {
                    output.readable = true;
                    if flags.intersects(gone) && !flags.contains(EpollFlags::EPOLLIN) {
                        // Nothing is in the pipe and nobody can write to it any more.
                        output.fd = None;
                    }
                }
                self.core.enqueue(Work::Process(key));
            }
        }
    }

    /// Takes one connection; the poller says again if more wait. Asking until nobody is left would cost each
    /// newcomer up to 4 ms: where none waits, Linux 6.1's vsock sleeps until the next tick even if told not
    /// to block (`vsock_accept` calls `schedule_timeout(0)`).
    fn accept(&mut self) {
        let Some(socket) = self.listener.accept() else {
            return;
        };
        if self.conns.len() >= MAX_CONNS && !self.close_most_idle() {
            // Everybody is busy: the newcomer is turned away.
            return;
        }
        let token = Token::Conn(self.conns.next_key());
        if self.core.watch(&socket, token, CONN_EVENTS).is_ok() {
            let key = self.conns.insert(Conn::new(socket));
            self.core.enqueue(Work::Conn(key));
        }
    }

    #[cold]
    #[inline(never)]
    fn close_most_idle(&mut self) -> bool {
        let idle = self.conns.iter().filter(|(_, conn)| conn.is_idle());
        let oldest = idle.min_by_key(|(_, conn)| conn.used).map(|(key, _)| key);
        oldest.is_some_and(|key| self.conns.remove(key).is_some())
    }

    fn read_signals(&mut self) {
        while let Ok(Some(info)) = self.signals.read_signal() {
            match i32::try_from(info.ssi_signo) {
                Ok(libc::SIGTERM | libc::SIGINT) => self.ending = true,
                _ => self.reap(),
            }
        }
    }

    /// Takes every dead child out of the process table: ours, and orphans that nobody asks about.
    fn reap(&mut self) {
        loop {
            let (pid, status) = match sys::reap() {
                Ok(Some(dead)) => dead,
                Err(Errno::EINTR) => continue,
                Ok(None) | Err(_) => return,
            };
            let Some(end) = process::end_event(status) else {
                continue;
            };
            let mut all = self.core.processes.iter();
            let ours = all.find(|(_, p)| p.pid == pid && p.status.is_none());
            let ours = ours.map(|(key, _)| key);
            drop(all);
            let Some(key) = ours else {
                continue;
            };
            if let Some(process) = self.core.processes.get_mut(key) {
                process.reaped(end);
            }
            self.core.enqueue(Work::Process(key));
        }
    }

    fn pump_conn(&mut self, key: Key) {
        let Some(conn) = self.conns.get_mut(key) else {
            return;
        };
        if request::pump(&mut self.core, key, conn).is_err() {
            self.close(key);
        }
    }

    /// Drops a connection. What it followed goes on.
    fn close(&mut self, key: Key) {
        let Some(conn) = self.conns.remove(key) else {
            return;
        };
        match conn.phase {
            Phase::Follow(follow) => {
                if let Some(process) = self.core.processes.get_mut(follow.process) {
                    process.followers.retain(|follower| *follower != key);
                    self.core.enqueue(Work::Process(follow.process));
                }
            }
            Phase::Watch(stream) => drop(self.core.watchers.remove(stream.watcher)),
            _ => {}
        }
    }

    /// Moves bytes between a process and those who talk to it.
    fn pump_process(&mut self, key: Key) {
        self.pump_stdin(key);
        let Some(process) = self.core.processes.get_mut(key) else {
            return;
        };
        if !process.is_running() {
            return;
        }
        let mut rounds = 0;
        while rounds < ROUNDS && has_room(&mut self.conns, &process.followers) {
            let Some((pipe, len)) = process.read(&mut self.core.scratch) else {
                break;
            };
            let bytes = self.core.scratch.get(..len).unwrap_or_default();
            for follower in &process.followers {
                if let Some(conn) = self.conns.get_mut(*follower) {
                    events::push_data(&mut conn.out, conn.codec, pipe, bytes);
                    // Who is gone is found out when its connection is pumped.
                    conn.hangup |= conn.flush().is_err();
                }
            }
            rounds += 1;
        }
        if rounds == ROUNDS && process.cut && process.status.is_some() {
            // Somebody who outlived the kill goes on writing: not part of the answer.
            process
                .outputs
                .iter_mut()
                .for_each(|output| output.fd = None);
        }
        let followers = process.followers.clone();
        if process.is_over() {
            self.finish(key);
        } else if rounds == ROUNDS {
            self.core.enqueue(Work::Process(key));
        }
        for follower in followers {
            self.core.enqueue(Work::Conn(follower));
        }
    }

    fn pump_stdin(&mut self, key: Key) {
        loop {
            let Some(process) = self.core.processes.get_mut(key) else {
                return;
            };
            let Some(written) = process.stdin.write() else {
                return;
            };
            let (Written::Done(waiting) | Written::Broken(waiting)) = written;
            let Some(conn) = self.conns.get_mut(waiting) else {
                continue;
            };
            match written {
                Written::Done(_) => input::written(conn),
                Written::Broken(_) => input::unread(conn),
            }
            self.core.enqueue(Work::Conn(waiting));
        }
    }

    /// A process is over: tells everybody and keeps only its end.
    fn finish(&mut self, key: Key) {
        let Some(process) = self.core.processes.get_mut(key) else {
            return;
        };
        let end = process.status.clone().unwrap_or_default();
        let followers = std::mem::take(&mut process.followers);
        process.end(Instant::now());
        for follower in followers {
            let conn = self.conns.get_mut(follower);
            if let Some(conn) = conn.filter(|conn| conn.follows(key)) {
                events::push_end(&mut conn.out, conn.codec, &end);
                conn.end_request(conn::Rest::Read);
                conn.hangup |= conn.flush().is_err();
            }
        }
        // Input that nobody will read any more is answered for.
        self.pump_stdin(key);
    }

    fn fire_deadlines(&mut self, now: Instant) {
        let due = |at: Option<Instant>| at.is_some_and(|at| at <= now);
        let all = self.core.processes.iter();
        let processes: Vec<Key> = all
            .filter(|(_, p)| due(p.deadline))
            .map(|(k, _)| k)
            .collect();
        for key in processes {
            self.expire_process(key);
        }
        let all = self.conns.iter();
        let conns: Vec<Key> = all
            .filter(|(_, c)| due(c.wake))
            .map(|(key, _)| key)
            .collect();
        for key in conns {
            self.wake_conn(key, now);
        }
    }

    /// The time that the caller of `Start` gave is over.
    #[cold]
    #[inline(never)]
    fn expire_process(&mut self, key: Key) {
        let Some(process) = self.core.processes.get_mut(key) else {
            return;
        };
        process.deadline = None;
        // One that has just ended is reaped in this turn.
        let _ = process.signal(Signal::SIGKILL);
        let starter = process.starter;
        if process.followers.contains(&starter) {
            self.stop_following(starter);
        }
        self.core.enqueue(Work::Process(key));
    }

    /// Ends a stream because its time is over.
    #[cold]
    #[inline(never)]
    fn stop_following(&mut self, key: Key) {
        let Some(conn) = self.conns.get_mut(key) else {
            return;
        };
        let Phase::Follow(follow) = &conn.phase else {
            return;
        };
        if let Some(process) = self.core.processes.get_mut(follow.process) {
            process.followers.retain(|follower| *follower != key);
            self.core.enqueue(Work::Process(follow.process));
        }
        let error = ConnectError::new(ConnectCode::DeadlineExceeded, "context deadline exceeded");
        events::push_end_stream(&mut conn.out, Some(error));
        conn.end_request(conn::Rest::Read);
        self.core.enqueue(Work::Conn(key));
    }

    #[cold]
    #[inline(never)]
    fn wake_conn(&mut self, key: Key, now: Instant) {
        let Some(conn) = self.conns.get_mut(key) else {
            return;
        };
        conn.wake = None;
        match &mut conn.phase {
            Phase::Follow(follow) if follow.deadline.is_some_and(|at| at <= now) => {
                self.stop_following(key);
            }
            Phase::Follow(follow) => {
                follow.next_keepalive = now + follow.keepalive;
                conn.wake = Some(follow.wake());
                if conn.out.len() < HIGH_WATER {
                    events::push_keepalive(&mut conn.out, conn.codec);
                }
                self.core.enqueue(Work::Conn(key));
            }
            Phase::Head | Phase::Collect { .. } | Phase::Upload { .. } => {
                conn.refuse(408, "the request did not arrive in time");
                self.core.enqueue(Work::Conn(key));
            }
            Phase::Watch(_) => self.wake_watch(key, now),
            Phase::Tunnel(_) => {
                tunnel::expire(conn);
                self.core.enqueue(Work::Conn(key));
            }
            Phase::Input(_) | Phase::StreamInput(_) => {
                input::expire(&mut self.core, key, conn);
                self.core.enqueue(Work::Conn(key));
            }
            Phase::Download(_) | Phase::Task(_) | Phase::Closing(_) | Phase::Draining { .. } => {
                self.close(key);
            }
        }
    }
}

/// Most descriptors of this process and of what it starts, where the system lets it.
const FILES: u64 = 1 << 19;

/// Takes as many descriptors as there may be, for [`MAX_CONNS`] and [`MAX_RUNNING`]; the limits for what is
/// started: as many as before, and as many as here for those who ask.
fn raise_file_limit() -> (u64, u64) {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap_or((1024, 1024));
    let most = hard.max(FILES);
    // Only root may raise the hard limit; others take what they have.
    match setrlimit(Resource::RLIMIT_NOFILE, most, most) {
        Ok(()) => (soft, most),
        Err(_) => {
            // Then fewer connections fit.
            let _ = setrlimit(Resource::RLIMIT_NOFILE, hard, hard);
            (soft, hard)
        }
    }
}

fn has_room(conns: &mut Slots<Conn>, followers: &[Key]) -> bool {
    let mut conns = followers
        .iter()
        .filter_map(|key| conns.get_mut(*key).map(|c| c.backlog()));
    conns.all(|backlog| backlog < HIGH_WATER)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_survive_the_poller() {
        let key = Key::from_bits(12 << slots::BITS | 34);
        for token in [
            Token::Listener,
            Token::Signals,
            Token::Conn(key),
            Token::Stdin(key),
            Token::Output(key, 0),
            Token::Output(key, 1),
            Token::Tunnel(key),
            Token::Watch(key),
        ] {
            assert_eq!(Token::from_bits(token.to_bits()), Some(token));
        }
        assert_eq!(Token::from_bits(u64::MAX), None);
    }
}
