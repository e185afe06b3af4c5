//! Copies a build from another node.

use std::{
    fs, io,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use builds::{
    cancel::cancellation,
    owner::{BuildsError, Copied, Made},
    run::Arrived,
    store::KeptOrder,
};
use pool::durable::private_dir;

use super::{
    Parts,
    give::{GivenBuild, LAYER, ROOT, WantedBuild},
    plan::Missing,
};
use crate::peers::{PeerError, Peers, question, transfer::TransferError};
use tasks::blocking;

/// How many incomplete copies are kept for another attempt, and for how long.
const KEPT: usize = 4;
const KEPT_FOR: Duration = Duration::from_secs(24 * 3600);
/// The only files of a copy.
const NAMES: [&str; 2] = [ROOT, LAYER];

/// Why a build could not be copied.
#[derive(Debug, thiserror::Error)]
pub(super) enum TakeError {
    #[error(transparent)]
    Transfer(#[from] TransferError),
    #[error("refused the response of the node: {0}")]
    Malformed(String),
    #[error("cannot use the directory of copies")]
    Io(#[source] io::Error),
    #[error("cannot create the template: {0}")]
    Make(String),
    #[error("cannot store the template")]
    Keep(#[from] BuildsError),
}

impl From<PeerError> for TakeError {
    fn from(why: PeerError) -> Self {
        Self::Transfer(why.into())
    }
}

impl TakeError {
    /// Whether the other node did not respond.
    pub(super) fn is_away(&self) -> bool {
        match self {
            Self::Transfer(TransferError::Peer(_) | TransferError::NotOffered { .. }) => true,
            Self::Transfer(
                TransferError::Corrupt { .. }
                | TransferError::NoSpace { .. }
                | TransferError::Io { .. },
            )
            | Self::Malformed(_)
            | Self::Io(_)
            | Self::Make(_)
            | Self::Keep(_) => false,
        }
    }
}

/// Copies a build. When it returns, sandboxes can be cloned from it under its names. Returns the number of bytes
/// received.
pub(super) async fn take(
    peers: &Peers,
    parts: &Parts,
    missing: &Missing,
) -> Result<u64, TakeError> {
    let (dir, all) = (parts.dir.join(&missing.build), parts.dir.clone());
    let own = dir.clone();
    let cleaned = blocking(move || clean(&all, &own)).await;
    cleaned.map_err(TakeError::Io)?;
    let wanted = WantedBuild {
        template: missing.record.id.clone(),
        build: missing.build.clone(),
    };
    let body = serde_json::to_vec(&wanted).map_err(|why| TakeError::Io(why.into()))?;
    let question = question("POST", "/cluster/template/offer", body);
    let given: GivenBuild = peers.ask(&missing.source, question).await?;
    if let Some(why) = given.described.check() {
        return Err(TakeError::Malformed(why.to_owned()));
    }
    let order = given
        .order
        .as_deref()
        .map(|text| KeptOrder::parse(text.as_bytes()));
    let order = order
        .transpose()
        .map_err(|why| TakeError::Malformed(why.to_string()))?;
    let list = peers.list_files(&missing.source, &given.key).await?;
    let names: Vec<_> = list.files().iter().map(|file| file.name.as_str()).collect();
    let (Some(root), Some(layer), 2) = (list.get(ROOT), list.get(LAYER), names.len()) else {
        return Err(TakeError::Malformed(format!(
            "its files are {names:?} and not {NAMES:?}"
        )));
    };
    let content = format!("{} {}", root.content(), layer.content());
    let sums = peers.offers().sums();
    let known = sums.same(parts.executor.roots().await, root).await;
    let list = match &known {
        Some(_) => list.without(ROOT),
        None => list,
    };
    let sent = peers
        .fetch_files(&missing.source, &given.key, &list, &dir)
        .await?;
    let build = missing.record.build(&missing.build);
    let (_never, cancel) = cancellation();
    let (root, layer) = (known.unwrap_or_else(|| dir.join(ROOT)), dir.join(LAYER));
    let made = parts.executor.make_of(
        Arrived {
            template_id: &missing.record.id,
            root: &root,
            layer: &layer,
            content: &content,
            described: given.described,
            min_free_disk: build.map(|build| build.min_free_disk).unwrap_or_default(),
        },
        &parts.builds.uploads,
        cancel,
    );
    let made = made.await.map_err(TakeError::Make)?;
    let copied = Copied {
        record: missing.record.clone(),
        home: missing.home.clone(),
        made: Some(Made {
            build: missing.build.clone(),
            template: made,
            order,
        }),
    };
    parts.builds.follow(copied).await?;
    let removed = blocking(move || fs::remove_dir_all(dir)).await;
    removed.map_err(TakeError::Io)?;
    Ok(sent)
}

/// Removes incomplete copies while no copy is in progress: the old ones, and all but the newest.
pub(super) async fn clean_all(dir: PathBuf) -> io::Result<()> {
    blocking(move || clean(&dir, &dir)).await
}

/// Removes incomplete copies except `own`, which is in progress: the old ones, and all but the newest.
fn clean(dir: &Path, own: &Path) -> io::Result<()> {
    private_dir(dir)?;
    let mut found = Vec::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if entry.path() != own {
            let changed = entry.metadata()?.modified()?;
            found.push((changed, entry.path()));
        }
    }
    found.sort();
    let recent = SystemTime::now().checked_sub(KEPT_FOR);
    for (at, (changed, path)) in found.iter().rev().enumerate() {
        if at + 1 >= KEPT || Some(*changed) < recent {
            fs::remove_dir_all(path)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn incomplete_copies_are_few() {
        let dir = tempfile::tempdir().unwrap();
        let path = |n: usize| dir.path().join(n.to_string());
        for n in 0..6 {
            fs::create_dir(path(n)).unwrap();
            fs::write(path(n).join("layer.part"), "x").unwrap();
        }
        clean(dir.path(), &path(0)).unwrap();
        let left = fs::read_dir(dir.path()).unwrap().count();
        assert!(left == KEPT && path(0).exists() && path(5).exists());
    }
}
