//! Exchange and merging of secrets between the nodes of a cluster.
//!
//! Each node has all secrets. For each id, the greatest [`Stamp`] wins, and a deletion wins over any stamp, so the
//! nodes converge in whatever order changes reach them. If two nodes have stored a name at the same time, both secrets
//! stay, and the name refers to the one that was created first ([`Sealed::age`]).

use std::collections::BTreeMap;

use model::hex;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tracing::warn;
use zeroize::Zeroize;

use super::{
    MAX_SECRETS, Secret, SecretError, Secrets, check_value,
    record::{Sealed, check, sum_of},
};

/// Size of values and labels after which no more secrets are added to a batch, in bytes. As JSON, they may be six times
/// as long.
const ENOUGH: usize = 1 << 20;

/// The version of a secret on a node. Later versions are greater.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Stamp {
    version: u64,
    updated_at_ms: u64,
    /// SHA-256 of the secret with its value. Only members see it, and they have the value.
    sum: String,
}

/// The stamps of all secrets of a node, by id.
pub(crate) type Stamps = BTreeMap<String, Stamp>;

/// A secret with its value in plain text, which is overwritten on drop. Does not implement `Debug`.
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

/// Data that one node sends to another: some secrets, and all deletions. Does not implement `Debug`.
#[derive(Serialize, Deserialize)]
pub(crate) struct Batch {
    secrets: Vec<Plain>,
    deleted: BTreeMap<String, u64>,
}

impl Batch {
    /// # Errors
    /// Returns where the text is malformed, without quoting it.
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

    /// A batch of secrets that a node with these stamps lacks. Omits secrets that it has no room for.
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

    /// This secret, if it exists, and the deletions.
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

    /// Merges secrets from another node, and returns how many were refused. Blocks until they are on disk.
    ///
    /// # Errors
    /// Returns [`SecretError::Io`]. Secrets merged so far are kept.
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
                last = format!("there are already {MAX_SECRETS}");
                continue;
            }
            store.write(secret.clone(), value)?;
            let named = store.named(&name);
            if is_new && named.len() > 1 {
                let used = self.get(&name)?.id;
                warn!(name, ids = ?named, used, "several secrets have the same name: all nodes use the one that was created first");
            }
        }
        if refused > 0 {
            warn!(refused, why = last, "refused secrets of another node");
        }
        Ok(refused)
    }
}

#[cfg(test)]
mod tests;
