//! The timeout that a request asks for.

use super::{app::App, error::ApiError};

/// The timeout of a request to the newer create route, or to connect, that names none, in seconds.
pub(super) const TIMEOUT_S: u32 = 300;

/// Checks that a requested timeout is at most the server's maximum. `None`: the request has no timeout.
pub(super) fn timeout(app: &App, asked: Option<i64>) -> Result<Option<u32>, ApiError> {
    let Some(asked) = asked else {
        return Ok(None);
    };
    let most = app.max_timeout_s;
    match u32::try_from(asked) {
        Ok(timeout_s) if timeout_s <= most => Ok(Some(timeout_s)),
        _ => Err(ApiError::BadRequest(format!(
            "timeout is {asked} seconds: use 0 to {most}"
        ))),
    }
}
