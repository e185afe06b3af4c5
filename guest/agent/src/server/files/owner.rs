//! The ownership of directories and files that the agent creates for a user.

use std::{
    fs::{self, DirBuilder},
    io,
    os::unix::fs::{DirBuilderExt, lchown},
    path::Path,
};

use crate::users::User;

/// Creates a directory and its missing parents, and gives them to the user if [`gives_away`]. Existing directories keep
/// their owners.
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

/// Whether created files and directories are given to the user. An agent without root can do so only if it runs as that
/// user; otherwise they belong to the agent's own user.
pub(crate) fn gives_away(user: &User) -> bool {
    let me = nix::unistd::geteuid();
    me.is_root() || me.as_raw() == user.credentials.uid
}
