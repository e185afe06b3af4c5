//! The base of a sandbox that moves to this node: the files of the template that its pause is a difference to. A node that
//! has no template with the same content fetches them, once for all sandboxes of that template.
//!
//! ```text
//! <state>/incoming/base-<SHA-256 of the manifest>/    files that arrive, also for another attempt
//! <state>/images/<SHA-256 of the manifest>/           complete; the pool keeps them as long as a sandbox needs them
//! <state>/incoming/<id>/base, vmm                     links, until the sandbox is this node's
//! ```

use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use cluster::NodeId;
use pool::{
    Pool,
    durable::{private_dir, sync_dir},
};

use super::{MoveError, Moves, take::Offer};
use crate::{
    blocking::blocking,
    peers::transfer::{FileList, PART},
};

/// What names of directories of bases that arrive begin with.
const PREFIX: &str = "base-";
/// How long an incomplete base is kept for another attempt.
const KEPT_FOR: Duration = Duration::from_secs(24 * 3600);
const ROOT: &str = "root";
/// The files that are not sent if this node has them in another template: those beside a root image.
const LINKED: [&str; 3] = [ROOT, "vmlinux", "initramfs.cpio"];

impl Moves {
    /// Makes sure that the base of an offered sandbox is here, and stays until the sandbox is.
    pub(super) async fn hold_base(&self, from: &NodeId, offer: &Offer) -> Result<(), MoveError> {
        if self.is_held(offer, None).await? {
            return Ok(());
        }
        let _turn = self.0.bases.lock().await;
        // Another move may have fetched it meanwhile.
        if self.is_held(offer, None).await? {
            return Ok(());
        }
        let lacks = || MoveError::Malformed("the offer has no base".to_owned());
        let key = offer.base_key.as_deref().ok_or_else(lacks)?;
        let dir = self
            .0
            .incoming
            .join(format!("{PREFIX}{}", offer.needs.base));
        self.fetch_base(from, key, &dir).await?;
        match self.is_held(offer, Some(dir.clone())).await {
            Ok(true) => Ok(()),
            Ok(false) => Err(lacks()),
            Err(why) => {
                // It has the content that the other node has listed, so another attempt has the same end.
                in_dir(dir, remove_base).await?;
                Err(why)
            }
        }
    }

    async fn is_held(&self, offer: &Offer, fetched: Option<PathBuf>) -> Result<bool, MoveError> {
        let (pool, needs) = (&self.0.pool, offer.needs.clone());
        let held = pool.hold(&self.0.incoming, &offer.sandbox, needs, fetched);
        Ok(held.await?)
    }

    async fn fetch_base(&self, from: &NodeId, key: &str, dir: &Path) -> Result<(), MoveError> {
        let peers = &self.0.peers;
        let mut list: FileList = peers.list_files(from, key).await?;
        let mut names = list.files().iter().map(|file| &file.name);
        if let Some(name) = names.find(|name| !Pool::is_file_of_base(name)) {
            return Err(MoveError::Malformed(format!("no file of a base: {name}")));
        }
        let mut links = Vec::new();
        for name in LINKED {
            if let Some(found) = self.same(&list, name).await {
                list = list.without(name);
                links.push((name, found));
            }
        }
        in_dir(dir.to_owned(), remove_links).await?;
        let bytes: u64 = list.files().iter().map(|file| file.bytes).sum();
        let linked = links.len();
        tracing::info!(dir = %dir.display(), %from, bytes, linked, "fetching the base of a sandbox that moves to this node");
        self.fetch_list(from, key, &list, dir).await?;
        in_dir(dir.to_owned(), move |dir| link_all(&links, dir)).await
    }

    /// A file of this node with the content of one of the list.
    async fn same(&self, list: &FileList, name: &str) -> Option<PathBuf> {
        let wanted = list.get(name)?;
        let roots = self.0.pool.root_images().await.into_iter();
        let paths = roots.map(|root| match name {
            ROOT => root,
            beside => root.with_file_name(beside),
        });
        let sums = self.0.peers.offers().sums();
        sums.same(paths, wanted).await
    }

    /// Removes incomplete bases that no attempt has used for long.
    pub(super) async fn clean_bases(&self) {
        let Ok(_turn) = self.0.bases.try_lock() else {
            return;
        };
        let cleaned = in_dir(self.0.incoming.clone(), |incoming| {
            clean(incoming, SystemTime::now())
        });
        if let Err(why) = cleaned.await {
            tracing::warn!(why = %model::chain(&why), "cannot remove an incomplete base of a sandbox");
        }
    }
}

fn remove_base(dir: &Path) -> io::Result<()> {
    match fs::remove_dir_all(dir) {
        Err(why) if why.kind() != io::ErrorKind::NotFound => Err(why),
        _ => Ok(()),
    }
}

/// Removes the links that an earlier attempt has made: a fetch writes to the files that it finds.
fn remove_links(dir: &Path) -> io::Result<()> {
    for path in LINKED.into_iter().flat_map(|name| places(dir, name)) {
        if fs::symlink_metadata(&path).is_ok_and(|meta| meta.nlink() > 1) {
            fs::remove_file(path)?;
        }
    }
    Ok(())
}

/// Where a file is, whole or not.
fn places(dir: &Path, name: &str) -> [PathBuf; 2] {
    [dir.join(name), dir.join(format!("{name}{PART}"))]
}

fn link_all(links: &[(&str, PathBuf)], dir: &Path) -> io::Result<()> {
    private_dir(dir)?;
    for (name, file) in links {
        for path in places(dir, name) {
            match fs::remove_file(path) {
                Err(why) if why.kind() != io::ErrorKind::NotFound => return Err(why),
                _ => {}
            }
        }
        let link = dir.join(name);
        match fs::hard_link(file, &link) {
            Err(why) if why.kind() == io::ErrorKind::CrossesDevices => {
                fs::copy(file, &link)?;
                fs::File::open(&link)?.sync_all()?;
            }
            linked => linked?,
        }
    }
    sync_dir(dir)
}

fn clean(incoming: &Path, now: SystemTime) -> io::Result<()> {
    let entries = match fs::read_dir(incoming) {
        Err(why) if why.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        let is_base = entry.file_name().to_string_lossy().starts_with(PREFIX);
        let changed = entry.metadata()?.modified()?;
        let age = now.duration_since(changed).unwrap_or_default();
        if is_base && age > KEPT_FOR {
            tracing::info!(dir = %entry.path().display(), "removing an incomplete base");
            fs::remove_dir_all(entry.path())?;
        }
    }
    Ok(())
}

async fn in_dir(
    dir: PathBuf,
    work: impl FnOnce(&Path) -> io::Result<()> + Send + 'static,
) -> Result<(), MoveError> {
    let path = dir.clone();
    let done = blocking(move || work(&dir)).await;
    done.map_err(|source| MoveError::Io { path, source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_old_incomplete_bases_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        clean(&dir.path().join("none"), SystemTime::now()).unwrap();
        for name in ["base-1", "i123"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        let now = SystemTime::now();
        clean(dir.path(), now).unwrap();
        assert!(dir.path().join("base-1").exists());
        clean(dir.path(), now + 2 * KEPT_FOR).unwrap();
        assert!(!dir.path().join("base-1").exists() && dir.path().join("i123").exists());
    }

    #[test]
    fn a_file_of_this_node_is_linked_and_not_written() {
        let dir = tempfile::tempdir().unwrap();
        let (image, base) = (dir.path().join("image"), dir.path().join("base"));
        fs::write(&image, "root").unwrap();
        for _ in 0..2 {
            link_all(&[(ROOT, image.clone())], &base).unwrap();
        }
        assert_eq!(fs::read(base.join(ROOT)).unwrap(), b"root");
        // The next attempt may fetch it, and must not write to the image.
        remove_links(&base).unwrap();
        assert!(!base.join(ROOT).exists());
        fs::write(base.join(ROOT), "part").unwrap();
        remove_links(&base).unwrap();
        assert!(base.join(ROOT).exists());
    }
}
