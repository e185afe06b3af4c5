//! The engine keeps this node registered and its view current. It performs no I/O and reads no clock: inputs and times
//! come in, requests to etcd go out. The simulation therefore runs the same code as the server.
//!
//! ```text
//!            ┌─ Answer, Watched ──┐                     ┌─► Ask: list, lease, registration, load, replicas, tags
//! driver ───►│ Load, Hold, Tick … ├─► state ─► pump() ──┼─► Watch from a revision
//!            └────────────────────┘                     └─► View, Event
//! ```
//! After each input, [`Engine::pump`] compares the actual state with the desired one and requests what is missing. A
//! lost response, a lost lease and a first start are therefore handled in the same way:
//!
//! ```text
//! list ─► watch from the next revision           lease ─► nodes/THIS ─► load/THIS, replicas/THIS/*
//!   ▲        │ ended: from the next revision       ▲         │ conditions on the revision of nodes/THIS:
//!   └────────┘ compacted, or etcd is older         └─────────┘ a write of a lost registration fails
//! ```

use std::collections::{BTreeMap, BTreeSet};

use model::SandboxId;

use crate::{
    ClusterEvent, Load, MemberVerifier, Node, Owner, View,
    keys::Key,
    mirror::{Mirror, Updated},
    store::{Answer, Entry, Fault, LeaseId, Request, Watched},
};

mod held;
mod registration;
#[cfg(test)]
mod tests;

use held::Held;
pub(crate) use registration::Standing;

/// Intervals in milliseconds of a clock that cannot be set and that includes suspension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Timing {
    /// Time to live of the lease.
    pub(crate) lease_ms: u64,
    /// Minimum interval between two writes of the load.
    pub(crate) load_ms: u64,
    /// Interval between lists, in case a watch has missed changes.
    pub(crate) relist_ms: u64,
    /// Delay before a retry after a fault.
    pub(crate) retry_ms: u64,
}

impl Timing {
    /// Interval between ticks.
    pub(crate) const TICK_MS: u64 = 250;

    pub(crate) fn with_lease(lease_ms: u64) -> Self {
        Self {
            lease_ms,
            load_ms: 1000,
            relist_ms: 60_000,
            retry_ms: 500,
        }
    }
}

/// Identifies a request until its response arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Token(u64);

#[derive(Clone, Debug)]
pub(crate) enum Input {
    /// [`Timing::TICK_MS`] have passed.
    Tick,
    Answer(Token, Result<Answer, Fault>),
    /// From the watch with this generation.
    Watched(u64, Watched),
    Load(Load),
    /// Keeps a value under a key of this node (a replica or tags). `None` deletes it.
    Publish(Key, Option<Vec<u8>>),
    /// A change of this record has been requested. The record is not judged before `Hold`, `Settled` or `Release`.
    Changing(SandboxId),
    /// The change was refused, or its outcome is unknown.
    Settled(SandboxId),
    /// This node holds `owner`, written at this revision, or 0 if the revision is unknown.
    Hold(SandboxId, Owner, u64),
    /// This node no longer holds the sandbox.
    Release(SandboxId),
}

#[derive(Clone, Debug)]
pub(crate) enum Effect {
    Ask(Token, Request),
    /// Replaces the watch. Reports of the new one carry the generation.
    Watch {
        generation: u64,
        from: u64,
    },
    View(View),
    Event(ClusterEvent),
}

#[derive(Debug)]
enum Asked {
    /// The list must not be older than this revision, which was known when the list was requested.
    List {
        known: u64,
    },
    Grant {
        sent: u64,
    },
    Renew {
        lease: LeaseId,
        sent: u64,
    },
    Register {
        lease: LeaseId,
    },
    Write(Vec<(Key, Option<Vec<u8>>)>),
    Reassert {
        id: SandboxId,
        owner: Owner,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Watch {
    Off,
    On { from: u64 },
}

/// A granted lease.
#[derive(Clone, Copy, Debug)]
struct Lease {
    id: LeaseId,
    /// When the last successful grant or renewal was sent. etcd counts from a later moment.
    renewed: u64,
}

#[derive(Debug)]
pub(crate) struct Engine {
    timing: Timing,
    this: Node,
    instance: u64,
    mirror: Mirror,
    asked: BTreeMap<Token, Asked>,
    tokens: u64,
    /// Whether the mirror must be listed again before the next regular time.
    list_wanted: bool,
    listed_at: Option<u64>,
    watch: Watch,
    generation: u64,
    lease: Option<Lease>,
    renew_at: u64,
    /// Revision of this process's record in nodes/.
    registered: Option<u64>,
    ever_registered: bool,
    load: Load,
    load_at: Option<u64>,
    /// Replicas and tags.
    published: BTreeMap<Key, Vec<u8>>,
    /// Values under the current registration (`None` if deleted), and the revisions at which they were written.
    written: BTreeMap<Key, (Option<Vec<u8>>, u64)>,
    held: BTreeMap<SandboxId, Held>,
    /// Sandboxes whose record the server is changing.
    changing: BTreeSet<SandboxId>,
    /// Held sandboxes whose record must be written again.
    reassert: BTreeSet<SandboxId>,
    /// Earliest time of the next attempt, for each kind of request that failed.
    retry: [u64; KINDS],
    last_contact: Option<u64>,
    attached: bool,
    effects: Vec<Effect>,
}

/// Kinds of requests that are retried independently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    List,
    Watch,
    Lease,
    Write,
    Reassert,
}

const KINDS: usize = 5;

impl Engine {
    pub(crate) fn new(timing: Timing, this: Node, instance: u64, verifier: MemberVerifier) -> Self {
        Self {
            timing,
            mirror: Mirror::new(this.id.clone(), verifier),
            this,
            instance,
            asked: BTreeMap::new(),
            tokens: 0,
            list_wanted: true,
            listed_at: None,
            watch: Watch::Off,
            generation: 0,
            lease: None,
            renew_at: 0,
            registered: None,
            ever_registered: false,
            load: Load::default(),
            load_at: None,
            published: BTreeMap::new(),
            written: BTreeMap::new(),
            held: BTreeMap::new(),
            changing: BTreeSet::new(),
            reassert: BTreeSet::new(),
            retry: [0; KINDS],
            last_contact: None,
            attached: false,
            effects: Vec::new(),
        }
    }

    pub(crate) fn view(&self) -> &View {
        self.mirror.view()
    }

    pub(crate) fn last_contact(&self) -> Option<u64> {
        self.last_contact
    }

    pub(crate) fn lease(&self) -> Option<LeaseId> {
        self.lease.map(|lease| lease.id)
    }

    /// When the lease was last renewed, if this node is registered. Half a lease later, by its own clock, the node
    /// stops starting and accepting moves.
    pub(crate) fn renewed(&self) -> Option<u64> {
        let lease = self.lease?;
        self.registered.map(|_| lease.renewed)
    }

    /// Handles one input and returns the actions to perform.
    pub(crate) fn step(&mut self, now: u64, input: Input) -> Vec<Effect> {
        match input {
            Input::Tick => {}
            Input::Answer(token, answer) => self.answer(now, token, answer),
            Input::Watched(generation, watched) if generation == self.generation => {
                self.watched(now, watched);
            }
            // From a watch that has been replaced.
            Input::Watched(..) => {}
            Input::Load(load) => self.load = load,
            Input::Publish(key, Some(value)) => drop(self.published.insert(key, value)),
            Input::Publish(key, None) => drop(self.published.remove(&key)),
            Input::Changing(id) => {
                self.reassert.remove(&id);
                self.changing.insert(id);
            }
            Input::Settled(id) => {
                self.changing.remove(&id);
                self.judge(&id);
            }
            Input::Hold(id, owner, revision) => {
                self.changing.remove(&id);
                self.hold(id, owner, revision);
            }
            Input::Release(id) => {
                self.changing.remove(&id);
                self.held.remove(&id);
                self.reassert.remove(&id);
            }
        }
        self.pump(now);
        std::mem::take(&mut self.effects)
    }

    fn answer(&mut self, now: u64, token: Token, answer: Result<Answer, Fault>) {
        let Some(asked) = self.asked.remove(&token) else {
            return;
        };
        if answer.is_ok() {
            self.last_contact = Some(now);
        }
        match asked {
            Asked::List { known } => match answer {
                Ok(Answer::List { revision, entries }) => {
                    self.listed(now, known, revision, entries);
                }
                _ => self.later(now, Kind::List),
            },
            Asked::Grant { sent } => match answer {
                Ok(Answer::Granted(id)) => self.leased(now, Lease { id, renewed: sent }),
                _ => self.later(now, Kind::Lease),
            },
            Asked::Renew { lease, sent } => match answer {
                Ok(Answer::Renewed { alive: true }) => {
                    self.leased(
                        now,
                        Lease {
                            id: lease,
                            renewed: sent,
                        },
                    );
                }
                Ok(Answer::Renewed { alive: false }) => self.lease_lost(),
                _ => self.later(now, Kind::Lease),
            },
            Asked::Register { lease } => self.register_answered(now, lease, answer),
            Asked::Write(writes) => self.write_answered(now, writes, answer),
            Asked::Reassert { id, owner } => self.reassert_answered(now, &id, owner, answer),
        }
    }

    fn listed(&mut self, now: u64, known: u64, revision: u64, entries: Vec<Entry>) {
        if revision < known {
            // A linearizable list that is older than what was known before it was requested.
            self.effects.push(Effect::Event(ClusterEvent::HistoryLost {
                had: known,
                found: revision,
            }));
            self.history_lost();
        } else if revision < self.mirror.view().revision {
            // The watch has overtaken the list.
            self.list_wanted = false;
            self.listed_at = Some(now);
            return;
        }
        self.list_wanted = false;
        self.listed_at = Some(now);
        let updated = self.mirror.list(revision, entries);
        let held: Vec<SandboxId> = self.held.keys().cloned().collect();
        self.updated(updated, held);
    }

    /// Resets everything that depends on revisions of the previous history.
    fn history_lost(&mut self) {
        self.watch = Watch::Off;
        self.registered = None;
        for held in self.held.values_mut() {
            held.revision = 0;
        }
    }

    fn watched(&mut self, now: u64, watched: Watched) {
        match watched {
            Watched::Started { revision } => {
                self.last_contact = Some(now);
                // Either the member lags behind, or etcd was restored to an older state and would report nothing until
                // it has caught up. A linearizable list decides.
                self.list_wanted |= self.watch_from().is_some_and(|from| revision + 1 < from);
            }
            Watched::Changes(changes) => {
                self.last_contact = Some(now);
                let updated = self.mirror.follow(changes);
                let owners = updated.owners.iter().cloned().collect();
                self.updated(updated, owners);
            }
            Watched::Compacted => {
                self.watch = Watch::Off;
                self.list_wanted = true;
            }
            Watched::Broken => {
                self.watch = Watch::Off;
                self.later(now, Kind::Watch);
            }
        }
    }

    fn watch_from(&self) -> Option<u64> {
        match self.watch {
            Watch::Off => None,
            Watch::On { from } => Some(from),
        }
    }

    fn updated(&mut self, updated: Updated, owners: Vec<SandboxId>) {
        for event in updated.events {
            self.effects.push(Effect::Event(event));
        }
        self.check_registration();
        self.check_written();
        for id in owners {
            self.judge(&id);
        }
        if updated.changed {
            self.effects.push(Effect::View(self.mirror.view().clone()));
        }
    }

    /// Requests everything that is missing and not requested yet.
    fn pump(&mut self, now: u64) {
        self.notice_contact(now);
        let due = |at: Option<u64>, every: u64| at.is_none_or(|at| now >= at + every);
        let relist = due(self.listed_at, self.timing.relist_ms);
        let listing = |asked: &Asked| matches!(asked, Asked::List { .. });
        if (self.list_wanted || relist) && self.may(now, Kind::List, listing) {
            let known = self.mirror.view().revision;
            self.ask(Asked::List { known }, Request::List);
        }
        let is_listed = self.listed_at.is_some() && !self.list_wanted;
        if self.watch == Watch::Off && is_listed && self.is_due(now, Kind::Watch) {
            let from = self.mirror.view().revision + 1;
            self.generation += 1;
            self.watch = Watch::On { from };
            let generation = self.generation;
            self.effects.push(Effect::Watch { generation, from });
        }
        self.keep_lease(now);
        self.keep_registered(now);
        self.keep_written(now);
        self.keep_held(now);
    }

    fn keep_lease(&mut self, now: u64) {
        let leasing = |asked: &Asked| matches!(asked, Asked::Grant { .. } | Asked::Renew { .. });
        if !self.may(now, Kind::Lease, leasing) {
            return;
        }
        match self.lease {
            None => {
                let ttl_s = self.timing.lease_ms.div_ceil(1000);
                self.ask(Asked::Grant { sent: now }, Request::Grant { ttl_s });
            }
            Some(Lease { id, .. }) if now >= self.renew_at => {
                let asked = Asked::Renew {
                    lease: id,
                    sent: now,
                };
                self.ask(asked, Request::Renew(id));
            }
            Some(_) => {}
        }
    }

    fn leased(&mut self, now: u64, lease: Lease) {
        if self.lease.is_none_or(|before| before.id != lease.id) {
            self.registered = None;
        }
        self.lease = Some(lease);
        self.renew_at = now + self.timing.lease_ms / 4;
    }

    fn lease_lost(&mut self) {
        self.lease = None;
        self.registered = None;
    }

    fn notice_contact(&mut self, now: u64) {
        let half = self.timing.lease_ms / 2;
        let attached = self.last_contact.is_some_and(|at| now < at + half);
        if attached != self.attached {
            self.attached = attached;
            let event = if attached {
                ClusterEvent::Attached
            } else {
                ClusterEvent::Detached
            };
            self.effects.push(Effect::Event(event));
        }
    }

    fn ask(&mut self, asked: Asked, request: Request) {
        self.tokens += 1;
        let token = Token(self.tokens);
        self.asked.insert(token, asked);
        self.effects.push(Effect::Ask(token, request));
    }

    /// Whether a request of this kind is due and none is in flight.
    fn may(&self, now: u64, kind: Kind, is_kind: impl Fn(&Asked) -> bool) -> bool {
        self.is_due(now, kind) && !self.asked.values().any(is_kind)
    }

    fn is_due(&self, now: u64, kind: Kind) -> bool {
        now >= self.retry[kind as usize]
    }

    fn later(&mut self, now: u64, kind: Kind) {
        self.retry[kind as usize] = now + self.timing.retry_ms;
    }
}
