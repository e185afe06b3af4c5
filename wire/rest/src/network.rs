//! Network options of a sandbox.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Network options of a create request. An absent option means the server's default.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NetworkConfig {
    /// Addresses, CIDR blocks and domains that the sandbox may reach. Takes precedence over `deny_out`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allow_out: Option<Vec<String>>,
    /// Addresses and CIDR blocks that the sandbox may not reach.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deny_out: Option<Vec<String>>,
    /// DNS servers that the sandbox may query if `allow_out` contains a domain.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dns_servers: Option<Vec<String>>,
    /// A SOCKS5 proxy for all outbound TCP connections: `address` (`host:port`), `username` and `password`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress_proxy: Option<Value>,
    /// Whether the sandbox's ports are reachable without a traffic token. Absent: yes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allow_public_traffic: Option<bool>,
    /// The `Host` header of requests that are forwarded to the sandbox; `${PORT}` stands for the port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mask_request_host: Option<String>,
    /// Ports of the sandbox whose servers speak TLS. The proxy does not verify their certificates.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub https_ports: Option<Vec<u16>>,
    /// Headers that are added to outbound requests, by host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rules: Option<BTreeMap<String, Value>>,
}

/// Body of `PUT /sandboxes/{id}/network`. Replaces all outbound options; absent options are cleared.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NetworkUpdate {
    #[serde(default)]
    pub allow_out: Option<Vec<String>>,
    #[serde(default)]
    pub deny_out: Option<Vec<String>>,
    #[serde(default)]
    pub dns_servers: Option<Vec<String>>,
    #[serde(default)]
    pub egress_proxy: Option<Value>,
    #[serde(default)]
    pub rules: Option<BTreeMap<String, Value>>,
    /// `false` denies all outbound traffic except to `allow_out`; `true` allows the internet by default. E2B writes
    /// this key in snake case.
    #[serde(default, rename = "allow_internet_access")]
    pub allow_internet_access: Option<bool>,
}
