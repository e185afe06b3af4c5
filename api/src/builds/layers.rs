//! The cache of builds: disks by the keys of the steps that made them, and finished templates by the keys of their builds.
//!
//! ```text
//! step's key ─► disk template of the pool, settings after the step        ours: removed with the last entry and holder
//! build's key ─► built template of the pool ─► settings, start command    the owner of builds removes it
//! ```
//! A step's key depends on the result of the step before, not on its key, so after a step that
//! runs again, the cached steps that followed its former result do not apply.
//! A [`Layer`] holds a disk: as long as there is one, the disk stays. A disk that neither an entry nor a holder needs is
//! removed from the pool, so a build that fails leaves only disks that its next attempt continues from. All disks
//! together have a quota, and the least recently used entries go first. The index is a file that is replaced as a
//! whole; if it is lost, the next server removes all disks, builds start anew, and no build can begin with a template of
//! a former one.

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

/// File name of the index in the directory of builds.
const INDEX: &str = "layers.json";

/// A handle to the cache. Clones share it.
#[derive(Clone, Debug)]
pub(super) struct Layers(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    pool: Pool,
    dir: PathBuf,
    state: Mutex<State>,
    /// Held while the file is written, so that an older index never replaces a newer one.
    writing: Mutex<()>,
}

/// A disk that stays as long as this value exists.
#[derive(Debug)]
pub(super) struct Layer {
    id: String,
    /// `None`: others remove it.
    cache: Option<Layers>,
}

/// A finished template that is not removed as long as this value exists.
#[derive(Debug)]
pub(super) struct HeldTemplate {
    id: String,
    cache: Layers,
}

/// A step that an earlier build has done.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) layer: Layer,
    pub(super) result: Key,
    pub(super) settings: Settings,
}

impl Layers {
    /// Reads the index in `dir`, forgets the disks that the pool does not have, and removes disks that former builds have
    /// left in the pool and that no entry names.
    /// `quota`: space of all disks in bytes. `others`: disks of the pool that are not of builds.
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
                       be built again");
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

    /// The disks of former builds that no entry needs.
    fn orphans(&self, all: Vec<TemplateInfo>, others: &BTreeSet<String>) -> BTreeSet<String> {
        let all = all.into_iter();
        let disks = all.filter(|t| t.kind == TemplateKind::Disk && !others.contains(&t.id));
        let state = self.state();
        let unneeded = disks.filter(|disk| !state.needs(&disk.id));
        unneeded.map(|disk| disk.id).collect()
    }

    /// Holds a disk that a build has made.
    pub(super) fn hold(&self, id: String) -> Layer {
        self.state().hold(&id);
        Layer {
            id,
            cache: Some(self.clone()),
        }
    }

    /// The result of a step that an earlier build has done, whether or not its disk is there.
    pub(super) fn result(&self, key: Key) -> Option<Key> {
        let entry = self.state().use_step(key, unix_ms());
        entry.map(|entry| entry.result())
    }

    /// A step that an earlier build has done, if the pool still has its disk.
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

    /// Records a step that was done, and returns its result.
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

    /// A template of a build with this key that the pool still has.
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

    /// What the build of a template ended with.
    pub(super) fn finished(&self, template: &str) -> Option<Finished> {
        self.state().finished(template)
    }

    /// Records a finished build, which is found by these keys, and forgets those whose templates are gone.
    pub(super) async fn keep_built(&self, keys: &[Key], finished: Finished) {
        // Before the pool's list, which lacks the templates of builds that end meanwhile.
        let mut gone = self.state().all_finished();
        for template in self.0.pool.templates().await {
            gone.remove(&template.id);
        }
        self.state().keep_built(keys, finished, &gone);
        self.write().await;
    }

    /// A failure costs the next server some steps, so it does not end the build.
    async fn write(&self) {
        let shared = Arc::clone(&self.0);
        let write = move || {
            let _writes = lock(&shared.writing);
            let bytes = lock(&shared.state).index.render(MAX_INDEX)?;
            replace(&shared.dir, INDEX, &bytes, Durability::Host)
        };
        let written = tokio::task::spawn_blocking(write).await;
        if let Err(error) = written.map_err(io::Error::from).flatten() {
            warn!(%error, "cannot write the cache of builds: a restart of the server loses its last entries");
        }
    }

    /// Removes disks from the pool, in the background. A failure is followed by another attempt after the next step.
    fn remove(&self, disks: BTreeSet<String>) {
        // Without a runtime, the server is ending: the next one removes them.
        let Ok(runtime) = Handle::try_current() else {
            return;
        };
        for disk in disks {
            let cache = self.clone();
            runtime.spawn(async move {
                match cache.0.pool.remove_template(&disk).await {
                    Ok(()) | Err(PoolError::NoTemplate(_) | PoolError::Draining) => {}
                    Err(why) => {
                        warn!(disk, why = %model::chain(&why), "cannot remove a disk of a build: the next step or server tries again");
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
    /// A disk that others keep and remove.
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
