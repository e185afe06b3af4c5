//! `POST /init`: the identity and settings of the sandbox.

use api_types::envd::InitRequest;

use super::core::{Conn, Core};
use crate::identity::IdentityError;

/// Applies the identity, then the settings. A setting that the request leaves out keeps its value, as do the variables
/// if `env_vars` is empty.
#[inline(never)]
pub(crate) fn init(core: &mut Core, conn: &mut Conn, body: &[u8]) {
    let request: InitRequest =
        match serde_json::from_slice(if body.is_empty() { b"{}" } else { body }) {
            Ok(request) => request,
            Err(error) => return conn.error(400, &format!("bad init request: {error}")),
        };
    if let Err(error) = core.duties.apply(&request) {
        let status = match error {
            IdentityError::Invalid(_) => 400,
            IdentityError::System { .. } => 500,
        };
        return conn.error(status, &model::chain(&error));
    }
    if !request.env_vars.is_empty() {
        let json = serde_json::to_vec(&request.env_vars).unwrap_or_default();
        if let Err(error) = core.duties.publish_environment(&json) {
            return conn.error(500, &model::chain(&error));
        }
        core.settings.env_vars = request.env_vars;
    }
    let settings = &mut core.settings;
    if let Some(token) = request.access_token {
        settings.access_token = token;
    }
    if let Some(user) = request.default_user {
        settings.default_user = user;
    }
    if let Some(workdir) = request.default_workdir {
        settings.default_workdir = workdir;
    }
    settings.initialised = true;
    conn.answer(204, "", b"");
}
