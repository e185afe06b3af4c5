//! The sandboxes that this server knows: one task owns them all, deadlines included.
//!
//! [`Registry`] is a handle that sends the task messages. What may happen to a sandbox and when is drawn and
//! decided in [`lifecycle`]; the task performs it on the pool and answers. What it knows of a sandbox is in the
//! note that the pool keeps in the sandbox's record ([`note`]), so that after a restart everything is as it was,
//! deadlines included. A deadline that passed while there was no server is acted upon at once.
//!
//! What must never happen: a sandbox without an owner (a create that nobody waits for any more is ended again), a
//! running sandbox without a deadline, two changes of one sandbox at once, an answer that a restart takes back.

mod book;
mod driver;
mod error;
pub mod lifecycle;
mod message;
pub mod note;
mod route;
mod sample;
mod signature;
mod wakes;

use std::{path::PathBuf, sync::Arc};

use api_types::rest::NetworkConfig;
use model::{SandboxId, Timeline};
use netisolation::{EventLog, Policy};
use pool::{Ended, Pool, Recovered, TemplateInfo};
use tokio::sync::{mpsc, oneshot};

pub use book::LifeEvent;
pub use error::RegistryError;
pub use message::{NewLease, Token, Wake};
pub use route::{Route, RouteError};
pub use sample::{Sample, sample_all, timestamp};

use lifecycle::Rest;
use message::{Message, Reply};
use note::Note;

/// Messages that may wait for the task; senders wait when there are more.
const QUEUE: usize = 1024;

/// A sandbox as it was at the moment of the answer.
#[derive(Clone, Debug)]
pub struct View {
    /// Which.
    pub id: SandboxId,
    /// What the server knows of it.
    pub note: Arc<Note>,
    /// What it was made of.
    pub template: Arc<TemplateInfo>,
    /// Running or paused.
    pub rest: Rest,
}

/// What a create made.
#[derive(Debug)]
pub struct Created {
    /// The sandbox.
    pub view: View,
    /// Stamps of its start, CLOCK_MONOTONIC of the host.
    pub timeline: Timeline,
    /// Whether a warm slot served it.
    pub warm: bool,
}

/// What a connect found.
#[derive(Debug)]
pub struct Connected {
    /// The sandbox, which runs.
    pub view: View,
    /// It was paused and this request brought it back.
    pub resumed: bool,
}

/// What a sandbox left to be read.
#[derive(Debug)]
pub struct History {
    /// The sandbox.
    pub view: View,
    /// Its figures, oldest first.
    pub samples: Vec<Sample>,
    /// What happened to it, oldest first.
    pub events: Vec<LifeEvent>,
    /// Its console, and since when.
    pub console: (PathBuf, note::UnixMs),
    /// The socket of its VM; dead while it is paused.
    pub vsock: PathBuf,
}

/// A handle of the registry's task; clones reach the same one.
#[derive(Clone, Debug)]
pub struct Registry {
    messages: mpsc::Sender<Message>,
}

impl Registry {
    /// Starts the task on an opened pool and what it found. `refused` forgets sandboxes that are gone.
    #[must_use]
    pub fn open(
        pool: Pool,
        recovered: Recovered,
        ended: mpsc::Receiver<Ended>,
        refused: Option<EventLog>,
    ) -> Self {
        let (messages, inbox) = mpsc::channel(QUEUE);
        let driver = driver::Driver::new(pool, recovered, refused);
        tokio::spawn(driver.run(inbox, ended));
        Self { messages }
    }

    /// Asks the task. It ends only with the last handle, so that a missing answer is a bug of the task.
    async fn ask<T>(&self, message: impl FnOnce(Reply<T>) -> Message) -> Result<T, RegistryError> {
        let (reply, answer) = oneshot::channel();
        if self.messages.send(message(reply)).await.is_err() {
            return Err(RegistryError::Draining);
        }
        answer.await.unwrap_or(Err(RegistryError::Draining))
    }

    /// A new sandbox. If the caller goes away before the answer, the sandbox is ended again: nobody knows it.
    ///
    /// # Errors
    /// The pool's; [`RegistryError::Draining`]; [`RegistryError::Note`].
    pub async fn create(&self, lease: NewLease) -> Result<Created, RegistryError> {
        let lease = Box::new(lease);
        self.ask(|reply| Message::Create { lease, reply }).await
    }

    /// Makes sure that a sandbox runs, for `timeout_s` from now at least. Never shortens. Without a timeout a
    /// running one keeps its deadline and a paused one gets [`note::Note::wake_timeout_s`].
    ///
    /// # Errors
    /// [`RegistryError::NotFound`], [`RegistryError::ColdBoot`], the pool's.
    pub async fn connect(
        &self,
        id: &SandboxId,
        timeout_s: Option<u32>,
        wake: Wake,
    ) -> Result<Connected, RegistryError> {
        let id = id.clone();
        self.ask(|reply| Message::Connect {
            id,
            timeout_s,
            wake,
            reply,
        })
        .await
    }

    /// Sets the deadline of a running sandbox to so long from now; may shorten. On disk when this returns.
    ///
    /// # Errors
    /// [`RegistryError::NotFound`], [`RegistryError::NotRunning`].
    pub async fn set_timeout(&self, id: &SandboxId, timeout_s: u32) -> Result<(), RegistryError> {
        let id = id.clone();
        self.ask(|reply| Message::SetTimeout {
            id,
            timeout_s,
            reply,
        })
        .await
    }

    /// As [`Registry::set_timeout`], but never shortens.
    ///
    /// # Errors
    /// [`RegistryError::NotFound`], [`RegistryError::NotRunning`].
    pub async fn refresh(&self, id: &SandboxId, timeout_s: u32) -> Result<(), RegistryError> {
        let id = id.clone();
        self.ask(|reply| Message::Refresh {
            id,
            timeout_s,
            reply,
        })
        .await
    }

    /// Writes a running sandbox to disk.
    ///
    /// # Errors
    /// [`RegistryError::NotFound`], [`RegistryError::AlreadyPaused`], the pool's.
    pub async fn pause(&self, id: &SandboxId, mode: pool::PauseMode) -> Result<(), RegistryError> {
        let id = id.clone();
        self.ask(|reply| Message::Pause { id, mode, reply }).await
    }

    /// Ends a sandbox, running or paused. When this returns nothing of it is left.
    ///
    /// # Errors
    /// [`RegistryError::NotFound`].
    pub async fn kill(&self, id: &SandboxId) -> Result<(), RegistryError> {
        let id = id.clone();
        self.ask(|reply| Message::Kill { id, reply }).await
    }

    /// Makes a template of a sandbox, which stays as it is.
    ///
    /// # Errors
    /// [`RegistryError::NotFound`], the pool's.
    pub async fn snapshot(
        &self,
        id: &SandboxId,
        names: Vec<String>,
    ) -> Result<TemplateInfo, RegistryError> {
        let id = id.clone();
        self.ask(|reply| Message::Snapshot { id, names, reply })
            .await
    }

    /// New sandboxes that go on where a running one is now, with its settings and tokens of their own.
    ///
    /// # Errors
    /// [`RegistryError::NotFound`], [`RegistryError::NotRunning`], the pool's; each fork has its own result.
    pub async fn fork(
        &self,
        id: &SandboxId,
        count: u32,
        timeout_s: u32,
    ) -> Result<Vec<Result<View, RegistryError>>, RegistryError> {
        let id = id.clone();
        self.ask(|reply| Message::Fork {
            id,
            count,
            timeout_s,
            reply,
        })
        .await
    }

    /// Replaces the outbound options of a running sandbox, and what it may reach: `policy` is what they come to.
    ///
    /// # Errors
    /// [`RegistryError::NotFound`], [`RegistryError::NotRunning`], the pool's: then all is as it was.
    pub async fn set_network(
        &self,
        id: &SandboxId,
        outbound: NetworkConfig,
        allow_internet_access: Option<bool>,
        policy: Policy,
    ) -> Result<(), RegistryError> {
        let id = id.clone();
        let outbound = Box::new(outbound);
        self.ask(|reply| Message::SetNetwork {
            id,
            outbound,
            allow_internet_access,
            policy,
            reply,
        })
        .await
    }

    /// A sandbox as it is now.
    ///
    /// # Errors
    /// [`RegistryError::NotFound`].
    pub async fn get(&self, id: &SandboxId) -> Result<View, RegistryError> {
        let id = id.clone();
        self.ask(|reply| Message::Get { id, reply }).await
    }

    /// All sandboxes, in no order.
    ///
    /// # Errors
    /// [`RegistryError::Draining`].
    pub async fn list(&self) -> Result<Vec<View>, RegistryError> {
        self.ask(|reply| Message::List { reply }).await
    }

    /// What a sandbox left to be read.
    ///
    /// # Errors
    /// [`RegistryError::NotFound`].
    pub async fn history(&self, id: &SandboxId) -> Result<History, RegistryError> {
        let id = id.clone();
        self.ask(|reply| Message::History { id, reply }).await
    }

    /// The socket of a sandbox's VM if it runs. Wakes nobody.
    ///
    /// # Errors
    /// [`RegistryError::NotFound`].
    pub async fn running_vsock(&self, id: &SandboxId) -> Result<Option<PathBuf>, RegistryError> {
        let history = self.history(id).await?;
        let runs = history.view.rest == Rest::Running;
        Ok(runs.then_some(history.vsock))
    }

    /// Adds figures taken at one moment; of sandboxes that are gone they are dropped.
    pub async fn record(&self, at: note::UnixMs, usage: Vec<(SandboxId, pool::Usage)>) {
        // Without a task there is nobody to read them.
        let _ = self.messages.send(Message::Record { at, usage }).await;
    }

    /// From now on nothing is created. Returns when no change is under way any more.
    pub async fn drain(&self) {
        // An error says that the task is gone, and with it all changes.
        let _ = self.ask(|reply| Message::Drain { reply }).await;
    }

    /// The route to a sandbox. A paused one with auto-resume is resumed first.
    ///
    /// # Errors
    /// See [`RouteError`].
    pub async fn route(&self, id: &SandboxId) -> Result<Route, RouteError> {
        let (reply, answer) = oneshot::channel();
        let message = Message::Route {
            id: id.clone(),
            reply,
        };
        let gone = || RouteError::Unavailable("the server is stopping".into());
        self.messages.send(message).await.map_err(|_| gone())?;
        answer.await.unwrap_or_else(|_| Err(gone()))
    }

    /// The sandbox whose envd token signs a file URL (`signature`, `path`, `read` or `write`, user,
    /// expiration), when a request names none. Compares in constant time; bounded by the number of sandboxes.
    pub async fn find_by_signature(
        &self,
        query: &str,
        operation: &'static str,
    ) -> Option<SandboxId> {
        let signed = signature::Signed::parse(query, operation)?;
        let tokens = self.ask(|reply| Message::Tokens { reply }).await.ok()?;
        signed.find(&tokens)
    }
}
