//! E2B's state of a sandbox: settings and tokens, the route for the data plane, and usage samples.
//!
//! The pool owns sandboxes, including their deadlines. A [`Registry`] is a handle without its own task. The pool stores
//! E2B's settings, the [`Note`], as text in the sandbox's record, so that they outlive the server. The registry caches
//! parsed notes and keeps samples, both of which are lost when the server exits.

mod error;
mod lease;
pub mod note;
mod opener;
mod renewal;
mod route;
mod sample;
mod signature;

use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use builds::machine;
use model::SandboxId;
use netisolation::Policy;
use pool::{Ended, LifeEvent, Lifetime, Pool, PoolError, Refusal, Sandbox, TimeoutChange, Wake};
use rest::NetworkConfig;
use tokio::sync::mpsc;
use tracing::error;

pub use error::RegistryError;
pub use lease::{NewLease, Token};
pub(crate) use opener::Opener;
pub use renewal::Renewal;
pub use route::{Route, RouteError};
pub use sample::{Sample, sample_all};
pub use signature::SignatureError;
pub(crate) use signature::check as check_signed;

use crate::rules::{RuleError, Rules};
use lease::{fork_note, spec, token};
use note::{Note, now};

/// A sandbox and its state at the time of the pool's response.
#[derive(Clone, Debug)]
pub struct View {
    pub sandbox: Sandbox,
    pub note: Arc<Note>,
}

/// The result of a connect.
#[derive(Debug)]
pub struct Connected {
    pub view: View,
    /// The sandbox was paused and this request resumed it.
    pub resumed: bool,
}

/// Usage samples and life-cycle events of a sandbox. Both lists are sorted oldest first.
#[derive(Debug)]
pub struct History {
    pub view: View,
    pub samples: Vec<Sample>,
    pub events: Vec<LifeEvent>,
}

/// A handle to the registry. Clones share notes and samples.
#[derive(Clone, Debug)]
pub struct Registry {
    pool: Pool,
    known: Arc<Mutex<HashMap<SandboxId, Known>>>,
    /// `None` without a cluster.
    opener: Option<Opener>,
}

/// The registry's data about one sandbox.
#[derive(Debug)]
struct Known {
    /// The text that `note` was parsed from.
    text: Arc<str>,
    note: Arc<Note>,
    rules: SandboxRules,
    samples: VecDeque<Sample>,
    /// A request has moved the deadline, and the change is being written.
    renewing: bool,
}

/// The parsed `network.rules` of a note, or an error if a server of another version accepted rules that this one cannot
/// parse.
type SandboxRules = Arc<Result<Rules, RuleError>>;

impl Registry {
    /// A registry of the sandboxes that an opened pool has recovered. A sandbox whose note cannot be read is killed,
    /// because no client could use it. Sandboxes of builds are killed too, because builds end with their server.
    #[must_use]
    pub(crate) fn open(pool: Pool, recovered: Vec<Sandbox>, opener: Option<Opener>) -> Self {
        let registry = Self {
            pool,
            known: Arc::default(),
            opener,
        };
        for sandbox in recovered {
            let id = sandbox.id.clone();
            if &*sandbox.note == machine::NOTE {
                let pool = registry.pool.clone();
                tasks::spawn(async move { drop(pool.kill(&id).await) });
                continue;
            }
            if let Err(why) = registry.view(sandbox) {
                error!(sandbox = %id, why = %why, "cannot read the note of a sandbox: killing the sandbox");
                let pool = registry.pool.clone();
                tasks::spawn(async move { drop(pool.kill(&id).await) });
            }
        }
        registry
    }

    async fn open_sealed(&self, id: &SandboxId) -> Result<(), PoolError> {
        let sealed = || PoolError::Refused(id.clone(), Refusal::Sealed);
        let opener = self.opener.as_ref().ok_or_else(sealed)?;
        (opener.0)(id.clone()).await.map_err(|why| {
            tracing::warn!(sandbox = %id, why, "cannot resume a sandbox after its move");
            sealed()
        })
    }

    /// Creates a sandbox. If the caller drops the future before it completes, the sandbox is killed.
    ///
    /// # Errors
    /// Returns [`RegistryError::Note`] if metadata and options are too long, [`RegistryError::Random`] if no token can
    /// be generated, and the errors of [`Pool::create`].
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
            on_activity_s: lease.on_activity_s,
        };
        let spec = spec(&note, lease.template, lifetime, lease.policy)?;
        let sandbox = self.pool.create(spec).await?;
        Ok(self.enter(sandbox, note))
    }

    /// Resumes a sandbox if it is paused, and extends its deadline; see [`Pool::connect`].
    ///
    /// # Errors
    /// Returns the errors of [`Pool::connect`], and [`RegistryError::Note`] if the sandbox's note cannot be read.
    pub async fn connect(
        &self,
        id: &SandboxId,
        timeout_s: Option<u32>,
        wake: Wake,
    ) -> Result<Connected, RegistryError> {
        let connected = match self.pool.connect(id, timeout_s, wake).await {
            Err(PoolError::Refused(_, Refusal::Sealed)) => {
                self.open_sealed(id).await?;
                self.pool.connect(id, timeout_s, wake).await?
            }
            connected => connected?,
        };
        Ok(Connected {
            view: self.view(connected.sandbox)?,
            resumed: connected.resumed,
        })
    }

    /// Creates `count` sandboxes that continue from the current state of a running sandbox, with its settings and new
    /// tokens. Returns one result per fork.
    ///
    /// # Errors
    /// Returns the errors of [`Pool::fork`], [`RegistryError::Note`] if the source's note cannot be read, and
    /// [`RegistryError::Random`] if no token can be generated.
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
            // The policy is not used, because the pool gives forks the policy of their source.
            specs.push(spec(&note, template, lifetime, Policy::default())?);
            notes.push(note);
        }
        let forks = self.pool.fork(id, specs).await?;
        let forks = notes.into_iter().zip(forks);
        let views = forks.map(|(note, fork)| Ok(self.enter(fork?, note)));
        Ok(views.collect())
    }

    /// Replaces the outbound options of a running sandbox and its policy. `policy` must match the options. The options
    /// for inbound traffic stay unchanged.
    ///
    /// # Errors
    /// Returns the errors of [`Pool::set_policy`], and [`RegistryError::Note`] if the sandbox's note cannot be read or
    /// would become too long.
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
    /// Returns [`pool::Refusal::NotFound`] if the sandbox does not exist, and [`RegistryError::Note`] if its note
    /// cannot be read.
    pub async fn get(&self, id: &SandboxId) -> Result<View, RegistryError> {
        self.view(self.pool.get(id).await?)
    }

    /// Whether the pool has a sandbox that is listed here. A sandbox that has just moved to another node stays listed
    /// for a moment.
    pub async fn has(&self, id: &SandboxId) -> bool {
        let is_known = self.known().contains_key(id);
        is_known && !self.pool.get(id).await.is_err_and(|why| why.is_not_found())
    }

    /// All sandboxes, in no particular order.
    ///
    /// # Errors
    /// Returns [`pool::PoolError::Draining`] if the pool is closed.
    pub async fn list(&self) -> Result<Vec<View>, RegistryError> {
        // A response of the pool may be older than the sandbox's end. Its view then adds the sandbox again after
        // `forget_ended`. Such an entry is removed here: ids are not reused, so a sandbox that was known before the
        // pool made the list and is not on it has ended.
        let mut ended: HashSet<SandboxId> = self.known().keys().cloned().collect();
        let sandboxes = self.pool.list().await?;
        for sandbox in &sandboxes {
            ended.remove(&sandbox.id);
        }
        self.known().retain(|id, _| !ended.contains(id));
        // A sandbox whose note cannot be read is being killed; see `open`.
        Ok(sandboxes
            .into_iter()
            .filter_map(|s| self.view(s).ok())
            .collect())
    }

    /// # Errors
    /// Returns the errors of [`Registry::get`].
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

    /// The route to a sandbox. If the sandbox is paused and has auto-resume, it is resumed first.
    ///
    /// # Errors
    /// Returns [`RouteError::NotFound`] if the sandbox does not exist or is paused without auto-resume, and
    /// [`RouteError::Unavailable`] if it cannot be resumed now.
    pub async fn route(&self, id: &SandboxId) -> Result<Route, RouteError> {
        let sandbox = match self.pool.reach(id).await {
            Err(PoolError::Refused(_, Refusal::Sealed)) => match self.open_sealed(id).await {
                Ok(()) => self.pool.reach(id).await,
                Err(why) => Err(why),
            },
            reached => reached,
        };
        let view = sandbox.map_err(RegistryError::from);
        let view = view.and_then(|sandbox| self.view(sandbox));
        view.map(Route::from).map_err(|e| RouteError::of(&e))
    }

    /// Extends the deadline of a sandbox with renewal by activity, because a request has reached it. The request does
    /// not wait for the change.
    pub fn renew(&self, route: &Route) {
        let Some(renewal) = route.renewal.filter(|renewal| renewal.is_due(now())) else {
            return;
        };
        let is_first = self
            .known()
            .get_mut(&route.id)
            .is_some_and(|known| !std::mem::replace(&mut known.renewing, true));
        if !is_first {
            return;
        }
        let (registry, id) = (self.clone(), route.id.clone());
        tasks::spawn(async move {
            let until = renewal.until;
            let change = TimeoutChange::Renew { until };
            if let Err(why) = registry
                .pool
                .set_timeout(&id, change, renewal.timeout_s)
                .await
            {
                tracing::debug!(sandbox = %id, %why, "cannot extend the deadline of a sandbox after a request");
            }
            if let Some(known) = registry.known().get_mut(&id) {
                known.renewing = false;
            }
        });
    }

    /// Finds the sandbox for a signed file URL that does not name a sandbox: the sandbox whose envd token produced the
    /// signature. `operation` is `read` or `write`. Signatures are compared in constant time; the duration grows with
    /// the number of sandboxes.
    #[must_use]
    pub fn find_by_signature(&self, query: &str, operation: &'static str) -> Option<SandboxId> {
        let signed = signature::Signed::parse(query, operation).ok()?;
        let known = self.known();
        let with_token = known.iter().filter_map(|(id, known)| {
            let has_token = known.note.envd_token.is_some();
            has_token.then(|| (id.clone(), Arc::clone(&known.note)))
        });
        let notes: Vec<_> = with_token.collect();
        drop(known);
        signed.find(&notes)
    }

    /// The current rules of a sandbox for outbound requests.
    ///
    /// # Errors
    /// Returns the errors of [`Registry::get`].
    pub(crate) async fn rules(&self, id: &SandboxId) -> Result<SandboxRules, RegistryError> {
        let view = self.get(id).await?;
        let known = self.known();
        let rules = known.get(id).map(|known| Arc::clone(&known.rules));
        // It may have ended in the meantime.
        Ok(rules.unwrap_or_else(|| rules_of(&view.note)))
    }

    /// Removes sandboxes that have ended, and has their other state removed by `forget`.
    pub(crate) async fn forget_ended(
        self,
        mut ended: mpsc::UnboundedReceiver<Ended>,
        forget: impl Fn(&SandboxId),
    ) {
        while let Some(Ended { id, .. }) = ended.recv().await {
            self.known().remove(&id);
            forget(&id);
        }
    }

    /// Adds a new sandbox and returns its view.
    fn enter(&self, sandbox: Sandbox, note: Note) -> View {
        let note = Arc::new(note);
        let known = Known {
            text: Arc::clone(&sandbox.note),
            rules: rules_of(&note),
            note: Arc::clone(&note),
            samples: VecDeque::new(),
            renewing: false,
        };
        self.known().insert(sandbox.id.clone(), known);
        View { sandbox, note }
    }

    /// The view of a sandbox. The note is parsed only if it has changed since the last call.
    fn view(&self, sandbox: Sandbox) -> Result<View, RegistryError> {
        if &*sandbox.note == machine::NOTE {
            return Err(PoolError::Refused(sandbox.id, Refusal::NotFound).into());
        }
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
            rules: rules_of(&note),
            note: Arc::clone(&note),
            samples: samples.unwrap_or_default(),
            renewing: false,
        };
        known.insert(sandbox.id.clone(), entry);
        Ok(View { sandbox, note })
    }

    /// Locks the map. A panic while the lock is held cannot leave an entry half changed.
    fn known(&self) -> MutexGuard<'_, HashMap<SandboxId, Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn rules_of(note: &Note) -> SandboxRules {
    let rules = note
        .network
        .as_ref()
        .and_then(|network| network.rules.as_ref());
    Arc::new(rules.map_or_else(|| Ok(Rules::default()), Rules::parse))
}

#[cfg(test)]
pub(crate) mod tests {
    use std::collections::BTreeMap;

    use model::Bytes;
    use pool::{MissingLimits, PoolConfig};

    use super::*;

    /// A pool without templates and sandboxes.
    pub(crate) async fn empty_pool(state: &std::path::Path) -> Pool {
        let config = PoolConfig {
            missing_limits: MissingLimits::Allow,
            memory_reserve: Bytes(0),
            disk_reserve: Bytes(0),
            ..PoolConfig::new("/bin/true".into(), state.to_owned())
        };
        let (pool, ..) = Pool::open(config).await.unwrap();
        pool
    }

    #[tokio::test]
    async fn a_sandbox_that_was_entered_after_its_end_is_not_here() {
        let state = tempfile::tempdir().unwrap();
        let pool = empty_pool(state.path()).await;
        let registry = Registry::open(pool, Vec::new(), None);
        let note = Note {
            started_at: 0,
            metadata: BTreeMap::new(),
            env_vars: BTreeMap::new(),
            envd_token: None,
            traffic_token: None,
            allow_internet_access: None,
            network: None,
            mcp: None,
            on_activity_s: None,
        };
        let known = Known {
            text: note.to_text().unwrap().into(),
            rules: rules_of(&note),
            note: Arc::new(note),
            samples: VecDeque::new(),
            renewing: false,
        };
        let id = SandboxId::from_random([0; 19]);
        registry.known().insert(id.clone(), known);
        assert!(!registry.has(&id).await);
        assert!(registry.list().await.unwrap().is_empty());
        assert!(registry.known().is_empty());
    }
}
