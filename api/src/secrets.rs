//! Secrets: values that `cube-egress` adds to outbound requests of sandboxes. [`crate::control`] has the routes.
//!
//! ```text
//! <state>/secrets/sec_<id>.json   name, version, labels; the value is encrypted
//! <state>/secrets/key             the key, unless the operator provides one; mode 0600, created once
//! <state>/cluster/deleted-secrets.json   ids, if this host is in a cluster
//! ```
//! A file is replaced atomically and synced before the response to a change. A value is decrypted only for the request
//! that it is added to, and for the other nodes of a cluster ([`merge`]), which encrypt it with their own keys. It must
//! never be in a response to a client, a log, a `Debug` text, a record of the pool, or an error.

mod key;
pub(crate) mod merge;
mod name;
mod record;

use std::{
    collections::{BTreeMap, HashMap},
    fmt, fs, io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError, RwLock},
};

use pool::durable::{Durability, private_dir, read_bounded, replace, sync_dir};
use tracing::warn;
use zeroize::Zeroizing;

pub use key::{KeyError, KeySource};
pub use name::{SecretName, check_hosts, check_metadata, check_value};
pub use record::Secret;

use crate::{
    auth::random_hex,
    node::{
        deleted::Deleted,
        settings::{self, SettingsError},
    },
};
use key::SealKey;
use record::{MAX_RECORD, MAX_VERSION, Sealed, sum_of};

/// Maximum number of secrets.
const MAX_SECRETS: usize = 1000;
/// Directory below the state directory.
const DIR: &str = "secrets";
const EXTENSION: &str = "json";
/// A file in the directory of cluster settings.
const DELETED: &str = "deleted-secrets.json";
/// Suffix of incomplete files.
const DRAFT: &str = "new";

/// A value in plain text. Its `Debug` output hides it, and its memory is overwritten on drop.
#[derive(Clone, PartialEq, Eq)]
pub struct Value(Zeroizing<String>);

impl Value {
    /// The plain text, for the message to the proxy.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }

    #[cfg(any(test, fuzzing))]
    pub(crate) fn of_test(text: &str) -> Self {
        Self(Zeroizing::new(text.to_owned()))
    }
}

impl fmt::Debug for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Value")
    }
}

/// Why a secret cannot be stored, found or used.
#[derive(Debug, thiserror::Error)]
pub enum SecretError {
    #[error("{0}")]
    Invalid(String),
    #[error("secret {0:?} was not found")]
    NotFound(String),
    #[error("a secret with the name {0:?} exists: update it, or choose another name")]
    Taken(String),
    #[error("the server keeps at most {MAX_SECRETS} secrets: delete one first")]
    TooMany,
    #[error("cannot write the secret")]
    Io(#[from] io::Error),
    #[error("cannot create the secret: the kernel provides no random numbers")]
    Random(#[from] getrandom::Error),
    /// The name of the secret, and the host or the pattern of a rule.
    #[error("the secret {0:?} must not be sent to {1:?}: `cube secret info {0}` shows its hosts")]
    Elsewhere(String, String),
    /// The stored value does not match its name, id and version under the server's key.
    #[error("the stored value of the secret {0:?} is damaged: update it")]
    Damaged(String),
}

/// Why the secrets of a state directory cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error(transparent)]
    Key(#[from] KeyError),
    #[error(transparent)]
    Cluster(#[from] SettingsError),
    #[error("cannot open the secrets in {}", path.display())]
    Io {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(
        "cannot decrypt the {count} secrets in {} with the key from {key}: start the server with the key that encrypted them \
         (server.secrets_key), or move the directory away to start without secrets",
        path.display()
    )]
    WrongKey {
        path: PathBuf,
        key: KeySource,
        count: usize,
    },
}

/// The secrets of a server. Clones share them.
#[derive(Clone)]
pub struct Secrets(Arc<Store>);

struct Store {
    dir: PathBuf,
    key: SealKey,
    /// The cluster's key.
    text_key: Option<SealKey>,
    /// False if the operator has configured a key.
    seals_for_cluster: bool,
    /// By id. Read for each request of a sandbox, so it is never locked while a file is written.
    known: RwLock<HashMap<String, Arc<Sealed>>>,
    /// Where deletions are stored. `None` outside a cluster.
    deletions: Option<PathBuf>,
    deleted: RwLock<Deleted>,
    /// Serializes changes.
    change: Mutex<()>,
}

impl fmt::Debug for Secrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secrets")
    }
}

impl Secrets {
    /// Opens the secrets of the state directory. Creates a key if the operator has not configured one.
    ///
    /// # Errors
    /// Returns [`OpenError`]. A single unreadable file is logged and left alone.
    pub fn open(state: &Path, source: &KeySource) -> Result<Self, OpenError> {
        let dir = state.join(DIR);
        let failed = |source| OpenError::Io {
            path: dir.clone(),
            source,
        };
        if *source == KeySource::Unused {
            let key = SealKey::load(source, &dir)?;
            return Ok(Self(Arc::new(Store::new(dir, key, HashMap::new()))));
        }
        let made = !dir.exists();
        private_dir(&dir).map_err(failed)?;
        if made {
            sync_dir(state).map_err(failed)?;
        }
        let key = SealKey::load(source, &dir)?;
        let (known, undecrypted) = read_all(&dir, &key).map_err(failed)?;
        if known.is_empty() && undecrypted > 0 {
            return Err(OpenError::WrongKey {
                path: dir,
                key: source.clone(),
                count: undecrypted,
            });
        }
        let mut store = Store::new(dir, key, known);
        let cluster = settings::Dir::of(state);
        match cluster.load() {
            Err(SettingsError::None(_)) => {}
            Err(why) => return Err(why.into()),
            Ok(settings) => {
                let file = cluster.path(DELETED);
                store.deleted = RwLock::new(Deleted::load(&file));
                store.deletions = Some(file);
                store.text_key = settings.text_key().and_then(|key| SealKey::new(&key));
                store.seals_for_cluster = *source == KeySource::Generated;
            }
        }
        let secrets = Self(Arc::new(store));
        // A killed server may have left their files.
        if let Err(why) = secrets.0.forget_deleted() {
            warn!(why = %model::chain(&why), "cannot remove deleted secrets");
        }
        Ok(secrets)
    }

    /// Stores a new secret. Blocks until it is on disk.
    ///
    /// # Errors
    /// Returns [`SecretError::Invalid`], [`SecretError::Taken`], [`SecretError::TooMany`], [`SecretError::Io`] or
    /// [`SecretError::Random`].
    pub fn create(
        &self,
        name: &str,
        value: &str,
        metadata: BTreeMap<String, String>,
        hosts: Vec<String>,
        now_ms: u64,
    ) -> Result<Secret, SecretError> {
        let name = SecretName::parse(name).map_err(SecretError::Invalid)?;
        check_value(value).map_err(SecretError::Invalid)?;
        check_metadata(&metadata).map_err(SecretError::Invalid)?;
        let hosts = check_hosts(&hosts).map_err(SecretError::Invalid)?;
        let _change = self.0.lock();
        if self.find(name.as_str()).is_some() {
            return Err(SecretError::Taken(name.into_string()));
        }
        if self.0.read().len() >= MAX_SECRETS {
            return Err(SecretError::TooMany);
        }
        let secret = Secret {
            id: format!("{}{}", name::ID_PREFIX, random_hex::<10>()?),
            name: name.into_string(),
            version: 1,
            metadata,
            hosts,
            created_at_ms: now_ms,
            updated_at_ms: now_ms,
        };
        self.0.write(secret, value)
    }

    /// Replaces the value of the secret with an id, or of all secrets with a name. Also replaces its labels and hosts
    /// if they are set. Blocks until the new version is on disk. The old value is then in no file.
    ///
    /// # Errors
    /// Returns [`SecretError::NotFound`] and the errors of [`Secrets::create`].
    pub fn update(
        &self,
        reference: &str,
        value: &str,
        metadata: Option<BTreeMap<String, String>>,
        hosts: Option<Vec<String>>,
        now_ms: u64,
    ) -> Result<Secret, SecretError> {
        check_value(value).map_err(SecretError::Invalid)?;
        if let Some(metadata) = &metadata {
            check_metadata(metadata).map_err(SecretError::Invalid)?;
        }
        let hosts = hosts.map(|hosts| check_hosts(&hosts)).transpose();
        let hosts = hosts.map_err(SecretError::Invalid)?;
        let _change = self.0.lock();
        let used = self.get(reference)?;
        let next = |old: Secret| {
            let version = old.version.saturating_add(1);
            if version >= MAX_VERSION {
                let why = "the secret has too many versions: delete it, and create it again";
                return Err(SecretError::Invalid(why.to_owned()));
            }
            Ok(Secret {
                version,
                metadata: metadata.clone().unwrap_or(old.metadata),
                hosts: hosts.clone().unwrap_or(old.hosts),
                updated_at_ms: now_ms.max(old.updated_at_ms),
                ..old
            })
        };
        // Otherwise a previous value of the name would come back when the current secret is deleted by its id.
        let all = self.0.meant(reference, &used).into_iter();
        for id in all.filter(|id| *id != used.id) {
            self.0.write(next(self.get(&id)?)?, value)?;
        }
        self.0.write(next(used)?, value)
    }

    /// Removes the secret with an id, or all secrets that nodes have stored under a name. Blocks until the files are
    /// removed from the disk and, in a cluster, until the deletions are recorded on disk.
    ///
    /// # Errors
    /// Returns [`SecretError::NotFound`] or [`SecretError::Io`].
    pub fn delete(&self, reference: &str, now_ms: u64) -> Result<(), SecretError> {
        let _change = self.0.lock();
        let ids = self.0.meant(reference, &self.get(reference)?);
        let deleted = ids.iter().map(|id| (id.clone(), now_ms));
        self.0.remember(deleted.collect(), now_ms)?;
        ids.iter().try_for_each(|id| self.0.forget(id))
    }

    /// The secret with this id or name.
    ///
    /// # Errors
    /// Returns [`SecretError::NotFound`].
    pub fn get(&self, reference: &str) -> Result<Secret, SecretError> {
        let found = self.find(reference).map(|sealed| sealed.secret.clone());
        found.ok_or_else(|| SecretError::NotFound(reference.chars().take(200).collect()))
    }

    /// All secrets, in no particular order.
    #[must_use]
    pub fn list(&self) -> Vec<Secret> {
        let known = self.0.read();
        known.values().map(|sealed| sealed.secret.clone()).collect()
    }

    /// Rejects a rule that would send this secret to a host, or to all hosts of a pattern, to which it must not be
    /// sent. If the secret does not exist yet, [`Secrets::value`] makes the check later.
    ///
    /// # Errors
    /// Returns [`SecretError::Elsewhere`].
    pub fn check_host(&self, name: &str, host: &str) -> Result<(), SecretError> {
        match self.find(name) {
            Some(sealed) if !sealed.secret.may_go_to(host) => {
                Err(SecretError::Elsewhere(name.to_owned(), host.to_owned()))
            }
            Some(_) | None => Ok(()),
        }
    }

    /// The current value of the secret with this name, for a request to a host.
    ///
    /// # Errors
    /// Returns [`SecretError::NotFound`], [`SecretError::Elsewhere`] or [`SecretError::Damaged`].
    pub fn value(&self, name: &str, host: &str) -> Result<Value, SecretError> {
        let sealed = self.find(name);
        let sealed = sealed.ok_or_else(|| SecretError::NotFound(name.to_owned()))?;
        if !sealed.secret.may_go_to(host) {
            return Err(SecretError::Elsewhere(name.to_owned(), host.to_owned()));
        }
        let damaged = || SecretError::Damaged(name.to_owned());
        let plain = self.0.key.open(&sealed).ok_or_else(damaged)?;
        let text = std::str::from_utf8(&plain).map_err(|_| damaged())?;
        Ok(Value(Zeroizing::new(text.to_owned())))
    }

    /// Encrypts a text that is not a secret, for storage elsewhere.
    ///
    /// # Errors
    /// Returns an error if there are no random numbers.
    pub(crate) fn seal_text(&self, text: &str) -> io::Result<String> {
        let of_cluster = self.0.text_key.as_ref();
        let key = of_cluster.filter(|_| self.0.seals_for_cluster);
        key.unwrap_or(&self.0.key).seal_text(text)
    }

    /// Decrypts the result of [`Secrets::seal_text`]. `None` if it was encrypted with another key.
    pub(crate) fn open_text(&self, sealed: &str) -> Option<Zeroizing<String>> {
        let of_cluster = self.0.text_key.as_ref();
        let opened = of_cluster.and_then(|key| key.open_text(sealed));
        // Encrypted before this host joined, or with the operator's key.
        opened.or_else(|| self.0.key.open_text(sealed))
    }

    fn find(&self, reference: &str) -> Option<Arc<Sealed>> {
        let known = self.0.read();
        if reference.starts_with(name::ID_PREFIX) {
            return known.get(reference).cloned();
        }
        let name = reference.to_ascii_lowercase();
        let named = known.values().filter(|sealed| sealed.secret.name == name);
        named.min_by(|a, b| a.age().cmp(&b.age())).cloned()
    }
}

impl Store {
    /// For a host without a cluster.
    fn new(dir: PathBuf, key: SealKey, known: HashMap<String, Arc<Sealed>>) -> Self {
        Self {
            dir,
            key,
            text_key: None,
            seals_for_cluster: false,
            known: RwLock::new(known),
            deletions: None,
            deleted: RwLock::default(),
            change: Mutex::new(()),
        }
    }

    /// Encrypts a value, replaces the secret's file, and publishes the secret in memory.
    fn write(&self, secret: Secret, value: &str) -> Result<Secret, SecretError> {
        let sealed = self.key.seal(secret, value.as_bytes())?;
        let file = format!("{}.{EXTENSION}", sealed.secret.id);
        replace(&self.dir, &file, &sealed.render()?, Durability::Host)?;
        let secret = sealed.secret.clone();
        self.write_known()
            .insert(secret.id.clone(), Arc::new(sealed));
        Ok(secret)
    }

    /// Records deletions, if this host belongs to a cluster.
    fn remember(&self, deleted: BTreeMap<String, u64>, now_ms: u64) -> io::Result<()> {
        let Some(file) = &self.deletions else {
            return Ok(());
        };
        let merged = self.deleted().merged(deleted, now_ms);
        if let Some(merged) = merged {
            merged.store(file)?;
            *self.deleted.write().unwrap_or_else(PoisonError::into_inner) = merged;
        }
        Ok(())
    }

    /// Removes all secrets with a recorded deletion.
    fn forget_deleted(&self) -> Result<(), SecretError> {
        let deleted = self.deleted().clone();
        let known = self.read();
        let gone: Vec<_> = known.keys().filter(|id| deleted.has(id)).cloned().collect();
        drop(known);
        gone.iter().try_for_each(|id| self.forget(id))
    }

    fn forget(&self, id: &str) -> Result<(), SecretError> {
        // Removed from memory first: later requests must not use it, even if the disk fails.
        let removed = self.write_known().remove(id);
        let gone = fs::remove_file(self.path(id)).and_then(|()| sync_dir(&self.dir));
        match (gone, removed) {
            (Ok(()), _) => Ok(()),
            (Err(why), Some(sealed)) if self.path(id).exists() => {
                self.write_known().insert(id.to_owned(), sealed);
                Err(why.into())
            }
            (Err(why), _) => Err(why.into()),
        }
    }

    /// The ids of all secrets that a client's reference means: only the secret itself for an id, all secrets of the
    /// name for a name.
    fn meant(&self, reference: &str, secret: &Secret) -> Vec<String> {
        if reference == secret.id {
            vec![secret.id.clone()]
        } else {
            self.named(&secret.name)
        }
    }

    /// The ids of the secrets with this name. Several nodes may have stored one at the same time.
    fn named(&self, name: &str) -> Vec<String> {
        let known = self.read();
        let named = known.values().filter(|sealed| sealed.secret.name == name);
        named.map(|sealed| sealed.secret.id.clone()).collect()
    }

    fn path(&self, id: &str) -> PathBuf {
        self.dir.join(format!("{id}.{EXTENSION}"))
    }

    /// A panic while one of the locks is held cannot leave an entry half changed.
    fn lock(&self) -> std::sync::MutexGuard<'_, ()> {
        self.change.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn read(&self) -> std::sync::RwLockReadGuard<'_, HashMap<String, Arc<Sealed>>> {
        self.known.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn deleted(&self) -> std::sync::RwLockReadGuard<'_, Deleted> {
        self.deleted.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write_known(&self) -> std::sync::RwLockWriteGuard<'_, HashMap<String, Arc<Sealed>>> {
        self.known.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Reads all files, and removes incomplete ones. Also returns the number of files that the key does not decrypt.
fn read_all(dir: &Path, key: &SealKey) -> io::Result<(HashMap<String, Arc<Sealed>>, usize)> {
    let (mut known, mut undecrypted) = (HashMap::new(), 0);
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        let extension = path.extension().and_then(|extension| extension.to_str());
        match extension {
            Some(DRAFT) => fs::remove_file(&path)?,
            Some(EXTENSION) => match read(&path, key) {
                Ok(Some(sealed)) => {
                    known.insert(sealed.secret.id.clone(), Arc::new(sealed));
                }
                Ok(None) => {
                    undecrypted += 1;
                    warn!(path = %path.display(), "cannot decrypt a secret: ignoring it, and keeping its file");
                }
                Err(why) => {
                    warn!(path = %path.display(), %why, "cannot read a secret: ignoring it, and keeping its file");
                }
            },
            _ => {}
        }
    }
    Ok((known, undecrypted))
}

/// Reads a file. `Ok(None)` if the key does not decrypt it.
fn read(path: &Path, key: &SealKey) -> Result<Option<Sealed>, String> {
    let bytes = read_bounded(path, MAX_RECORD).map_err(|why| why.to_string())?;
    let mut sealed = Sealed::parse(&bytes)?;
    if path.file_stem().and_then(|stem| stem.to_str()) != Some(&sealed.secret.id) {
        return Err("its name is not the id in it".to_owned());
    }
    let Some(value) = key.open(&sealed) else {
        return Ok(None);
    };
    sealed.sum = sum_of(&sealed.secret, &value).map_err(|why| why.to_string())?;
    Ok(Some(sealed))
}

#[cfg(test)]
mod tests;
