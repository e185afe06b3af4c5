//! Ids of deleted objects (templates, secrets), which no node accepts from another one again.

use std::{collections::BTreeMap, ffi::OsStr, io, path::Path};

use pool::durable::{Durability, read_bounded, replace};

/// Maximum file size in bytes, more than all entries need.
const MAX_FILE: u64 = 1 << 20;
/// Maximum number of entries. The newest ones are kept.
const MOST: usize = 10_000;
/// How long an entry is kept. Longer than a certificate is valid, so a node that was unreachable for longer is no
/// longer a member.
const KEPT_MS: u64 = 100 * 24 * 3600 * 1000;

/// Deletion times (Unix, ms) by id.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Deleted(BTreeMap<String, u64>);

impl Deleted {
    /// Loads the file. A file that cannot be read is logged and treated as empty, because the other nodes have most
    /// entries.
    pub(crate) fn load(file: &Path) -> Self {
        let read = read_bounded(file, MAX_FILE);
        let read = read.and_then(|bytes| Ok(serde_json::from_slice(&bytes)?));
        match read {
            Ok(entries) => Self(entries),
            Err(why) if why.kind() == io::ErrorKind::NotFound => Self::default(),
            Err(why) => {
                tracing::error!(%why, file = %file.display(), "cannot read the list of deletions: getting it from the other nodes");
                Self::default()
            }
        }
    }

    pub(crate) fn store(&self, file: &Path) -> io::Result<()> {
        let bytes = serde_json::to_vec(&self.0)?;
        let name = file.file_name().and_then(OsStr::to_str).unwrap_or_default();
        let dir = file.parent().unwrap_or(file);
        replace(dir, name, &bytes, Durability::Host)
    }

    pub(crate) fn has(&self, id: &str) -> bool {
        self.0.contains_key(id)
    }

    pub(crate) fn entries(&self) -> &BTreeMap<String, u64> {
        &self.0
    }

    /// Merges the entries of another node. The earlier time of an id wins. Returns `None` if nothing changes.
    pub(crate) fn merged(&self, others: BTreeMap<String, u64>, now_ms: u64) -> Option<Self> {
        let is_recent = |at: &u64| at.saturating_add(KEPT_MS) > now_ms;
        let mut all = self.0.clone();
        for (id, at) in others {
            if is_recent(&at) && is_id(&id) {
                // An entry from a node whose clock is ahead must not be kept for ever.
                let at = at.min(now_ms);
                let own = all.entry(id).or_insert(at);
                *own = at.min(*own);
            }
        }
        all.retain(|_, at| is_recent(at));
        let surplus = all.len().saturating_sub(MOST);
        if surplus > 0 {
            tracing::warn!(
                surplus,
                "too many deletions: dropping the oldest, keeping the newest {MOST}"
            );
            let mut by_age: Vec<_> = all.iter().map(|(id, at)| (*at, id.clone())).collect();
            by_age.sort_unstable();
            for (_, id) in by_age.into_iter().take(surplus) {
                all.remove(&id);
            }
        }
        (all != self.0).then_some(Self(all))
    }
}

fn is_id(id: &str) -> bool {
    id.len() <= 64
        && id
            .bytes()
            .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deletions_are_merged_kept_for_their_time_and_bounded() {
        let now = 2 * KEPT_MS;
        let all = |entries: &[(&str, u64)]| {
            let entries = entries.iter().map(|(id, at)| ((*id).to_owned(), *at));
            entries.collect::<BTreeMap<_, _>>()
        };
        let own = Deleted(all(&[("a", now - 1)]));
        let given = all(&[
            ("a", now - 2),
            ("sec_b", now + 9),
            ("c", now - KEPT_MS),
            ("../d", now),
        ]);
        let merged = own.merged(given.clone(), now).unwrap();
        assert_eq!(merged.0, all(&[("a", now - 2), ("sec_b", now)]));
        assert_eq!(merged.merged(given, now), None);
        let later = merged.merged(BTreeMap::new(), now + KEPT_MS).unwrap();
        assert_eq!(later, Deleted::default());
        let many = (0..MOST as u64 + 5).map(|n| (n.to_string(), now - n));
        let merged = own.merged(many.collect(), now).unwrap();
        assert_eq!(merged.0.len(), MOST);
        assert!(merged.has("0") && !merged.has(&(MOST + 4).to_string()));
    }

    #[test]
    fn deletions_survive_a_restart() {
        let state = tempfile::tempdir().unwrap();
        let file = state.path().join("deleted.json");
        assert_eq!(Deleted::load(&file), Deleted::default());
        let own = Deleted(BTreeMap::from([("a".to_owned(), 1)]));
        own.store(&file).unwrap();
        assert_eq!(Deleted::load(&file), own);
        std::fs::write(&file, b"x").unwrap();
        assert_eq!(Deleted::load(&file), Deleted::default());
    }
}
