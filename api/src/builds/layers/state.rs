//! The index of the cache, and who holds which disk. Pure.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    io,
};

use pool::Work;
use serde::{Deserialize, Serialize};

use crate::builds::{key::Key, settings::Settings};

const FORMAT: u32 = 1;
/// Most entries of steps.
pub(super) const MAX_STEPS: usize = 5000;
/// Most bytes of environment variables in all entries of steps.
const MAX_ENV: usize = 8 << 20;

/// What the file contains.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Index {
    format: u32,
    pub(super) steps: BTreeMap<Key, StepEntry>,
    built: BTreeMap<Key, Finished>,
}

/// The result of a step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct StepEntry {
    /// Id of a disk template of the pool.
    pub(super) disk: String,
    /// Whether the cache removes the disk.
    pub(super) is_ours: bool,
    /// Space of the disk's layer.
    pub(super) bytes: u64,
    pub(super) settings: Settings,
    pub(super) used_unix_ms: u64,
}

/// What a finished build ended with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(in crate::builds) struct Finished {
    /// Id of the built template in the pool.
    pub(in crate::builds) template: String,
    pub(in crate::builds) settings: Settings,
    pub(in crate::builds) start_up: StartUp,
}

/// What runs before the memory of a template is taken.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(in crate::builds) enum StartUp {
    #[default]
    Nothing,
    /// Bash scripts of the template's author.
    Author {
        start: Option<String>,
        ready: Option<String>,
    },
    /// Of the recipe of an installed template: a program that root runs, and when it is ready.
    Recipe {
        start: Vec<String>,
        ready: Option<Work>,
    },
}

impl Index {
    /// # Errors
    /// Returns an error for another format and for malformed text.
    pub(super) fn parse(bytes: &[u8]) -> io::Result<Self> {
        #[derive(Deserialize)]
        struct Header {
            format: u32,
        }
        let Header { format } = serde_json::from_slice(bytes)?;
        if format != FORMAT {
            let text = format!("it has format {format}; this server reads format {FORMAT}");
            return Err(io::Error::other(text));
        }
        Ok(serde_json::from_slice(bytes)?)
    }

    pub(super) fn render(&self) -> io::Result<Vec<u8>> {
        Ok(serde_json::to_vec(self)?)
    }
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) index: Index,
    /// Number of holders by disk.
    held: HashMap<String, usize>,
    quota: u64,
}

impl State {
    pub(super) fn new(index: Index, quota: u64) -> Self {
        Self {
            index: Index {
                format: FORMAT,
                ..index
            },
            held: HashMap::new(),
            quota,
        }
    }

    pub(super) fn hold(&mut self, disk: &str) {
        *self.held.entry(disk.to_owned()).or_default() += 1;
    }

    /// Ends a hold. Returns the disk if it is not needed any more.
    pub(super) fn release(&mut self, disk: &str) -> Option<String> {
        let holders = self.held.get_mut(disk)?;
        *holders -= 1;
        if *holders == 0 {
            self.held.remove(disk);
        }
        (!self.needs(disk)).then(|| disk.to_owned())
    }

    pub(super) fn needs(&self, disk: &str) -> bool {
        self.held.contains_key(disk) || self.index.steps.values().any(|entry| entry.disk == disk)
    }

    pub(super) fn use_step(&mut self, key: Key, now_ms: u64) -> Option<StepEntry> {
        let entry = self.index.steps.get_mut(&key)?;
        entry.used_unix_ms = now_ms;
        Some(entry.clone())
    }

    pub(super) fn forget(&mut self, key: Key) {
        self.index.steps.remove(&key);
    }

    /// Adds an entry, and drops the least recently used ones beyond the limits. Returns the disks that are not needed any
    /// more.
    pub(super) fn keep(&mut self, key: Key, entry: StepEntry) -> BTreeSet<String> {
        let mut dropped = Vec::new();
        dropped.extend(self.index.steps.insert(key, entry));
        let mut total = Total::default();
        for entry in self.index.steps.values() {
            total.add(entry);
        }
        let mut by_use: Vec<_> = self.index.steps.iter().collect();
        by_use.sort_by_key(|(_, entry)| entry.used_unix_ms);
        let free = by_use
            .into_iter()
            .filter(|(_, entry)| !self.held.contains_key(&entry.disk));
        let goes = |(key, entry): (&Key, &StepEntry)| {
            let is_too_large = total.is_above(self.quota);
            if is_too_large {
                total.take(entry);
            }
            is_too_large.then_some(*key)
        };
        let goes: Vec<_> = free.map_while(goes).collect();
        dropped.extend(goes.iter().filter_map(|key| self.index.steps.remove(key)));
        let ours = dropped.into_iter().filter(|entry| entry.is_ours);
        let ours = ours.map(|entry| entry.disk);
        ours.filter(|disk| !self.needs(disk)).collect()
    }

    pub(super) fn built(&self, key: Key) -> Option<String> {
        Some(self.index.built.get(&key)?.template.clone())
    }

    pub(super) fn finished(&self, template: &str) -> Option<Finished> {
        let mut all = self.index.built.values();
        all.find(|built| built.template == template).cloned()
    }

    /// Adds a finished build. `present`: the templates of the pool.
    pub(super) fn keep_built(&mut self, key: Key, built: Finished, present: &BTreeSet<String>) {
        let all = &mut self.index.built;
        all.retain(|_, built| present.contains(&built.template));
        all.insert(key, built);
    }
}

/// What entries of steps take together.
#[derive(Default)]
struct Total {
    entries: usize,
    /// Bytes of environment variables.
    env: usize,
    disks: u64,
    /// Number of entries by disk.
    users: HashMap<String, usize>,
}

impl Total {
    fn add(&mut self, entry: &StepEntry) {
        self.entries += 1;
        self.env += env_bytes(entry);
        if entry.is_ours {
            let users = self.users.entry(entry.disk.clone()).or_default();
            self.disks += if *users == 0 { entry.bytes } else { 0 };
            *users += 1;
        }
    }

    fn take(&mut self, entry: &StepEntry) {
        self.entries -= 1;
        self.env -= env_bytes(entry);
        if let Some(users) = self.users.get_mut(&entry.disk).filter(|_| entry.is_ours) {
            *users -= 1;
            self.disks -= if *users == 0 { entry.bytes } else { 0 };
        }
    }

    fn is_above(&self, quota: u64) -> bool {
        self.disks > quota || self.entries > MAX_STEPS || self.env > MAX_ENV
    }
}

fn env_bytes(entry: &StepEntry) -> usize {
    let all = entry.settings.env.iter();
    all.map(|(name, value)| name.len() + value.len()).sum()
}
