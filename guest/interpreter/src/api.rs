//! Routes, and the bodies of requests and responses.

use serde::{Deserialize, Serialize};

use crate::clone_state::Variables;

/// A route.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Route {
    Health,
    /// Whether all contexts are ready; not part of the official API.
    Ready,
    Execute,
    ListContexts,
    CreateContext,
    RestartContext(String),
    RemoveContext(String),
}

/// The status and text of the response to a request without a route.
pub(crate) type NoRoute = (u16, &'static str);

/// Finds the route of a request.
pub(crate) fn route(method: &str, path: &str) -> Result<Route, NoRoute> {
    let parts: Vec<&str> = path.trim_matches('/').split('/').collect();
    match (method, parts.as_slice()) {
        ("GET", ["health"]) => Ok(Route::Health),
        ("GET", ["ready"]) => Ok(Route::Ready),
        ("POST", ["execute"]) => Ok(Route::Execute),
        ("GET", ["contexts"]) => Ok(Route::ListContexts),
        ("POST", ["contexts"]) => Ok(Route::CreateContext),
        ("POST", ["contexts", id, "restart"]) => Ok(Route::RestartContext((*id).to_owned())),
        ("DELETE", ["contexts", id]) => Ok(Route::RemoveContext((*id).to_owned())),
        (
            _,
            ["health" | "ready" | "execute" | "contexts"]
            | ["contexts", _]
            | ["contexts", _, "restart"],
        ) => Err((405, "Method Not Allowed")),
        _ => Err((404, "Not Found")),
    }
}

/// Body of `POST /execute`. For optional fields, null is equivalent to absent.
#[derive(Debug, Deserialize)]
pub(crate) struct ExecuteRequest {
    pub(crate) code: String,
    pub(crate) context_id: Option<String>,
    pub(crate) language: Option<String>,
    pub(crate) env_vars: Option<Variables>,
    /// Whether the cell is counted and its results enter the history; true if absent. Named as in Jupyter. Not part of
    /// the official API, in which every cell is stored.
    pub(crate) store_history: Option<bool>,
}

/// Body of `POST /contexts`.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct CreateContextRequest {
    pub(crate) language: Option<String>,
    pub(crate) cwd: Option<String>,
}

/// A context in responses.
#[derive(Debug, Serialize)]
pub(crate) struct ContextInfo<'a> {
    pub(crate) id: &'a str,
    pub(crate) language: &'a str,
    pub(crate) cwd: &'a str,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routes_are_found() {
        assert_eq!(route("GET", "/health"), Ok(Route::Health));
        assert_eq!(
            route("POST", "/contexts/a/restart"),
            Ok(Route::RestartContext("a".into()))
        );
        assert_eq!(
            route("DELETE", "/contexts/a"),
            Ok(Route::RemoveContext("a".into()))
        );
        assert_eq!(route("PUT", "/contexts").unwrap_err().0, 405);
        assert_eq!(route("GET", "/").unwrap_err().0, 404);
        assert_eq!(route("POST", "/contexts/a/b/c").unwrap_err().0, 404);
    }

    #[test]
    fn null_is_equivalent_to_absent() {
        let short: ExecuteRequest = serde_json::from_str(r#"{"code":"1"}"#).unwrap();
        let long = r#"{"code":"1","context_id":null,"language":null,"env_vars":null,"more":1}"#;
        let long: ExecuteRequest = serde_json::from_str(long).unwrap();
        assert!(short.context_id.is_none() && long.context_id.is_none());
        assert!(short.env_vars.is_none() && long.env_vars.is_none());
    }
}
