//! E2B's part of a sandbox: settings and tokens, the route for the data plane, and samples of usage over time.
//!
//! The pool owns sandboxes, deadlines included. A [`Registry`] is a handle without a task of its own: E2B's settings are
//! the [`Note`] that the pool keeps as text in the sandbox's record, so that they outlive the server. The registry holds
//! the notes that it has parsed, and the samples, which end with the server.

mod error;
pub mod note;
mod route;
mod sample;
mod signature;

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use api_types::rest::NetworkConfig;
use model::SandboxId;
use netisolation::{EventLog, Policy};
use pool::{CreateSpec, Ended, LifeEvent, Lifetime, OnTimeout, Pool, Sandbox, Wake};
use serde_json::Value;
use tokio::sync::mpsc;
use tracing::error;

pub use error::RegistryError;
pub use route::{Route, RouteError};
pub use sample::{Sample, sample_all, timestamp};

use note::{Note, now};

/// A sandbox as it was when the pool answered.
#[derive(Clone, Debug)]
pub struct View {
    pub sandbox: Sandbox,
    pub note: Arc<Note>,
}

/// The answer to a connect.
#[derive(Debug)]
pub struct Connected {
    pub view: View,
    /// The sandbox was paused and this request resumed it.
    pub resumed: bool,
}

/// Samples and life events of a sandbox, each oldest first.
#[derive(Debug)]
pub struct History {
    pub view: View,
    pub samples: Vec<Sample>,
    pub events: Vec<LifeEvent>,
}

/// A new sandbox, as a client asks for it. The registry adds times and tokens.
#[derive(Clone, Debug)]
pub struct NewLease {
    /// Id, name, `name:tag` or snapshot id.
    pub template: String,
    pub timeout_s: u32,
    pub on_timeout: OnTimeout,
    /// Traffic to a sandbox that is paused with its memory resumes it.
    pub auto_resume: bool,
    /// Required by the agent.
    pub envd_token: Token,
    /// Required by the other ports.
    pub traffic_token: Token,
    pub metadata: BTreeMap<String, String>,
    /// Environment of every process in the sandbox.
    pub env_vars: BTreeMap<String, String>,
    pub allow_internet_access: Option<bool>,
    pub network: Option<NetworkConfig>,
    /// The policy that follows from `allow_internet_access` and `network`.
    pub policy: Policy,
    /// Kept for the client.
    pub mcp: Option<Value>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Token {
    /// A random one is required.
    Drawn,
    /// None is required.
    None,
}

/// A handle; clones share notes and samples.
#[derive(Clone, Debug)]
pub struct Registry {
    pool: Pool,
    known: Arc<Mutex<HashMap<SandboxId, Known>>>,
}

/// The registry's part of a sandbox.
#[derive(Debug)]
struct Known {
    /// The text that `note` was parsed from.
    text: Arc<str>,
    note: Arc<Note>,
    samples: VecDeque<Sample>,
}

impl Registry {
    /// A registry of the sandboxes that an opened pool has recovered. One whose note cannot be read has no owner and is
    /// ended.
    #[must_use]
    pub fn open(pool: Pool, recovered: Vec<Sandbox>) -> Self {
        let registry = Self {
            pool,
            known: Arc::default(),
        };
        for sandbox in recovered {
            let id = sandbox.id.clone();
            if let Err(why) = registry.view(sandbox) {
                error!(sandbox = %id, why = %why, "cannot read the sandbox's note: ending the sandbox");
                let pool = registry.pool.clone();
                tokio::spawn(async move { pool.kill(&id).await });
            }
        }
        registry
    }

    /// Creates a sandbox. If the caller drops the future, the sandbox is ended.
    ///
    /// # Errors
    /// Returns [`RegistryError::Note`] if metadata and options are too long, [`RegistryError::Random`], and the errors
    /// of [`Pool::create`].
    pub async fn create(&self, lease: NewLease) -> Result<View, RegistryError> {
        let now = now();
        let mut lifetime = Lifetime {
            on_timeout: lease.on_timeout,
            auto_resume: lease.auto_resume,
            ..Lifetime::default()
        };
        lifetime.set(now, lease.timeout_s);
        let note = Note {
            started_at: now,
            metadata: lease.metadata,
            env_vars: lease.env_vars,
            envd_token: token(lease.envd_token)?,
            traffic_token: token(lease.traffic_token)?,
            allow_internet_access: lease.allow_internet_access,
            network: lease.network,
            mcp: lease.mcp,
        };
        let spec = spec(&note, lease.template, lifetime, lease.policy)?;
        let sandbox = self.pool.create(spec).await?;
        Ok(self.enter(sandbox, note))
    }

    /// Makes sure that a sandbox runs; see [`Pool::connect`].
    ///
    /// # Errors
    /// Returns the errors of [`Pool::connect`], and [`RegistryError::Note`].
    pub async fn connect(
        &self,
        id: &SandboxId,
        timeout_s: Option<u32>,
        wake: Wake,
    ) -> Result<Connected, RegistryError> {
        let connected = self.pool.connect(id, timeout_s, wake).await?;
        Ok(Connected {
            view: self.view(connected.sandbox)?,
            resumed: connected.resumed,
        })
    }

    /// Makes new sandboxes that continue where a running one is now, with its settings and new tokens. Returns one
    /// result for each.
    ///
    /// # Errors
    /// Returns the errors of [`Pool::fork`], and [`RegistryError::Note`] or [`RegistryError::Random`].
    pub async fn fork(
        &self,
        id: &SandboxId,
        count: u32,
        timeout_s: u32,
    ) -> Result<Vec<Result<View, RegistryError>>, RegistryError> {
        let source = self.get(id).await?;
        let mut lifetime = source.sandbox.lifetime;
        lifetime.set(now(), timeout_s);
        let (mut notes, mut specs) = (Vec::new(), Vec::new());
        for _ in 0..count {
            let note = fork_note(&source.note)?;
            let template = source.sandbox.template.id.clone();
            // The pool gives forks the policy of their source.
            specs.push(spec(&note, template, lifetime, Policy::default())?);
            notes.push(note);
        }
        let forks = self.pool.fork(id, specs).await?;
        let forks = notes.into_iter().zip(forks);
        let views = forks.map(|(note, fork)| Ok(self.enter(fork?, note)));
        Ok(views.collect())
    }

    /// Replaces the outbound options of a running sandbox and, with `policy`, what they amount to. How the sandbox is
    /// reached from outside stays as it is.
    ///
    /// # Errors
    /// Returns the errors of [`Pool::set_policy`], and [`RegistryError::Note`].
    pub async fn set_network(
        &self,
        id: &SandboxId,
        outbound: NetworkConfig,
        allow_internet_access: Option<bool>,
        policy: Policy,
    ) -> Result<(), RegistryError> {
        let mut note = Note::clone(&*self.get(id).await?.note);
        let inbound = note.network.take().unwrap_or_default();
        note.network = Some(NetworkConfig {
            allow_public_traffic: inbound.allow_public_traffic,
            mask_request_host: inbound.mask_request_host,
            https_ports: inbound.https_ports,
            ..outbound
        });
        note.allow_internet_access = allow_internet_access;
        Ok(self.pool.set_policy(id, policy, note.to_text()?).await?)
    }

    /// # Errors
    /// Returns [`pool::Refusal::NotFound`], and [`RegistryError::Note`].
    pub async fn get(&self, id: &SandboxId) -> Result<View, RegistryError> {
        self.view(self.pool.get(id).await?)
    }

    /// All sandboxes, in no order.
    ///
    /// # Errors
    /// Returns [`pool::PoolError::Draining`] if the pool is closed.
    pub async fn list(&self) -> Result<Vec<View>, RegistryError> {
        let sandboxes = self.pool.list().await?;
        // A sandbox whose note cannot be read is being ended.
        Ok(sandboxes
            .into_iter()
            .filter_map(|s| self.view(s).ok())
            .collect())
    }

    /// # Errors
    /// As [`Registry::get`].
    pub async fn history(&self, id: &SandboxId) -> Result<History, RegistryError> {
        let (sandbox, events) = self.pool.history(id).await?;
        let view = self.view(sandbox)?;
        let known = self.known();
        let samples = known.get(id).map(|known| known.samples.iter().copied());
        Ok(History {
            view,
            samples: samples.into_iter().flatten().collect(),
            events,
        })
    }

    /// The route to a sandbox. One that is paused with auto-resume is resumed first.
    ///
    /// # Errors
    /// Returns [`RouteError::NotFound`] or [`RouteError::Unavailable`].
    pub async fn route(&self, id: &SandboxId) -> Result<Route, RouteError> {
        let sandbox = self.pool.reach(id).await;
        let view = sandbox.map_err(RegistryError::from);
        let view = view.and_then(|sandbox| self.view(sandbox));
        view.map(Route::from).map_err(|e| RouteError::of(&e))
    }

    /// The sandbox whose envd token signs a file URL (`signature`, `path`, `read` or `write`, user, expiration), when a
    /// request names none. Compares in constant time; bounded by the number of sandboxes.
    #[must_use]
    pub fn find_by_signature(&self, query: &str, operation: &'static str) -> Option<SandboxId> {
        let signed = signature::Signed::parse(query, operation)?;
        let known = self.known();
        let with_token = known.iter().filter_map(|(id, known)| {
            let has_token = known.note.envd_token.is_some();
            has_token.then(|| (id.clone(), Arc::clone(&known.note)))
        });
        let notes: Vec<_> = with_token.collect();
        drop(known);
        signed.find(&notes)
    }

    /// Forgets sandboxes as they end, here and in the log of refused packets.
    pub async fn forget_ended(
        self,
        mut ended: mpsc::UnboundedReceiver<Ended>,
        refused: Option<EventLog>,
    ) {
        while let Some(Ended { id, .. }) = ended.recv().await {
            self.known().remove(&id);
            if let Some(refused) = &refused {
                refused.forget(&id);
            }
        }
    }

    /// The view of a new sandbox.
    fn enter(&self, sandbox: Sandbox, note: Note) -> View {
        let note = Arc::new(note);
        let known = Known {
            text: Arc::clone(&sandbox.note),
            note: Arc::clone(&note),
            samples: VecDeque::new(),
        };
        self.known().insert(sandbox.id.clone(), known);
        View { sandbox, note }
    }

    /// The view of a sandbox; its note is parsed only if it is another text than before.
    fn view(&self, sandbox: Sandbox) -> Result<View, RegistryError> {
        let mut known = self.known();
        if let Some(known) = known.get(&sandbox.id)
            && Arc::ptr_eq(&known.text, &sandbox.note)
        {
            let note = Arc::clone(&known.note);
            return Ok(View { sandbox, note });
        }
        let note = Arc::new(Note::from_text(&sandbox.note)?);
        let samples = known.remove(&sandbox.id).map(|known| known.samples);
        let entry = Known {
            text: Arc::clone(&sandbox.note),
            note: Arc::clone(&note),
            samples: samples.unwrap_or_default(),
        };
        known.insert(sandbox.id.clone(), entry);
        Ok(View { sandbox, note })
    }

    /// A panic while the lock is held leaves a map that is whole.
    fn known(&self) -> MutexGuard<'_, HashMap<SandboxId, Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn spec(
    note: &Note,
    template: String,
    lifetime: Lifetime,
    policy: Policy,
) -> Result<CreateSpec, RegistryError> {
    Ok(CreateSpec {
        template,
        init: note.init(),
        note: note.to_text()?,
        lifetime,
        policy,
    })
}

/// The source's settings, with new tokens where it has some.
fn fork_note(source: &Note) -> Result<Note, RegistryError> {
    let renewed = |token: &Option<String>| match token {
        Some(_) => Token::Drawn,
        None => Token::None,
    };
    Ok(Note {
        started_at: now(),
        envd_token: token(renewed(&source.envd_token))?,
        traffic_token: token(renewed(&source.traffic_token))?,
        ..source.clone()
    })
}

/// 256 random bits in hex.
fn token(wanted: Token) -> Result<Option<String>, RegistryError> {
    match wanted {
        Token::None => Ok(None),
        Token::Drawn => Ok(Some(crate::auth::random_hex::<32>()?)),
    }
}
