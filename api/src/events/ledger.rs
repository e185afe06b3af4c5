//! The state of each live sandbox according to the event log. Pure: turns changes into log entries.
//!
//! The ledger also compares itself with the sandboxes that a new server finds. Changes that a killed server wrote to a
//! sandbox's record but not to the log then become events, so no change of state is missing in the log.

use std::collections::{BTreeMap, HashSet};

use envd::Timestamp;
use model::SandboxId;
use pool::{ChangeKind, Sandbox, SandboxState, UnixMs};
use rest::{EventData, Execution, RefusedTraffic};
use serde::{Deserialize, Serialize};

use super::Kind;
use crate::registry::note::Note;

/// Maximum size of labels in an event. Of larger metadata, the first keys that fit are kept.
const MAX_METADATA: usize = 16 << 10;
const MIB: u64 = 1 << 20;

/// A live sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Alive {
    pub(super) execution: String,
    pub(super) template: String,
    pub(super) build: String,
    pub(super) metadata: BTreeMap<String, String>,
    vcpus: u8,
    memory_mb: u64,
    started_at: UnixMs,
    is_paused: bool,
}

/// By sandbox.
pub(super) type AliveMap = BTreeMap<String, Alive>;

/// An event that becomes a log entry.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Happened {
    pub(super) at: UnixMs,
    pub(super) kind: Kind,
    pub(super) sandbox: String,
    /// The state at the time, or before its end if it has ended.
    pub(super) alive: Alive,
    pub(super) data: EventData,
}

/// Client-visible template ids and random ids. Passed in, so that the ledger is pure.
pub(super) trait Names {
    /// Id and build of a template by its id in the pool.
    fn template(&self, pool_id: &str) -> (String, String);
    fn execution(&mut self) -> String;
}

#[derive(Debug, Default)]
pub(super) struct Ledger {
    pub(super) alive: AliveMap,
}

impl Ledger {
    /// Applies a change from the pool. `None` if it does not concern a client's sandbox, or contains nothing new.
    pub(super) fn change(
        &mut self,
        id: &SandboxId,
        at: UnixMs,
        kind: &ChangeKind,
        sandbox: Option<&Sandbox>,
        names: &mut impl Names,
    ) -> Option<Happened> {
        let id = id.to_string();
        match kind {
            ChangeKind::Ended(why) => self.ended(&id, at, why.clone()),
            ChangeKind::Created => self.created(&id, at, sandbox?, names),
            ChangeKind::Arrived => self.arrived(&id, at, sandbox?, names),
            // From now on the other node has its events.
            ChangeKind::Left => {
                self.alive.remove(&id);
                None
            }
            ChangeKind::Resumed => self.resumed(&id, at, sandbox?, names),
            ChangeKind::Paused => self.paused(&id, at),
            ChangeKind::Updated => {
                let end = Timestamp::from_unix_ms(sandbox?.lifetime.end_at);
                self.told(&id, at, Kind::Updated, |data| data.set_timeout = Some(end))
            }
            ChangeKind::Snapshotted => self.told(&id, at, Kind::Checkpointed, |_| {}),
        }
    }

    /// Compares with the sandboxes that a new server has found, and ends the `lost` ones. Differences happened while no
    /// log was written.
    pub(super) fn reconcile(
        &mut self,
        now: UnixMs,
        sandboxes: &[Sandbox],
        lost: &[(SandboxId, String)],
        names: &mut impl Names,
    ) -> Vec<Happened> {
        let mut happened = Vec::new();
        for sandbox in sandboxes {
            let id = sandbox.id.to_string();
            if !self.alive.contains_key(&id) {
                let created = Note::from_text(&sandbox.note).map_or(now, |note| note.started_at);
                happened.extend(self.created(&id, created, sandbox, names));
            }
            match (sandbox.state, self.alive.get(&id).map(|a| a.is_paused)) {
                (SandboxState::Paused(_), Some(false)) => happened.extend(self.paused(&id, now)),
                (SandboxState::Running, Some(true)) => {
                    happened.extend(self.resumed(&id, now, sandbox, names));
                }
                _ => {}
            }
        }
        for (id, why) in lost {
            happened.extend(self.ended(&id.to_string(), now, Some(why.clone())));
        }
        let present: HashSet<String> = sandboxes.iter().map(|s| s.id.to_string()).collect();
        let gone: Vec<String> = self.alive.keys().cloned().collect();
        for id in gone.into_iter().filter(|id| !present.contains(id)) {
            happened.extend(self.ended(&id, now, None));
        }
        happened
    }

    /// Refused traffic of a sandbox.
    pub(super) fn refused(
        &self,
        id: &SandboxId,
        at: UnixMs,
        traffic: RefusedTraffic,
    ) -> Option<Happened> {
        self.told(&id.to_string(), at, Kind::NetworkRefused, |data| {
            data.network = Some(traffic);
        })
    }

    /// A sandbox from another node, paused.
    fn arrived(
        &mut self,
        id: &str,
        at: UnixMs,
        sandbox: &Sandbox,
        names: &mut impl Names,
    ) -> Option<Happened> {
        self.enter(id, at, sandbox, names)?;
        self.alive.get_mut(id)?.is_paused = true;
        self.told(id, at, Kind::Moved, |_| {})
    }

    fn created(
        &mut self,
        id: &str,
        at: UnixMs,
        sandbox: &Sandbox,
        names: &mut impl Names,
    ) -> Option<Happened> {
        self.enter(id, at, sandbox, names)?;
        let end = Timestamp::from_unix_ms(sandbox.lifetime.end_at);
        self.told(id, at, Kind::Created, |data| data.set_timeout = Some(end))
    }

    fn enter(
        &mut self,
        id: &str,
        at: UnixMs,
        sandbox: &Sandbox,
        names: &mut impl Names,
    ) -> Option<()> {
        // A build's sandbox has another note.
        let note = Note::from_text(&sandbox.note).ok()?;
        let (template, build) = names.template(&sandbox.template.id);
        let alive = Alive {
            execution: names.execution(),
            template,
            build,
            metadata: bounded(note.metadata),
            vcpus: sandbox.template.vcpus,
            memory_mb: sandbox.template.memory.0 / MIB,
            started_at: at,
            is_paused: false,
        };
        self.alive.insert(id.to_owned(), alive);
        Some(())
    }

    fn resumed(
        &mut self,
        id: &str,
        at: UnixMs,
        sandbox: &Sandbox,
        names: &mut impl Names,
    ) -> Option<Happened> {
        let alive = self.alive.get_mut(id)?;
        alive.execution = names.execution();
        alive.started_at = at;
        alive.is_paused = false;
        let end = Timestamp::from_unix_ms(sandbox.lifetime.end_at);
        self.told(id, at, Kind::Resumed, |data| data.set_timeout = Some(end))
    }

    fn paused(&mut self, id: &str, at: UnixMs) -> Option<Happened> {
        let alive = self.alive.get_mut(id)?;
        alive.is_paused = true;
        let execution = alive.execution_until(at);
        self.told(id, at, Kind::Paused, |data| {
            data.execution = Some(execution);
        })
    }

    fn ended(&mut self, id: &str, at: UnixMs, why: Option<String>) -> Option<Happened> {
        let alive = self.alive.remove(id)?;
        let execution = (!alive.is_paused).then(|| alive.execution_until(at));
        Some(Happened {
            at,
            kind: Kind::Killed,
            sandbox: id.to_owned(),
            data: EventData {
                sandbox_metadata: alive.metadata.clone(),
                execution,
                reason: why,
                ..EventData::default()
            },
            alive,
        })
    }

    fn told(
        &self,
        id: &str,
        at: UnixMs,
        kind: Kind,
        add: impl FnOnce(&mut EventData),
    ) -> Option<Happened> {
        let alive = self.alive.get(id)?.clone();
        let mut data = EventData {
            sandbox_metadata: alive.metadata.clone(),
            ..EventData::default()
        };
        add(&mut data);
        Some(Happened {
            at,
            kind,
            sandbox: id.to_owned(),
            alive,
            data,
        })
    }
}

impl Alive {
    fn execution_until(&self, at: UnixMs) -> Execution {
        Execution {
            started_at: Timestamp::from_unix_ms(self.started_at),
            vcpu_count: self.vcpus,
            memory_mb: self.memory_mb,
            execution_time: at.saturating_sub(self.started_at),
        }
    }
}

fn bounded(metadata: BTreeMap<String, String>) -> BTreeMap<String, String> {
    let mut left = MAX_METADATA;
    let mut fits = |(key, value): &(String, String)| {
        let size = key.len() + value.len();
        let fits = size <= left;
        left = left.saturating_sub(size);
        fits
    };
    metadata.into_iter().take_while(|pair| fits(pair)).collect()
}
