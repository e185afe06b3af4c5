//! Answers of the proxy itself, in place of a server's.

use hyper::{
    Response, StatusCode,
    body::Bytes,
    header::{CACHE_CONTROL, CONNECTION, CONTENT_TYPE, HeaderValue, UPGRADE},
};

use super::body::ToGuest;

/// Why the proxy does not forward a request.
#[derive(Debug)]
pub(crate) struct Refusal {
    pub(crate) status: StatusCode,
    pub(crate) reason: String,
    /// Whether an HTTP/1 connection is closed afterwards. After a request that could be read in two ways it must be.
    pub(crate) after: After,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum After {
    Close,
    Continue,
}

impl Refusal {
    /// The request itself is wrong.
    pub(crate) fn closing(status: StatusCode, reason: impl Into<String>) -> Self {
        let (reason, after) = (reason.into(), After::Close);
        Self {
            status,
            reason,
            after,
        }
    }

    /// The same request may succeed later.
    pub(crate) fn passing(status: StatusCode, reason: impl Into<String>) -> Self {
        let (reason, after) = (reason.into(), After::Continue);
        Self {
            status,
            reason,
            after,
        }
    }

    /// The answer to the guest.
    pub(crate) fn response(&self, rule: Option<&str>, is_http1: bool) -> Response<ToGuest> {
        let mut text = serde_json::json!({
            "code": self.status.as_u16(),
            "message": format!("cube-egress: {}", self.reason),
        });
        if let Some(rule) = rule {
            text["rule"] = rule.into();
        }
        let mut response = Response::new(ToGuest::text(Bytes::from(format!("{text}\n"))));
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        if self.status == StatusCode::UPGRADE_REQUIRED {
            // RFC 9110, section 15.5.22.
            headers.insert(UPGRADE, HeaderValue::from_static("TLS/1.2, HTTP/1.1"));
            headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
        }
        if is_http1 && self.after == After::Close {
            headers.insert(CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }
}
