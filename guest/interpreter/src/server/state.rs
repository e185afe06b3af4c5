//! State that all requests share.

use std::{
    process::Child,
    time::{Duration, Instant},
};

use transport::{Key, Reactor, ServerError, Slots, Work};

use super::notice::Notices;
use crate::{
    clone_state::CloneState, config::Config, context::Context, language::Language, zygote::Zygote,
};

/// Size of the read buffer in bytes.
const SCRATCH: usize = 64 << 10;
/// Interval at which killed hosts are reaped.
pub(super) const REAP: Duration = Duration::from_millis(50);

/// A connection of this server.
pub(super) type Conn = transport::Conn<Interpreter>;
/// The connections of this server.
pub(super) type Conns = transport::Conns<Interpreter>;

/// State that all requests share.
pub(crate) struct Interpreter {
    pub(super) io: Reactor,
    pub(super) config: Config,
    pub(super) contexts: Slots<Context>,
    /// The last number assigned to a context, for the order in listings.
    pub(super) created: u64,
    pub(super) clone: CloneState,
    pub(super) zygote: Zygote,
    pub(super) notices: Notices,
    /// Hosts that were killed and are not yet reaped.
    pub(super) dying: Vec<Child>,
    /// When to reap next; `None` if no host is dying.
    pub(super) reap_at: Option<Instant>,
    /// Whether new default contexts run warm-up code: set while the server creates its first contexts for a snapshot.
    pub(super) warming: bool,
}

/// Work that belongs to no connection, as numbers of [`Work::Service`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Job {
    /// Move bytes between a context's host and the connection that it answers.
    Context,
    /// Deliver the pending notices.
    Notices,
}

impl Interpreter {
    /// Queues work for the next turn.
    pub(super) fn enqueue(&mut self, job: Job, key: Key) {
        self.io.enqueue(Work::Service(job as u8, key));
    }

    /// Creates the contexts that exist from the start.
    pub(super) fn new(config: Config) -> Result<Self, ServerError> {
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
    pub(super) fn reap(&mut self, now: Instant) {
        self.dying
            .retain_mut(|child| matches!(child.try_wait(), Ok(None)));
        self.reap_at = (!self.dying.is_empty()).then_some(now + REAP);
    }
}
