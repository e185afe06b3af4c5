//! Responses of the data plane to requests that it does not forward.
//!
//! Clients act on some of these texts: "was not found" means that the sandbox has ended, "port is not open" that it is
//! running. Programs get JSON, always with `code` and `message`. A browser that navigates to the URL gets a small HTML
//! page.

use axum::body::Body;
use axum::http::{HeaderMap, HeaderValue, Response, StatusCode, header};
use model::SandboxId;
use serde::Serialize;

use super::{target::TargetError, upstream::INTERPRETER_PORT};
use crate::registry::SignatureError;

/// Delay in seconds after which clients should retry.
const RETRY_AFTER: HeaderValue = HeaderValue::from_static("1");

/// Why a request is not forwarded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The request refers to its sandbox incorrectly.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// The request is not valid HTTP, or the server behind this proxy could interpret it differently.
    #[error("{0}")]
    Malformed(&'static str),
    /// The method is CONNECT, or does not fit a signed file URL.
    #[error("method not allowed")]
    Method,
    /// The client paused for too long while sending the request body.
    #[error("the request body was not received in time")]
    Stalled,
    /// The URL is a signed file URL whose signature matches no sandbox.
    #[error(transparent)]
    Signature(#[from] SignatureError),
    /// The client has sent too many such URLs.
    #[error("too many signed URLs of this client match no sandbox: try again later")]
    TooManyGuesses,
    /// The route is one of the agent's internal routes.
    #[error("this route is not reachable from outside the sandbox")]
    Internal { path: String },
    /// The sandbox does not exist or has ended.
    #[error("The sandbox was not found")]
    NotFound { id: SandboxId },
    /// No program listens on the port.
    #[error("The sandbox is running but port is not open{}", hint(*port))]
    PortClosed { id: SandboxId, port: u16 },
    /// A paused sandbox could not be resumed.
    #[error("{message}")]
    Unavailable {
        id: SandboxId,
        /// Why the resume failed.
        message: String,
    },
    /// The port is not public, and the request has no traffic token.
    #[error(
        "Sandbox is secured with traffic access token. Token header 'e2b-traffic-access-token' is missing"
    )]
    TokenMissing { id: SandboxId },
    /// The port is not public, and the request's traffic token is wrong.
    #[error(
        "Sandbox is secured with traffic access token. Provided token in header 'e2b-traffic-access-token' is invalid"
    )]
    TokenInvalid { id: SandboxId },
    /// The route runs code, the sandbox is secure, and its access token is missing or wrong.
    #[error(
        "Sandbox is secured with access token. Send it in the header 'X-Access-Token' to run code"
    )]
    CodeToken { id: SandboxId },
    /// A client behind a trusted proxy has too many requests in flight.
    #[error("too many concurrent requests from this client (limit: {limit})")]
    TooManyOfClient { limit: usize },
    /// The sandbox has too many requests in flight. `limit` is lower while the server as a whole is busy.
    #[error("The sandbox has too many concurrent incoming connections (limit: {limit})")]
    TooMany { id: SandboxId, limit: usize },
    /// Only another node could serve a request without a key, and this node has already sent the others many such
    /// requests.
    #[error("too many requests without a key that other nodes would have to serve: try again")]
    TooManyKeyless,
    /// This process has handed over its sandboxes, and the successor does not respond.
    #[error("the server is being restarted: try again")]
    NoSuccessor,
    /// The sandbox is on a node of the cluster that is unreachable. If it was running, it is lost unless the node
    /// returns.
    #[error(
        "The sandbox is on node {node}, which is unreachable: {last}; it is lost unless the node returns"
    )]
    NodeAway {
        id: SandboxId,
        node: String,
        /// The last state known to another node.
        last: String,
    },
    /// Another node did not respond. The text names it.
    #[error("{why}")]
    NodeFailed { why: String },
    /// A connection to the cluster listener is not from a member.
    #[error("this listener is for the nodes of the cluster")]
    NotMember,
}

/// A hint for the port that clients do not choose themselves: `run_code` uses it.
fn hint(port: u16) -> &'static str {
    match port {
        INTERPRETER_PORT => {
            ": it has no code interpreter, or that has ended; run_code needs a sandbox of the template code-interpreter-v1, \
             or of one that was built from it"
        }
        _ => "",
    }
}

/// The format of a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    Json,
    /// HTML, for a person using a browser.
    Page,
}

/// The JSON body. Fields that do not apply are omitted.
#[derive(Serialize)]
struct RefusalBody<'a> {
    #[serde(rename = "sandboxId", skip_serializing_if = "Option::is_none")]
    sandbox_id: Option<&'a SandboxId>,
    message: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    port: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    path: Option<&'a str>,
    #[serde(rename = "connectionLimit", skip_serializing_if = "Option::is_none")]
    connection_limit: Option<usize>,
    code: u16,
}

impl Refusal {
    fn status(&self) -> StatusCode {
        match self {
            Self::Target(_) | Self::Malformed(_) => StatusCode::BAD_REQUEST,
            Self::Method => StatusCode::METHOD_NOT_ALLOWED,
            Self::Stalled => StatusCode::REQUEST_TIMEOUT,
            Self::Signature(_) | Self::CodeToken { .. } => StatusCode::UNAUTHORIZED,
            Self::Internal { .. } => StatusCode::NOT_FOUND,
            Self::NotFound { .. }
            | Self::PortClosed { .. }
            | Self::NodeAway { .. }
            | Self::NodeFailed { .. } => StatusCode::BAD_GATEWAY,
            Self::NotMember => StatusCode::FORBIDDEN,
            Self::Unavailable { .. } | Self::NoSuccessor => StatusCode::SERVICE_UNAVAILABLE,
            Self::TokenMissing { .. } | Self::TokenInvalid { .. } => StatusCode::FORBIDDEN,
            Self::TooMany { .. }
            | Self::TooManyOfClient { .. }
            | Self::TooManyGuesses
            | Self::TooManyKeyless => StatusCode::TOO_MANY_REQUESTS,
        }
    }

    fn body(&self) -> RefusalBody<'_> {
        let mut body = RefusalBody {
            sandbox_id: None,
            message: self.to_string(),
            port: None,
            path: None,
            connection_limit: None,
            code: self.status().as_u16(),
        };
        match self {
            Self::Target(_)
            | Self::Malformed(_)
            | Self::Method
            | Self::Stalled
            | Self::Signature(_)
            | Self::TooManyGuesses
            | Self::NoSuccessor
            | Self::TooManyKeyless
            | Self::NodeFailed { .. }
            | Self::NotMember => {}
            Self::Internal { path } => body.path = Some(path),
            Self::NotFound { id }
            | Self::NodeAway { id, .. }
            | Self::Unavailable { id, .. }
            | Self::TokenMissing { id }
            | Self::TokenInvalid { id }
            | Self::CodeToken { id } => body.sandbox_id = Some(id),
            Self::PortClosed { id, port } => {
                body.sandbox_id = Some(id);
                body.port = Some(*port);
            }
            Self::TooManyOfClient { limit } => body.connection_limit = Some(*limit),
            Self::TooMany { id, limit } => {
                body.sandbox_id = Some(id);
                body.connection_limit = Some(*limit);
            }
        }
        body
    }

    /// The response in the given format.
    #[must_use]
    pub fn answer(&self, form: Form) -> Response<Body> {
        let body = self.body();
        let (kind, body) = match form {
            Form::Page => ("text/html; charset=utf-8", page(&body)),
            Form::Json => (
                "application/json",
                serde_json::to_string(&body).unwrap_or_default(),
            ),
        };
        let mut response = Response::new(Body::from(body));
        *response.status_mut() = self.status();
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        if matches!(
            self,
            Self::Unavailable { .. }
                | Self::TooMany { .. }
                | Self::TooManyOfClient { .. }
                | Self::TooManyGuesses
                | Self::TooManyKeyless
                | Self::NoSuccessor
        ) {
            headers.insert(header::RETRY_AFTER, RETRY_AFTER);
        }
        // The end of a malformed request is uncertain, so no further request is read from the connection.
        if matches!(self, Self::Malformed(_)) {
            headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }
}

impl Form {
    /// The format that the client expects: HTML only if a browser navigates to the URL, JSON for programs and for
    /// scripts in a page.
    #[must_use]
    pub fn wanted(asked: &HeaderMap) -> Self {
        let text = |name: &str| {
            let value = asked.get(name).and_then(|value| value.to_str().ok());
            value.unwrap_or_default().to_ascii_lowercase()
        };
        let navigates = match text("sec-fetch-mode").as_str() {
            "navigate" => true,
            "" => !asked.contains_key("x-requested-with"),
            _ => false,
        };
        if navigates && text("accept").contains("text/html") {
            Self::Page
        } else {
            Self::Json
        }
    }
}

fn page(body: &RefusalBody<'_>) -> String {
    let mut facts = String::new();
    if let Some(id) = body.sandbox_id {
        facts.push_str(&format!("<p>Sandbox <code>{id}</code></p>"));
    }
    if let Some(port) = body.port {
        facts.push_str(&format!("<p>Port <code>{port}</code></p>"));
    }
    let (code, message) = (body.code, escape(&body.message));
    format!(
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><title>{code}</title>\
         <body style=\"font-family:sans-serif;margin:4em\"><h1>{code}</h1><p>{message}</p>{facts}</body></html>\n"
    )
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn json(refusal: &Refusal) -> String {
        serde_json::to_string(&refusal.body()).unwrap()
    }

    fn id() -> SandboxId {
        "iabcdefghij012345678".parse().unwrap()
    }

    #[test]
    fn refusals_have_the_json_bodies_that_the_sdks_expect() {
        assert_eq!(
            json(&Refusal::NotFound { id: id() }),
            r#"{"sandboxId":"iabcdefghij012345678","message":"The sandbox was not found","code":502}"#
        );
        assert_eq!(
            json(&Refusal::PortClosed { id: id(), port: 80 }),
            r#"{"sandboxId":"iabcdefghij012345678","message":"The sandbox is running but port is not open","port":80,"code":502}"#
        );
        let port = INTERPRETER_PORT;
        assert!(
            json(&Refusal::PortClosed { id: id(), port })
                .contains("port is not open: it has no code interpreter")
        );
        assert_eq!(
            json(&TargetError::Host.into()),
            r#"{"message":"Invalid host","code":400}"#
        );
        assert_eq!(
            json(&Refusal::TooMany { id: id(), limit: 3 }),
            r#"{"sandboxId":"iabcdefghij012345678","message":"The sandbox has too many concurrent incoming connections (limit: 3)","connectionLimit":3,"code":429}"#
        );
    }

    #[test]
    fn only_a_navigating_browser_gets_an_html_page() {
        let asked = |pairs: &[(&'static str, &'static str)]| {
            let mut headers = HeaderMap::new();
            for (name, value) in pairs {
                headers.insert(*name, HeaderValue::from_static(value));
            }
            Form::wanted(&headers) == Form::Page
        };
        let html = ("accept", "text/html,application/xhtml+xml,*/*;q=0.8");
        assert!(asked(&[html]));
        assert!(asked(&[html, ("sec-fetch-mode", "navigate")]));
        assert!(!asked(&[html, ("sec-fetch-mode", "cors")]));
        assert!(!asked(&[html, ("x-requested-with", "XMLHttpRequest")]));
        assert!(!asked(&[("accept", "*/*")]));
        assert!(!asked(&[("accept", "application/json")]));
        assert!(!asked(&[]));
    }

    #[test]
    fn html_pages_escape_messages() {
        let message = "<script>\"&".to_owned();
        let refusal = Refusal::Unavailable { id: id(), message };
        let page = page(&refusal.body());
        assert!(page.contains("&lt;script&gt;&quot;&amp;"), "{page}");
    }
}
