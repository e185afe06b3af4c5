//! The server: one thread, one `poll`, owner of connections and contexts.
//!
//! ```text
//! connection ─► route ─► job ─► queue of a context ─► host
//!      ▲                                               │ events, done, what was printed
//!      └───────────────────────────────────────────────┘
//! ```
//! What must never happen: waiting anywhere but in `poll`; reading from a host whose client has no room;
//! a cell that is begun before the clone's state was looked at ([`Context::dispatch`]).

mod contexts;
mod requests;

use std::{
    collections::BTreeMap,
    process::Child,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
};

use crate::{
    Config,
    clone_state::CloneState,
    conn::{Conn, Phase},
    context::Context,
    event::Event,
    host::Stream,
    language::Language,
    listener::{ListenError, Listener},
    zygote::Zygote,
};

/// Connections at once; the most idle one makes room for another.
const MAX_CONNS: usize = 256;
/// Everything is read through a buffer of this size.
const SCRATCH: usize = 64 << 10;
/// How often dead hosts are looked for that have not been taken out of the process table.
const REAP: Duration = Duration::from_millis(50);

/// The server cannot go on.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ServerError {
    #[error(transparent)]
    Listen(#[from] ListenError),
    #[error("cannot wait for events")]
    Wait(#[source] Errno),
}

/// The server.
#[derive(Debug)]
pub(crate) struct Server {
    config: Config,
    listeners: Vec<Listener>,
    conns: BTreeMap<u64, Conn>,
    /// In the order of their creation.
    contexts: Vec<Context>,
    clone: CloneState,
    zygote: Zygote,
    /// Killed and not yet gone.
    graves: Vec<Child>,
    scratch: Vec<u8>,
    next_serial: u64,
    /// The contexts that exist from the start are made now.
    warming: bool,
}

/// What a descriptor of `poll` belongs to.
#[derive(Clone, Copy, Debug)]
enum Token {
    Listener(usize),
    Conn(u64),
    Control(u64),
    Output(u64, Stream),
}

const OUTPUTS: [Stream; 2] = [Stream::Stdout, Stream::Stderr];

impl Server {
    /// Listens, and starts the contexts that exist from the start.
    pub(crate) fn bind(config: Config) -> Result<Self, ServerError> {
        let mut listeners = vec![Listener::tcp(config.listen)?];
        if let Some(port) = config.vsock {
            listeners.push(Listener::vsock(port)?);
        }
        let clone = CloneState::new(&config.state);
        let warming = config.warm;
        let mut server = Self {
            config,
            listeners,
            conns: BTreeMap::new(),
            contexts: Vec::new(),
            clone,
            zygote: Zygote::default(),
            graves: Vec::new(),
            scratch: vec![0; SCRATCH],
            next_serial: 0,
            warming,
        };
        for language in Language::AT_START {
            server.default_context(language);
        }
        if warming {
            server.prepare_context(Language::AHEAD);
        }
        server.warming = false;
        Ok(server)
    }

    /// Serves until the process is ended.
    pub(crate) fn run(&mut self) -> Result<(), ServerError> {
        loop {
            for (token, flags) in self.wait()? {
                self.handle(token, flags);
            }
            let now = Instant::now();
            self.fire_deadlines(now);
            self.dispatch(now);
            self.flush();
            self.graves
                .retain_mut(|child| matches!(child.try_wait(), Ok(None)));
        }
    }

    /// Everything that happened since the last call, waiting until something does.
    fn wait(&self) -> Result<Vec<(Token, PollFlags)>, ServerError> {
        let (mut tokens, mut fds) = (Vec::new(), Vec::new());
        for (at, listener) in self.listeners.iter().enumerate() {
            tokens.push(Token::Listener(at));
            fds.push(PollFd::new(listener.fd(), PollFlags::POLLIN));
        }
        for (serial, conn) in &self.conns {
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::POLLIN, conn.wants_input());
            flags.set(PollFlags::POLLOUT, conn.wants_room());
            tokens.push(Token::Conn(*serial));
            fds.push(PollFd::new(conn.socket(), flags));
        }
        for context in &self.contexts {
            let Some(host) = &context.host else { continue };
            let (control, waiting) = host.control();
            let room = self.has_room(context);
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::POLLIN, room);
            flags.set(PollFlags::POLLOUT, waiting);
            if !flags.is_empty() {
                tokens.push(Token::Control(context.serial));
                fds.push(PollFd::new(control, flags));
            }
            let ends = OUTPUTS.map(|stream| (stream, host.stream(stream)));
            for (stream, end) in ends {
                if let Some(end) = end.filter(|_| room) {
                    tokens.push(Token::Output(context.serial, stream));
                    fds.push(PollFd::new(end, PollFlags::POLLIN));
                }
            }
        }
        match poll(&mut fds, self.timeout()) {
            Ok(_) => {}
            Err(Errno::EINTR) => return Ok(Vec::new()),
            Err(errno) => return Err(ServerError::Wait(errno)),
        }
        let flags = fds
            .iter()
            .map(|fd| fd.revents().unwrap_or(PollFlags::empty()));
        let happened = tokens.into_iter().zip(flags);
        Ok(happened.filter(|(_, flags)| !flags.is_empty()).collect())
    }

    fn timeout(&self) -> PollTimeout {
        let conns = self.conns.values().filter_map(Conn::due);
        let contexts = self.contexts.iter().filter_map(|c| c.patience);
        let due = conns.chain(contexts).min();
        let left = due.map(|due| due.saturating_duration_since(Instant::now()));
        let reap = (!self.graves.is_empty()).then_some(REAP);
        match left.into_iter().chain(reap).min() {
            None => PollTimeout::NONE,
            // Rounded up, so that the time has come when poll returns.
            Some(left) => {
                PollTimeout::try_from(left + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX)
            }
        }
    }

    fn handle(&mut self, token: Token, flags: PollFlags) {
        let readable = PollFlags::POLLIN | PollFlags::POLLHUP | PollFlags::POLLERR;
        match token {
            Token::Listener(at) => self.accept(at),
            Token::Conn(serial) if flags.intersects(readable) => self.receive(serial),
            // Everything is flushed at the end of the turn.
            Token::Conn(_) => {}
            Token::Control(serial) => {
                if flags.contains(PollFlags::POLLOUT) {
                    self.flush_host(serial);
                }
                if flags.intersects(readable) {
                    self.hear(serial);
                }
            }
            Token::Output(serial, stream) => self.pass_output(serial, stream, 1),
        }
    }

    fn accept(&mut self, listener: usize) {
        let listener = self.listeners.get(listener);
        let Some(socket) = listener.and_then(Listener::accept) else {
            return;
        };
        if self.conns.len() >= MAX_CONNS && !self.close_most_idle() {
            return;
        }
        let serial = self.serial();
        self.conns.insert(serial, Conn::new(socket, Instant::now()));
    }

    fn serial(&mut self) -> u64 {
        self.next_serial += 1;
        self.next_serial
    }

    fn close_most_idle(&mut self) -> bool {
        let idle = self.conns.iter().filter(|(_, conn)| conn.is_idle());
        let oldest = idle.min_by_key(|(_, conn)| conn.used);
        let oldest = oldest.map(|(serial, _)| *serial);
        oldest.is_some_and(|serial| self.conns.remove(&serial).is_some())
    }

    /// Drops a connection; what it waited for is interrupted or never begun.
    fn close(&mut self, serial: u64) {
        self.conns.remove(&serial);
        let now = Instant::now();
        for context in &mut self.contexts {
            context.leave(serial, now);
        }
    }

    fn fire_deadlines(&mut self, now: Instant) {
        let mut late = Vec::new();
        for (serial, conn) in &mut self.conns {
            conn.uncork(now);
            if conn.wake.is_none_or(|at| at > now) {
                continue;
            }
            match &conn.phase {
                Phase::Stream => {
                    conn.push_event(&Event::Keepalive, now);
                    conn.hurry();
                }
                Phase::Head | Phase::Body { .. } => {
                    conn.refuse(408, "the request did not arrive in time");
                }
                Phase::Await { .. } | Phase::Closing => late.push(*serial),
            }
        }
        for serial in late {
            self.close(serial);
        }
        let mut deaf = Vec::new();
        for context in &mut self.contexts {
            if context.patience.is_some_and(|at| at <= now) && context.lose_patience(now) {
                deaf.push(context.serial);
            }
        }
        for serial in deaf {
            self.host_died(serial);
        }
    }

    fn flush(&mut self) {
        let flushed = self
            .conns
            .iter_mut()
            .filter_map(|(serial, conn)| conn.flush().is_err().then_some(*serial));
        let gone: Vec<u64> = flushed.collect();
        for serial in gone {
            self.close(serial);
        }
    }
}
