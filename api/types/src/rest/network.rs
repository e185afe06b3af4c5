//! What a sandbox may reach, and who may reach it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Network options of a create. Absent means the server's default.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NetworkConfig {
    /// Addresses, CIDR blocks and domains that may be reached; beats `deny_out`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allow_out: Option<Vec<String>>,
    /// Addresses and CIDR blocks that may not be reached.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deny_out: Option<Vec<String>>,
    /// Name servers that may be asked when `allow_out` has a domain.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dns_servers: Option<Vec<String>>,
    /// A SOCKS5 proxy for what goes out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress_proxy: Option<Value>,
    /// Whether the sandbox's ports answer without a traffic token; absent: they do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allow_public_traffic: Option<bool>,
    /// What services in the sandbox see as `Host`; `${PORT}` stands for the port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mask_request_host: Option<String>,
    /// Ports that speak TLS themselves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub https_ports: Option<Vec<u16>>,
    /// Headers put into outbound requests, by host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rules: Option<BTreeMap<String, Value>>,
}

/// `PUT /sandboxes/{id}/network`: replaces the outbound options; what is absent is cleared.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NetworkUpdate {
    /// See [`NetworkConfig::allow_out`].
    #[serde(default)]
    pub allow_out: Option<Vec<String>>,
    /// See [`NetworkConfig::deny_out`].
    #[serde(default)]
    pub deny_out: Option<Vec<String>>,
    /// See [`NetworkConfig::dns_servers`].
    #[serde(default)]
    pub dns_servers: Option<Vec<String>>,
    /// See [`NetworkConfig::egress_proxy`].
    #[serde(default)]
    pub egress_proxy: Option<Value>,
    /// See [`NetworkConfig::rules`].
    #[serde(default)]
    pub rules: Option<BTreeMap<String, Value>>,
    /// The switch for all of it. The one name on the wire that is in snake case.
    #[serde(default, rename = "allow_internet_access")]
    pub allow_internet_access: Option<bool>,
}
