//! Authentication and rate limiting of requests to the control plane.

use std::{
    collections::HashMap,
    fs,
    os::unix::fs::MetadataExt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use hyper::header::{AUTHORIZATION, HeaderMap, HeaderName, HeaderValue};
use subtle::ConstantTimeEq;
use tracing::{error, info};

use super::{
    bucket::{Bucket, Rate},
    keys::{Granted, KeyFile, KeyRecord, Scope, hash},
};

/// Interval at which a running server checks whether the key file has changed.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Why a request is not authorized.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AuthError {
    #[error("no API key: send one in the header X-API-KEY; `cube-api key new` creates one")]
    Missing,
    /// No live key matches: the presented key does not exist or was revoked.
    #[error("the API key is unknown or revoked: `cube-api key list` lists the keys")]
    Unknown,
    /// The key is valid, but lacks the named scope.
    #[error("this API key lacks the scope {0}")]
    Scope(&'static str),
    #[error("too many requests with this API key: retry after the time in Retry-After")]
    Rate {
        /// Time until the key's bucket holds a token again.
        retry_after: Duration,
    },
}

/// Whether clients must authenticate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Auth {
    /// Every request is accepted. The server must listen on loopback addresses only.
    Open,
    /// Every request needs an API key.
    Keys {
        /// Rate limit of each key.
        rate: Rate,
    },
}

/// Decides whether a request may use a route.
#[derive(Debug)]
pub struct Authenticator(Mode);

#[derive(Debug)]
enum Mode {
    Open,
    Keys { rate: Rate, state: Mutex<KeyState> },
}

#[derive(Debug, Default)]
struct KeyState {
    /// Keys that are not revoked.
    keys: Vec<KeyRecord>,
    /// Keys of other nodes.
    others: Vec<KeyRecord>,
    /// Rate limits by the keys' SHA-256. A reload of the key file does not refill the buckets.
    buckets: HashMap<String, Bucket>,
}

impl Authenticator {
    /// Accepts requests that present one of `keys`, each key at most at `rate`.
    #[must_use]
    pub fn with_keys(keys: Vec<KeyRecord>, rate: Rate) -> Self {
        let state = Mutex::default();
        let authenticator = Self(Mode::Keys { rate, state });
        authenticator.replace(keys);
        authenticator
    }

    /// Accepts every request; see [`Auth::Open`].
    #[must_use]
    pub fn open() -> Self {
        Self(Mode::Open)
    }

    #[must_use]
    pub fn is_open(&self) -> bool {
        matches!(self.0, Mode::Open)
    }

    /// Replaces the accepted keys. Has no effect on an open server.
    pub fn replace(&self, keys: Vec<KeyRecord>) {
        let Mode::Keys { state, .. } = &self.0 else {
            return;
        };
        let mut state = lock(state);
        let live = keys.into_iter().filter(|key| key.revoked_unix_s.is_none());
        state.keys = live.collect();
        state.forget_buckets();
    }

    /// Replaces the accepted keys of other nodes. Has no effect on an open server.
    pub fn replace_others(&self, keys: Vec<KeyRecord>) {
        let Mode::Keys { state, .. } = &self.0 else {
            return;
        };
        let mut state = lock(state);
        let live = keys.into_iter().filter(|key| key.revoked_unix_s.is_none());
        state.others = live.collect();
        state.forget_buckets();
    }

    /// The keys of this node, for other nodes. Empty on an open server.
    #[must_use]
    pub fn own_keys(&self) -> Vec<KeyRecord> {
        match &self.0 {
            Mode::Open => Vec::new(),
            Mode::Keys { state, .. } => lock(state).keys.clone(),
        }
    }

    /// The keys that are accepted now. Empty for an open server.
    #[must_use]
    pub fn live_keys(&self) -> Vec<KeyRecord> {
        match &self.0 {
            Mode::Open => Vec::new(),
            Mode::Keys { state, .. } => lock(state).keys.clone(),
        }
    }

    /// Identifies the key in `headers`, for state that is kept for each key. `None`: the server needs no key.
    #[must_use]
    pub fn owner(&self, headers: &HeaderMap) -> Option<String> {
        match self.0 {
            Mode::Open => None,
            Mode::Keys { .. } => presented_sum(headers),
        }
    }

    /// Checks that the key in `headers` has `scope`, and takes one token from the key's bucket. Returns all scopes of the
    /// key.
    ///
    /// # Errors
    /// Returns [`AuthError::Missing`] if the request presents no key, [`AuthError::Unknown`] if the key is not live,
    /// [`AuthError::Rate`] if the key's bucket is empty, and [`AuthError::Scope`] if the key lacks `scope`; a request
    /// that lacks the scope costs a token as well.
    pub fn admit(
        &self,
        headers: &HeaderMap,
        scope: Scope,
        now: Instant,
    ) -> Result<Granted, AuthError> {
        self.admit_sum(presented_sum(headers), scope, now)
    }

    /// Like [`Self::admit`], for the SHA-256 of a key that another node of the cluster has authenticated.
    ///
    /// # Errors
    /// Those of [`Self::admit`].
    pub(crate) fn admit_sum(
        &self,
        presented: Option<String>,
        scope: Scope,
        now: Instant,
    ) -> Result<Granted, AuthError> {
        let Mode::Keys { rate, state } = &self.0 else {
            return Ok(Granted::ALL);
        };
        let rate = *rate;
        let presented = presented.ok_or(AuthError::Missing)?;
        let mut state = lock(state);
        let granted = state.find(&presented).ok_or(AuthError::Unknown)?;
        let bucket = state.buckets.entry(presented);
        let bucket = bucket.or_insert_with(|| Bucket::full(rate, now));
        bucket
            .take(rate, now)
            .map_err(|retry_after| AuthError::Rate { retry_after })?;
        if granted.has(scope) {
            Ok(granted)
        } else {
            Err(AuthError::Scope(scope.name()))
        }
    }

    /// Removes the fields that [`Authenticator::admit`] reads if they contain a live key, because guests must not get
    /// it.
    pub fn strip(&self, headers: &mut HeaderMap) {
        let Mode::Keys { state, .. } = &self.0 else {
            return;
        };
        for (name, key_of) in FIELDS {
            let mut keys = headers.get_all(&name).iter().filter_map(key_of).map(hash);
            if keys.any(|key| lock(state).find(&key).is_some()) {
                headers.remove(name);
            }
        }
    }
}

impl KeyState {
    /// The scopes of the live key with this hash.
    fn find(&self, sha256: &str) -> Option<Granted> {
        let mut found = None;
        // Every hash is compared, each in constant time, so that the duration does not depend on which key matches.
        for key in self.keys.iter().chain(&self.others) {
            if bool::from(key.sha256.as_bytes().ct_eq(sha256.as_bytes())) {
                found = Some(key.granted());
            }
        }
        found
    }

    /// Drops the rate limits of keys that are no longer accepted.
    fn forget_buckets(&mut self) {
        let Self {
            keys,
            others,
            buckets,
        } = self;
        buckets.retain(|hash, _| keys.iter().chain(&*others).any(|key| key.sha256 == *hash));
    }
}

type KeyOf = fn(&HeaderValue) -> Option<&str>;

/// Fields that may contain a key, and how the key is read. The first field that is present counts.
const FIELDS: [(HeaderName, KeyOf); 2] = [
    (HeaderName::from_static("x-api-key"), |value| {
        value.to_str().ok()
    }),
    (AUTHORIZATION, bearer),
];
/// Removes every field that may contain a key, whether the key is live or not.
pub(crate) fn remove_keys(headers: &mut HeaderMap) {
    for (field, _) in FIELDS {
        headers.remove(field);
    }
}

/// SHA-256 of the key that a request presents, in hex.
pub(crate) fn presented_sum(headers: &HeaderMap) -> Option<String> {
    presented(headers).map(hash)
}

/// The key in `X-API-KEY` or, without that header, the bearer token in `Authorization`.
fn presented(headers: &HeaderMap) -> Option<&str> {
    let mut fields = FIELDS.into_iter();
    let (value, key_of) = fields.find_map(|(name, key_of)| Some((headers.get(name)?, key_of)))?;
    key_of(value)
}

fn bearer(value: &HeaderValue) -> Option<&str> {
    let (scheme, key) = value.to_str().ok()?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| key.trim())
}

fn lock(state: &Mutex<KeyState>) -> MutexGuard<'_, KeyState> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Reloads the keys whenever the key file changes; never returns. While the file cannot be read, every key is rejected.
/// It is read again periodically, because the cause (a full descriptor table, a failing disk) may go away without a
/// change to the file.
pub async fn watch_keys(file: KeyFile, authenticator: Arc<Authenticator>) {
    // The first iteration always reloads: the file may have changed since the server read it at startup.
    let mut seen = None;
    let mut logged = None;
    loop {
        tokio::time::sleep(POLL_INTERVAL).await;
        let now = Some(stamp(&file));
        if now == seen {
            continue;
        }
        match file.read() {
            Ok(keys) => {
                info!(keys = keys.len(), "reloaded API keys");
                authenticator.replace(keys);
                (seen, logged) = (now, None);
            }
            Err(why) => {
                authenticator.replace(Vec::new());
                seen = None;
                let why = model::chain(&why);
                if logged.as_ref() != Some(&why) {
                    error!(%why, "cannot reload API keys: rejecting every key until the file can be read");
                    logged = Some(why);
                }
            }
        }
    }
}

/// Identifies one version of the key file: each replacement changes the inode or the modification time. `None`: the
/// file does not exist or cannot be examined.
fn stamp(file: &KeyFile) -> Option<(u64, i64, i64)> {
    let meta = fs::metadata(file.path()).ok()?;
    Some((meta.ino(), meta.mtime(), meta.mtime_nsec()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATE: Rate = Rate {
        per_second: 1,
        burst: 2,
    };

    fn record(key: &str, scopes: Vec<Scope>, revoked_unix_s: Option<u64>) -> KeyRecord {
        KeyRecord {
            id: hash(key)[..8].to_owned(),
            name: key.to_owned(),
            sha256: hash(key),
            scopes,
            names_secrets: true,
            created_unix_s: 0,
            revoked_unix_s,
        }
    }

    fn with(name: &'static str, value: &str) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(name, value.parse().unwrap());
        headers
    }

    #[test]
    fn only_live_keys_with_the_scope_are_admitted() {
        let now = Instant::now();
        let keys = vec![
            record("good", vec![Scope::SandboxesRead], None),
            record("gone", Scope::ALL.to_vec(), Some(1)),
        ];
        let authenticator = Authenticator::with_keys(keys, RATE);
        let read = Scope::SandboxesRead;
        let granted = authenticator.admit(&with("x-api-key", "good"), read, now);
        assert_eq!(granted, Ok(Granted::from_iter([read])));
        let bearer = with("authorization", "Bearer good");
        let write = authenticator.admit(&bearer, Scope::SandboxesWrite, now);
        assert_eq!(write, Err(AuthError::Scope("sandboxes:write")));
        for wrong in ["gone", "goo", "good ", "", &hash("good")] {
            let refused = authenticator.admit(&with("x-api-key", wrong), read, now);
            assert_eq!(refused, Err(AuthError::Unknown), "{wrong:?}");
        }
        let missing = authenticator.admit(&HeaderMap::new(), read, now);
        assert_eq!(missing, Err(AuthError::Missing));
    }

    #[test]
    fn each_key_has_its_own_bucket_and_a_reload_does_not_refill_it() {
        let now = Instant::now();
        let scopes = vec![Scope::SandboxesRead];
        let keys = vec![record("a", scopes.clone(), None), record("b", scopes, None)];
        let authenticator = Authenticator::with_keys(keys.clone(), RATE);
        let admit = |key| {
            let headers = with("x-api-key", key);
            authenticator
                .admit(&headers, Scope::SandboxesRead, now)
                .map(drop)
        };
        assert_eq!((admit("a"), admit("a")), (Ok(()), Ok(())));
        assert!(matches!(admit("a"), Err(AuthError::Rate { .. })));
        assert_eq!(admit("b"), Ok(()));
        authenticator.replace(keys);
        assert!(matches!(admit("a"), Err(AuthError::Rate { .. })));
        authenticator.replace(Vec::new());
        assert_eq!(admit("b"), Err(AuthError::Unknown));
    }

    #[tokio::test]
    async fn a_running_server_reloads_new_and_revoked_keys() {
        let dir = tempfile::tempdir().unwrap();
        let file = KeyFile::of(dir.path());
        let authenticator = Arc::new(Authenticator::with_keys(Vec::new(), RATE));
        let watch = tokio::spawn(watch_keys(file.clone(), authenticator.clone()));
        let key = file.add("k", Scope::ALL.to_vec(), 0).unwrap();
        let is_accepted = || {
            let headers = with("x-api-key", &key);
            let admitted = authenticator.admit(&headers, Scope::SandboxesRead, Instant::now());
            admitted != Err(AuthError::Unknown)
        };
        becomes(is_accepted, true).await;
        file.revoke("k", 1).unwrap();
        becomes(is_accepted, false).await;
        watch.abort();
    }

    #[tokio::test]
    async fn keys_are_accepted_again_when_an_unchanged_file_can_be_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let file = KeyFile::of(dir.path());
        let key = file.add("k", Scope::ALL.to_vec(), 0).unwrap();
        let keys = file.read().unwrap();
        let readable = fs::read(file.path()).unwrap();
        let written = stamp(&file);
        let time = fs::metadata(file.path()).unwrap().modified().unwrap();
        // Neither the inode nor the modification time changes, as with a file that temporarily could not be read.
        let overwrite = |contents: &[u8]| {
            fs::write(file.path(), contents).unwrap();
            let opened = fs::File::options().write(true).open(file.path()).unwrap();
            opened.set_modified(time).unwrap();
            assert_eq!(stamp(&file), written);
        };
        overwrite(b"torn");
        let authenticator = Arc::new(Authenticator::with_keys(keys, RATE));
        let is_accepted = || {
            let headers = with("x-api-key", &key);
            let admitted = authenticator.admit(&headers, Scope::SandboxesRead, Instant::now());
            admitted != Err(AuthError::Unknown)
        };
        assert!(is_accepted());
        let watch = tokio::spawn(watch_keys(file.clone(), authenticator.clone()));
        becomes(is_accepted, false).await;
        overwrite(&readable);
        becomes(is_accepted, true).await;
        watch.abort();
    }

    /// Waits until `condition` returns `wanted`.
    async fn becomes(condition: impl Fn() -> bool, wanted: bool) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while condition() != wanted {
            assert!(Instant::now() < deadline, "the key file was not reloaded");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}
