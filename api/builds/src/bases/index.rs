//! Index of the disk templates in the pool by the images that they were made from: `images.json`, next to the store.
//!
//! Every build that requested an entry holds it until the build's canceller is dropped.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    path::PathBuf,
    sync::{Mutex, MutexGuard, PoisonError},
};

use pool::durable::{Durability, private_dir, read_bounded, replace};
use serde::{Deserialize, Serialize};
use tracing::warn;

use crate::cancel::Cancel;

const FORMAT: u32 = 1;
const FILE: &str = "images.json";
const MAX_FILE: u64 = 16 << 20;

/// A disk template of the pool.
#[derive(Clone, Copy, Debug)]
pub(super) struct Disk<'a> {
    /// Id in the pool.
    pub(super) template: &'a str,
    /// Disk space of its root image in the store.
    pub(super) bytes: u64,
    /// The guest that boots it.
    pub(super) guest: &'a str,
}

#[derive(Debug, Default)]
pub(super) struct Index {
    dir: PathBuf,
    entries: Mutex<BTreeMap<String, Entry>>,
    /// Forgotten templates that the pool could not remove yet. The next server finds them in the pool.
    unremoved: Mutex<Vec<String>>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Entry {
    /// Id in the pool.
    template: String,
    /// Disk space of its root image in the store.
    bytes: u64,
    /// The guest that its key names.
    guest: String,
    used_unix_ms: u64,
    #[serde(skip)]
    holders: Vec<Cancel>,
}

#[derive(Deserialize)]
struct Stored {
    format: u32,
    images: BTreeMap<String, Entry>,
}

#[derive(Serialize)]
struct Written<'a> {
    format: u32,
    images: &'a BTreeMap<String, Entry>,
}

impl Entry {
    fn is_held(&self) -> bool {
        self.holders.iter().any(|build| !build.is_cancelled())
    }

    fn hold(&mut self, build: &Cancel, now_ms: u64) {
        self.used_unix_ms = now_ms;
        self.holders.retain(|build| !build.is_cancelled());
        self.holders.push(build.clone());
    }
}

impl Index {
    /// Reads the index in `dir`. An unreadable index counts as empty.
    pub(super) fn open(dir: PathBuf) -> Self {
        let entries = match read(&dir) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => BTreeMap::new(),
            Err(error) => {
                warn!(path = %dir.join(FILE).display(), %error, "cannot read the index of images: they will be converted again");
                BTreeMap::new()
            }
        };
        Self {
            dir,
            entries: Mutex::new(entries),
            unremoved: Mutex::default(),
        }
    }

    pub(super) fn has(&self, key: &str) -> bool {
        self.entries().contains_key(key)
    }

    /// The template of an image. The build holds it from then on.
    pub(super) fn take(&self, key: &str, build: &Cancel, now_ms: u64) -> Option<String> {
        let mut entries = self.entries();
        let entry = entries.get_mut(key)?;
        entry.hold(build, now_ms);
        Some(entry.template.clone())
    }

    /// Adds a template, which the build holds.
    pub(super) fn add(&self, key: &str, disk: Disk<'_>, build: &Cancel, now_ms: u64) {
        let mut entry = Entry {
            template: disk.template.to_owned(),
            bytes: disk.bytes,
            guest: disk.guest.to_owned(),
            used_unix_ms: now_ms,
            holders: Vec::new(),
        };
        entry.hold(build, now_ms);
        self.entries().insert(key.to_owned(), entry);
    }

    /// Forgets a template that the pool does not have, unless another one has replaced it.
    pub(super) fn forget(&self, key: &str, template: &str) {
        let mut entries = self.entries();
        if entries
            .get(key)
            .is_some_and(|entry| entry.template == template)
        {
            entries.remove(key);
        }
    }

    /// Forgets templates that the pool does not have, after a crash between their removal and the next write of the
    /// index. Returns whether there were any.
    pub(super) fn forget_lost(&self, present: &BTreeSet<String>) -> bool {
        let mut entries = self.entries();
        let lost = entries.extract_if(.., |_, entry| !present.contains(&entry.template));
        lost.count() > 0
    }

    /// Forgets the least recently used templates that no build holds, until the rest take at most `limit` bytes.
    /// Returns the templates to remove, including those that could not be removed before.
    pub(super) fn trim(&self, limit: u64) -> Vec<String> {
        let mut entries = self.entries();
        let mut bytes: u64 = entries.values().map(|entry| entry.bytes).sum();
        let idle = entries.iter().filter(|(_, entry)| !entry.is_held());
        let mut idle: Vec<_> = idle
            .map(|(key, entry)| (entry.used_unix_ms, key.clone()))
            .collect();
        idle.sort();
        let mut removed = std::mem::take(&mut *self.unremoved());
        for (_, key) in idle {
            if bytes <= limit {
                break;
            }
            if let Some(entry) = entries.remove(&key) {
                bytes -= entry.bytes;
                removed.push(entry.template);
            }
        }
        removed
    }

    /// Records that the pool could not remove a forgotten template. The next [`Index::trim`] returns it again.
    pub(super) fn remove_later(&self, template: String) {
        self.unremoved().push(template);
    }

    /// Forgets templates that another guest boots, and returns them: no build requests them any more.
    pub(super) fn retire(&self, guest: &str) -> Vec<String> {
        let mut entries = self.entries();
        let outdated = entries.extract_if(.., |_, entry| entry.guest != guest && !entry.is_held());
        outdated.map(|(_, entry)| entry.template).collect()
    }

    pub(super) fn templates(&self) -> BTreeSet<String> {
        self.entries()
            .values()
            .map(|entry| entry.template.clone())
            .collect()
    }

    /// Writes the index, so that it survives a crash of the host.
    ///
    /// # Errors
    /// Returns an error if it cannot be written. The previous index then stays.
    pub(super) fn write(&self) -> io::Result<()> {
        private_dir(&self.dir)?;
        // Locked until the file is written, so that an older index never replaces a newer one.
        let entries = self.entries();
        let written = Written {
            format: FORMAT,
            images: &entries,
        };
        let bytes = serde_json::to_vec(&written)?;
        replace(&self.dir, FILE, &bytes, Durability::Host)
    }

    fn unremoved(&self) -> MutexGuard<'_, Vec<String>> {
        let unremoved = self.unremoved.lock();
        unremoved.unwrap_or_else(PoisonError::into_inner)
    }

    fn entries(&self) -> MutexGuard<'_, BTreeMap<String, Entry>> {
        // Consistent after each statement that can panic.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn read(dir: &std::path::Path) -> io::Result<BTreeMap<String, Entry>> {
    let bytes = read_bounded(&dir.join(FILE), MAX_FILE)?;
    let stored: Stored = serde_json::from_slice(&bytes)?;
    if stored.format != FORMAT {
        let format = stored.format;
        return Err(io::Error::other(format!(
            "it has format {format}; this server reads format {FORMAT}"
        )));
    }
    Ok(stored.images)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cancel::cancellation;

    fn disk(template: &str) -> Disk<'_> {
        Disk {
            template,
            bytes: 10,
            guest: "guest",
        }
    }

    #[test]
    fn the_least_recently_used_templates_go_and_held_ones_stay() {
        let index = Index::default();
        let (owner, build) = cancellation();
        let (ended, past) = cancellation();
        drop(ended);
        index.add("a", disk("1"), &build, 1);
        for (key, template, now) in [("b", "2", 2), ("c", "3", 3), ("d", "4", 4)] {
            index.add(key, disk(template), &past, now);
        }
        assert_eq!(index.take("b", &past, 5).as_deref(), Some("2"));
        assert_eq!(index.trim(40), Vec::<String>::new());
        assert_eq!(index.trim(29), ["3", "4"]);
        assert_eq!(index.trim(0), ["2"]);
        assert_eq!(index.templates(), BTreeSet::from(["1".to_owned()]));
        drop(owner);
        assert_eq!(index.trim(0), ["1"]);
    }

    #[test]
    fn a_template_that_could_not_be_removed_is_tried_again() {
        let index = Index::default();
        index.remove_later("1".to_owned());
        assert_eq!(index.trim(100), ["1"]);
        assert!(index.trim(100).is_empty());
    }

    #[test]
    fn an_index_is_the_same_after_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let (_owner, build) = cancellation();
        let index = Index::open(dir.path().join("new"));
        index.add("a", disk("1"), &build, 1);
        index.write().unwrap();
        let again = Index::open(dir.path().join("new"));
        assert_eq!(again.templates(), index.templates());
        again.forget("a", "2");
        assert!(again.has("a"));
        // No build of the previous server holds it.
        assert_eq!(again.retire("guest"), Vec::<String>::new());
        assert!(!again.forget_lost(&again.templates()));
        assert_eq!(again.retire("other"), ["1"]);
        index.add("b", disk("2"), &build, 1);
        assert!(index.forget_lost(&BTreeSet::from(["2".to_owned()])));
        assert!(!index.has("a") && index.has("b"));
        assert!(again.trim(0).is_empty());
    }

    #[test]
    fn an_index_that_cannot_be_read_is_empty() {
        let dir = tempfile::tempdir().unwrap();
        for text in ["", "{}", r#"{"format":2,"images":{}}"#] {
            std::fs::write(dir.path().join(FILE), text).unwrap();
            assert!(Index::open(dir.path().to_owned()).templates().is_empty());
        }
    }
}
