//! `GET` and `POST /files`: whole files and parts of them, as bytes, gzip or forms.
//!
//! As in envd, the agent reads and writes as root and gives the files that it writes to the requested user: that user's
//! permissions are not checked. Only regular files are served, and paths are opened without blocking: a FIFO or a
//! device must not block the only thread. (A file system whose server hangs, such as FUSE, still can.)

mod download;
pub(crate) mod failure;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
pub(crate) mod head;
mod media_type;
pub(crate) mod metadata;
mod multipart;
pub(crate) mod owner;
pub(crate) mod path;
mod range;
mod signature;
mod upload;

use std::time::{SystemTime, UNIX_EPOCH};

use transport::http;

use super::{
    core::{Conn, Core},
    head::Head,
};
use crate::users::User;
use download::Download;
use failure::FileError;
use signature::Operation;
pub(crate) use upload::Upload;

/// Authorizes a request for a file, which must carry the access token or a signature. If the sandbox has no access
/// token, every request is authorized.
///
/// # Errors
/// Returns the message of the 401 response.
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
    signature::check(
        operation,
        token,
        &head.fields.access_token,
        &head.query,
        now,
    )
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
    let file = user(core, head).and_then(|user| {
        let path = http::query_value(&head.query, "path").unwrap_or_default();
        path::resolve(&path, &core.settings.default_workdir, &user.home)
    });
    let asked = head.fields.file.as_deref().cloned().unwrap_or_default();
    match file.and_then(|path| Download::open(&path, &asked)) {
        Ok(opened) => download::begin(conn, opened),
        Err(error) => conn.error(error.status, &error.message),
    }
}

/// Begins `POST /files`, before its body is read.
///
/// # Errors
/// Returns the error response if the request cannot be served.
#[cold]
#[inline(never)]
pub(crate) fn write(core: &mut Core, head: &Head) -> Result<Upload, FileError> {
    let user = user(core, head)?;
    let asked = head.fields.file.as_deref().cloned().unwrap_or_default();
    metadata::check(&asked.metadata)
        .map_err(|why| FileError::new(400, format!("invalid metadata: {why}")))?;
    Upload::open(upload::Plan {
        path: http::query_value(&head.query, "path"),
        workdir: core.settings.default_workdir.clone(),
        user,
        metadata: asked.metadata,
        content_type: head.fields.content_type.clone(),
        encoding: head.fields.encoding.clone(),
    })
}
