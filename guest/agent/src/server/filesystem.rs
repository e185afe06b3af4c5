//! `filesystem.Filesystem`: listing, creating, moving, removing and watching.
//!
//! As with `/files`, the agent works as root, and created entries belong to the requested user. Paths in responses
//! begin with the path of the request, in which links are not resolved.
//!
//! [`entry`] describes the entry at a path; [`tasks`] does long work in turns.

pub(crate) mod entry;
pub(crate) mod failure;
pub(crate) mod list;
pub(crate) mod method;
mod remove;
pub(crate) mod target;
mod tasks;

use std::{fs, io, path::Path};

use envd::{
    ConnectCode::{AlreadyExists, InvalidArgument},
    ConnectError, EntryResponse, ListDirRequest, MoveRequest, PathRequest,
};

use super::{
    call,
    core::{Conn, Core},
    files::owner::make_dirs,
    head::Head,
    message::{error, read, write},
    watch,
};
use entry::{Names, entry};
use failure::explain;
use method::Method;
use target::target;
use tasks::Task;

/// Handles a unary call.
#[cold]
#[inline(never)]
pub(crate) fn unary(core: &mut Core, conn: &mut Conn, method: Method, head: &Head, body: &[u8]) {
    if let Some(body) = call::begin_unary(conn, head, body) {
        let answered = answer_call(core, conn, method, head, &body);
        call::end_unary(conn, answered);
    }
}

/// The response to a call; `None` if a [`Task`] that will respond later has begun.
fn answer_call(
    core: &mut Core,
    conn: &mut Conn,
    method: Method,
    head: &Head,
    body: &[u8],
) -> Result<Option<Vec<u8>>, ConnectError> {
    let answer = match method {
        Method::Stat => write(&stat(core, head, &read(body)?)?)?,
        Method::MakeDir => write(&make_dir(core, head, &read(body)?)?)?,
        Method::Move => write(&move_to(core, head, &read(body)?)?)?,
        Method::CreateWatcher => write(&watch::create(core, head, &read(body)?)?)?,
        Method::GetWatcherEvents => write(&watch::events(core, &read(body)?)?)?,
        Method::RemoveWatcher => write(&watch::remove(core, &read(body)?)?)?,
        Method::ListDir => {
            let request: ListDirRequest = read(body)?;
            let (path, _) = target(core, head, &request.path)?;
            conn.begin(Task::list(path, request.depth)?);
            return Ok(None);
        }
        Method::Remove => {
            let request: PathRequest = read(body)?;
            if request.path.is_empty() {
                return error(InvalidArgument, "no path to remove");
            }
            let (path, _) = target(core, head, &request.path)?;
            conn.begin(Task::remove(&path)?);
            return Ok(None);
        }
    };
    Ok(Some(answer))
}

/// Describes the entry at a path.
fn describe(core: &mut Core, path: &Path) -> Result<EntryResponse, ConnectError> {
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
    describe(core, &path)
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
    make_dirs(&path, &user).map_err(|e| no_parent(&path, &e))?;
    describe(core, &path)
}

/// Like [`explain`], but a file in the place of a parent is an invalid argument.
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
        make_dirs(parent, &user).map_err(|e| no_parent(&destination, &e))?;
    }
    fs::rename(&source, &destination).map_err(|e| explain(&source, &e))?;
    describe(core, &destination)
}
