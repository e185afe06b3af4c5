//! The secrets of a cluster: what its nodes give each other, and how that is merged.
//!
//! Each node has all secrets. For an id, the greatest [`Stamp`] counts, and a deletion more than any; so the nodes have the
//! same, in whatever order they have heard of changes. If two nodes have stored a name at the same moment, both secrets
//! stay, and the one that was created first has the name ([`Sealed::age`]).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tracing::warn;
use zeroize::Zeroize;

use super::{
    MAX_SECRETS, Secret, SecretError, Secrets, check_value,
    record::{Sealed, check, sum_of},
};
use crate::hex::hex;

/// Bytes of values and labels in a batch, after which no other secret is added: as JSON, they may be six times as long.
const ENOUGH: usize = 1 << 20;

/// Which state of a secret a node has. The later one is greater.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Stamp {
    version: u64,
    updated_at_ms: u64,
    /// SHA-256 of the secret with its value. Only members see it, and they have the value.
    sum: String,
}

/// The stamps of all secrets of a node, by id.
pub(crate) type Stamps = BTreeMap<String, Stamp>;

/// A secret with its value in plain text, which is overwritten when it is dropped. It has no `Debug`.
#[derive(Serialize, Deserialize)]
struct Plain {
    secret: Secret,
    value: String,
}

impl Drop for Plain {
    fn drop(&mut self) {
        self.value.zeroize();
    }
}

/// What one node gives another one: some secrets, and all deletions. It has no `Debug`.
#[derive(Serialize, Deserialize)]
pub(crate) struct Batch {
    secrets: Vec<Plain>,
    deleted: BTreeMap<String, u64>,
}

impl Batch {
    /// # Errors
    /// Returns where the text is malformed, and nothing of it.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, String> {
        serde_json::from_slice(bytes).map_err(|why| {
            let (line, column) = (why.line(), why.column());
            format!("they are malformed at line {line}, column {column}")
        })
    }
}

impl Sealed {
    fn stamp(&self) -> Stamp {
        Stamp {
            version: self.secret.version,
            updated_at_ms: self.secret.updated_at_ms,
            sum: self.sum.clone(),
        }
    }
}

impl Secrets {
    /// Equal on two nodes that have the same secrets and deletions.
    pub(crate) fn digest(&self) -> String {
        let mut digest = Sha256::new();
        for (id, stamp) in self.stamps() {
            digest.update(format!("{id} {}\n", stamp.sum));
        }
        for id in self.0.deleted().entries().keys() {
            digest.update(format!("{id}\n"));
        }
        hex(&digest.finalize())
    }

    pub(crate) fn stamps(&self) -> Stamps {
        let known = self.0.read();
        let stamps = known
            .iter()
            .map(|(id, sealed)| (id.clone(), sealed.stamp()));
        stamps.collect()
    }

    /// A part of what a node with these secrets lacks; nothing of what it has no room for.
    pub(crate) fn newer_than(&self, known: &Stamps) -> Batch {
        let mut room = MAX_SECRETS.saturating_sub(known.len());
        self.batch(|sealed| match known.get(&sealed.secret.id) {
            Some(stamp) => *stamp < sealed.stamp(),
            None => {
                let has_room = room > 0;
                room = room.saturating_sub(1);
                has_room
            }
        })
    }

    /// This secret, if it is there, and the deletions.
    pub(crate) fn changed(&self, id: &str) -> Batch {
        self.batch(|sealed| sealed.secret.id == id)
    }

    fn batch(&self, mut is_wanted: impl FnMut(&Sealed) -> bool) -> Batch {
        let known: Vec<_> = self.0.read().values().cloned().collect();
        let (mut secrets, mut bytes) = (Vec::new(), 0);
        for sealed in known {
            if bytes < ENOUGH
                && is_wanted(&sealed)
                && let Some(plain) = self.0.key.open(&sealed)
                && let Ok(value) = std::str::from_utf8(&plain)
            {
                let (secret, value) = (sealed.secret.clone(), value.to_owned());
                let labels = secret.metadata.iter();
                let labels = labels.map(|(key, value)| key.len() + value.len());
                bytes += value.len() + labels.sum::<usize>();
                secrets.push(Plain { secret, value });
            }
        }
        let deleted = self.0.deleted().entries().clone();
        Batch { secrets, deleted }
    }

    /// Takes over what another node has given, and returns how many secrets it refuses. Blocks until it is on disk.
    ///
    /// # Errors
    /// Returns [`SecretError::Io`]; what was taken over until then stays.
    pub(crate) fn merge(&self, batch: Batch, now_ms: u64) -> Result<usize, SecretError> {
        let store = &self.0;
        let _change = store.lock();
        let (mut refused, mut last) = (0, String::new());
        store.remember(batch.deleted, now_ms)?;
        store.forget_deleted()?;
        for plain in batch.secrets {
            let (secret, value) = (&plain.secret, &plain.value);
            if let Err(why) = check(secret).and_then(|()| check_value(value)) {
                refused += 1;
                last = why;
                continue;
            }
            let (id, name) = (secret.id.clone(), secret.name.clone());
            let own = store.read().get(&id).map(|own| own.stamp());
            let stamp = Stamp {
                version: secret.version,
                updated_at_ms: secret.updated_at_ms,
                sum: sum_of(secret, value.as_bytes()).map_err(std::io::Error::from)?,
            };
            let is_new = own.is_none();
            if store.deleted().has(&id) || own.is_some_and(|own| own >= stamp) {
                continue;
            }
            if is_new && store.read().len() >= MAX_SECRETS {
                refused += 1;
                last = format!("there are {MAX_SECRETS} already");
                continue;
            }
            store.write(secret.clone(), value)?;
            let named = store.named(&name);
            if is_new && named.len() > 1 {
                let used = self.get(&name)?.id;
                warn!(name, ids = ?named, used, "several secrets have one name: the one that was created first is used by all nodes");
            }
        }
        if refused > 0 {
            warn!(
                refused,
                why = last,
                "secrets of another node are not used here"
            );
        }
        Ok(refused)
    }
}

#[cfg(test)]
mod tests;
