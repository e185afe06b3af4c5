//! The path and the user of a request.

use std::path::PathBuf;

use envd::{
    ConnectCode::{InvalidArgument, Unauthenticated},
    ConnectError,
};

use super::super::{core::Core, files, head::Head, message::error};
use crate::users::User;

/// Resolves the path of a request, and finds its user.
///
/// # Errors
/// Returns `Unauthenticated` for an unknown user, `InvalidArgument` for a malformed path.
pub(crate) fn target(
    core: &mut Core,
    head: &Head,
    path: &str,
) -> Result<(PathBuf, User), ConnectError> {
    let name = head
        .fields
        .user
        .as_ref()
        .unwrap_or(&core.settings.default_user);
    let name = name.clone();
    let Some(user) = core.users.find(&name) else {
        return error(Unauthenticated, format!("invalid username: '{name}'"));
    };
    let path = files::path::resolve(path, &core.settings.default_workdir, &user.home)
        .or_else(|e| error(InvalidArgument, e.message))?;
    Ok((path, user))
}
