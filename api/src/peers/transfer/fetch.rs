//! Fetches files of another node into a local directory.

use std::{
    fs::{self, File, OpenOptions},
    future::Future,
    io,
    os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::Arc,
};

use axum::body::Bytes;
use cluster::NodeId;
use hyper::StatusCode;
use nix::libc::O_NOFOLLOW;
use pool::durable::{private_dir, sync_dir};
use tasks::{boxed, on_thread};
use tokio::task::JoinSet;

use super::{
    CHUNK, FileList, FileSum, PeerError, Rate, TransferError, TransferLimits,
    list::{Sum, sum_of},
};

/// Suffix of incomplete files.
pub(crate) const PART: &str = ".part";
/// Chunks of one fetch that are requested concurrently.
const AT_ONCE: usize = 2;
/// How often a chunk is requested if its content is wrong.
const TRIES: usize = 2;
/// Blocks of zeros of this size stay holes.
const BLOCK: usize = 64 << 10;

/// A node that serves requests. Tests use their own implementation.
pub(crate) trait Source: Clone + Send + Sync + 'static {
    fn node(&self) -> &NodeId;
    /// The response to a GET, of at most `most` bytes.
    fn get(
        &self,
        path: String,
        most: usize,
    ) -> impl Future<Output = Result<(StatusCode, Bytes), PeerError>> + Send;
}

/// A fetch to run.
#[derive(Debug)]
pub(crate) struct Fetch<'a> {
    /// Key of the offer.
    pub(crate) key: &'a str,
    pub(crate) list: &'a FileList,
    /// Target directory, which is created and has no other use. Complete and incomplete files of the list that exist
    /// there are used if their content matches, and replaced otherwise.
    pub(crate) dir: &'a Path,
}

impl Fetch<'_> {
    /// Returns when all files are in the directory, verified and synced. Returns the number of bytes received.
    ///
    /// # Errors
    /// Returns [`TransferError`]. Data fetched so far is kept for another attempt.
    pub(crate) async fn run(
        &self,
        source: &impl Source,
        rate: &Rate,
        limits: TransferLimits,
    ) -> Result<u64, TransferError> {
        // For all files, so that a full disk is found before the first chunk.
        let (dir, list) = (self.dir.to_owned(), self.list.clone());
        blocking(move || {
            let io = |source| TransferError::Io {
                path: dir.clone(),
                source,
            };
            private_dir(&dir).map_err(io)?;
            let missing = list.files().iter().map(|file| missing(&dir, file));
            check_space(&dir, missing.sum(), limits)
        })
        .await?;
        let mut sent = 0;
        for file in self.list.files() {
            sent += self.file(source, file, rate, limits).await?;
        }
        Ok(sent)
    }

    async fn file(
        &self,
        source: &impl Source,
        file: &FileSum,
        rate: &Rate,
        limits: TransferLimits,
    ) -> Result<u64, TransferError> {
        let (dir, of) = (self.dir.to_owned(), file.clone());
        let opened = blocking(move || {
            let part = Part::open(&dir, of)?;
            let missing = part.missing.iter();
            let needed: u64 = missing.map(|chunk| part.sum.range(*chunk).1 as u64).sum();
            check_space(&dir, needed, limits)?;
            Ok((Arc::new(part), needed))
        });
        let (part, needed) = opened.await?;
        let (mut fetches, mut missing) = (JoinSet::new(), part.missing.clone().into_iter());
        let mut failed = None;
        loop {
            while failed.is_none()
                && fetches.len() < AT_ONCE
                && let Some(chunk) = missing.next()
            {
                let (_, len) = file.range(chunk);
                rate.take(len as u64).await;
                let (source, part) = (source.clone(), Arc::clone(&part));
                let path = format!("/cluster/files/{}/{}/{chunk}", self.key, file.name);
                let key = self.key.to_owned();
                fetches.spawn(boxed(async move {
                    part.fetch(&source, &key, path, chunk).await
                }));
            }
            match fetches.join_next().await {
                None => break,
                // Chunks in flight must finish: nothing may write to the file when the next attempt starts.
                Some(Ok(done)) => failed = failed.or(done.err()),
                Some(Err(why)) => failed = failed.or(Some(part.failed(why.into()))),
            }
        }
        if let Some(why) = failed {
            return Err(why);
        }
        blocking(move || part.publish()).await?;
        Ok(needed)
    }
}

/// An incomplete file.
#[derive(Debug)]
struct Part {
    file: File,
    path: PathBuf,
    place: PathBuf,
    sum: FileSum,
    /// Chunks whose content differs from the list.
    missing: Vec<usize>,
    /// Everything not fetched yet is a hole.
    is_new: bool,
}

impl Part {
    /// Opens the file of an earlier attempt and finds out which chunks are missing.
    fn open(dir: &Path, sum: FileSum) -> Result<Self, TransferError> {
        let place = dir.join(&sum.name);
        let path = dir.join(format!("{}{PART}", sum.name));
        let failed = |source| TransferError::Io {
            path: path.clone(),
            source,
        };
        private_dir(dir).map_err(failed)?;
        // The file may be complete but from a different list.
        match fs::rename(&place, &path) {
            Err(why) if why.kind() != io::ErrorKind::NotFound => return Err(failed(why)),
            _ => {}
        }
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        options.mode(0o600).custom_flags(O_NOFOLLOW);
        let file = options.open(&path).map_err(failed)?;
        let had = file.metadata().map_err(failed)?.len();
        let mut is_new = had == 0;
        file.set_len(sum.bytes).map_err(failed)?;
        let data = sum.data();
        let missing = if is_new {
            data
        } else {
            let missing = sum.wrong_chunks(&file).map_err(failed)?;
            // Chunks of zeros are not fetched. If such a chunk has data here, start with an empty file.
            let (left, chunks) = (missing.len(), sum.chunks.len());
            tracing::info!(path = %path.display(), missing = left, chunks, "resuming the fetch of a file from another node");
            is_new = missing
                .iter()
                .any(|chunk| data.binary_search(chunk).is_err());
            if is_new {
                let emptied = file.set_len(0).and_then(|()| file.set_len(sum.bytes));
                emptied.map_err(failed)?;
                data
            } else {
                missing
            }
        };
        Ok(Self {
            file,
            path,
            place,
            sum,
            missing,
            is_new,
        })
    }

    async fn fetch(
        self: Arc<Self>,
        source: &impl Source,
        key: &str,
        path: String,
        chunk: usize,
    ) -> Result<(), TransferError> {
        let (begin, len) = self.sum.range(chunk);
        for _ in 0..TRIES {
            let (status, bytes) = source.get(path.clone(), len).await?;
            let node = source.node().clone();
            match status {
                StatusCode::OK => {}
                StatusCode::NOT_FOUND => {
                    let key = key.to_owned();
                    return Err(TransferError::NotOffered { node, key });
                }
                other => {
                    let why = format!("status {other} for a chunk");
                    return Err(PeerError::Malformed { node, why }.into());
                }
            }
            let (part, wanted) = (Arc::clone(&self), self.sum.chunks[chunk]);
            let written = move || part.write(&bytes, begin, len, &wanted);
            if blocking(written).await? {
                return Ok(());
            }
        }
        Err(TransferError::Corrupt {
            node: source.node().clone(),
            file: self.sum.name.clone(),
            chunk,
        })
    }

    /// Returns `false` if the content does not match; nothing was written then.
    fn write(
        &self,
        bytes: &[u8],
        begin: u64,
        len: usize,
        wanted: &Sum,
    ) -> Result<bool, TransferError> {
        if bytes.len() != len || sum_of(bytes) != *wanted {
            return Ok(false);
        }
        let mut at = begin;
        for block in bytes.chunks(BLOCK) {
            if !self.is_new || block.iter().any(|byte| *byte != 0) {
                let written = self.file.write_all_at(block, at);
                written.map_err(|why| self.failed(why))?;
            }
            at += block.len() as u64;
        }
        Ok(true)
    }

    /// Syncs the file and renames it to its final name. If that fails, removes the file: after a failed sync the page
    /// cache may have chunks that are not on disk but look written, so the next attempt must not find them.
    fn publish(&self) -> Result<(), TransferError> {
        let dir = self.place.parent().unwrap_or(Path::new("/"));
        let synced = self.file.sync_all();
        let placed = synced.and_then(|()| fs::rename(&self.path, &self.place));
        placed.and_then(|()| sync_dir(dir)).map_err(|why| {
            self.remove();
            self.failed(why)
        })
    }

    fn remove(&self) {
        for path in [&self.path, &self.place] {
            match fs::remove_file(path) {
                Err(why) if why.kind() != io::ErrorKind::NotFound => {
                    tracing::error!(path = %path.display(), %why, "cannot remove a fetched file that could not be synced: remove it before the next attempt");
                }
                _ => {}
            }
        }
    }

    fn failed(&self, source: io::Error) -> TransferError {
        if pool::is_full(&source) {
            let needed = self.sum.size();
            return TransferError::NoSpace { needed };
        }
        TransferError::Io {
            path: self.path.clone(),
            source,
        }
    }
}

/// Upper limit of the bytes of a file that are not on disk.
fn missing(dir: &Path, file: &FileSum) -> u64 {
    let wanted: u64 = file.data().iter().map(|at| file.range(*at).1 as u64).sum();
    let part = format!("{}{PART}", file.name);
    let found = [file.name.as_str(), part.as_str()].map(|name| {
        let meta = fs::symlink_metadata(dir.join(name));
        meta.map_or(0, |meta| meta.blocks() * 512)
    });
    wanted.saturating_sub(found.iter().sum())
}

/// Checks that the remaining data leaves the reserve free.
fn check_space(dir: &Path, needed: u64, limits: TransferLimits) -> Result<(), TransferError> {
    let stat = nix::sys::statvfs::statvfs(dir).map_err(|why| TransferError::Io {
        path: dir.to_owned(),
        source: why.into(),
    })?;
    let free = stat.blocks_available().saturating_mul(stat.fragment_size());
    let with_reserve = needed
        .saturating_add(limits.disk_reserve.0)
        .saturating_add(CHUNK);
    if needed > 0 && free < with_reserve {
        let needed = model::Bytes(needed);
        return Err(TransferError::NoSpace { needed });
    }
    Ok(())
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, TransferError> + Send + 'static,
) -> Result<T, TransferError> {
    let lost = |why: tokio::task::JoinError| TransferError::Io {
        path: PathBuf::new(),
        source: why.into(),
    };
    on_thread(work).await.map_err(lost)?
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use super::*;

    #[test]
    fn a_file_that_was_not_synced_is_fetched_anew() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(format!("layer{PART}"));
        fs::write(&path, vec![7; usize::try_from(3 * CHUNK).unwrap()]).unwrap();
        let sum = FileSum::of("layer", &File::open(&path).unwrap()).unwrap();
        let mut part = Part::open(dir.path(), sum.clone()).unwrap();
        assert!(part.missing.is_empty(), "all of it was written");
        // A file whose fsync(2) fails: EINVAL.
        let (_reader, writer) = io::pipe().unwrap();
        part.file = OwnedFd::from(writer).into();
        let failed = part.publish().unwrap_err();
        assert!(matches!(failed, TransferError::Io { .. }), "{failed}");
        let again = Part::open(dir.path(), sum).unwrap();
        assert_eq!(again.missing, [0, 1, 2]);
    }
}
