//! Which token a request needs before it is passed on. Pure.
//!
//! | port | needs |
//! |---|---|
//! | 49983, the agent | nothing here: the agent checks its own token |
//! | any other | `E2b-Traffic-Access-Token`, if the sandbox's ports are not public |
//! | 49999, a route that runs code | also `X-Access-Token`, if the sandbox is secure |
//!
//! The interpreter's token is checked here and not in the guest: the server keeps each sandbox's token and reads it
//! anew for every request, a template may have an interpreter of its own at this port, and a program in the guest that
//! reaches the interpreter by loopback can run code anyway.

use api_types::envd::ENVD_PORT;
use axum::http::{HeaderMap, HeaderName};
use subtle::ConstantTimeEq;

use super::upstream::INTERPRETER_PORT;
use super::{Refusal, TRAFFIC_TOKEN, internal};
use crate::registry::Route;

/// The agent's token, which the SDKs send to the interpreter with each cell.
const ACCESS_TOKEN: HeaderName = HeaderName::from_static("x-access-token");

/// Whether a request for `path` of a port may be passed on.
///
/// # Errors
/// [`Refusal::TokenMissing`], [`Refusal::TokenInvalid`], [`Refusal::CodeToken`].
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
