//! A context: one host, the cells that wait for it, and the clone state that the host was last sent.
//!
//! ```text
//!            ready                 next cell
//! Starting ────────► Idle ◄──────────────────► Running
//!     │  ▲             │           done           │
//!     │  └─────────────┴──────────────────────────┘  the host ended, or was restarted
//!     └────────────► Failed ──► Starting  at the next cell
//!   ended before it was ready
//! ```
//! One cell runs at a time; the others wait in order.

use std::{collections::VecDeque, path::Path, time::Instant};

use nix::errno::Errno;
use transport::{Key, Reactor};

use crate::{
    clone_state::{CloneState, Variables},
    host::{Gone, Host},
    language::{Language, Start},
    message::Run,
    setup::Setup,
    zygote::Zygote,
};

/// Largest number of waiting cells.
const MAX_QUEUE: usize = 256;

/// A cell, and the connection that gets its events.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) conn: Key,
    pub(crate) code: String,
    pub(crate) env_vars: Variables,
    /// Whether the cell is counted and its results enter the history.
    pub(crate) store_history: bool,
}

/// The states in the module's drawing.
#[derive(Debug)]
pub(crate) enum State {
    Starting,
    Idle,
    /// The connection that gets the cell's events; `None` after its client has left.
    Running(Option<Key>),
    Failed,
}

/// A context.
#[derive(Debug)]
pub(crate) struct Context {
    /// Contexts are listed in this order.
    pub(crate) order: u64,
    /// The name that clients use.
    pub(crate) id: String,
    pub(crate) language: Language,
    pub(crate) cwd: String,
    /// Whether cells that name only the language run here.
    pub(crate) is_default: bool,
    /// False for a context that was created ahead and has not been used.
    pub(crate) is_listed: bool,
    pub(crate) state: State,
    pub(crate) host: Option<Host>,
    pub(crate) queue: VecDeque<Job>,
    /// Connections to answer once the context is ready, with their responses.
    pub(crate) waiting: Vec<(Key, Vec<u8>)>,
    /// Counted cells that have begun since the host started.
    count: u64,
    /// The generation that the host was last sent, as counted by [`CloneState`].
    generation: Option<u64>,
    /// The environment that the host was last sent, as counted by [`CloneState`].
    environment: Option<u64>,
    /// Only the first host of a context runs warm-up code, because a replacement must be ready quickly.
    next_start: Start,
    /// When a cell that was interrupted and still runs is interrupted again, or loses its host.
    pub(crate) patience: Option<Instant>,
    /// When the running cell was first interrupted; meaningless if it was not.
    interrupted: Instant,
}

/// [`MAX_QUEUE`] cells are waiting.
#[derive(Debug)]
pub(crate) struct QueueFull;

impl Context {
    pub(crate) fn new(
        order: u64,
        id: String,
        language: Language,
        cwd: String,
        start: Start,
    ) -> Self {
        Self {
            order,
            id,
            language,
            cwd,
            is_default: false,
            is_listed: true,
            state: State::Failed,
            host: None,
            queue: VecDeque::new(),
            waiting: Vec::new(),
            count: 0,
            generation: None,
            environment: None,
            next_start: start,
            patience: None,
            interrupted: Instant::now(),
        }
    }

    /// Starts a host. The context must have none.
    pub(crate) fn start(
        &mut self,
        hosts: &Path,
        clone: &mut CloneState,
        zygote: &mut Zygote,
    ) -> std::io::Result<()> {
        let how = std::mem::replace(&mut self.next_start, Start::Plain);
        self.count = 0;
        self.generation = None;
        self.environment = None;
        self.patience = None;
        self.state = State::Failed;
        // Other hosts get the sandbox's environment with their first cell. For a kernel, there may be no code that sets
        // variables, and processes that Java starts inherit the environment with which the JVM was started.
        let none = Variables::new();
        let env = match self.language {
            Language::Kernel(_) | Language::Java => {
                clone.refresh();
                clone.variables()
            }
            _ => &none,
        };
        let setup = Setup {
            hosts,
            cwd: &self.cwd,
            how,
            env,
        };
        self.host = Some(Host::start(&self.language, &setup, zygote)?);
        self.state = State::Starting;
        Ok(())
    }

    /// Adds the host's descriptors to the poller.
    pub(crate) fn watch(&self, io: &Reactor, key: Key) -> Result<(), Errno> {
        self.host
            .as_ref()
            .map_or(Ok(()), |host| host.watch(io, key))
    }

    /// Whether part of a request has not been sent to the host.
    pub(crate) fn has_pending_request(&self) -> bool {
        self.host.as_ref().is_some_and(Host::has_pending_request)
    }

    /// Queues a cell.
    pub(crate) fn push(&mut self, job: Job) -> Result<(), QueueFull> {
        if self.queue.len() >= MAX_QUEUE {
            return Err(QueueFull);
        }
        self.queue.push_back(job);
        Ok(())
    }

    /// Sends the next cell to an idle host. Returns the cell's connection and number.
    ///
    /// # Errors
    /// Returns [`Gone`] if the host has ended; the cell counts as running.
    pub(crate) fn dispatch(&mut self, clone: &mut CloneState) -> Result<Option<(Key, u64)>, Gone> {
        let (State::Idle, Some(host)) = (&self.state, &mut self.host) else {
            return Ok(None);
        };
        let Some(job) = self.queue.pop_front() else {
            return Ok(None);
        };
        clone.refresh();
        let number = self.count + 1;
        if job.store_history {
            self.count = number;
        }
        self.patience = None;
        self.state = State::Running(Some(job.conn));
        let changed = self.environment != Some(clone.environment);
        // A new host assumes an empty environment.
        let nothing = self.environment.is_none() && clone.variables().is_empty();
        let base = (changed && !nothing).then(|| clone.variables());
        let run = Run {
            n: number,
            code: &job.code,
            env: &job.env_vars,
            base,
            seed: self.generation != Some(clone.generation),
            unstored: !job.store_history,
        };
        let request = run.encode(self.language.dialect());
        self.environment = Some(clone.environment);
        self.generation = Some(clone.generation);
        host.send(&request)?;
        Ok(Some((job.conn, number)))
    }

    /// Whether the host accepts cells.
    pub(crate) fn is_ready(&self) -> bool {
        match self.state {
            State::Idle | State::Running(_) => true,
            State::Starting | State::Failed => false,
        }
    }

    /// The connection whose cell runs.
    pub(crate) fn answered(&self) -> Option<Key> {
        match self.state {
            State::Running(conn) => conn,
            State::Starting | State::Idle | State::Failed => None,
        }
    }

    /// Drops a client that has left: its running cell is interrupted, a waiting one is removed.
    pub(crate) fn leave(&mut self, conn: Key, now: Instant) {
        self.queue.retain(|job| job.conn != conn);
        if self.answered() == Some(conn) {
            self.state = State::Running(None);
            self.interrupted = now;
            self.interrupt(now, false);
        }
    }

    fn interrupt(&mut self, now: Instant, again: bool) {
        if let Some(host) = &mut self.host {
            host.interrupt(again);
        }
        self.patience = Some(now + self.language.escalation().again);
    }

    /// Interrupts a cell again if it survived its first interrupt. If its host must be replaced instead, only
    /// returns true.
    pub(crate) fn lose_patience(&mut self, now: Instant) -> bool {
        let replace = self.language.escalation().replace;
        let hopeless = replace.is_some_and(|after| now >= self.interrupted + after);
        if !hopeless {
            self.interrupt(now, true);
        }
        hopeless
    }
}
