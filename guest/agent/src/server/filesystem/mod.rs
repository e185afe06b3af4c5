//! `filesystem.Filesystem`: what is where, and making, moving, removing and watching it.
//!
//! As with `/files`, everything is done as root, and what is made belongs to the user who was named. Paths
//! are answered as they were asked for: links in them are not resolved.
//!
//! [`entry`] says what is at a path; [`tasks`] is work that may take long and is done in turns.

mod entry;
mod list;
mod remove;
mod tasks;

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use api_types::envd::{
    ConnectCode, ConnectError, EntryResponse, ListDirRequest, MoveRequest, PathRequest,
};

pub(crate) use entry::{Names, entry};
pub(crate) use list::weight;
pub(crate) use tasks::{Task, step};

use super::{
    Core,
    conn::{Conn, Phase},
    files,
    http::Head,
    rpc::{error, json, message},
    watch,
};
use crate::users::User;
use ConnectCode::{
    AlreadyExists, FailedPrecondition, Internal, InvalidArgument, NotFound, PermissionDenied,
    Unauthenticated,
};

/// RPCs that are answered once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Method {
    Stat,
    ListDir,
    MakeDir,
    Move,
    Remove,
    CreateWatcher,
    GetWatcherEvents,
    RemoveWatcher,
}

impl Method {
    /// By the last part of its path.
    pub(crate) fn find(name: &str) -> Option<Self> {
        Some(match name {
            "Stat" => Self::Stat,
            "ListDir" => Self::ListDir,
            "MakeDir" => Self::MakeDir,
            "Move" => Self::Move,
            "Remove" => Self::Remove,
            "CreateWatcher" => Self::CreateWatcher,
            "GetWatcherEvents" => Self::GetWatcherEvents,
            "RemoveWatcher" => Self::RemoveWatcher,
            _ => return None,
        })
    }
}

/// Answers a call, or puts the connection to a task that will.
#[cold]
#[inline(never)]
pub(crate) fn call(
    core: &mut Core,
    conn: &mut Conn,
    method: Method,
    head: &Head,
    body: &[u8],
) -> Result<Option<Vec<u8>>, ConnectError> {
    let answer = match method {
        Method::Stat => json(&stat(core, head, &message(body)?)?)?,
        Method::MakeDir => json(&make_dir(core, head, &message(body)?)?)?,
        Method::Move => json(&move_to(core, head, &message(body)?)?)?,
        Method::CreateWatcher => json(&watch::create(core, head, &message(body)?)?)?,
        Method::GetWatcherEvents => json(&watch::events(core, &message(body)?)?)?,
        Method::RemoveWatcher => json(&watch::remove(core, &message(body)?)?)?,
        Method::ListDir => {
            let request: ListDirRequest = message(body)?;
            let (path, _) = target(core, head, &request.path)?;
            conn.phase = Phase::Task(Box::new(Task::list(path, request.depth)?));
            return Ok(None);
        }
        Method::Remove => {
            let request: PathRequest = message(body)?;
            if request.path.is_empty() {
                return error(InvalidArgument, "no path to remove");
            }
            let (path, _) = target(core, head, &request.path)?;
            conn.phase = Phase::Task(Box::new(Task::remove(&path)?));
            return Ok(None);
        }
    };
    Ok(Some(answer))
}

/// The path that a caller means, and the user it comes from.
pub(crate) fn target(
    core: &mut Core,
    head: &Head,
    path: &str,
) -> Result<(PathBuf, User), ConnectError> {
    let name = head.user.as_ref().unwrap_or(&core.settings.default_user);
    let name = name.clone();
    let Some(user) = core.users.find(&name) else {
        return error(Unauthenticated, format!("invalid username: '{name}'"));
    };
    let path = files::resolve(path, &core.settings.default_workdir, &user.home)
        .or_else(|e| error(InvalidArgument, e.message))?;
    Ok((path, user))
}

/// Why something cannot be done with a path.
pub(crate) fn explain(path: &Path, failed: &io::Error) -> ConnectError {
    let path = path.display();
    let (code, message) = match failed.kind() {
        io::ErrorKind::NotFound => (NotFound, format!("file not found: '{path}'")),
        io::ErrorKind::NotADirectory => {
            let message = format!("file not found: a part of '{path}' is no directory");
            (NotFound, message)
        }
        io::ErrorKind::PermissionDenied => (PermissionDenied, format!("'{path}': {failed}")),
        io::ErrorKind::InvalidFilename | io::ErrorKind::InvalidInput => {
            (InvalidArgument, format!("'{path}': {failed}"))
        }
        _ if failed.raw_os_error() == Some(libc::ELOOP) => (
            FailedPrecondition,
            format!("cyclic symlink or too long a chain of links at '{path}'"),
        ),
        _ => (Internal, format!("'{path}': {failed}")),
    };
    ConnectError::new(code, message)
}

fn answer(core: &mut Core, path: &Path) -> Result<EntryResponse, ConnectError> {
    let found = entry(path, path, &mut Names::default(), &mut core.users);
    let (entry, _) = found.map_err(|e| explain(path, &e))?;
    Ok(EntryResponse { entry: Some(entry) })
}

fn stat(
    core: &mut Core,
    head: &Head,
    request: &PathRequest,
) -> Result<EntryResponse, ConnectError> {
    let (path, _) = target(core, head, &request.path)?;
    answer(core, &path)
}

fn make_dir(
    core: &mut Core,
    head: &Head,
    request: &PathRequest,
) -> Result<EntryResponse, ConnectError> {
    let (path, user) = target(core, head, &request.path)?;
    let shown = path.display();
    match fs::metadata(&path) {
        Ok(found) if found.is_dir() => {
            return error(AlreadyExists, format!("directory already exists: {shown}"));
        }
        Ok(_) => {
            let message = format!("path already exists but it is not a directory: {shown}");
            return error(InvalidArgument, message);
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(no_parent(&path, &e)),
    }
    files::make_dirs(&path, &user).map_err(|e| no_parent(&path, &e))?;
    answer(core, &path)
}

/// As [`explain`], where a file in a parent's place is the caller's mistake.
fn no_parent(path: &Path, failed: &io::Error) -> ConnectError {
    match failed.kind() {
        io::ErrorKind::NotADirectory => {
            let message = format!("a part of '{}' is not a directory", path.display());
            ConnectError::new(InvalidArgument, message)
        }
        _ => explain(path, failed),
    }
}

fn move_to(
    core: &mut Core,
    head: &Head,
    request: &MoveRequest,
) -> Result<EntryResponse, ConnectError> {
    if request.source.is_empty() || request.destination.is_empty() {
        return error(InvalidArgument, "source or destination is missing");
    }
    let (source, _) = target(core, head, &request.source)?;
    let (destination, user) = target(core, head, &request.destination)?;
    let found = fs::symlink_metadata(&source);
    found.map_err(|e| explain(&source, &e))?;
    if fs::symlink_metadata(&destination).is_ok_and(|there| there.is_dir()) && source != destination
    {
        let message = format!("a directory is at '{}'", destination.display());
        return error(AlreadyExists, message);
    }
    if let Some(parent) = destination.parent() {
        files::make_dirs(parent, &user).map_err(|e| no_parent(&destination, &e))?;
    }
    fs::rename(&source, &destination).map_err(|e| explain(&source, &e))?;
    answer(core, &destination)
}
