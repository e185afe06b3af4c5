//! Files of the state directory: [`journal::durable`], and copies of large files.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::Path,
};

use vmm_control::template::copy_sparse;

pub use journal::durable::*;

/// Disk space that a file occupies, in bytes. Zero if it does not exist.
pub fn allocated(path: &Path) -> u64 {
    fs::metadata(path).map_or(0, |meta| meta.blocks() * 512)
}

/// Hard-links a file to a new path after resolving symbolic links. If the path is on another file system, copies the
/// file without its holes.
///
/// # Errors
/// Returns an error that names `from`.
pub fn link_or_copy(from: &Path, to: &Path) -> io::Result<()> {
    let named = |e: io::Error| io::Error::new(e.kind(), format!("{}: {e}", from.display()));
    let from = from.canonicalize().map_err(named)?;
    if !fs::metadata(&from).map_err(named)?.is_file() {
        return Err(named(io::Error::other("it is not a regular file")));
    }
    match fs::hard_link(&from, to) {
        Err(e) if e.kind() == io::ErrorKind::CrossesDevices => copy(&from, to),
        linked => linked,
    }
    .map_err(named)
}

/// Copies a file to a new one, keeping its holes.
///
/// # Errors
/// Returns the errors of the files; the new one is then incomplete.
pub fn copy(from: &Path, to: &Path) -> io::Result<()> {
    let from = File::open(from)?;
    let mut options = OpenOptions::new();
    let to = options.write(true).create_new(true).mode(0o600).open(to)?;
    copy_sparse(&from, &to, from.metadata()?.len())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn a_copy_has_the_same_bytes_and_holes() {
        let dir = tempfile::tempdir().unwrap();
        let (from, to) = (dir.path().join("from"), dir.path().join("to"));
        let file = File::create(&from).unwrap();
        let length: u64 = 64 << 20;
        file.set_len(length).unwrap();
        for (at, byte) in [(0, 1), (5 << 20, 2), (length - 3, 3)] {
            file.write_all_at(&[byte; 3], at).unwrap();
        }
        file.write_all_at(&[4; 3 << 20], 20 << 20).unwrap();
        copy(&from, &to).unwrap();
        assert!(fs::read(&from).unwrap() == fs::read(&to).unwrap());
        assert!(allocated(&to) < length / 4, "{}", allocated(&to));
        assert!(copy(&from, &to).is_err(), "it replaces a file");
        assert!(link_or_copy(dir.path(), &dir.path().join("other")).is_err());
        assert_eq!(allocated(&dir.path().join("none")), 0);
    }
}
