//! Headers that pass through the proxy: hop-by-hop headers are removed (RFC 9110, section 7.6.1), and headers of a rule
//! are added.

use egress::control::{NOT_FOR_RULES, RuleOutcome};
use hyper::{
    HeaderMap, Method, StatusCode, Version,
    header::{
        ALT_SVC, CONNECTION, CONTENT_LENGTH, EXPECT, HOST, HeaderName, HeaderValue,
        PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, TE, TRANSFER_ENCODING, UPGRADE,
    },
    http::request::Parts,
};

use super::answer::Refusal;

/// Hop-by-hop headers that are removed in both directions. `Trailer` is kept, because the fields that it announces are
/// forwarded.
const HOP_BY_HOP: [HeaderName; 8] = [
    CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    HeaderName::from_static("http2-settings"),
    PROXY_AUTHORIZATION,
    PROXY_AUTHENTICATE,
    TRANSFER_ENCODING,
    UPGRADE,
];

/// The validated headers of a rule.
pub(crate) struct Ruled {
    headers: Vec<(HeaderName, HeaderValue)>,
}

/// The effect of a rule on a request.
pub(crate) struct RuleHeaders {
    /// The rule's key. `None` if there is no rule.
    pub(crate) rule: Option<String>,
    pub(crate) secrets: Vec<String>,
    pub(crate) headers: Result<Ruled, Refusal>,
}

impl RuleHeaders {
    pub(crate) fn new(outcome: RuleOutcome) -> Self {
        match outcome {
            RuleOutcome::None => Self {
                rule: None,
                secrets: Vec::new(),
                headers: Ok(Ruled::none()),
            },
            RuleOutcome::Headers {
                rule,
                headers,
                secrets,
            } => Self {
                headers: Ruled::new(headers).map_err(|reason| failed(&rule, &reason)),
                rule: Some(rule),
                secrets,
            },
            RuleOutcome::NeedsTls { rule } => Self::refused(rule, |rule| {
                let reason = format!(
                    "the rule for {rule} adds headers in TLS only: use https://, or give the rule \"plain\": true if its headers may leave this host in clear text"
                );
                Refusal::passing(StatusCode::UPGRADE_REQUIRED, reason)
            }),
            RuleOutcome::Failed { rule, reason } => {
                Self::refused(rule, |rule| failed(rule, &reason))
            }
        }
    }

    fn refused(rule: String, why: impl FnOnce(&str) -> Refusal) -> Self {
        Self {
            headers: Err(why(&rule)),
            rule: Some(rule),
            secrets: Vec::new(),
        }
    }
}

fn failed(rule: &str, reason: &str) -> Refusal {
    let text = format!("the headers of the rule for {rule} cannot be made: {reason}");
    Refusal::passing(StatusCode::BAD_GATEWAY, text)
}

impl Ruled {
    pub(crate) fn none() -> Self {
        let headers = Vec::new();
        Self { headers }
    }

    /// The error contains the header's name, never its value.
    fn new(headers: Vec<(String, String)>) -> Result<Self, String> {
        let checked = headers.into_iter().map(|(name, value)| {
            let name = HeaderName::from_bytes(name.as_bytes())
                .map_err(|_| format!("{:?} is not the name of a header", shortened(&name)))?;
            if NOT_FOR_RULES.contains(&name.as_str()) {
                return Err(format!("the header {name} belongs to the connection"));
            }
            // Moves the value's memory, so that there is no second copy.
            let mut value =
                HeaderValue::from_maybe_shared(hyper::body::Bytes::from(value.into_bytes()))
                    .map_err(|_| {
                        format!(
                            "the value of the header {name} has a byte that a header cannot have"
                        )
                    })?;
            value.set_sensitive(true);
            Ok((name, value))
        });
        let headers = checked.collect::<Result<_, _>>()?;
        Ok(Self { headers })
    }

    pub(crate) fn names(&self) -> Vec<HeaderName> {
        self.headers.iter().map(|(name, _)| name.clone()).collect()
    }

    /// Replaces the guest's headers of these names.
    pub(crate) fn apply(self, headers: &mut HeaderMap) {
        for (name, _) in &self.headers {
            headers.remove(name);
        }
        for (name, value) in self.headers {
            headers.append(name, value);
        }
    }
}

fn shortened(name: &str) -> String {
    name.chars().take(100).collect()
}

/// The protocol to which a request asks to switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Switch {
    None,
    WebSocket,
}

/// Reads and removes headers of the guest's connection. Only a switch to WebSocket is forwarded, because any other
/// would end the checks of later requests.
pub(crate) fn of_guest(request: &mut Parts) -> Switch {
    let headers = &mut request.headers;
    let asks = request.version == Version::HTTP_11
        && request.method == Method::GET
        && has_token(headers, &CONNECTION, "upgrade")
        && is_exactly(headers, &UPGRADE, "websocket")
        && !headers.contains_key(TRANSFER_ENCODING)
        && !headers.contains_key(CONTENT_LENGTH);
    let chunked = headers.contains_key(TRANSFER_ENCODING);
    let trailers = has_token(headers, &TE, "trailers");
    let continues = is_exactly(headers, &EXPECT, "100-continue");
    strip(headers);
    headers.remove(TE);
    headers.remove(EXPECT);
    if trailers {
        headers.insert(TE, HeaderValue::from_static("trailers"));
    }
    if continues {
        headers.insert(EXPECT, HeaderValue::from_static("100-continue"));
    }
    if chunked {
        headers.remove(CONTENT_LENGTH);
        headers.insert(TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
    }
    if !asks {
        return Switch::None;
    }
    switch(headers);
    Switch::WebSocket
}

/// Removes headers of the server's connection, and headers that advertise other ways to the server, which would bypass
/// the proxy.
pub(crate) fn of_server(headers: &mut HeaderMap) {
    if headers.contains_key(TRANSFER_ENCODING) {
        headers.remove(CONTENT_LENGTH);
    }
    strip(headers);
    headers.remove(ALT_SVC);
}

/// Whether the server has switched to WebSocket. Must be called before [`of_server`].
pub(crate) fn is_websocket(headers: &HeaderMap) -> bool {
    is_exactly(headers, &UPGRADE, "websocket") && has_token(headers, &CONNECTION, "upgrade")
}

/// Adds the headers of a switch to WebSocket.
pub(crate) fn switch(headers: &mut HeaderMap) {
    headers.insert(CONNECTION, HeaderValue::from_static("Upgrade"));
    headers.insert(UPGRADE, HeaderValue::from_static("websocket"));
}

fn strip(headers: &mut HeaderMap) {
    let connection = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok());
    let named: Vec<HeaderName> = connection
        .flat_map(|value| value.split(','))
        .filter_map(|name| HeaderName::from_bytes(name.trim().as_bytes()).ok())
        // Never options of a connection, whatever the message contains.
        .filter(|name| *name != HOST && *name != CONTENT_LENGTH && *name != TE && *name != EXPECT)
        .collect();
    for name in named.iter().chain(&HOP_BY_HOP) {
        headers.remove(name);
    }
}

fn has_token(headers: &HeaderMap, name: &HeaderName, token: &str) -> bool {
    let values = headers
        .get_all(name)
        .iter()
        .filter_map(|value| value.to_str().ok());
    let mut tokens = values.flat_map(|value| value.split(','));
    tokens.any(|found| found.trim().eq_ignore_ascii_case(token))
}

fn is_exactly(headers: &HeaderMap, name: &HeaderName, value: &str) -> bool {
    let mut values = headers.get_all(name).iter();
    let first = values.next().and_then(|value| value.to_str().ok());
    first.is_some_and(|first| first.trim().eq_ignore_ascii_case(value)) && values.next().is_none()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(headers: &[(&str, &str)]) -> RuleHeaders {
        let headers = headers
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        RuleHeaders::new(RuleOutcome::Headers {
            rule: "api.test".to_owned(),
            headers: headers.collect(),
            secrets: Vec::new(),
        })
    }

    #[test]
    fn headers_of_a_rule_replace_those_of_the_guest() {
        let mut headers = HeaderMap::new();
        headers.append("x-api-key", HeaderValue::from_static("own"));
        headers.append("x-api-key", HeaderValue::from_static("second"));
        headers.append("accept", HeaderValue::from_static("*/*"));
        let ruled = outcome(&[("X-Api-Key", "hunter2")]).headers.ok().unwrap();
        ruled.apply(&mut headers);
        let values: Vec<_> = headers.get_all("x-api-key").iter().collect();
        assert_eq!(values, ["hunter2"]);
        assert!(values[0].is_sensitive());
        assert!(!format!("{headers:?}").contains("hunter2"));
        assert_eq!(headers["accept"], "*/*");
    }

    #[test]
    fn headers_that_cannot_be_made_are_refused_without_their_values() {
        for (name, value) in [
            ("x-key", "hunter2\r\nevil: 1"),
            ("x-key", "hunter2\nevil: 1"),
            ("x-key", "hunter2\0"),
            ("x key", "hunter2"),
            ("x\r\nkey", "hunter2"),
            ("", "hunter2"),
            (":authority", "hunter2"),
            ("Host", "hunter2"),
            ("transfer-encoding", "hunter2"),
            ("Connection", "hunter2"),
        ] {
            let refusal = outcome(&[(name, value)]).headers.err().unwrap();
            assert_eq!(refusal.status, StatusCode::BAD_GATEWAY, "{name:?}");
            assert!(
                refusal.reason.contains("api.test") && !refusal.reason.contains("hunter2"),
                "{}",
                refusal.reason
            );
        }
    }

    #[test]
    fn only_a_change_to_websocket_is_passed_on() {
        let request = |upgrade: &'static str| {
            let request = hyper::Request::builder()
                .header("connection", "Upgrade, X-Own, host")
                .header("upgrade", upgrade)
                .header("http2-settings", "AAMAAABkAAQAAP__")
                .header("host", "api.test")
                .header("x-own", "1");
            request.body(()).unwrap().into_parts().0
        };
        let mut websocket = request("WebSocket");
        assert_eq!(of_guest(&mut websocket), Switch::WebSocket);
        assert_eq!(websocket.headers["upgrade"], "websocket");
        for other in ["h2c", "websocket, h2c", "TLS/1.0"] {
            let mut parts = request(other);
            assert_eq!(of_guest(&mut parts), Switch::None, "{other}");
            let names: Vec<_> = parts.headers.keys().map(HeaderName::as_str).collect();
            assert_eq!(names, ["host"], "{other}");
        }
    }
}
