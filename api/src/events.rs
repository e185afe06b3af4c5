//! Life-cycle events of sandboxes, listed and posted to webhooks in E2B's format.
//!
//! ```text
//! pool ── Change (after the write of the record) ──► owner ─► log (events/*.jsonl) ─► ring of the latest entries
//! refused traffic ─────────────────────────────────►   │                                │
//!                                                      └─ number of the latest ─► deliver ─► webhooks (events/webhooks)
//! ```
//! One task owns the log and the ledger, another one the deliveries. An event is in the log before it is delivered, and
//! a webhook's progress is recorded after the delivery. A delivery interrupted by a crash is therefore repeated with
//! the same `e2b-delivery-id`: delivery is at least once. Events that a crash kept out of the log are found by
//! comparison when the next server starts ([`ledger`]). The pool never waits for either task.

mod attempts;
mod deliver;
mod hooks;
mod ledger;
mod log;
mod refusal;

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    io,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant, SystemTime},
};

use envd::Timestamp;
use model::SandboxId;
use netisolation::ForbiddenAddresses;
use pool::{Change, Recovered, Sandbox};
use rest::{
    DeliveryStats, LifecycleEvent, NewWebhook, RefusedTraffic, Webhook, WebhookDelivery,
    WebhookDeliveryGroup, WebhookUpdate,
};
use serde::{Deserialize, Serialize};
use tasks::blocking;
use tokio::{
    sync::{Notify, mpsc},
    task::JoinHandle,
};

pub(crate) use attempts::WantedAttempts;
pub use hooks::HookError;
pub(crate) use refusal::{Refusal, name_of_reason};

use crate::{auth::random_hex, registry::note::now, uuid::uuid};
use attempts::Attempts;
use hooks::Hooks;
use ledger::{Happened, Ledger, Names};
use log::{Entry, Listing, Log, kept_since_ns};

/// Number of latest entries kept for webhooks. A webhook that is further behind misses the oldest.
const RING: usize = 1024;
/// Maximum number of refusals that wait for the owner. Excess ones are dropped.
const REFUSALS: usize = 1024;
/// Minimum interval between two events of refused traffic of one sandbox. Refusals in between are counted.
const REFUSED_EVERY: Duration = Duration::from_secs(60);
/// Maximum number of sandboxes with counted refusals. When exceeded, all counts are dropped.
const MAX_REFUSED: usize = 4096;
/// Maximum number of events in one response.
pub(crate) const MAX_LISTED: usize = 100;

/// The type of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Kind {
    #[serde(rename = "sandbox.lifecycle.created")]
    Created,
    #[serde(rename = "sandbox.lifecycle.updated")]
    Updated,
    #[serde(rename = "sandbox.lifecycle.paused")]
    Paused,
    #[serde(rename = "sandbox.lifecycle.resumed")]
    Resumed,
    #[serde(rename = "sandbox.lifecycle.killed")]
    Killed,
    #[serde(rename = "sandbox.lifecycle.checkpointed")]
    Checkpointed,
    /// Moved to this node from another node of the cluster. Not an E2B event.
    #[serde(rename = "sandbox.lifecycle.moved")]
    Moved,
    /// Not an E2B event. Logged only while a webhook subscribes to it, and listed only on request.
    #[serde(rename = "sandbox.network.refused")]
    NetworkRefused,
}

impl Kind {
    const ALL: [Self; 8] = [
        Self::Created,
        Self::Updated,
        Self::Paused,
        Self::Resumed,
        Self::Killed,
        Self::Checkpointed,
        Self::Moved,
        Self::NetworkRefused,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Created => "sandbox.lifecycle.created",
            Self::Updated => "sandbox.lifecycle.updated",
            Self::Paused => "sandbox.lifecycle.paused",
            Self::Resumed => "sandbox.lifecycle.resumed",
            Self::Killed => "sandbox.lifecycle.killed",
            Self::Checkpointed => "sandbox.lifecycle.checkpointed",
            Self::Moved => "sandbox.lifecycle.moved",
            Self::NetworkRefused => "sandbox.network.refused",
        }
    }

    pub(crate) fn of(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    fn is_e2b(self) -> bool {
        self != Self::NetworkRefused
    }
}

/// Filter of events for a client.
#[derive(Clone, Debug)]
pub(crate) struct Wanted {
    pub(crate) sandbox: Option<String>,
    pub(crate) kinds: Vec<String>,
    pub(crate) offset: usize,
    pub(crate) limit: usize,
    pub(crate) is_ascending: bool,
}

/// Counts of deliveries since the start.
#[derive(Debug, Default)]
pub struct DeliveryCounts {
    pub(crate) delivered: AtomicU64,
    pub(crate) failed: AtomicU64,
    /// Deliveries given up after the last try.
    pub(crate) given_up: AtomicU64,
    /// Entries that were not sent to a webhook because it was too far behind.
    pub(crate) missed: AtomicU64,
}

impl DeliveryCounts {
    /// Each count with its name.
    #[must_use]
    pub fn named(&self) -> [(&'static str, u64); 4] {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        [
            ("delivered", read(&self.delivered)),
            ("failed", read(&self.failed)),
            ("given_up", read(&self.given_up)),
            ("missed", read(&self.missed)),
        ]
    }
}

/// A handle.
#[derive(Clone, Debug)]
pub struct Events(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    dir: PathBuf,
    team: &'static str,
    hooks: Mutex<Hooks>,
    /// Locked after `hooks`.
    attempts: Mutex<Attempts>,
    ring: Mutex<VecDeque<Arc<Entry>>>,
    /// Number of the latest entry.
    latest: AtomicU64,
    /// Signals new entries and changes of webhooks.
    news: Notify,
    refusals: mpsc::Sender<Refusal>,
    counts: DeliveryCounts,
}

/// The result of [`Events::open`], for [`Events::start`].
#[derive(Debug)]
pub(crate) struct Opened {
    log: Log,
    ledger: Ledger,
    refusals: mpsc::Receiver<Refusal>,
}

/// The sandboxes that an opened pool has found, and its later reports.
#[derive(Debug)]
pub(crate) struct Found {
    /// Sandboxes that are alive, and lost ones that are known.
    sandboxes: Vec<Sandbox>,
    /// Lost sandboxes, with the reason.
    lost: Vec<(SandboxId, String)>,
    changes: mpsc::UnboundedReceiver<Change>,
}

impl Found {
    pub(crate) fn new(recovered: &Recovered, changes: mpsc::UnboundedReceiver<Change>) -> Self {
        let sandboxes = recovered.alive.iter().chain(&recovered.former);
        Self {
            sandboxes: sandboxes.cloned().collect(),
            lost: recovered.lost.clone(),
            changes,
        }
    }
}

/// The tasks. They end when the pool is closed.
#[derive(Debug)]
pub(crate) struct Running {
    owner: JoinHandle<()>,
    deliveries: JoinHandle<()>,
}

impl Running {
    /// Waits until everything that the closed pool has reported is in the log. Unfinished deliveries are left to the
    /// next server.
    pub(crate) async fn stop(self) {
        if let Err(error) = self.owner.await {
            tracing::error!(%error, "the event task failed");
        }
        self.deliveries.abort();
    }
}

/// Returns the ids of a template and of its build for its id in the pool.
pub(crate) type TemplateNames = Box<dyn Fn(&str) -> (String, String) + Send>;

impl Events {
    /// Opens the log and the webhooks in the state directory.
    ///
    /// # Errors
    /// Returns an error if they cannot be read or written.
    pub(crate) fn open(state: &Path, team: &'static str) -> io::Result<(Self, Opened)> {
        let dir = state.join("events");
        let (log, past) = Log::open(&dir, RING)?;
        let hooks = Hooks::open(dir.join("webhooks"), log.next() - 1)?;
        let (sender, refusals) = mpsc::channel(REFUSALS);
        let shared = Shared {
            dir,
            team,
            hooks: Mutex::new(hooks),
            attempts: Mutex::default(),
            ring: Mutex::new(past.latest.into_iter().map(Arc::new).collect()),
            latest: AtomicU64::new(log.next() - 1),
            news: Notify::new(),
            refusals: sender,
            counts: DeliveryCounts::default(),
        };
        let opened = Opened {
            log,
            ledger: Ledger { alive: past.alive },
            refusals,
        };
        Ok((Self(Arc::new(shared)), opened))
    }

    /// Starts logging and delivering. `forbidden` are addresses that no webhook may have.
    pub(crate) fn start(
        &self,
        opened: Opened,
        found: Found,
        templates: TemplateNames,
        forbidden: ForbiddenAddresses,
    ) -> Running {
        let owner = Owner {
            events: self.clone(),
            log: opened.log,
            ledger: opened.ledger,
            names: Drawn(templates),
            refused: HashMap::new(),
        };
        Running {
            owner: tasks::spawn(owner.run(found, opened.refusals)),
            deliveries: tasks::spawn(deliver::run(
                self.clone(),
                forbidden,
                deliver::Pauses::default(),
            )),
        }
    }

    /// # Errors
    /// Returns an error if the log cannot be read.
    pub(crate) async fn list(&self, wanted: Wanted) -> io::Result<Vec<LifecycleEvent>> {
        let dir = self.0.dir.clone();
        let listed = blocking(move || {
            let listing = Listing {
                sandbox: wanted.sandbox.as_deref(),
                kinds: &wanted.kinds,
                offset: wanted.offset,
                limit: wanted.limit.min(MAX_LISTED),
                is_ascending: wanted.is_ascending,
                since_ns: kept_since_ns(SystemTime::now()),
            };
            log::list(&dir, &listing)
        });
        listed.await
    }

    pub(crate) fn webhooks(&self) -> Vec<Webhook> {
        let hooks = self.hooks();
        hooks.all().map(|hook| hook.on_wire(self.0.team)).collect()
    }

    /// # Errors
    /// Returns [`HookError::NotFound`].
    pub(crate) fn webhook(&self, id: &str) -> Result<Webhook, HookError> {
        Ok(self.hooks().get(id)?.on_wire(self.0.team))
    }

    /// # Errors
    /// Returns [`HookError`].
    pub(crate) fn create(&self, body: NewWebhook) -> Result<Webhook, HookError> {
        let hook = self.hooks().create(body, now(), self.latest())?;
        Ok(hook.on_wire(self.0.team))
    }

    /// # Errors
    /// Returns [`HookError`].
    pub(crate) fn update(&self, id: &str, body: WebhookUpdate) -> Result<Webhook, HookError> {
        let hook = self.hooks().update(id, body, self.latest())?;
        self.0.news.notify_one();
        Ok(hook.on_wire(self.0.team))
    }

    /// # Errors
    /// Returns [`HookError`].
    pub(crate) fn delete(&self, id: &str) -> Result<(), HookError> {
        let mut hooks = self.hooks();
        hooks.delete(id)?;
        self.attempts().forget(id);
        Ok(())
    }

    /// The delivery attempts of a webhook, grouped by event with its number.
    ///
    /// # Errors
    /// Returns [`HookError::NotFound`].
    pub(crate) fn deliveries(
        &self,
        id: &str,
        wanted: &WantedAttempts,
    ) -> Result<BTreeMap<u64, WebhookDeliveryGroup>, HookError> {
        self.hooks().get(id)?;
        Ok(self.attempts().groups(id, wanted))
    }

    /// # Errors
    /// Returns [`HookError::NotFound`].
    pub(crate) fn stats(
        &self,
        id: &str,
        wanted: &WantedAttempts,
    ) -> Result<DeliveryStats, HookError> {
        self.hooks().get(id)?;
        Ok(self.attempts().stats(id, wanted))
    }

    /// Records an attempt, unless its webhook has been deleted. `number` is the event's.
    fn attempted(&self, number: u64, attempt: WebhookDelivery) {
        let hooks = self.hooks();
        if hooks.get(&attempt.webhook_id).is_ok() {
            self.attempts().add(number, attempt);
        }
    }

    #[must_use]
    pub fn counts(&self) -> &DeliveryCounts {
        &self.0.counts
    }

    /// Reports refused traffic. It becomes an event if a webhook subscribes to it.
    pub(crate) fn refused(&self, refusal: &Refusal) {
        // A full queue means that there are far more refusals than events to report.
        let _dropped = self.0.refusals.try_send(refusal.clone());
    }

    fn latest(&self) -> u64 {
        self.0.latest.load(Ordering::Acquire)
    }

    /// Locks the webhooks. A panic while the lock is held cannot leave one half changed.
    fn hooks(&self) -> MutexGuard<'_, Hooks> {
        self.0.hooks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn attempts(&self) -> MutexGuard<'_, Attempts> {
        let attempts = self.0.attempts.lock();
        attempts.unwrap_or_else(PoisonError::into_inner)
    }

    fn ring(&self) -> MutexGuard<'_, VecDeque<Arc<Entry>>> {
        self.0.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Drawn(TemplateNames);

impl Names for Drawn {
    fn template(&self, pool_id: &str) -> (String, String) {
        (self.0)(pool_id)
    }

    fn execution(&mut self) -> String {
        drawn_uuid()
    }
}

/// The owner of log and ledger.
struct Owner {
    events: Events,
    log: Log,
    ledger: Ledger,
    names: Drawn,
    /// Number of refusals since the last event of a sandbox, and the time of that event.
    refused: HashMap<SandboxId, (u64, Option<Instant>)>,
}

impl Owner {
    async fn run(mut self, found: Found, mut refusals: mpsc::Receiver<Refusal>) {
        let Found {
            sandboxes,
            lost,
            mut changes,
        } = found;
        self.roll();
        for happened in self
            .ledger
            .reconcile(now(), &sandboxes, &lost, &mut self.names)
        {
            self.write(happened);
        }
        loop {
            tokio::select! {
                biased;
                change = changes.recv() => match change {
                    Some(change) => self.changed(&change),
                    None => return,
                },
                Some(refusal) = refusals.recv() => self.refused(refusal),
            }
        }
    }

    fn changed(&mut self, change: &Change) {
        let Change {
            at,
            id,
            kind,
            sandbox,
        } = change;
        self.roll();
        let sandbox = sandbox.as_ref();
        let happened = self.ledger.change(id, *at, kind, sandbox, &mut self.names);
        if let Some(happened) = happened {
            self.write(happened);
        }
        if matches!(kind, pool::ChangeKind::Ended(_) | pool::ChangeKind::Left) {
            self.refused.remove(id);
        }
    }

    fn refused(&mut self, refusal: Refusal) {
        let is_wanted = {
            let hooks = self.events.hooks();
            let name = Kind::NetworkRefused.name();
            hooks.all().any(|hook| hook.enabled && hook.wants(name))
        };
        if !is_wanted {
            return;
        }
        if self.refused.len() >= MAX_REFUSED && !self.refused.contains_key(&refusal.sandbox) {
            self.refused.clear();
        }
        let (count, last) = self.refused.entry(refusal.sandbox.clone()).or_default();
        *count = count.saturating_add(refusal.count);
        let now_is = Instant::now();
        if last.is_some_and(|last| now_is.saturating_duration_since(last) < REFUSED_EVERY) {
            return;
        }
        *last = Some(now_is);
        let traffic = RefusedTraffic {
            count: std::mem::take(count),
            destination: refusal.destination,
            name: refusal.name,
            reason: refusal.reason,
        };
        if let Some(happened) = self.ledger.refused(&refusal.sandbox, now(), traffic) {
            self.roll();
            self.write(happened);
        }
    }

    fn roll(&mut self) {
        if let Err(error) = self.log.roll(&self.ledger.alive) {
            tracing::error!(%error, "cannot create a new segment of the event log");
        }
    }

    fn write(&mut self, happened: Happened) {
        let Happened {
            at,
            kind,
            sandbox,
            alive,
            data,
        } = happened;
        let entry = Entry {
            number: self.log.next(),
            event: LifecycleEvent {
                version: "v1".to_owned(),
                id: drawn_uuid(),
                kind: kind.name().to_owned(),
                event_data: data,
                sandbox_id: sandbox,
                sandbox_execution_id: alive.execution.clone(),
                sandbox_template_id: alive.template.clone(),
                sandbox_build_id: alive.build.clone(),
                sandbox_team_id: self.events.0.team.to_owned(),
                timestamp: Timestamp::from_unix_ms(at),
            },
            alive: (kind != Kind::Killed).then_some(alive),
        };
        if let Err(error) = self.log.append(&entry) {
            tracing::error!(sandbox = entry.event.sandbox_id, kind = kind.name(), %error, "cannot log an event");
            return;
        }
        let number = entry.number;
        {
            let mut ring = self.events.ring();
            if ring.len() >= RING {
                ring.pop_front();
            }
            ring.push_back(Arc::new(entry));
        }
        self.events.0.latest.store(number, Ordering::Release);
        self.events.0.news.notify_one();
    }
}

/// A random id in the form of a UUID (RFC 9562, version 8).
fn drawn_uuid() -> String {
    // Without random bytes, the rest of the server does not work either.
    random_hex::<16>().map_or_else(|_| uuid(&"0".repeat(32)), |hex| uuid(&hex))
}

#[cfg(test)]
mod tests;
