//! Metrics, logs and network events of sandboxes.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use envd::Timestamp;

/// Resource usage of a sandbox. Clients require all fields.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SandboxMetric {
    /// When the sample was taken.
    pub timestamp: Timestamp,
    /// `timestamp` in whole seconds since 1970.
    pub timestamp_unix: u64,
    pub cpu_count: u8,
    /// Usage since the previous sample: 0 to 100 for all vCPUs together; 0 in the first sample of a VM.
    pub cpu_used_pct: f64,
    /// In bytes.
    pub mem_used: u64,
    /// In bytes.
    pub mem_total: u64,
    /// Page cache in bytes.
    pub mem_cache: u64,
    /// In bytes.
    pub disk_used: u64,
    /// In bytes.
    pub disk_total: u64,
}

/// The latest sample of each requested sandbox.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SandboxesWithMetrics {
    /// By sandbox id.
    pub sandboxes: BTreeMap<String, SandboxMetric>,
}

/// The severity of a log entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogLevel {
    Debug,
    Info,
    Warn,
    Error,
}

/// A structured log entry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogEntry {
    pub timestamp: Timestamp,
    pub message: String,
    pub level: LogLevel,
    /// Further attributes, including `logger`.
    pub fields: BTreeMap<String, String>,
}

/// A log line for older clients.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogLine {
    pub timestamp: Timestamp,
    /// A JSON object with `level`, `logger`, `message` and `timestamp`.
    pub line: String,
}

/// Response to `GET /sandboxes/{id}/logs`: the same entries in two formats.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SandboxLogs {
    /// For older clients.
    pub logs: Vec<LogLine>,
    pub log_entries: Vec<LogEntry>,
}

/// Packets that the network policy of a sandbox refused, or a call through the egress proxy that matched a rule or
/// was refused. Element of the response to `GET /sandboxes/{id}/network/events`, sorted oldest first. E2B has no
/// such route.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NetworkEvent {
    /// When the first of the packets was refused, or the call began.
    pub timestamp: Timestamp,
    /// `out`: from the sandbox; `in`: to the sandbox.
    pub direction: String,
    /// `tcp`, `udp`, `icmp`, or a protocol number.
    pub protocol: String,
    /// Address and port; port 0 for protocols without ports, and for calls.
    pub source: String,
    /// Address and port; port 0 for protocols without ports.
    pub destination: String,
    /// An identifier of the reason, for example `no_route`; `proxy` for a refused call, `none` for a call that was not
    /// refused.
    pub reason: String,
    /// The DNS name that was queried, or through which the sandbox learned the address; the host name of a call.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    pub count: u64,
    /// Absent for packets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub call: Option<NetworkCall>,
}

/// A request, or a connection from which the proxy has read no request.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NetworkCall {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub method: Option<String>,
    /// Path without the query.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Status of the response to the sandbox.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<u16>,
    /// Bytes of bodies, or of the whole connection.
    pub bytes_out: u64,
    pub bytes_in: u64,
    pub duration_ms: u64,
    /// The matching key in `network.rules`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rule: Option<String>,
    /// Names of the inserted secrets.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub secrets: Vec<String>,
    /// Why the call was refused. Absent: it was not refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
}

/// Response to `GET /v2/sandboxes/{id}/logs`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxLogsV2 {
    /// Oldest first, unless the request asks for reverse order.
    pub logs: Vec<LogEntry>,
}
