//! Decides which token a request needs before it is forwarded. Performs no I/O.
//!
//! | port | required token |
//! |---|---|
//! | 49983, the agent | none: the agent checks its own token |
//! | any other | `E2b-Traffic-Access-Token`, unless the sandbox's ports are public |
//! | 49999, a route that runs code | also `X-Access-Token`, if the sandbox is secure |
//!
//! This server, not the guest, checks the token for the interpreter: it has the current token of each sandbox, and a
//! template may run an interpreter that checks none. A check in the guest would add no protection, since a program that
//! reaches the interpreter over loopback can run code anyway.

use axum::http::{HeaderMap, HeaderName};
use envd::ENVD_PORT;
use subtle::ConstantTimeEq;

use super::upstream::INTERPRETER_PORT;
use super::{Refusal, TRAFFIC_TOKEN, internal};
use crate::registry::Route;

/// Header with the agent's token. The SDKs also send it to the interpreter with each cell.
const ACCESS_TOKEN: HeaderName = HeaderName::from_static("x-access-token");

/// Checks the tokens of a request for `path` on `port`.
///
/// # Errors
/// Returns [`Refusal::TokenMissing`] or [`Refusal::TokenInvalid`] if the port is not public and the traffic token is
/// missing or wrong, and [`Refusal::CodeToken`] if the request would run code in a secure sandbox and the sandbox's
/// access token is missing or wrong.
pub(super) fn check(
    route: &Route,
    port: u16,
    path: &str,
    headers: &HeaderMap,
) -> Result<(), Refusal> {
    if port == ENVD_PORT {
        return Ok(());
    }
    if let Some(wanted) = &route.traffic_token {
        check_traffic(route, wanted, headers)?;
    }
    let wanted = match &route.envd_token {
        Some(token) if port == INTERPRETER_PORT && internal::runs_code(path) => token,
        _ => return Ok(()),
    };
    let id = route.id.clone();
    let mut given = headers.get_all(ACCESS_TOKEN).iter();
    match (given.next(), given.next()) {
        (Some(given), None) if is_same(given.as_bytes(), wanted) => Ok(()),
        _ => Err(Refusal::CodeToken { id }),
    }
}

fn check_traffic(route: &Route, wanted: &str, headers: &HeaderMap) -> Result<(), Refusal> {
    let id = route.id.clone();
    match headers.get(TRAFFIC_TOKEN) {
        None => Err(Refusal::TokenMissing { id }),
        Some(given) if given.is_empty() => Err(Refusal::TokenMissing { id }),
        Some(given) if is_same(given.as_bytes(), wanted) => Ok(()),
        Some(_) => Err(Refusal::TokenInvalid { id }),
    }
}

fn is_same(given: &[u8], wanted: &str) -> bool {
    given.ct_eq(wanted.as_bytes()).into()
}
