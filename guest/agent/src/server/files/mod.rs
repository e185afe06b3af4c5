//! `GET` and `POST /files`: whole files and parts of them, as bytes, gzip or forms.
//!
//! Everything is done as root and given to the user who was named, as envd does it: rights of that user are
//! not looked at. Only regular files are touched, opened without blocking: a FIFO or a device must not hold
//! the one thread. (A file system whose server hangs, FUSE for one, still can.)

mod download;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod media_type;
mod metadata;
mod multipart;
mod range;
mod signature;
mod upload;

use std::{
    fs::{self, DirBuilder},
    io,
    os::unix::fs::{DirBuilderExt, lchown},
    path::{Component, Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

pub(crate) use download::{Download, begin_download, send_file};
pub(crate) use metadata::read as read_metadata;
pub(crate) use upload::Upload;

use super::{
    Core,
    conn::Conn,
    http::{self, Head},
};
use crate::users::User;
use metadata::Metadata;
use signature::Operation;

/// What a request for a file says besides what all requests say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct FileHead {
    accept_encoding: String,
    range: Option<String>,
    /// Whether the range counts only for a version of the file: nothing here says which version it is, so it
    /// is another one.
    if_range: bool,
    /// Of `X-Metadata-` headers; keys in lower case.
    metadata: Metadata,
}

impl FileHead {
    /// Values that are not text are left out: they were refused before.
    #[cold]
    #[inline(never)]
    pub(crate) fn read(headers: &[httparse::Header<'_>]) -> Self {
        const METADATA: &str = "x-metadata-";
        let mut head = Self::default();
        for header in headers {
            let name = header.name.to_ascii_lowercase();
            let Ok(value) = std::str::from_utf8(header.value) else {
                continue;
            };
            match name.as_str() {
                "accept-encoding" => value.clone_into(&mut head.accept_encoding),
                "range" => head.range = Some(value.to_owned()),
                "if-range" => head.if_range = true,
                _ => {
                    if let Some(key) = name.strip_prefix(METADATA).filter(|key| !key.is_empty()) {
                        // The first of several, as envd takes it.
                        let value = value.trim_matches([' ', '\t']).to_owned();
                        head.metadata.entry(key.to_owned()).or_insert(value);
                    }
                }
            }
        }
        head
    }
}

/// A request that fails, as the plain routes say it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{status}: {message}")]
pub(crate) struct FileError {
    pub(crate) status: u16,
    pub(crate) message: String,
}

impl FileError {
    pub(crate) fn new(status: u16, message: impl Into<String>) -> Self {
        Self {
            status,
            message: message.into(),
        }
    }

    fn of(path: &Path, error: &io::Error) -> Self {
        let path = path.display();
        match error.kind() {
            io::ErrorKind::NotFound => Self::new(404, format!("path '{path}' does not exist")),
            io::ErrorKind::IsADirectory => Self::new(400, format!("path '{path}' is a directory")),
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                Self::new(507, format!("not enough disk space available for '{path}'"))
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

/// Whether a request for a file comes from somebody who may: with the token, or with a signed link.
///
/// # Errors
/// The text of a 401.
#[cold]
#[inline(never)]
pub(crate) fn admit(core: &Core, head: &Head) -> Result<(), &'static str> {
    let token = &core.settings.access_token;
    if token.is_empty() {
        return Ok(());
    }
    let operation = match head.method.as_str() {
        "GET" => Operation::Read,
        _ => Operation::Write,
    };
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.map_or(0, |since| since.as_secs());
    signature::check(operation, token, &head.access_token, &head.query, now)
}

/// The absolute path behind what a caller wrote: relative ones start in the home, `~` is the home, an empty
/// one is `workdir`. `..` in an absolute path is left to the kernel, for which links count.
pub(crate) fn resolve(path: &str, workdir: &str, home: &str) -> Result<PathBuf, FileError> {
    let home = if home.is_empty() { "/" } else { home };
    let path = match (path, workdir) {
        ("", "") => home,
        ("", workdir) => workdir,
        (path, _) => path,
    };
    if path.contains('\0') {
        return Err(FileError::new(400, "a path contains a zero byte"));
    }
    let full = match path.strip_prefix('~') {
        Some(rest) if rest.is_empty() || rest.starts_with('/') => format!("{home}{rest}"),
        Some(_) => {
            let message = "cannot expand user-specific home dir";
            return Err(FileError::new(400, message));
        }
        None if path.starts_with('/') => path.to_owned(),
        None => return Ok(tidy(&Path::new(home).join(path))),
    };
    // Without double slashes, single dots and a slash at the end.
    Ok(Path::new(&full).components().collect())
}

/// Without `..` too, as text: links are not looked at.
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

/// The user of a request for a file.
fn user(core: &mut Core, head: &Head) -> Result<User, FileError> {
    let name = http::query_value(&head.query, "username").filter(|name| !name.is_empty());
    let name = name.unwrap_or_else(|| core.settings.default_user.clone());
    let user = core.users.find(&name);
    user.ok_or_else(|| FileError::new(401, format!("invalid username: '{name}'")))
}

/// `GET /files`.
#[cold]
#[inline(never)]
pub(crate) fn read(core: &mut Core, conn: &mut Conn, head: &Head) {
    let path = user(core, head).and_then(|user| {
        let path = http::query_value(&head.query, "path").unwrap_or_default();
        resolve(&path, &core.settings.default_workdir, &user.home)
    });
    let asked = head.file.as_deref().cloned().unwrap_or_default();
    match path.and_then(|path| Download::open(&path, &asked)) {
        Ok(opened) => begin_download(conn, opened),
        Err(error) => conn.error(error.status, &error.message),
    }
}

/// `POST /files`, before its body.
///
/// # Errors
/// What to answer.
#[cold]
#[inline(never)]
pub(crate) fn write(core: &mut Core, head: &Head) -> Result<Upload, FileError> {
    let user = user(core, head)?;
    let asked = head.file.as_deref().cloned().unwrap_or_default();
    metadata::check(&asked.metadata)
        .map_err(|why| FileError::new(400, format!("invalid metadata: {why}")))?;
    Upload::open(upload::Plan {
        path: http::query_value(&head.query, "path"),
        workdir: core.settings.default_workdir.clone(),
        user,
        metadata: asked.metadata,
        content_type: head.content_type.clone(),
        encoding: head.encoding.clone(),
    })
}

/// Makes a directory and its parents, where they are missing, the user's.
pub(crate) fn make_dirs(path: &Path, user: &User) -> io::Result<()> {
    let mut missing = Vec::new();
    for dir in path.ancestors() {
        match fs::metadata(dir) {
            Ok(found) if found.is_dir() => break,
            Ok(_) => return Err(io::ErrorKind::NotADirectory.into()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => missing.push(dir),
            Err(error) => return Err(error),
        }
    }
    for dir in missing.into_iter().rev() {
        match DirBuilder::new().mode(0o755).create(dir) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            Ok(()) | Err(_) => {}
        }
        if gives_away(user) {
            lchown(dir, Some(user.credentials.uid), Some(user.credentials.gid))?;
        }
    }
    Ok(())
}

/// Whether things made here are to be made the user's: root does so always, others can only for themselves.
pub(crate) fn gives_away(user: &User) -> bool {
    let me = nix::unistd::geteuid();
    me.is_root() || me.as_raw() == user.credentials.uid
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_resolved() {
        let resolved = |path| resolve(path, "/work", "/home/user").unwrap();
        assert_eq!(resolved("/a//b/./c/"), Path::new("/a/b/c"));
        assert_eq!(resolved("/a/../b"), Path::new("/a/../b"));
        assert_eq!(resolved("x/./y/../z"), Path::new("/home/user/x/z"));
        assert_eq!(resolved("../../.."), Path::new("/"));
        assert_eq!(resolved("~/x"), Path::new("/home/user/x"));
        assert_eq!(resolved("~"), Path::new("/home/user"));
        assert_eq!(resolved(""), Path::new("/work"));
        let homeless = |path, workdir| resolve(path, workdir, "").unwrap();
        assert_eq!(homeless("", ""), Path::new("/"));
        assert_eq!(homeless("x", "work"), Path::new("/x"));
        assert_eq!(homeless("", "work"), Path::new("/work"));
        assert!(resolve("~x", "/", "/").is_err());
        assert!(resolve("a\0b", "/", "/").is_err());
    }
}
