//! The check of each request.

use std::{
    collections::HashMap,
    fs,
    os::unix::fs::MetadataExt,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use hyper::header::{AUTHORIZATION, HeaderMap};
use subtle::ConstantTimeEq;
use tracing::{error, info};

use super::{
    bucket::{Bucket, Rate},
    keys::{KeyFile, KeyRecord, Scope, hash},
};

/// How soon a running server notices a new or revoked key.
const WATCH: Duration = Duration::from_millis(500);

/// Why a request is not let in.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AuthError {
    /// No key was sent.
    #[error("no API key: send one in the header X-API-KEY; `cube-api key new` makes one")]
    Missing,
    /// There is no such key, or it is revoked.
    #[error("this API key is not known here or was revoked")]
    Unknown,
    /// The key may do other things.
    #[error("this API key lacks the scope {0}")]
    Scope(&'static str),
    /// Too many requests.
    #[error("too many requests with this API key")]
    Rate {
        /// When there is room again.
        retry_after: Duration,
    },
}

/// Lets requests in.
#[derive(Debug)]
pub struct Door {
    /// `None`: everybody is let in, which only loopback listeners may do.
    held: Option<Mutex<Held>>,
    rate: Rate,
}

#[derive(Debug, Default)]
struct Held {
    keys: Vec<KeyRecord>,
    /// By the key's hash; kept when the keys are read anew.
    buckets: HashMap<String, Bucket>,
}

impl Door {
    /// Lets in who has a key.
    #[must_use]
    pub fn locked(keys: Vec<KeyRecord>, rate: Rate) -> Self {
        let door = Self {
            held: Some(Mutex::default()),
            rate,
        };
        door.replace(keys);
        door
    }

    /// Lets in everybody. For loopback only.
    #[must_use]
    pub fn open() -> Self {
        Self {
            held: None,
            rate: Rate {
                per_second: 0,
                burst: 0,
            },
        }
    }

    /// Whether nobody is asked for a key.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.held.is_none()
    }

    /// Other keys from now on.
    pub fn replace(&self, keys: Vec<KeyRecord>) {
        let Some(held) = &self.held else {
            return;
        };
        let mut held = lock(held);
        let live = keys.into_iter().filter(|key| key.revoked_unix_s.is_none());
        held.keys = live.collect();
        let Held { keys, buckets } = &mut *held;
        buckets.retain(|hash, _| keys.iter().any(|key| key.sha256 == *hash));
    }

    /// Whether a request with these headers may do this. Takes one request from the key's rate.
    ///
    /// # Errors
    /// See [`AuthError`].
    pub fn admit(&self, headers: &HeaderMap, scope: Scope, now: Instant) -> Result<(), AuthError> {
        let Some(held) = &self.held else {
            return Ok(());
        };
        let presented = presented(headers).ok_or(AuthError::Missing)?;
        let presented = hash(presented);
        let mut held = lock(held);
        let mut found = None;
        for key in &held.keys {
            if bool::from(key.sha256.as_bytes().ct_eq(presented.as_bytes())) {
                found = Some(key.scopes.contains(&scope));
            }
        }
        let has_scope = found.ok_or(AuthError::Unknown)?;
        let rate = self.rate;
        let bucket = held.buckets.entry(presented);
        let bucket = bucket.or_insert_with(|| Bucket::full(rate, now));
        bucket
            .take(rate, now)
            .map_err(|retry_after| AuthError::Rate { retry_after })?;
        if has_scope {
            Ok(())
        } else {
            Err(AuthError::Scope(scope.name()))
        }
    }
}

/// `X-API-KEY`, or what follows `Bearer` in `Authorization`.
fn presented(headers: &HeaderMap) -> Option<&str> {
    if let Some(key) = headers.get("x-api-key") {
        return key.to_str().ok();
    }
    let authorization = headers.get(AUTHORIZATION)?.to_str().ok()?;
    let (scheme, key) = authorization.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| key.trim())
}

fn lock(held: &Mutex<Held>) -> MutexGuard<'_, Held> {
    held.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Reads the keys again whenever the file changes. A file that does not read lets nobody in.
pub async fn watch_keys(file: KeyFile, door: std::sync::Arc<Door>) {
    // Nothing yet: the file may have changed since it was read for the first time.
    let mut seen = None;
    loop {
        tokio::time::sleep(WATCH).await;
        let now = Some(stamp(&file));
        if now == seen {
            continue;
        }
        seen = now;
        match file.read() {
            Ok(keys) => {
                info!(keys = keys.len(), "the keys were read again");
                door.replace(keys);
            }
            Err(why) => {
                error!(why = %why, "the keys do not read any more; nobody is let in");
                door.replace(Vec::new());
            }
        }
    }
}

/// What changes when the file is replaced.
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
    fn only_live_keys_with_the_scope_are_let_in() {
        let now = Instant::now();
        let keys = vec![
            record("good", vec![Scope::SandboxesRead], None),
            record("gone", Scope::ALL.to_vec(), Some(1)),
        ];
        let door = Door::locked(keys, RATE);
        let read = Scope::SandboxesRead;
        assert_eq!(door.admit(&with("x-api-key", "good"), read, now), Ok(()));
        let bearer = with("authorization", "Bearer good");
        let write = door.admit(&bearer, Scope::SandboxesWrite, now);
        assert_eq!(write, Err(AuthError::Scope("sandboxes:write")));
        for wrong in ["gone", "goo", "good ", "", &hash("good")] {
            let refused = door.admit(&with("x-api-key", wrong), read, now);
            assert_eq!(refused, Err(AuthError::Unknown), "{wrong:?}");
        }
        let missing = door.admit(&HeaderMap::new(), read, now);
        assert_eq!(missing, Err(AuthError::Missing));
    }

    #[test]
    fn each_key_has_its_own_rate_that_a_reload_does_not_refill() {
        let now = Instant::now();
        let scopes = vec![Scope::SandboxesRead];
        let keys = vec![record("a", scopes.clone(), None), record("b", scopes, None)];
        let door = Door::locked(keys.clone(), RATE);
        let admit = |key| door.admit(&with("x-api-key", key), Scope::SandboxesRead, now);
        assert_eq!((admit("a"), admit("a")), (Ok(()), Ok(())));
        assert!(matches!(admit("a"), Err(AuthError::Rate { .. })));
        assert_eq!(admit("b"), Ok(()));
        door.replace(keys);
        assert!(matches!(admit("a"), Err(AuthError::Rate { .. })));
        door.replace(Vec::new());
        assert_eq!(admit("b"), Err(AuthError::Unknown));
    }

    #[tokio::test]
    async fn a_running_server_notices_new_and_revoked_keys() {
        let dir = tempfile::tempdir().unwrap();
        let file = KeyFile::of(dir.path());
        let door = std::sync::Arc::new(Door::locked(Vec::new(), RATE));
        let watch = tokio::spawn(watch_keys(file.clone(), door.clone()));
        let key = file.add("k", Scope::ALL.to_vec(), 0).unwrap();
        let is_let_in = || {
            let headers = with("x-api-key", &key);
            let admitted = door.admit(&headers, Scope::SandboxesRead, Instant::now());
            admitted != Err(AuthError::Unknown)
        };
        becomes(is_let_in, true).await;
        file.revoke("k", 1).unwrap();
        becomes(is_let_in, false).await;
        watch.abort();
    }

    async fn becomes(condition: impl Fn() -> bool, wanted: bool) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while condition() != wanted {
            assert!(Instant::now() < deadline, "not noticed");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}
