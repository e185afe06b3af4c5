//! The build cache: disks by the keys of the steps that made them, and finished templates by the keys of their builds.
//!
//! ```text
//! step's key ─► disk template of the pool, settings after the step        removed with the last entry and holder
//! build's key ─► built template of the pool ─► settings, start command    the owner of builds removes it
//! ```
//! A step's key depends on the result of the previous step, not on its key. If a step runs again, cached steps that
//! followed its previous result therefore no longer apply. A [`Layer`] keeps its disk as long as the value exists. A
//! disk without an entry and without a holder is removed from the pool, so a failed build leaves only disks from which
//! its next attempt continues. All disks together have a quota, and the least recently used entries are dropped first.
//! The index file is replaced atomically. If it is lost, the next server removes all disks, all builds start from
//! scratch, and no build can start from a previously built template.

mod state;
#[cfg(test)]
mod tests;

use std::{
    collections::BTreeSet,
    io,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use model::clock::unix_ms;
use pool::{
    Pool, PoolError, TemplateInfo, TemplateKind,
    durable::{Durability, read_bounded, replace},
};
use tokio::runtime::Handle;
use tracing::warn;

use super::{key::Key, settings::Settings};
pub(super) use state::{Finished, StartUp};
use state::{Index, MAX_INDEX, State, StepEntry};

/// File name of the index in the builds directory.
const INDEX: &str = "layers.json";

/// A handle to the cache. Clones share it.
#[derive(Clone, Debug)]
pub(super) struct Layers(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    pool: Pool,
    dir: PathBuf,
    state: Mutex<State>,
    /// Locked while the file is written, so that an older index never replaces a newer one.
    writing: Mutex<()>,
}

/// Keeps a disk as long as this value exists.
#[derive(Debug)]
pub(super) struct Layer {
    id: String,
    /// `None`: the disk is removed elsewhere.
    cache: Option<Layers>,
}

/// Keeps a finished template from being removed as long as this value exists.
#[derive(Debug)]
pub(super) struct HeldTemplate {
    id: String,
    cache: Layers,
}

/// A step that an earlier build has completed.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) layer: Layer,
    pub(super) result: Key,
    pub(super) settings: Settings,
}

impl Layers {
    /// Reads the index in `dir`, forgets disks that the pool does not have, and removes disks of earlier builds from
    /// the pool that no entry refers to. `quota` is the space for all disks in bytes. `others` are disks in the pool
    /// that do not belong to builds.
    pub(super) async fn open(
        pool: Pool,
        dir: PathBuf,
        quota: u64,
        others: &BTreeSet<String>,
    ) -> Self {
        let index = match read_bounded(&dir.join(INDEX), MAX_INDEX as u64)
            .and_then(|b| Index::parse(&b))
        {
            Ok(index) => index,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Index::default(),
            Err(error) => {
                warn!(path = %dir.join(INDEX).display(), %error,
                      "cannot read the cache of builds: all steps will run again, and templates that others are built from have to \
                       be rebuilt");
                Index::default()
            }
        };
        let state = Mutex::new(State::new(index, quota));
        let this = Self(Arc::new(Shared {
            pool,
            dir,
            state,
            writing: Mutex::default(),
        }));
        let all = this.0.pool.templates().await;
        let ids = all.iter().map(|template| template.id.clone()).collect();
        let has_lost = this.state().forget_lost(&ids);
        this.remove(this.orphans(all, others));
        if has_lost {
            this.write().await;
        }
        this
    }

    /// Disks of earlier builds that no entry needs.
    fn orphans(&self, all: Vec<TemplateInfo>, others: &BTreeSet<String>) -> BTreeSet<String> {
        let all = all.into_iter();
        let disks = all.filter(|t| t.kind == TemplateKind::Disk && !others.contains(&t.id));
        let state = self.state();
        let unneeded = disks.filter(|disk| !state.needs(&disk.id));
        unneeded.map(|disk| disk.id).collect()
    }

    /// Holds a disk made by a build.
    pub(super) fn hold(&self, id: String) -> Layer {
        self.state().hold(&id);
        Layer {
            id,
            cache: Some(self.clone()),
        }
    }

    /// The result of a step that an earlier build has completed, even if its disk is gone.
    pub(super) fn result(&self, key: Key) -> Option<Key> {
        let entry = self.state().use_step(key, unix_ms());
        entry.map(|entry| entry.result())
    }

    /// A step that an earlier build has completed, if the pool still has its disk.
    pub(super) async fn find(&self, key: Key) -> Option<Found> {
        let (entry, layer) = {
            let mut state = self.state();
            let entry = state.use_step(key, unix_ms())?;
            if !entry.has_disk {
                return None;
            }
            let disk = entry.disk.clone();
            let cache = entry.is_ours.then(|| self.clone());
            if entry.is_ours {
                state.hold(&disk);
            }
            (entry, Layer { id: disk, cache })
        };
        if self.0.pool.template(&entry.disk).await.is_none() {
            self.state().forget_disk(key);
            return None;
        }
        Some(Found {
            layer,
            result: entry.result(),
            settings: entry.settings,
        })
    }

    /// Records a completed step and returns its result.
    pub(super) async fn keep(&self, key: Key, layer: &Layer, settings: &Settings) -> Key {
        let template = self.0.pool.template(&layer.id).await;
        let entry = StepEntry {
            disk: layer.id.clone(),
            is_ours: layer.cache.is_some(),
            has_disk: true,
            bytes: template.map_or(0, |template| template.bytes.0),
            settings: settings.clone(),
            used_unix_ms: unix_ms(),
        };
        let result = entry.result();
        let unneeded = self.state().keep(key, entry);
        self.remove(unneeded);
        self.write().await;
        result
    }

    /// A template made by a build with this key, if the pool still has one.
    pub(super) async fn find_built(&self, key: Key) -> Option<HeldTemplate> {
        let mut lost = BTreeSet::new();
        loop {
            let id = self.state().hold_built(key, &lost)?;
            let cache = self.clone();
            let held = HeldTemplate { id, cache };
            if self.0.pool.template(&held.id).await.is_some() {
                return Some(held);
            }
            lost.insert(held.id.clone());
        }
    }

    /// Removes the template of a finished build from the pool.
    ///
    /// # Errors
    /// Returns [`PoolError::InUse`] if a build holds it, and the errors of [`Pool::remove_template`].
    pub(super) async fn remove_built(&self, template: &str) -> Result<(), PoolError> {
        if !self.state().begin_removal(template) {
            let user = "a build is about to use it".to_owned();
            return Err(PoolError::InUse(template.to_owned(), user));
        }
        let removed = self.0.pool.remove_template(template).await;
        self.state().end_removal(template);
        removed
    }

    /// The recorded results of the build of a template.
    pub(super) fn finished(&self, template: &str) -> Option<Finished> {
        self.state().finished(template)
    }

    /// Records a finished build under these keys, and forgets builds whose templates are gone.
    pub(super) async fn keep_built(&self, keys: &[Key], finished: Finished) {
        // Before the pool's list, which lacks templates of builds that end during this call.
        let mut gone = self.state().all_finished();
        for template in self.0.pool.templates().await {
            gone.remove(&template.id);
        }
        self.state().keep_built(keys, finished, &gone);
        self.write().await;
    }

    /// A failure costs the next server some steps, so it does not fail the build.
    async fn write(&self) {
        let shared = Arc::clone(&self.0);
        let write = move || {
            let _writes = lock(&shared.writing);
            let bytes = lock(&shared.state).index.render(MAX_INDEX)?;
            replace(&shared.dir, INDEX, &bytes, Durability::Host)
        };
        let written = tasks::on_thread(write).await;
        if let Err(error) = written.map_err(io::Error::from).flatten() {
            warn!(%error, "cannot write the cache of builds: a restart of the server loses its last entries");
        }
    }

    /// Removes disks from the pool in the background. After a failure, the next step tries again.
    fn remove(&self, disks: BTreeSet<String>) {
        // Without a runtime, the server is exiting. The next one removes them.
        if Handle::try_current().is_err() {
            return;
        }
        for disk in disks {
            let cache = self.clone();
            tasks::spawn(async move {
                match cache.0.pool.remove_template(&disk).await {
                    Ok(()) | Err(PoolError::NoTemplate(_) | PoolError::Draining) => {}
                    Err(why) => {
                        warn!(disk, why = %model::chain(&why), "cannot remove a disk of a build: retrying after the next step or restart");
                        cache.state().remove_later(disk);
                    }
                }
            });
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.0.state)
    }
}

/// Ignores poisoning: the protected data is consistent after each statement that can panic.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Layer {
    /// A disk that is kept and removed elsewhere.
    pub(super) fn of_others(id: String) -> Self {
        Self { id, cache: None }
    }

    /// Its id in the pool.
    pub(super) fn id(&self) -> &str {
        &self.id
    }
}

impl HeldTemplate {
    /// Its id in the pool.
    pub(super) fn id(&self) -> &str {
        &self.id
    }
}

impl Drop for HeldTemplate {
    fn drop(&mut self) {
        // The owner of builds removes it, not the cache.
        let _disk = self.cache.state().release(&self.id);
    }
}

impl Drop for Layer {
    fn drop(&mut self) {
        if let Some(cache) = &self.cache {
            let unneeded = cache.state().release(&self.id);
            cache.remove(unneeded.into_iter().collect());
        }
    }
}
