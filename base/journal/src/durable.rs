//! Files and directories that survive a crash.

use std::{
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Read, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

/// The kind of crash that a write must survive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// A crash of the server process.
    Process,
    /// A crash of the server process or of the host. The file is synced, which is slow.
    Host,
}

/// Creates a directory, and missing parents, that only their owner may enter. An existing directory is not an error;
/// its mode is not changed.
///
/// # Errors
/// Returns an error if it cannot be created.
pub fn private_dir(dir: &Path) -> io::Result<()> {
    DirBuilder::new().mode(0o700).recursive(true).create(dir)
}

/// Reads a file.
///
/// # Errors
/// Returns an error if it cannot be read, or has more than `limit` bytes.
pub fn read_bounded(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(limit + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit {
        Err(io::Error::other("the file is too large"))
    } else {
        Ok(bytes)
    }
}

/// Replaces `dir/name` atomically. Only the owner may read the new file. A crash may leave an incomplete
/// `dir/name.new`.
///
/// # Errors
/// Returns an error if the new file cannot be written. The old file then remains.
pub fn replace(dir: &Path, name: &str, bytes: &[u8], durability: Durability) -> io::Result<()> {
    let draft = dir.join(format!("{name}.new"));
    let written = write_new(&draft, bytes, durability);
    if written.is_err() {
        // Frees the space of an incomplete file: the disk may be full.
        let _ = fs::remove_file(&draft);
    }
    written?;
    fs::rename(&draft, dir.join(name))?;
    match durability {
        Durability::Host => sync_dir(dir),
        Durability::Process => Ok(()),
    }
}

/// Writes a new file, after removing any file that a killed server left at `path`.
pub fn write_new(path: &Path, bytes: &[u8], durability: Durability) -> io::Result<()> {
    remove_file(path)?;
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)?;
    file.write_all(bytes)?;
    match durability {
        Durability::Host => file.sync_all(),
        Durability::Process => Ok(()),
    }
}

/// Prefix of incomplete directories: new ones that are being written, and old ones that are being removed. They are
/// removed when their parent directory is opened.
pub const DRAFT: &str = ".new-";

/// Renames a directory, so that it cannot be found under its name while its files are removed. Returns the new path.
pub fn set_aside(dir: &Path) -> io::Result<PathBuf> {
    let name = dir.file_name().unwrap_or_default().to_string_lossy();
    let aside = dir.with_file_name(format!("{DRAFT}{name}.old"));
    fs::rename(dir, &aside)?;
    Ok(aside)
}

/// Renames a complete, synced directory to its content hash and syncs the parent directory. If the name already exists,
/// removes this copy instead.
pub fn name_content(draft: &Path, place: &Path) -> io::Result<()> {
    match fs::rename(draft, place) {
        Err(_) if place.is_dir() => remove_dir(draft)?,
        renamed => renamed?,
    }
    // The other job may not have synced the parent directory yet.
    sync_dir(place.parent().unwrap_or(place))
}

/// Makes changes of a directory's entries survive a crash of the host: files created, renamed, linked or removed.
///
/// # Errors
/// Returns the errors of opening and syncing the directory.
pub fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

/// Syncs every regular file in a directory, and the directory. Ignores sub-directories.
///
/// # Errors
/// Returns the errors of reading the directory, and of opening and syncing its files.
pub fn sync_files(dir: &Path) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_file() {
            File::open(path)?.sync_all()?;
        }
    }
    sync_dir(dir)
}

/// Removes a file. A missing file is not an error.
pub fn remove_file(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

/// Removes a directory and everything in it. A missing directory is not an error.
pub fn remove_dir(dir: &Path) -> io::Result<()> {
    match fs::remove_dir_all(dir) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}
