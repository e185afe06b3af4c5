//! Reads a template's memory ahead. Without this, each page that a new VM touches first causes a separate read that the
//! VM waits for.

use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
};

use model::template_file;
use nix::{
    fcntl::{PosixFadviseAdvice, posix_fadvise},
    unistd::{Whence, lseek},
};

/// Most disks read at most this much for one call.
const CHUNK: i64 = 1 << 20;

/// Begins to read the memory files in these directories into the page cache, on a thread.
pub(super) fn begin(dirs: Vec<PathBuf>) {
    let read = move || {
        for dir in dirs {
            if let Err(error) = read_ahead(&dir.join(template_file::MEMORY)) {
                tracing::debug!(dir = %dir.display(), %error, "cannot read a template's memory ahead");
            }
        }
    };
    // If no thread can be started, the VM reads the pages itself.
    let _ = std::thread::Builder::new()
        .name("read-ahead".to_owned())
        .spawn(read);
}

/// Makes the kernel read all data of a file. Returns when the reads are queued.
fn read_ahead(path: &Path) -> io::Result<()> {
    let file = File::open(path)?;
    let len = i64::try_from(file.metadata()?.len()).unwrap_or(i64::MAX);
    let mut at = 0;
    while at < len {
        at = match lseek(&file, at, Whence::SeekData) {
            Ok(data) => data,
            Err(nix::errno::Errno::ENXIO) => return Ok(()),
            Err(e) => return Err(e.into()),
        };
        let hole = lseek(&file, at, Whence::SeekHole)?.min(len);
        while at < hole {
            let chunk = CHUNK.min(hole - at);
            posix_fadvise(&file, at, chunk, PosixFadviseAdvice::POSIX_FADV_WILLNEED)?;
            at += chunk;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::{
        io::IoSliceMut,
        time::{Duration, Instant},
    };

    use rustix::io::{ReadWriteFlags, preadv2};

    use super::*;

    const LEN: u64 = 8 << 20;

    /// Whether all data of the file is in the page cache.
    fn is_cached(file: &File) -> bool {
        (0..LEN).step_by(4096).all(|at| {
            let mut byte = [0];
            let mut parts = [IoSliceMut::new(&mut byte)];
            preadv2(file, &mut parts, at, ReadWriteFlags::NOWAIT).is_ok()
        })
    }

    #[test]
    fn memory_that_is_read_ahead_is_in_the_page_cache() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let path = dir.path().join(template_file::MEMORY);
        std::fs::write(&path, vec![7; usize::try_from(LEN).unwrap()]).unwrap();
        let file = File::open(&path).unwrap();
        file.sync_all().unwrap();
        posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED).unwrap();
        begin(vec![dir.path().join("none"), dir.path().to_owned()]);
        let deadline = Instant::now() + Duration::from_secs(60);
        while !is_cached(&file) {
            assert!(Instant::now() < deadline, "it is not read");
            std::thread::yield_now();
        }
    }
}
