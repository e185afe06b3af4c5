//! What the data plane answers when it does not pass a request on.
//!
//! Clients act on these texts: "was not found" means that the sandbox has ended, "port is not open" that it
//! runs. Programs get JSON, always with `code` and `message`; a browser that navigates gets a small page.

use axum::body::Body;
use axum::http::{HeaderMap, HeaderValue, Response, StatusCode, header};
use model::SandboxId;
use serde::Serialize;

use super::target::TargetError;

/// Seconds after which a client may try again when there is no room.
const RETRY_AFTER: HeaderValue = HeaderValue::from_static("1");

/// Why a request is not passed on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// It names a sandbox wrongly.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// It is not HTTP as a server behind a proxy may get it.
    #[error("{0}")]
    Malformed(&'static str),
    /// CONNECT.
    #[error("method not allowed")]
    Method,
    /// The client stopped sending the body of its request.
    #[error("the body of the request stopped coming")]
    Stalled,
    /// A signed file URL that no sandbox has signed.
    #[error("invalid signature")]
    Signature,
    /// A route of the agent that is not for clients.
    #[error("this route is not reachable from outside the sandbox")]
    Internal {
        /// The path as it was asked for.
        path: String,
    },
    /// No such sandbox, or it has ended.
    #[error("The sandbox was not found")]
    NotFound {
        /// Which.
        id: SandboxId,
    },
    /// Nobody listens at the port.
    #[error("The sandbox is running but port is not open")]
    PortClosed {
        /// Which.
        id: SandboxId,
        /// Which port.
        port: u16,
    },
    /// A paused sandbox could not be resumed.
    #[error("{message}")]
    Unavailable {
        /// Which.
        id: SandboxId,
        /// Why.
        message: String,
    },
    /// The port asks for a traffic token and there is none.
    #[error(
        "Sandbox is secured with traffic access token. Token header 'e2b-traffic-access-token' is missing"
    )]
    TokenMissing {
        /// Which.
        id: SandboxId,
    },
    /// The traffic token is another one.
    #[error(
        "Sandbox is secured with traffic access token. Provided token in header 'e2b-traffic-access-token' is invalid"
    )]
    TokenInvalid {
        /// Which.
        id: SandboxId,
    },
    /// The route runs code, the sandbox is secure, and its token is missing or another one.
    #[error(
        "Sandbox is secured with access token. Send it in the header 'X-Access-Token' to run code"
    )]
    CodeToken {
        /// Which.
        id: SandboxId,
    },
    /// Too many requests of one client behind a proxy at once.
    #[error("too many concurrent requests of this client (limit: {limit})")]
    TooManyOfClient {
        /// How many may be under way.
        limit: usize,
    },
    /// Too many requests at once.
    #[error("The sandbox has too many concurrent incoming connections (limit: {limit})")]
    TooMany {
        /// Which.
        id: SandboxId,
        /// How many may be under way.
        limit: usize,
    },
}

/// Who reads a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// A program.
    Json,
    /// A person before a browser.
    Page,
}

/// The JSON form. Absent fields do not apply.
#[derive(Serialize)]
struct Told<'a> {
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
            Self::Signature | Self::CodeToken { .. } => StatusCode::UNAUTHORIZED,
            Self::Internal { .. } => StatusCode::NOT_FOUND,
            Self::NotFound { .. } | Self::PortClosed { .. } => StatusCode::BAD_GATEWAY,
            Self::Unavailable { .. } => StatusCode::SERVICE_UNAVAILABLE,
            Self::TokenMissing { .. } | Self::TokenInvalid { .. } => StatusCode::FORBIDDEN,
            Self::TooMany { .. } | Self::TooManyOfClient { .. } => StatusCode::TOO_MANY_REQUESTS,
        }
    }

    fn told(&self) -> Told<'_> {
        let mut told = Told {
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
            | Self::Signature => {}
            Self::Internal { path } => told.path = Some(path),
            Self::NotFound { id }
            | Self::Unavailable { id, .. }
            | Self::TokenMissing { id }
            | Self::TokenInvalid { id }
            | Self::CodeToken { id } => told.sandbox_id = Some(id),
            Self::PortClosed { id, port } => {
                told.sandbox_id = Some(id);
                told.port = Some(*port);
            }
            Self::TooManyOfClient { limit } => told.connection_limit = Some(*limit),
            Self::TooMany { id, limit } => {
                told.sandbox_id = Some(id);
                told.connection_limit = Some(*limit);
            }
        }
        told
    }

    /// The answer, in the form that the asker can read.
    #[must_use]
    pub fn answer(&self, form: Form) -> Response<Body> {
        let told = self.told();
        let (kind, body) = match form {
            Form::Page => ("text/html; charset=utf-8", page(&told)),
            Form::Json => (
                "application/json",
                serde_json::to_string(&told).unwrap_or_default(),
            ),
        };
        let mut response = Response::new(Body::from(body));
        *response.status_mut() = self.status();
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        if matches!(
            self,
            Self::Unavailable { .. } | Self::TooMany { .. } | Self::TooManyOfClient { .. }
        ) {
            headers.insert(header::RETRY_AFTER, RETRY_AFTER);
        }
        // Where one message ends is in doubt, so no other is read after it.
        if matches!(self, Self::Malformed(_)) {
            headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }
}

impl Form {
    /// Whether a person looks at the answer. What scripts of a page fetch is JSON, although it comes with
    /// the browser's own `User-Agent`.
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

fn page(told: &Told<'_>) -> String {
    let mut facts = String::new();
    if let Some(id) = told.sandbox_id {
        facts.push_str(&format!("<p>Sandbox <code>{id}</code></p>"));
    }
    if let Some(port) = told.port {
        facts.push_str(&format!("<p>Port <code>{port}</code></p>"));
    }
    let (code, message) = (told.code, escape(&told.message));
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
        serde_json::to_string(&refusal.told()).unwrap()
    }

    fn id() -> SandboxId {
        "iabcdefghij012345678".parse().unwrap()
    }

    #[test]
    fn the_bodies_are_those_that_the_sdks_know() {
        assert_eq!(
            json(&Refusal::NotFound { id: id() }),
            r#"{"sandboxId":"iabcdefghij012345678","message":"The sandbox was not found","code":502}"#
        );
        assert_eq!(
            json(&Refusal::PortClosed { id: id(), port: 80 }),
            r#"{"sandboxId":"iabcdefghij012345678","message":"The sandbox is running but port is not open","port":80,"code":502}"#
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
    fn only_a_browser_that_navigates_gets_a_page() {
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
    fn pages_escape_what_they_are_given() {
        let message = "<script>\"&".to_owned();
        let refusal = Refusal::Unavailable { id: id(), message };
        let page = page(&refusal.told());
        assert!(page.contains("&lt;script&gt;&quot;&amp;"), "{page}");
    }
}
