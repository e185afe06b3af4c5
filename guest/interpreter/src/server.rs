//! The server: contexts and their hosts on the event loop of [`transport`].
//!
//! ```text
//! connection ─► route ─► job ─► queue of a context ─► host
//!      ▲                                               │ events, end of the cell, standard output and error
//!      └───────────────────────────────────────────────┘
//! ```
//! A handler gets [`Interpreter`] and its own connection. What it has for other connections (a restart ends another
//! client's cell, for example) goes through [`notice`].
//!
//! Invariants: the thread waits only in the poller; a host is not read while its client has no room; no cell begins
//! before the clone's state has been read ([`Context::dispatch`]).

mod contexts;
mod notice;
mod pump;
mod requests;
mod service;
mod stream;

use std::{
    process::Child,
    time::{Duration, Instant},
};

use transport::{ListenError, Listener, Peers, Reactor, Server, ServerError, Slots};

use crate::{
    clone_state::CloneState, config::Config, context::Context, language::Language, zygote::Zygote,
};
use notice::Notices;

/// Size of the read buffer in bytes.
const SCRATCH: usize = 64 << 10;
/// Interval at which killed hosts are reaped.
const REAP: Duration = Duration::from_millis(50);

/// The server cannot start or continue.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RunError {
    #[error(transparent)]
    Listen(#[from] ListenError),
    #[error(transparent)]
    Server(#[from] ServerError),
}

/// State that all requests share.
pub(crate) struct Interpreter {
    io: Reactor,
    config: Config,
    contexts: Slots<Context>,
    /// Number of contexts that have been created: their order in listings.
    created: u64,
    clone: CloneState,
    zygote: Zygote,
    notices: Notices,
    /// Hosts that were killed and are not yet reaped.
    dying: Vec<Child>,
    /// When to reap next; `None` if no host is dying.
    reap_at: Option<Instant>,
    /// The contexts of the start are being created.
    warming: bool,
}

/// Listens, starts the contexts that exist from the start, and serves until the process is killed.
pub(crate) fn run(config: Config) -> Result<(), RunError> {
    let mut listeners = vec![Listener::tcp(config.listen)?];
    if let Some(port) = config.vsock {
        listeners.push(Listener::vsock(port, Peers::Any)?);
    }
    let interpreter = Interpreter::new(config)?;
    Ok(Server::new(listeners, interpreter)?.run()?)
}

impl Interpreter {
    fn new(config: Config) -> Result<Self, ServerError> {
        let io = Reactor::new(SCRATCH).map_err(ServerError::cannot("create a poller"))?;
        let clone = CloneState::new(&config.state);
        let warming = config.warm;
        let mut interpreter = Self {
            io,
            config,
            contexts: Slots::new(),
            created: 0,
            clone,
            zygote: Zygote::default(),
            notices: Notices::default(),
            dying: Vec::new(),
            reap_at: None,
            warming,
        };
        for language in Language::AT_START {
            interpreter.default_context(language);
        }
        if warming {
            interpreter.prepare_context(Language::AHEAD);
        }
        interpreter.warming = false;
        Ok(interpreter)
    }

    /// Reaps hosts that were killed.
    fn reap(&mut self, now: Instant) {
        self.dying
            .retain_mut(|child| matches!(child.try_wait(), Ok(None)));
        self.reap_at = (!self.dying.is_empty()).then_some(now + REAP);
    }
}
