//! A context: one host, the cells that wait for it, and what it was last told.
//!
//! ```text
//!            ready                 next cell
//! Starting ────────► Idle ◄──────────────────► Running
//!     │  ▲             │           done           │
//!     │  └─────────────┴──────────────────────────┘  the host died, or was restarted
//!     └────────────► Failed ──► Starting  at the next cell
//!   died before it was ready
//! ```
//! One cell at a time; the others wait in order.

use std::{collections::VecDeque, path::Path, time::Instant};

use crate::{
    clone_state::{CloneState, Variables},
    host::{Gone, Host, Setup},
    language::{Language, Start},
    message::Run,
    zygote::Zygote,
};

/// Cells that wait at most.
const MAX_QUEUE: usize = 256;

/// A cell and who asked for it.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) conn: u64,
    pub(crate) code: String,
    pub(crate) env_vars: Variables,
    /// Whether it is counted and its results are remembered.
    pub(crate) store_history: bool,
}

/// See the drawing.
#[derive(Debug)]
pub(crate) enum State {
    Starting,
    Idle,
    /// The connection that is answered; absent when its client has gone.
    Running(Option<u64>),
    Failed,
}

/// A context.
#[derive(Debug)]
pub(crate) struct Context {
    /// Never used again; how the rest of the program refers to it.
    pub(crate) serial: u64,
    /// How clients refer to it.
    pub(crate) id: String,
    pub(crate) language: Language,
    pub(crate) cwd: String,
    /// Whether cells that name only the language run here.
    pub(crate) is_default: bool,
    /// Whether clients have made it, or used it, or it is there from the start: others know nothing of it.
    pub(crate) is_listed: bool,
    pub(crate) state: State,
    pub(crate) host: Option<Host>,
    pub(crate) queue: VecDeque<Job>,
    /// Cells begun since the host started, as far as they are counted.
    count: u64,
    /// What the host was last told, as counted by [`CloneState`].
    generation: Option<u64>,
    environment: Option<u64>,
    /// A context that dies is wanted again soon: only its first start takes its time.
    next_start: Start,
    /// When something is done about an interrupted cell that still runs.
    pub(crate) patience: Option<Instant>,
    /// Since when it is interrupted; meaningless otherwise.
    interrupted: Instant,
}

/// The context has too much to do.
#[derive(Debug)]
pub(crate) struct QueueFull;

impl Context {
    pub(crate) fn new(
        serial: u64,
        id: String,
        language: Language,
        cwd: String,
        start: Start,
    ) -> Self {
        Self {
            serial,
            id,
            language,
            cwd,
            is_default: false,
            is_listed: true,
            state: State::Failed,
            host: None,
            queue: VecDeque::new(),
            count: 0,
            generation: None,
            environment: None,
            next_start: start,
            patience: None,
            interrupted: Instant::now(),
        }
    }

    /// Starts a host where there is none.
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
        // Hosts of this project are told with the first cell; kernels may have no words for it, and what Java
        // starts has the environment that its process began with.
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

    /// Adds a cell to those that wait.
    pub(crate) fn push(&mut self, job: Job) -> Result<(), QueueFull> {
        if self.queue.len() >= MAX_QUEUE {
            return Err(QueueFull);
        }
        self.queue.push_back(job);
        Ok(())
    }

    /// Gives the next cell to the host if it has nothing to do; the cell's connection and number.
    pub(crate) fn dispatch(&mut self, clone: &mut CloneState) -> Result<Option<(u64, u64)>, Gone> {
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
        // A host that was told of no variable need not be told that there are none.
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

    /// Whether its host takes cells.
    pub(crate) fn is_ready(&self) -> bool {
        match self.state {
            State::Idle | State::Running(_) => true,
            State::Starting | State::Failed => false,
        }
    }

    /// The connection whose cell runs.
    pub(crate) fn answered(&self) -> Option<u64> {
        match self.state {
            State::Running(conn) => conn,
            State::Starting | State::Idle | State::Failed => None,
        }
    }

    /// Forgets a client that has gone: its cell is interrupted, or never begun.
    pub(crate) fn leave(&mut self, conn: u64, now: Instant) {
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
        self.patience = Some(now + self.language.deafness().again);
    }

    /// What an interrupted cell that still runs costs; whether it is the host's life.
    pub(crate) fn lose_patience(&mut self, now: Instant) -> bool {
        let replace = self.language.deafness().replace;
        let deaf = replace.is_some_and(|after| now >= self.interrupted + after);
        if !deaf {
            self.interrupt(now, true);
        }
        deaf
    }
}
