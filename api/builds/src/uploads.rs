//! Uploaded archives for COPY, below the server's state directory: `<template>/<hash>`. The hash comes from the client
//! and does not cover the archive's bytes, so an archive is used only for the template that it was uploaded for.
//!
//! An archive is written to a temporary file and renamed, so a reader sees either all of it or nothing. All archives
//! together have a quota: the least recently used ones are removed to make room.

mod ledger;

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use http_body_util::BodyExt;
use hyper::body::{Body, Bytes};
use tokio::{fs, io::AsyncWriteExt};

use super::{grant::Grant, random::random_hex};
use ledger::{Charge, Ledger};

/// Number of bytes after which the free space is checked again.
const SPACE_STEP: u64 = 16 << 20;
/// Maximum size of one archive.
const MAX_ARCHIVE: u64 = 8 << 30;
/// Suffix of unfinished archives.
const DRAFT: &str = ".draft";

/// Why an archive was not stored.
#[derive(Debug, thiserror::Error)]
pub enum UploadError {
    #[error("the archive has more than {0} bytes")]
    TooLarge(u64),
    /// Only the reserve of the disk is left.
    #[error("no space on disk for the archive: delete templates or enlarge the disk")]
    NoSpace,
    /// The archives of other builds, and uploads in progress, take up all the space.
    #[error(
        "the archive does not fit into the space of {0} bytes for all archives (builds.uploads)"
    )]
    Quota(u64),
    /// The client's connection ended, or its body is malformed.
    #[error("the upload was interrupted: {0}")]
    Interrupted(String),
    #[error("cannot store the archive")]
    Io(#[source] io::Error),
}

/// The directory of archives.
#[derive(Clone, Debug)]
pub struct Uploads {
    dir: PathBuf,
    /// Disk space that is kept free.
    reserve: u64,
    ledger: Arc<Ledger>,
}

impl Uploads {
    /// Opens the directory and removes files that the previous server did not finish. Drafts that a process is still
    /// receiving stay. `quota` is the space for all archives in bytes.
    ///
    /// # Errors
    /// Returns an error if the directory cannot be created or read.
    pub fn open(dir: PathBuf, reserve: u64, quota: u64) -> io::Result<Self> {
        pool::durable::private_dir(&dir)?;
        let mut found = Vec::new();
        for template in std::fs::read_dir(&dir)? {
            for entry in std::fs::read_dir(template?.path())? {
                let path = entry?.path();
                if !path.to_string_lossy().ends_with(DRAFT) {
                    found.push(path);
                } else if std::fs::File::open(&path)?.try_lock().is_ok() {
                    std::fs::remove_file(path)?;
                }
            }
        }
        let ledger = Arc::new(Ledger::new(quota, found));
        Ok(Self {
            dir,
            reserve,
            ledger,
        })
    }

    /// Maximum size of one archive in bytes.
    #[must_use]
    pub fn max_archive(&self) -> u64 {
        self.ledger.quota().min(MAX_ARCHIVE)
    }

    /// Whether the archive of a hash exists. Marks it as used. The arguments must be checked as for [`Uploads::path`].
    #[must_use]
    pub fn has(&self, template_id: &str, hash: &str) -> bool {
        let path = self.path(template_id, hash);
        self.ledger.touch(&path);
        path.exists()
    }

    /// The path of the archive of a hash, whether or not it exists. Both arguments must be checked: an id of this
    /// server and a hash of hex digits.
    #[must_use]
    pub fn path(&self, template_id: &str, hash: &str) -> PathBuf {
        self.dir.join(template_id).join(hash)
    }

    /// Stores a body under the template and hash of a verified grant, replacing an existing archive.
    ///
    /// # Errors
    /// Returns [`UploadError`]. Nothing of the body is kept then.
    pub async fn receive<B>(&self, grant: &Grant, body: B) -> Result<(), UploadError>
    where
        B: Body<Data = Bytes> + Unpin,
        B::Error: std::fmt::Display,
    {
        let place = self.path(&grant.template_id, &grant.hash);
        let dir = place.parent().unwrap_or(&self.dir);
        fs::create_dir_all(dir).await.map_err(UploadError::Io)?;
        let unique = random_hex::<8>().map_err(|why| UploadError::Io(why.into()))?;
        let draft = Draft(dir.join(format!("{unique}{DRAFT}")));
        let charge = self.write(&draft.0, grant.max_bytes, body).await?;
        fs::rename(&draft.0, &place).await.map_err(of_disk)?;
        charge.keep(place);
        Ok(())
    }

    async fn write<B>(&self, path: &Path, most: u64, mut body: B) -> Result<Charge, UploadError>
    where
        B: Body<Data = Bytes> + Unpin,
        B::Error: std::fmt::Display,
    {
        let file = std::fs::File::create_new(path).map_err(of_disk)?;
        // Locked while this process receives the archive.
        file.lock().map_err(UploadError::Io)?;
        let mut file = fs::File::from_std(file);
        let mut charge = Charge::new(&self.ledger);
        let (mut written, mut examined_at) = (0, 0);
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|why| UploadError::Interrupted(why.to_string()))?;
            let Ok(data) = frame.into_data() else {
                continue;
            };
            written += data.len() as u64;
            if written > most {
                return Err(UploadError::TooLarge(most));
            }
            if written >= examined_at {
                self.check_space(path, data.len() as u64)?;
                examined_at = written + SPACE_STEP;
            }
            if !charge.grow_to(written) {
                return Err(UploadError::Quota(self.ledger.quota()));
            }
            file.write_all(&data).await.map_err(of_disk)?;
        }
        file.sync_all().await.map_err(of_disk)?;
        Ok(charge)
    }

    /// Checks that at least [`SPACE_STEP`] and `more` bytes are free above the reserve.
    fn check_space(&self, path: &Path, more: u64) -> Result<(), UploadError> {
        let dir = path.parent().unwrap_or(&self.dir);
        let stat = nix::sys::statvfs::statvfs(dir).map_err(|why| UploadError::Io(why.into()))?;
        let free = stat.blocks_available().saturating_mul(stat.fragment_size());
        if free < self.reserve.saturating_add(SPACE_STEP).saturating_add(more) {
            return Err(UploadError::NoSpace);
        }
        Ok(())
    }

    /// Removes all archives of a template.
    ///
    /// # Errors
    /// Returns an error if they exist and cannot be removed.
    pub async fn forget(&self, template_id: &str) -> io::Result<()> {
        let dir = self.dir.join(template_id);
        self.ledger.forget(&dir);
        match fs::remove_dir_all(dir).await {
            Err(why) if why.kind() != io::ErrorKind::NotFound => Err(why),
            _ => Ok(()),
        }
    }
}

fn of_disk(why: io::Error) -> UploadError {
    if pool::is_full(&why) {
        UploadError::NoSpace
    } else {
        UploadError::Io(why)
    }
}

/// Removes an unfinished archive when dropped, also if the client's connection breaks.
struct Draft(PathBuf);

impl Drop for Draft {
    fn drop(&mut self) {
        // The rename consumes the draft. The next server removes a draft that a crash left.
        let _ = std::fs::remove_file(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http_body_util::Full;
    use hyper::body::Frame;
    use std::pin::Pin;
    use std::task::{Context, Poll};

    fn grant(max_bytes: u64) -> Grant {
        Grant {
            template_id: "abc".to_owned(),
            hash: "0".repeat(64),
            expires_unix_s: 0,
            max_bytes,
        }
    }

    fn files(dir: &Path) -> usize {
        std::fs::read_dir(dir.join("abc")).map_or(0, Iterator::count)
    }

    #[tokio::test]
    async fn an_archive_is_kept_whole_and_replaced_by_the_next() {
        let dir = tempfile::tempdir().unwrap();
        let uploads = Uploads::open(dir.path().to_owned(), 0, 1 << 30).unwrap();
        for text in ["first", "x"] {
            let body = Full::new(Bytes::from(text));
            uploads.receive(&grant(5), body).await.unwrap();
            let place = uploads.path("abc", &"0".repeat(64));
            assert_eq!(std::fs::read_to_string(place).unwrap(), text);
        }
        assert_eq!(files(dir.path()), 1);
        uploads.forget("abc").await.unwrap();
        uploads.forget("abc").await.unwrap();
        assert_eq!(files(dir.path()), 0);
    }

    #[tokio::test]
    async fn nothing_stays_of_an_archive_that_is_too_large_or_has_no_space() {
        let dir = tempfile::tempdir().unwrap();
        let body = || Full::new(Bytes::from_static(b"sixsix"));
        let uploads = Uploads::open(dir.path().to_owned(), 0, 1 << 30).unwrap();
        let found = uploads.receive(&grant(5), body()).await;
        assert!(matches!(found, Err(UploadError::TooLarge(5))), "{found:?}");
        let full = Uploads::open(dir.path().to_owned(), u64::MAX, 1 << 30).unwrap();
        let found = full.receive(&grant(6), body()).await;
        assert!(matches!(found, Err(UploadError::NoSpace)), "{found:?}");
        assert_eq!(files(dir.path()), 0);
    }

    #[tokio::test]
    async fn nothing_stays_of_an_interrupted_archive() {
        struct Broken(bool);
        impl Body for Broken {
            type Data = Bytes;
            type Error = io::Error;
            fn poll_frame(
                mut self: Pin<&mut Self>,
                _: &mut Context<'_>,
            ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
                let is_first = !std::mem::replace(&mut self.0, true);
                Poll::Ready(Some(if is_first {
                    Ok(Frame::data(Bytes::from_static(b"a")))
                } else {
                    Err(io::ErrorKind::ConnectionReset.into())
                }))
            }
        }
        let dir = tempfile::tempdir().unwrap();
        let uploads = Uploads::open(dir.path().to_owned(), 0, 1 << 30).unwrap();
        let found = uploads.receive(&grant(5), Broken(false)).await;
        assert!(matches!(found, Err(UploadError::Interrupted(_))));
        assert_eq!(files(dir.path()), 0);
    }

    #[test]
    fn drafts_of_a_former_server_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("abc")).unwrap();
        std::fs::write(dir.path().join("abc/x.draft"), "").unwrap();
        std::fs::write(dir.path().join("abc/kept"), "").unwrap();
        Uploads::open(dir.path().to_owned(), 0, 1 << 30).unwrap();
        assert_eq!(files(dir.path()), 1);
        assert!(dir.path().join("abc/kept").exists());
    }
}
