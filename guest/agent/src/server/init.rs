//! `POST /init`: the identity and settings of the sandbox.

use envd::InitRequest;

use super::core::{Conn, Core};
use crate::identity::IdentityError;

/// Applies the identity, then the settings. A setting that the request omits keeps its value, as do the variables
/// if `env_vars` is empty.
#[inline(never)]
pub(crate) fn init(core: &mut Core, conn: &mut Conn, body: &[u8]) {
    let request: InitRequest =
        match serde_json::from_slice(if body.is_empty() { b"{}" } else { body }) {
            Ok(request) => request,
            Err(error) => return conn.error(400, &format!("bad init request: {error}")),
        };
    let has_new_variables = match core.duties.apply(&request) {
        Ok(has_new_variables) => has_new_variables,
        Err(error) => {
            let status = match error {
                IdentityError::Invalid(_) => 400,
                IdentityError::System { .. } => 500,
            };
            return conn.error(status, &model::chain(&error));
        }
    };
    let has_environment = !request.env_vars.is_empty();
    if has_environment {
        core.settings.env_vars = request.env_vars;
    }
    if has_environment || has_new_variables {
        let json = serde_json::to_vec(&core.environment()).unwrap_or_default();
        if let Err(error) = core.duties.publish_environment(&json) {
            return conn.error(500, &model::chain(&error));
        }
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
