//! The cache index and the holders of disks. Pure.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    io,
};

use pool::Work;
use serde::{Deserialize, Serialize};

use crate::{key::Key, settings::Settings};

const FORMAT: u32 = 2;
/// Maximum number of step entries.
pub(super) const MAX_STEPS: usize = 5000;
/// Maximum size of all step entries in the file, in bytes.
const MAX_STEP_BYTES: usize = 16 << 20;
/// Above this size in bytes, step entries make room for entries of finished builds, which cannot be recreated.
pub(super) const MAX_BYTES: usize = 48 << 20;
/// Maximum size of the file in bytes.
pub(super) const MAX_INDEX: usize = 64 << 20;

/// Content of the file.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Index {
    format: u32,
    pub(super) steps: BTreeMap<Key, StepEntry>,
    /// Template ids by the keys of their builds. Each key maps to the newest template that is not a copy of another
    /// one.
    built: BTreeMap<Key, String>,
    /// By id. Several templates may come from builds with the same key.
    finished: BTreeMap<String, Finished>,
}

/// The result of a step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct StepEntry {
    /// Id of a disk template of the pool.
    pub(super) disk: String,
    /// Whether the cache is responsible for removing the disk.
    pub(super) is_ours: bool,
    /// Whether the pool has the disk. An entry without a disk still leads to the entries of later steps.
    pub(super) has_disk: bool,
    /// Space of the disk's layer.
    pub(super) bytes: u64,
    pub(super) settings: Settings,
    pub(super) used_unix_ms: u64,
}

/// The results of a finished build.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Finished {
    /// Id of the built template in the pool.
    pub(crate) template: String,
    pub(crate) settings: Settings,
    pub(crate) start_up: StartUp,
    /// The keys of its build. Empty in files of older releases.
    #[serde(default)]
    pub(crate) keys: Vec<Key>,
}

/// The start and ready commands, which run before the template's memory is captured.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum StartUp {
    #[default]
    Nothing,
    /// Bash scripts of the template's author.
    Author {
        start: Option<String>,
        ready: Option<String>,
    },
    /// From the recipe of an installed template: a program that runs as root, and its readiness check.
    Recipe {
        start: Vec<String>,
        ready: Option<Work>,
    },
}

impl Index {
    /// # Errors
    /// Returns an error for other formats and malformed text.
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

    /// The finished templates of builds with this key.
    fn all_with(&self, key: Key) -> Vec<String> {
        let has = |finished: &&Finished| finished.keys.contains(&key);
        let all = self.finished.values().filter(has);
        all.map(|finished| finished.template.clone()).collect()
    }

    /// # Errors
    /// Returns an error if the index has more than `limit` bytes, because no server would read it.
    pub(super) fn render(&self, limit: usize) -> io::Result<Vec<u8>> {
        let bytes = serde_json::to_vec(self)?;
        if bytes.len() > limit {
            let text = format!("it has {} bytes; at most {limit} are read", bytes.len());
            return Err(io::Error::other(text));
        }
        Ok(bytes)
    }
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) index: Index,
    /// Number of holds by disk.
    held: HashMap<String, usize>,
    /// Disks that the pool could not remove yet.
    unremoved: BTreeSet<String>,
    /// Finished templates that the pool is removing.
    leaving: BTreeSet<String>,
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
            unremoved: BTreeSet::new(),
            leaving: BTreeSet::new(),
            quota,
        }
    }

    pub(super) fn hold(&mut self, disk: &str) {
        *self.held.entry(disk.to_owned()).or_default() += 1;
    }

    /// Releases a hold. Returns the disk if nothing needs it any more.
    pub(super) fn release(&mut self, disk: &str) -> Option<String> {
        let holders = self.held.get_mut(disk)?;
        *holders -= 1;
        if *holders == 0 {
            self.held.remove(disk);
        }
        (!self.needs(disk)).then(|| disk.to_owned())
    }

    /// Finds a template of a build with this key and holds it. `lost` are templates that the pool does not have. Also
    /// returns `None` while the only one is being removed.
    pub(super) fn hold_built(&mut self, key: Key, lost: &BTreeSet<String>) -> Option<String> {
        let first = self.index.built.get(&key)?.clone();
        let is_there = |id: &String| !self.leaving.contains(id) && !lost.contains(id);
        let others = self.index.all_with(key);
        let template = [first].into_iter().chain(others).find(is_there)?;
        self.hold(&template);
        Some(template)
    }

    /// Begins the removal of a template. Returns `false` if a build holds it.
    pub(super) fn begin_removal(&mut self, template: &str) -> bool {
        let is_free = !self.held.contains_key(template);
        if is_free {
            self.leaving.insert(template.to_owned());
        }
        is_free
    }

    pub(super) fn end_removal(&mut self, template: &str) {
        self.leaving.remove(template);
    }

    pub(super) fn needs(&self, disk: &str) -> bool {
        let mut entries = self.index.steps.values();
        self.held.contains_key(disk) || entries.any(|entry| entry.has_disk && entry.disk == disk)
    }

    /// Records that the pool could not remove a disk. The next [`State::keep`] returns it again.
    pub(super) fn remove_later(&mut self, disk: String) {
        self.unremoved.insert(disk);
    }

    pub(super) fn use_step(&mut self, key: Key, now_ms: u64) -> Option<StepEntry> {
        let entry = self.index.steps.get_mut(&key)?;
        entry.used_unix_ms = now_ms;
        Some(entry.clone())
    }

    /// Records that the pool has lost the disk.
    pub(super) fn forget_disk(&mut self, key: Key) {
        if let Some(entry) = self.index.steps.get_mut(&key) {
            entry.has_disk = false;
        }
    }

    /// Forgets disks that the pool does not have, after a crash between their removal and the next write of the index.
    /// Returns whether there were any.
    pub(super) fn forget_lost(&mut self, present: &BTreeSet<String>) -> bool {
        let entries = self.index.steps.values_mut();
        let lost = entries.filter(|entry| entry.has_disk && !present.contains(&entry.disk));
        lost.map(|entry| entry.has_disk = false).count() > 0
    }

    /// Adds an entry. Above the limits, the least recently used entries lose their disks or are dropped. Returns the
    /// disks that are no longer needed.
    pub(super) fn keep(&mut self, key: Key, entry: StepEntry) -> BTreeSet<String> {
        let mut unneeded = std::mem::take(&mut self.unremoved);
        let former = self.index.steps.insert(key, entry);
        unneeded.extend(former.and_then(StepEntry::take_disk));
        let finished = self.index.finished.values().map(bytes_of);
        let mut total = Total {
            finished: finished.sum(),
            ..Total::default()
        };
        for entry in self.index.steps.values() {
            total.add(entry);
        }
        let mut by_use: Vec<_> = self.index.steps.iter_mut().collect();
        by_use.sort_by_key(|(_, entry)| entry.used_unix_ms);
        let mut goes = Vec::new();
        for (key, entry) in by_use {
            if self.held.contains_key(&entry.disk) {
                continue;
            }
            if total.has_too_many() {
                total.take(entry);
                goes.push(*key);
            } else if total.disks > self.quota && entry.is_ours {
                total.take_disk(entry);
                unneeded.extend(std::mem::take(&mut entry.has_disk).then(|| entry.disk.clone()));
            }
        }
        let gone = goes.iter().filter_map(|key| self.index.steps.remove(key));
        unneeded.extend(gone.filter_map(StepEntry::take_disk));
        unneeded.retain(|disk| !self.needs(disk));
        unneeded
    }

    pub(super) fn finished(&self, template: &str) -> Option<Finished> {
        self.index.finished.get(template).cloned()
    }

    /// The templates of all finished builds.
    pub(super) fn all_finished(&self) -> BTreeSet<String> {
        self.index.finished.keys().cloned().collect()
    }

    /// Adds a finished build under these keys. `gone` are templates that the pool no longer has.
    pub(super) fn keep_built(&mut self, keys: &[Key], built: Finished, gone: &BTreeSet<String>) {
        let index = &mut self.index;
        index.finished.retain(|id, _| !gone.contains(id));
        // The keys of a lost template pass to another template that has them.
        let lost = index.built.iter().filter(|(_, id)| gone.contains(*id));
        for key in lost.map(|(key, _)| *key).collect::<Vec<_>>() {
            match index.all_with(key).pop() {
                Some(heir) => index.built.insert(key, heir),
                None => index.built.remove(&key),
            };
        }
        for key in keys {
            index.built.insert(*key, built.template.clone());
        }
        index.finished.insert(built.template.clone(), built);
    }
}

/// Totals of all entries.
#[derive(Default)]
struct Total {
    entries: usize,
    /// Size of the step entries in the file.
    steps: usize,
    /// Size of the entries of finished builds.
    finished: usize,
    /// Size of the disks that the cache removes.
    disks: u64,
    /// Number of entries by disk.
    users: HashMap<String, usize>,
}

impl Total {
    fn add(&mut self, entry: &StepEntry) {
        self.entries += 1;
        self.steps += bytes_of(entry);
        if entry.is_ours && entry.has_disk {
            let users = self.users.entry(entry.disk.clone()).or_default();
            self.disks += if *users == 0 { entry.bytes } else { 0 };
            *users += 1;
        }
    }

    fn take(&mut self, entry: &StepEntry) {
        self.entries -= 1;
        self.steps -= bytes_of(entry);
        self.take_disk(entry);
    }

    fn take_disk(&mut self, entry: &StepEntry) {
        if !(entry.is_ours && entry.has_disk) {
            return;
        }
        if let Some(users) = self.users.get_mut(&entry.disk) {
            *users -= 1;
            self.disks -= if *users == 0 { entry.bytes } else { 0 };
        }
    }

    fn has_too_many(&self) -> bool {
        let bytes = self.steps + self.finished;
        self.entries > MAX_STEPS || self.steps > MAX_STEP_BYTES || bytes > MAX_BYTES
    }
}

/// Size of an entry in the file.
fn bytes_of(entry: &impl Serialize) -> usize {
    serde_json::to_vec(entry).map_or(0, |bytes| bytes.len())
}

impl StepEntry {
    /// Identifies the result, which the next step's key depends on. Repeating the step gives another result.
    pub(super) fn result(&self) -> Key {
        let settings = serde_json::to_string(&self.settings).unwrap_or_default();
        Key::of(&["result", &self.disk, &settings])
    }

    /// Takes the disk, if the cache has to remove it.
    fn take_disk(self) -> Option<String> {
        (self.is_ours && self.has_disk).then_some(self.disk)
    }
}
