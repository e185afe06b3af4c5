//! Messages between `cube-api`, which owns sandboxes, rules and secrets, and `cube-egress`, which requests them when
//! needed. They are sent over a connected Unix stream socket, the proxy's standard input, as one JSON object per line.
//!
//! The proxy sends a request for each flow and for the headers of each HTTP request. It therefore keeps no secret
//! longer than an HTTP request takes, and a change of a rule or secret applies to the next one.

use std::{fmt, net::SocketAddr};

use serde::{Deserialize, Serialize};

/// Descriptor number of the listening socket that the proxy inherits. It is bound to the resolver's device, so only
/// guests can reach it.
pub const LISTENER: i32 = 3;
/// Maximum length of a message in bytes, including the newline. A longer one ends the connection.
pub const MAX_MESSAGE: usize = 1 << 20;

/// Names, in lower case, of headers that describe the connection or the message itself. The proxy generates them, and
/// rules cannot set them: `cube-api` rejects such rules, and the proxy rejects their requests.
pub const NOT_FOR_RULES: [&str; 13] = [
    "connection",
    "content-length",
    "expect",
    "host",
    "http2-settings",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

/// Messages from `cube-api` to the proxy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ToProxy {
    /// The first message. The proxy accepts no connections before it.
    Start { authority: Authority },
    /// The response to [`ToServer::Flow`]. `None`: the flow no longer exists, or its sandbox has ended.
    Flow { id: u64, flow: Option<Flow> },
    /// The response to [`ToServer::Rule`].
    Rule { id: u64, outcome: RuleOutcome },
    /// The response to [`ToServer::Way`].
    Way { id: u64, way: Way },
    /// Ends all connections of a sandbox, because it has ended or its policy has changed.
    Cut { sandbox: String },
}

/// Messages from the proxy to `cube-api`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ToServer {
    /// Requests the sandbox and the destination of a connection. `peer` is the address from which it was accepted.
    Flow { id: u64, peer: SocketAddr },
    /// Requests the rule for a host name (lower case, without trailing dot) of the sandbox whose flow was accepted from
    /// `peer`. The proxy cannot name a sandbox: without an open flow, the server does not respond.
    Rule {
        id: u64,
        peer: SocketAddr,
        host: String,
        ask: Ask,
    },
    /// Requests how a connection of that sandbox leaves the host. Sent for each connection if [`Flow::has_own_way`] is
    /// set.
    Way { id: u64, peer: SocketAddr },
    /// Reports a request or connection that has ended or was refused. There is no response.
    Call(Call),
    /// Number of calls that were not sent, because the proxy's queue was full.
    Lost { calls: u64 },
}

/// The part of a rule that the proxy requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ask {
    /// Only whether the rule exists. The response has no headers.
    Existence,
    /// The headers of a request in TLS, with their values.
    Headers,
    /// The headers of a request without TLS.
    HeadersInClear,
}

/// The certificate authority of this server, in PEM.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Authority {
    pub certificate: String,
    pub key: String,
}

/// The common name of the authority with this raw public key, and its whole subject: `cube-api` gives it, and the proxy
/// names it as the issuer of certificates. Logs name an authority by it, so two servers' must differ.
#[must_use]
pub fn authority_name(public_key: &[u8]) -> String {
    let id = public_key.get(1..5).and_then(|id| id.try_into().ok());
    format!("cube-egress {:08x}", id.map_or(0, u32::from_be_bytes))
}

impl fmt::Debug for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Authority")
    }
}

/// A flow that the eBPF programs redirected to the proxy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Flow {
    pub sandbox: String,
    /// The guest's destination. The programs have already checked this address, and the proxy connects to no other.
    pub remote: SocketAddr,
    /// The names that the resolver resolved to this address for the sandbox, in lower case.
    pub names: Vec<String>,
    /// The sandbox's rules by address also allow `remote`: a connection with another name passes, unread.
    pub admitted_by_address: bool,
    /// The port is neither the HTTP nor the TLS port: the connection passes unread.
    #[serde(default)]
    pub is_unread: bool,
    /// The sandbox has its own proxy, which [`ToServer::Way`] returns.
    #[serde(default)]
    pub has_own_way: bool,
}

/// How a connection leaves the host.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "way", rename_all = "snake_case")]
pub enum Way {
    Direct,
    /// Through a SOCKS5 proxy (RFC 1928) at one of these addresses, with user name and password (RFC 1929) if present.
    Socks {
        addresses: Vec<SocketAddr>,
        credentials: Option<Credentials>,
        tls: Option<WayTls>,
    },
    /// No way is available now. The connection fails with this text.
    Failed {
        reason: String,
    },
}

/// TLS to the proxy of a sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WayTls {
    /// The name or address in the proxy's certificate.
    pub server_name: String,
    /// Authorities in PEM. `None`: the host's authorities.
    pub authorities: Option<String>,
}

#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Credentials {
    pub user: String,
    pub password: String,
}

/// Omits credentials.
impl fmt::Debug for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Direct => f.write_str("Direct"),
            Self::Socks { addresses, .. } => write!(f, "Socks({addresses:?})"),
            Self::Failed { reason } => write!(f, "Failed({reason:?})"),
        }
    }
}

/// The effect of a sandbox's rules on a host.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "outcome", rename_all = "snake_case")]
pub enum RuleOutcome {
    /// No rule: connections pass unread.
    None,
    /// Headers that replace existing headers with the same names (case-insensitive) in the request.
    Headers {
        /// The rule's key: `api.example.com` or `*.example.com`.
        rule: String,
        /// Names and values. Empty if only the rule's existence was requested.
        headers: Vec<(String, String)>,
        /// Names of the secrets in the values.
        secrets: Vec<String>,
    },
    /// The rule has headers but not `plain`, and the request does not use TLS: it fails with 426.
    NeedsTls { rule: String },
    /// The headers cannot be made, for example because a secret was deleted. The request fails with 502 and this text.
    Failed { rule: String, reason: String },
}

/// Omits values, because they contain secrets.
impl fmt::Debug for RuleOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("None"),
            Self::Headers { rule, secrets, .. } => f
                .debug_struct("Headers")
                .field("rule", rule)
                .field("secrets", secrets)
                .finish_non_exhaustive(),
            Self::NeedsTls { rule } => write!(f, "NeedsTls({rule:?})"),
            Self::Failed { rule, reason } => f
                .debug_struct("Failed")
                .field("rule", rule)
                .field("reason", reason)
                .finish(),
        }
    }
}

/// One request that the proxy has read, one spliced connection, or one refusal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Call {
    pub sandbox: String,
    /// Start time, in milliseconds since the Unix epoch.
    pub time_ms: u64,
    pub duration_ms: u64,
    pub remote: SocketAddr,
    /// The host name in TLS or HTTP, at most 255 bytes. `None` if there was none.
    pub name: Option<String>,
    /// Method and path without the query, if the proxy has read the request. At most 1024 bytes.
    pub method: Option<String>,
    pub path: Option<String>,
    /// Status of the response to the guest.
    pub status: Option<u16>,
    /// Bytes of bodies, or of the connection if it was not read.
    pub bytes_out: u64,
    pub bytes_in: u64,
    /// The rule's key.
    pub rule: Option<String>,
    /// Names of the secrets that were used.
    pub secrets: Vec<String>,
    /// Reason for a refusal. `None` if it was not refused.
    pub refused: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_not_shown_by_debug() {
        let outcome = RuleOutcome::Headers {
            rule: "api.test".to_owned(),
            headers: vec![("x-api-key".to_owned(), "hunter2".to_owned())],
            secrets: vec!["key".to_owned()],
        };
        let authority = Authority {
            certificate: "hunter2".to_owned(),
            key: "hunter2".to_owned(),
        };
        let start = ToProxy::Start { authority };
        let answer = ToProxy::Rule { id: 1, outcome };
        assert!(!format!("{start:?} {answer:?}").contains("hunter2"));
        let text = serde_json::to_string(&answer).unwrap();
        let read: ToProxy = serde_json::from_str(&text).unwrap();
        assert_eq!(read, answer);
    }
}
