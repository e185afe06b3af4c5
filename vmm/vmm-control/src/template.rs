//! A template whose memory is loaded into a tmpfs of huge pages.
//!
//! Clones map the memory file privately. On a disk file system they share its page cache. In a tmpfs with huge pages
//! the host also maps the guest kernel's text in 2 MiB pages, and one fault of a clone maps a whole range. The tmpfs is
//! not mounted anywhere: it is attached to a descriptor of this process, is reached through /proc, and disappears when
//! the process ends.

use std::{
    fs::File,
    io,
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::fs::{FileExt, symlink},
    },
    path::{Path, PathBuf},
};

use model::{MANIFEST_NAME, template_file};
use nix::unistd::{Whence, lseek};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_string, fsmount,
    fsopen,
};

/// Longest memory file that is loaded, in bytes: the largest guest and the monitor's region.
const MAX_MEMORY_FILE: u64 = model::MAX_MEMORY.0 + (64 << 20);
/// Page size of loaded templates, in bytes.
const HUGE_PAGE: u64 = 2 << 20;

/// Reasons why a template could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error("cannot read the template file {path}")]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// The kernel does not support `huge=always`, or this process is not root.
    #[error("cannot create a tmpfs of huge pages")]
    Tmpfs(#[source] io::Error),
    /// Copying failed, usually because the host is short of memory.
    #[error("cannot copy the template's memory into huge pages")]
    Copy(#[source] io::Error),
}

/// A loaded template. Dropping it does not affect running clones, which hold their own references.
#[derive(Debug)]
pub struct LoadedTemplate {
    mount: OwnedFd,
}

impl LoadedTemplate {
    /// Copies the template's memory file into the tmpfs, and adds symbolic links to its other files. The template must
    /// not be a diff.
    ///
    /// # Errors
    /// Returns [`LoadError`] if a file cannot be read, the tmpfs cannot be created, or memory is short. After
    /// [`LoadError::Tmpfs`] a caller can clone from `dir` itself.
    pub fn load(dir: &Path) -> Result<Self, LoadError> {
        let read = |path: &Path| {
            let path = path.to_owned();
            move |source| LoadError::Read { path, source }
        };
        let dir = dir.canonicalize().map_err(read(dir))?;
        let memory = dir.join(template_file::MEMORY);
        let from = File::open(&memory).map_err(read(&memory))?;
        let len = from.metadata().map_err(read(&memory))?.len();
        if len > MAX_MEMORY_FILE {
            let long = format!("the file has {len} bytes, the limit is {MAX_MEMORY_FILE}");
            return Err(read(&memory)(io::Error::other(long)));
        }
        let this = Self {
            mount: tmpfs().map_err(|e| LoadError::Tmpfs(e.into()))?,
        };
        for name in [
            MANIFEST_NAME,
            template_file::STATE,
            template_file::LAYER,
            template_file::WORKING_SET,
        ] {
            symlink(dir.join(name), this.dir().join(name)).map_err(LoadError::Copy)?;
        }
        File::create(this.dir().join(template_file::MEMORY))
            .and_then(|to| copy_sparse(&from, &to, len))
            .map_err(LoadError::Copy)?;
        Ok(this)
    }

    /// The directory to clone from. It exists as long as this value.
    #[must_use]
    pub fn dir(&self) -> PathBuf {
        let fd = self.mount.as_fd().as_raw_fd();
        PathBuf::from(format!("/proc/{}/fd/{fd}", std::process::id()))
    }
}

fn tmpfs() -> rustix::io::Result<OwnedFd> {
    let context = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_string(context.as_fd(), "huge", "always")?;
    fsconfig_set_string(context.as_fd(), "mode", "0700")?;
    fsconfig_create(context.as_fd())?;
    fsmount(
        context.as_fd(),
        FsMountFlags::FSMOUNT_CLOEXEC,
        MountAttrFlags::MOUNT_ATTR_NOSUID
            | MountAttrFlags::MOUNT_ATTR_NODEV
            | MountAttrFlags::MOUNT_ATTR_NOEXEC,
    )
}

/// Memory in bytes that [`LoadedTemplate::load`] takes for the template in `dir`: the huge pages with data.
///
/// # Errors
/// Returns an error if the memory file cannot be read.
pub fn loaded_size(dir: &Path) -> io::Result<u64> {
    let file = File::open(dir.join(template_file::MEMORY))?;
    let len = file.metadata()?.len();
    let mut size = 0;
    let mut at = 0;
    while let Some((data, hole)) = next_data(&file, at, len)? {
        // Extents may begin in the last page of the previous extent.
        let from = (data - data % HUGE_PAGE).max(at);
        at = hole.next_multiple_of(HUGE_PAGE);
        size += at - from;
    }
    Ok(size)
}

/// The first data at or after `at` and before `len`, as its start and end. `None` if there is none.
///
/// # Errors
/// Returns the errors of lseek(2).
pub fn next_data(file: &File, at: u64, len: u64) -> io::Result<Option<(u64, u64)>> {
    if at >= len {
        return Ok(None);
    }
    let data = match lseek(file, at.cast_signed(), Whence::SeekData) {
        Ok(data) => data.cast_unsigned(),
        Err(nix::errno::Errno::ENXIO) => return Ok(None),
        Err(e) => return Err(e.into()),
    };
    let hole = lseek(file, data.cast_signed(), Whence::SeekHole)?.cast_unsigned();
    Ok((data < len).then_some((data, hole.min(len))))
}

/// Copies the data in the first `len` bytes and keeps holes. `to` must be empty. The length is fixed, because a VMM may
/// have the file open and extend it during the copy.
///
/// # Errors
/// Returns the errors of reading and writing; `to` is then incomplete.
pub fn copy_sparse(from: &File, to: &File, len: u64) -> io::Result<()> {
    const CHUNK: usize = 2 << 20;
    to.set_len(len)?;
    let mut buffer = vec![0; CHUNK];
    let mut at = 0;
    while let Some((data, hole)) = next_data(from, at, len)? {
        at = data;
        while at < hole {
            let n = usize::try_from(hole - at).map_or(CHUNK, |left| left.min(CHUNK));
            from.read_exact_at(&mut buffer[..n], at)?;
            to.write_all_at(&buffer[..n], at)?;
            at += n as u64;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn a_loaded_template_has_the_same_bytes_and_leaves_no_mount() {
        if !nix::unistd::geteuid().is_root() {
            println!("skipped: only root can mount a tmpfs");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        for name in [MANIFEST_NAME, template_file::STATE, template_file::LAYER] {
            std::fs::write(dir.path().join(name), name).unwrap();
        }
        let memory = File::create(dir.path().join(template_file::MEMORY)).unwrap();
        memory.set_len(8 << 20).unwrap();
        memory.write_all_at(b"here", 5 << 20).unwrap();
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        let loaded = LoadedTemplate::load(dir.path()).unwrap();
        let copy = std::fs::read(loaded.dir().join(template_file::MEMORY)).unwrap();
        assert_eq!(copy.len(), 8 << 20);
        assert_eq!(&copy[5 << 20..(5 << 20) + 4], b"here");
        let state = std::fs::read_to_string(loaded.dir().join(template_file::STATE)).unwrap();
        assert_eq!(state, template_file::STATE);
        // The extent lies in one huge page.
        let taken = std::fs::metadata(loaded.dir().join(template_file::MEMORY)).unwrap();
        assert_eq!(taken.blocks() * 512, 2 << 20);
        assert_eq!(loaded_size(dir.path()).unwrap(), 2 << 20);
        assert_eq!(
            mounts,
            std::fs::read_to_string("/proc/self/mountinfo").unwrap()
        );
    }
}
