//! `GET` and `POST /files`: whole files as raw bytes.
//!
//! Only regular files are touched, opened without blocking: a FIFO or a device must not hold the one
//! thread. (A file system whose server hangs, FUSE for one, still can.)

use std::{
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Read, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt, fchown, lchown},
    path::{Component, Path, PathBuf},
};

use api_types::envd::WriteInfo;

use crate::users::User;

/// A file on its way to the caller.
pub(crate) struct Download {
    file: File,
    /// Bytes that the answer's head has promised and that are not yet sent; `None` for a file without a
    /// size, which is sent in chunks.
    pub(crate) left: Option<u64>,
}

/// A file on its way from the caller.
pub(crate) struct Upload {
    file: File,
    path: PathBuf,
}

/// A request that fails, as the plain routes say it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FileError {
    pub(crate) status: u16,
    pub(crate) message: String,
}

impl FileError {
    fn new(status: u16, message: String) -> Self {
        Self { status, message }
    }

    fn of(path: &Path, error: &io::Error) -> Self {
        let path = path.display();
        match error.kind() {
            io::ErrorKind::NotFound => Self::new(404, format!("path '{path}' does not exist")),
            io::ErrorKind::IsADirectory => Self::new(400, format!("path '{path}' is a directory")),
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                Self::new(507, format!("not enough space for '{path}'"))
            }
            io::ErrorKind::NotADirectory
            | io::ErrorKind::InvalidFilename
            | io::ErrorKind::InvalidInput
            | io::ErrorKind::ReadOnlyFilesystem => {
                Self::new(400, format!("path '{path}': {error}"))
            }
            _ => Self::new(500, format!("path '{path}': {error}")),
        }
    }
}

/// The absolute path behind what a caller wrote: relative ones start in `base`, `~` is the home.
pub(crate) fn resolve(path: &str, base: &str, home: &str) -> Result<PathBuf, FileError> {
    if path.is_empty() || path.contains('\0') {
        return Err(FileError::new(
            400,
            "a path is missing or contains a zero byte".into(),
        ));
    }
    let full = match path.strip_prefix('~') {
        Some(rest) if rest.is_empty() || rest.starts_with('/') => format!("{home}{rest}"),
        _ if path.starts_with('/') => path.to_owned(),
        _ => format!("{base}/{path}"),
    };
    Ok(tidy(Path::new(&full)))
}

/// Without `.`, `..` and double slashes, as text: links are not looked at.
fn tidy(path: &Path) -> PathBuf {
    let mut tidy = PathBuf::from("/");
    for component in path.components() {
        match component {
            Component::Normal(name) => tidy.push(name),
            Component::ParentDir => {
                tidy.pop();
            }
            Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
        }
    }
    tidy
}

impl Download {
    pub(crate) fn open(path: &Path) -> Result<Self, FileError> {
        let failed = |error| FileError::of(path, &error);
        let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
        let opened = OpenOptions::new().read(true).custom_flags(flags).open(path);
        let file = opened.map_err(failed)?;
        let metadata = file.metadata().map_err(failed)?;
        if metadata.is_dir() {
            return Err(failed(io::ErrorKind::IsADirectory.into()));
        }
        if !metadata.is_file() {
            let message = format!("path '{}' is not a regular file", path.display());
            return Err(FileError::new(400, message));
        }
        // Files of /proc and /sys say zero and have content all the same.
        let left = Some(metadata.len()).filter(|len| *len > 0);
        Ok(Self { file, left })
    }

    /// The next bytes, at most `scratch`; zero at the end. An error breaks the connection: the head is out.
    pub(crate) fn read(&mut self, scratch: &mut [u8]) -> io::Result<usize> {
        let most = self.left.map_or(usize::MAX, |left| {
            usize::try_from(left).unwrap_or(usize::MAX)
        });
        let len = scratch.len().min(most);
        let n = self.file.read(scratch.get_mut(..len).unwrap_or_default())?;
        if let Some(left) = &mut self.left {
            if n == 0 && *left > 0 {
                // Somebody has cut it meanwhile.
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            *left -= u64::try_from(n).unwrap_or(*left);
        }
        Ok(n)
    }
}

impl Upload {
    /// Makes the parents and the file, both the user's, and empties it.
    pub(crate) fn open(path: &Path, user: &User) -> Result<Self, FileError> {
        let failed = |error| FileError::of(path, &error);
        make_parents(path, user).map_err(failed)?;
        let opened = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
            .open(path);
        let file = opened.map_err(|error| match error.raw_os_error() {
            // A FIFO that nobody reads.
            Some(libc::ENXIO) => failed(io::ErrorKind::InvalidInput.into()),
            _ => failed(error),
        })?;
        if !file.metadata().map_err(failed)?.is_file() {
            return Err(failed(io::ErrorKind::InvalidInput.into()));
        }
        let (uid, gid) = (user.credentials.uid, user.credentials.gid);
        if nix::unistd::geteuid().is_root() {
            fchown(&file, Some(uid), Some(gid)).map_err(failed)?;
        }
        Ok(Self {
            file,
            path: path.to_owned(),
        })
    }

    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<(), FileError> {
        let written = self.file.write_all(bytes);
        written.map_err(|error| FileError::of(&self.path, &error))
    }

    /// What was written, for the answer.
    pub(crate) fn finish(self) -> WriteInfo {
        let name = self.path.file_name().unwrap_or_default();
        WriteInfo {
            name: name.to_string_lossy().into_owned(),
            path: self.path.to_string_lossy().into_owned(),
            kind: "file".into(),
        }
    }
}

fn make_parents(path: &Path, user: &User) -> io::Result<()> {
    let mut missing = Vec::new();
    for parent in path.ancestors().skip(1) {
        match fs::metadata(parent) {
            Ok(_) => break,
            Err(error) if error.kind() == io::ErrorKind::NotFound => missing.push(parent),
            Err(error) => return Err(error),
        }
    }
    for parent in missing.into_iter().rev() {
        match DirBuilder::new().mode(0o755).create(parent) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            Ok(()) | Err(_) => {}
        }
        if nix::unistd::geteuid().is_root() {
            lchown(
                parent,
                Some(user.credentials.uid),
                Some(user.credentials.gid),
            )?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_resolved() {
        let resolved = |path| resolve(path, "/work", "/home/user").unwrap();
        assert_eq!(resolved("/a//b/../c"), Path::new("/a/c"));
        assert_eq!(resolved("x/./y"), Path::new("/work/x/y"));
        assert_eq!(resolved("~/x"), Path::new("/home/user/x"));
        assert_eq!(resolved("~"), Path::new("/home/user"));
        assert_eq!(resolved("~x"), Path::new("/work/~x"));
        assert_eq!(resolved("/../.."), Path::new("/"));
        assert!(resolve("", "/", "/").is_err());
        assert!(resolve("a\0b", "/", "/").is_err());
    }
}
