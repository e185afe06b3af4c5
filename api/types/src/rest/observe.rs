//! Figures and lines that a sandbox leaves.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::envd::Timestamp;

/// One sample of a sandbox. All fields are required by clients.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SandboxMetric {
    /// When it was taken.
    pub timestamp: Timestamp,
    /// The same in whole seconds since 1970.
    pub timestamp_unix: u64,
    /// vCPUs.
    pub cpu_count: u8,
    /// Share of all its vCPUs that it used since the sample before, in per cent.
    pub cpu_used_pct: f64,
    /// Bytes.
    pub mem_used: u64,
    /// Bytes.
    pub mem_total: u64,
    /// Bytes.
    pub mem_cache: u64,
    /// Bytes.
    pub disk_used: u64,
    /// Bytes.
    pub disk_total: u64,
}

/// The newest sample of each of several sandboxes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SandboxesWithMetrics {
    /// By sandbox id.
    pub sandboxes: BTreeMap<String, SandboxMetric>,
}

/// How much a line matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogLevel {
    /// For those who look for a bug.
    Debug,
    /// What happened.
    Info,
    /// What may need somebody.
    Warn,
    /// What failed.
    Error,
}

/// A line of a log, taken apart.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogEntry {
    /// When it was written.
    pub timestamp: Timestamp,
    /// The text.
    pub message: String,
    /// How much it matters.
    pub level: LogLevel,
    /// Whatever else is known, `logger` among it.
    pub fields: BTreeMap<String, String>,
}

/// A line of a log as older clients read it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogLine {
    /// When it was written.
    pub timestamp: Timestamp,
    /// A JSON object with `level`, `logger` and `message`.
    pub line: String,
}

/// `GET /sandboxes/{id}/logs`: the same lines twice.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SandboxLogs {
    /// As older clients read them.
    pub logs: Vec<LogLine>,
    /// Taken apart.
    pub log_entries: Vec<LogEntry>,
}

/// Something that a sandbox's network refused: `GET /sandboxes/{id}/network/events`, the newest last. E2B has no such
/// route.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NetworkEvent {
    /// When its first packet was refused.
    pub timestamp: Timestamp,
    /// `out`, from the sandbox, or `in`.
    pub direction: String,
    /// `tcp`, `udp`, `icmp`, or the number of another.
    pub protocol: String,
    /// Address and port; port 0 where there is none.
    pub source: String,
    /// Address and port.
    pub destination: String,
    /// In one word.
    pub reason: String,
    /// The name that was asked for, or by which the address is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Packets that this stands for.
    pub count: u64,
}

/// `GET /v2/sandboxes/{id}/logs`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxLogsV2 {
    /// Oldest first unless asked otherwise.
    pub logs: Vec<LogEntry>,
}
