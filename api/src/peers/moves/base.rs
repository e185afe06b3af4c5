//! The base of an incoming sandbox: the files of the template that its diff snapshot refers to. A node without a
//! template of the same content fetches them, once for all sandboxes of that template.
//!
//! ```text
//! <state>/incoming/base-<SHA-256 of the manifest>/    incoming files, kept for another attempt
//! <state>/images/<SHA-256 of the manifest>/           complete; kept by the pool while a sandbox needs them
//! <state>/incoming/<id>/base, vmm                     links, until this node owns the sandbox
//! ```

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::{Duration, SystemTime},
};

use cluster::NodeId;
use pool::{
    Pool, PoolError,
    durable::{private_dir, sync_dir},
};

use super::{MoveError, Moves, take::Offer};
use crate::peers::transfer::{FileList, PART};
use tasks::blocking;

/// Prefix of the directories of incoming bases.
const PREFIX: &str = "base-";
/// How many incomplete bases are kept for another attempt, and for how long.
pub(super) const KEPT: usize = 4;
const KEPT_FOR: Duration = Duration::from_secs(24 * 3600);
const ROOT: &str = "root";
/// Files next to a root image that are not sent if this node has them in another template.
const LINKED: [&str; 3] = [ROOT, "vmlinux", "initramfs.cpio"];

/// Locks of incoming bases, by hash. Moves that need the same base wait for each other. Moves that need different bases
/// do not, because a lock is held as long as the other node takes to send the files.
#[derive(Debug, Default)]
pub(super) struct Bases(Mutex<BTreeMap<String, Weak<tokio::sync::Mutex<()>>>>);

/// Exclusive access to one base, until dropped.
type Turn = tokio::sync::OwnedMutexGuard<()>;

impl Bases {
    async fn turn(&self, base: &str) -> Turn {
        let lock = self.get(base);
        lock.lock_owned().await
    }

    /// `None` if a move uses the base or waits for it.
    fn try_turn(&self, base: &str) -> Option<Turn> {
        if self.lock().get(base).is_some_and(is_used) {
            return None;
        }
        self.get(base).try_lock_owned().ok()
    }

    fn used(&self) -> BTreeSet<String> {
        let all = self.lock();
        let used = all.iter().filter(|(_, lock)| is_used(lock));
        used.map(|(base, _)| base.clone()).collect()
    }

    fn get(&self, base: &str) -> Arc<tokio::sync::Mutex<()>> {
        let mut all = self.lock();
        all.retain(|_, lock| is_used(lock));
        if let Some(lock) = all.get(base).and_then(Weak::upgrade) {
            return lock;
        }
        let lock = Arc::default();
        all.insert(base.to_owned(), Arc::downgrade(&lock));
        lock
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Weak<tokio::sync::Mutex<()>>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Moves that hold or await access refer to the lock.
fn is_used(lock: &Weak<tokio::sync::Mutex<()>>) -> bool {
    lock.strong_count() > 0
}

impl Moves {
    /// Makes sure that the base of an offered sandbox is on this node and stays until the sandbox is.
    pub(super) async fn hold_base(&self, from: &NodeId, offer: &Offer) -> Result<(), MoveError> {
        if self.is_held(offer, None).await? {
            return Ok(());
        }
        let _turn = self.0.bases.turn(&offer.needs.base).await;
        // Another move may have fetched it while this one waited.
        if self.is_held(offer, None).await? {
            return Ok(());
        }
        let lacks = || MoveError::Malformed("the offer has no base".to_owned());
        let key = offer.base_key.as_deref().ok_or_else(lacks)?;
        let dir = self.base_dir(&offer.needs.base);
        self.clean_bases(KEPT).await;
        self.fetch_base(from, key, &dir).await?;
        self.accept(offer, dir).await
    }

    /// Installs a base from files that have arrived.
    async fn accept(&self, offer: &Offer, dir: PathBuf) -> Result<(), MoveError> {
        match self.is_held(offer, Some(dir.clone())).await {
            Ok(true) => Ok(()),
            Ok(false) => Err(MoveError::Malformed(
                "the base was removed while it was installed".to_owned(),
            )),
            Err(why) => {
                if matches!(why, PoolError::Unfit { .. }) {
                    // The files have the content that the other node listed, so another attempt would fail in the same
                    // way.
                    in_dir(dir, remove_base).await?;
                }
                Err(why.into())
            }
        }
    }

    async fn is_held(&self, offer: &Offer, fetched: Option<PathBuf>) -> Result<bool, PoolError> {
        let (pool, needs) = (&self.0.pool, offer.needs.clone());
        pool.hold(&self.0.incoming, &offer.sandbox, needs, fetched)
            .await
    }

    async fn fetch_base(&self, from: &NodeId, key: &str, dir: &Path) -> Result<(), MoveError> {
        let peers = &self.0.peers;
        let mut list: FileList = peers.list_files(from, key).await?;
        let mut names = list.files().iter().map(|file| &file.name);
        if let Some(name) = names.find(|name| !Pool::is_file_of_base(name)) {
            return Err(MoveError::Malformed(format!(
                "not a file of a base: {name}"
            )));
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

    /// Finds a file on this node with the content of one in the list.
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

    /// Removes incomplete bases that no move uses: those without a recent attempt, and the oldest ones if there are
    /// more than `most`. Returns the number removed.
    pub(super) async fn clean_bases(&self, most: usize) -> usize {
        let mut removed = 0;
        if let Err(why) = self.remove_bases(most, &mut removed).await {
            tracing::warn!(why = %model::chain(&why), "cannot remove an incomplete base of a sandbox");
        }
        removed
    }

    async fn remove_bases(&self, most: usize, removed: &mut usize) -> Result<(), MoveError> {
        let found = in_dir(self.0.incoming.clone(), incomplete).await?;
        let used = self.0.bases.used();
        for base in surplus(found, &used, most, SystemTime::now()) {
            let Some(turn) = self.0.bases.try_turn(&base) else {
                continue;
            };
            let remove = move |dir: &Path| {
                tracing::info!(dir = %dir.display(), "removing an incomplete base");
                let _turn = turn;
                remove_base(dir)
            };
            in_dir(self.base_dir(&base), remove).await?;
            *removed += 1;
        }
        Ok(())
    }

    /// Directory into which a base is fetched.
    fn base_dir(&self, base: &str) -> PathBuf {
        self.0.incoming.join(format!("{PREFIX}{base}"))
    }
}

fn remove_base(dir: &Path) -> io::Result<()> {
    match fs::remove_dir_all(dir) {
        Err(why) if why.kind() != io::ErrorKind::NotFound => Err(why),
        _ => Ok(()),
    }
}

/// Removes links that an earlier attempt created, because a fetch writes to existing files.
fn remove_links(dir: &Path) -> io::Result<()> {
    for path in LINKED.into_iter().flat_map(|name| places(dir, name)) {
        if fs::symlink_metadata(&path).is_ok_and(|meta| meta.nlink() > 1) {
            fs::remove_file(path)?;
        }
    }
    Ok(())
}

/// The paths of a file, complete and incomplete.
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
                let synced = || fs::File::open(&link)?.sync_all();
                let copied = fs::copy(file, &link).and_then(|_| synced());
                if copied.is_err() {
                    // The length must not be taken for data that is on the disk.
                    let _ = fs::remove_file(&link);
                }
                copied?;
            }
            linked => linked?,
        }
    }
    sync_dir(dir)
}

/// Incoming bases, each with the time of the last attempt.
fn incomplete(incoming: &Path) -> io::Result<Vec<(SystemTime, String)>> {
    let entries = match fs::read_dir(incoming) {
        Err(why) if why.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry?;
        if let Some(base) = entry
            .file_name()
            .to_str()
            .and_then(|name| name.strip_prefix(PREFIX))
        {
            found.push((entry.metadata()?.modified()?, base.to_owned()));
        }
    }
    Ok(found)
}

/// The bases to remove, oldest first. Among those that no move uses: the old ones, and those in excess of `most`,
/// counting the used ones.
fn surplus(
    mut found: Vec<(SystemTime, String)>,
    used: &BTreeSet<String>,
    most: usize,
    now: SystemTime,
) -> Vec<String> {
    found.retain(|(_, base)| !used.contains(base));
    found.sort();
    let beyond = (found.len() + used.len()).saturating_sub(most);
    let is_old = |changed| now.duration_since(changed).unwrap_or_default() > KEPT_FOR;
    let all = found.into_iter().enumerate();
    let surplus = all.filter(|(at, (changed, _))| *at < beyond || is_old(*changed));
    surplus.map(|(_, (_, base))| base).collect()
}

/// Runs a closure on a directory in a blocking thread.
pub(super) async fn in_dir<T: Send + 'static>(
    dir: PathBuf,
    work: impl FnOnce(&Path) -> io::Result<T> + Send + 'static,
) -> Result<T, MoveError> {
    let path = dir.clone();
    let done = blocking(move || work(&dir)).await;
    done.map_err(|source| MoveError::Io { path, source })
}

#[cfg(test)]
mod tests {
    use model::{Bytes, SandboxId, hex};
    use sha2::{Digest, Sha256};

    use super::*;
    use crate::peers::{
        moves::tests::{alone, offer, with_reserve},
        transfer::{FileSum, TransferError},
    };

    #[tokio::test]
    async fn only_old_incomplete_bases_that_no_move_uses_are_removed() {
        let state = tempfile::tempdir().unwrap();
        let moves = alone(state.path()).await;
        moves.clean_bases(KEPT).await;
        let old = SystemTime::now() - 2 * KEPT_FOR;
        let others = state.path().join("incoming/i123");
        let dirs = ["old", "new", "used"].map(|base| moves.base_dir(base));
        for dir in [&dirs[0], &dirs[1], &dirs[2], &others] {
            fs::create_dir_all(dir).unwrap();
        }
        for dir in [&dirs[0], &dirs[2], &others] {
            fs::File::open(dir).unwrap().set_modified(old).unwrap();
        }
        let turn = moves.0.bases.turn("used").await;
        moves.clean_bases(KEPT).await;
        assert_eq!(dirs.each_ref().map(|dir| dir.exists()), [false, true, true]);
        drop(turn);
        moves.clean_bases(KEPT).await;
        assert_eq!(
            dirs.each_ref().map(|dir| dir.exists()),
            [false, true, false]
        );
        assert!(others.exists());
    }

    /// The files of a base that a sandbox booted from, and an offer that needs it.
    fn fetched(moves: &Moves, id: u8) -> (Offer, PathBuf) {
        let dir = moves.base_dir(&id.to_string());
        private_dir(&dir).unwrap();
        let mut sum = Sha256::new();
        for name in LINKED {
            fs::write(dir.join(name), [id]).unwrap();
            sum.update(1_u64.to_le_bytes());
            sum.update(hex(&Sha256::digest([id])));
        }
        let offer = offer(&SandboxId::from_random([id; 19]), hex(&sum.finalize()), 4);
        private_dir(&moves.0.incoming.join(offer.sandbox.as_str())).unwrap();
        (offer, dir)
    }

    #[tokio::test]
    async fn a_fetched_base_is_removed_for_its_content_and_not_for_an_error_of_the_disk() {
        let state = tempfile::tempdir().unwrap();
        let moves = alone(state.path()).await;
        let images = state.path().join("images");
        let (offer, dir) = fetched(&moves, 1);
        moves.accept(&offer, dir.clone()).await.unwrap();
        let links = moves.0.incoming.join(offer.sandbox.as_str()).join("base");
        assert!(links.join(ROOT).exists() && !dir.exists());

        let (offer, dir) = fetched(&moves, 2);
        fs::write(dir.join(ROOT), "other").unwrap();
        let refused = moves.accept(&offer, dir.clone()).await.unwrap_err();
        assert!(!dir.exists(), "{refused}");

        let (offer, dir) = fetched(&moves, 3);
        fs::write(dir.join("memory"), "none of it").unwrap();
        let refused = moves.accept(&offer, dir.clone()).await.unwrap_err();
        assert!(!dir.exists(), "{refused}");

        // The rename to its final path fails with ENOTDIR.
        let (offer, dir) = fetched(&moves, 4);
        let place = images.join(&offer.needs.base);
        fs::write(&place, "in the way").unwrap();
        let failed = moves.accept(&offer, dir.clone()).await.unwrap_err();
        assert!(dir.join(ROOT).exists(), "{failed}");
        fs::remove_file(place).unwrap();
        moves.accept(&offer, dir.clone()).await.unwrap();

        // The file cannot be read during the check: EISDIR.
        let (offer, dir) = fetched(&moves, 5);
        fs::remove_file(dir.join(ROOT)).unwrap();
        fs::create_dir(dir.join(ROOT)).unwrap();
        let failed = moves.accept(&offer, dir.clone()).await.unwrap_err();
        assert!(dir.join(ROOT).exists(), "{failed}");
    }

    #[test]
    fn the_oldest_bases_beyond_four_are_removed_and_none_that_a_move_uses() {
        let now = SystemTime::now();
        let found: Vec<_> = (0..6)
            .map(|n| (now - Duration::from_secs(60 - n), n.to_string()))
            .collect();
        let removed = |used: &[&str], most| {
            let used = used.iter().map(|base| (*base).to_owned()).collect();
            surplus(found.clone(), &used, most, now).concat()
        };
        assert_eq!(removed(&[], KEPT), "01");
        assert_eq!(removed(&["0"], KEPT), "12");
        // A base that is about to be fetched has no directory yet.
        assert_eq!(removed(&["0", "new"], KEPT), "123");
        assert_eq!(removed(&["0", "1", "2", "3", "new"], KEPT), "45");
        assert_eq!(removed(&["5"], 0), "01234");
        assert_eq!(removed(&[], 6), "");
    }

    #[tokio::test]
    async fn incomplete_bases_are_removed_if_a_move_has_no_space() {
        let state = tempfile::tempdir().unwrap();
        let moves = with_reserve(state.path(), Bytes(u64::MAX)).await;
        let dirs = ["1", "2"].map(|base| moves.base_dir(base));
        for dir in &dirs {
            fs::create_dir_all(dir).unwrap();
        }
        let file = state.path().join("file");
        fs::write(&file, "x").unwrap();
        let sum = FileSum::of("layer", &fs::File::open(file).unwrap()).unwrap();
        let list = FileList::try_from(vec![sum]).unwrap();
        let _turn = moves.0.bases.turn("1").await;
        let to = state.path().join("to");
        let full = moves
            .fetch_list(&"a".parse().unwrap(), "k", &list, &to)
            .await;
        let full = full.unwrap_err();
        assert!(
            matches!(full, MoveError::Transfer(TransferError::NoSpace { .. })),
            "{full:?}"
        );
        assert_eq!(dirs.each_ref().map(|dir| dir.exists()), [true, false]);
    }

    #[tokio::test]
    async fn moves_wait_for_each_other_only_for_the_same_base() {
        let bases = Bases::default();
        let first = bases.turn("1").await;
        let (long, short) = (Duration::from_secs(10), Duration::from_millis(20));
        // The node that sends the first base may be stopped.
        let other = tokio::time::timeout(long, bases.turn("2")).await;
        drop(other.unwrap());
        let mut second = Box::pin(bases.turn("1"));
        let waits = tokio::time::timeout(short, &mut second).await;
        assert!(waits.is_err() && bases.try_turn("1").is_none());
        drop(first);
        // It is in use while a move waits for it.
        assert!(bases.try_turn("1").is_none());
        drop(tokio::time::timeout(long, second).await.unwrap());
        assert!(bases.try_turn("1").is_some());
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
        // The next attempt may fetch it and must not write to the image.
        remove_links(&base).unwrap();
        assert!(!base.join(ROOT).exists());
        fs::write(base.join(ROOT), "part").unwrap();
        remove_links(&base).unwrap();
        assert!(base.join(ROOT).exists());
    }
}
