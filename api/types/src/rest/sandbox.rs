//! Creating sandboxes and changing their lives.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{NetworkConfig, RestError};
use crate::envd::Timestamp;

/// `POST /v2/sandboxes` and, with `secure`, `POST /sandboxes`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NewSandbox {
    /// Id, alias, `name:tag` or snapshot id.
    #[serde(rename = "templateID")]
    pub template_id: String,
    /// Seconds until the sandbox ends or pauses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<i64>,
    /// Pause instead of ending.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auto_pause: Option<bool>,
    /// Whether such a pause keeps memory; absent: it does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auto_pause_memory: Option<bool>,
    /// Whether traffic wakes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auto_resume: Option<AutoResume>,
    /// The switch for all outbound traffic. In snake case on the wire.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "allow_internet_access")]
    pub allow_internet_access: Option<bool>,
    /// See [`NetworkConfig`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkConfig>,
    /// The caller's own words, to find it by.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<BTreeMap<String, String>>,
    /// Environment of every process in it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub env_vars: Option<BTreeMap<String, String>>,
    /// Kept; the client starts the gateway itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mcp: Option<Value>,
    /// Workload identity.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iam: Option<Value>,
    /// Volumes to mount.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume_mounts: Option<Vec<Value>>,
    /// Of the older route: whether the agent asks for a token; absent: it does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secure: Option<bool>,
}

/// Whether traffic wakes a paused sandbox.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AutoResume {
    /// It does.
    #[serde(default)]
    pub enabled: bool,
}

/// `POST …/connect`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConnectSandbox {
    /// Seconds from now that the sandbox shall live at least.
    #[serde(default)]
    pub timeout: Option<i64>,
    /// False: a paused one boots from its disk, its memory is left aside.
    #[serde(default)]
    pub memory: Option<bool>,
}

/// `POST /sandboxes/{id}/resume`, older than connect.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ResumeRequest {
    /// Seconds from now.
    #[serde(default)]
    pub timeout: Option<i64>,
    /// Replaces what the sandbox does at its timeout.
    #[serde(default)]
    pub auto_pause: Option<bool>,
    /// As [`ConnectSandbox::memory`].
    #[serde(default)]
    pub memory: Option<bool>,
}

/// `POST /sandboxes/{id}/timeout`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TimeoutRequest {
    /// Seconds from now; may shorten.
    pub timeout: i64,
}

/// `POST /sandboxes/{id}/refreshes`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RefreshRequest {
    /// Seconds from now; never shortens.
    #[serde(default)]
    pub duration: Option<i64>,
}

/// `POST /sandboxes/{id}/pause`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PauseRequest {
    /// Whether memory is kept; absent: it is.
    #[serde(default)]
    pub memory: Option<bool>,
    /// Refuse when the agent does not answer.
    #[serde(default)]
    pub require_healthy_guest: Option<bool>,
}

/// `POST /sandboxes/{id}/snapshots`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotRequest {
    /// `name` or `name:tag`.
    #[serde(default)]
    pub name: Option<String>,
    /// Whether memory is kept; absent: it is.
    #[serde(default)]
    pub memory: Option<bool>,
}

/// A snapshot that sandboxes can be made of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotInfo {
    /// What a create takes as `templateID`.
    #[serde(rename = "snapshotID")]
    pub snapshot_id: String,
    /// Names, with tags.
    pub names: Vec<String>,
}

/// `POST /sandboxes/{id}/fork`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForkRequest {
    /// Seconds each fork lives.
    #[serde(default)]
    pub timeout: Option<i64>,
    /// How many; absent: one.
    #[serde(default)]
    pub count: Option<i64>,
}

/// One fork: exactly one of both is set.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForkResult {
    /// It runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<Sandbox>,
    /// It could not be started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<RestError>,
}

/// What create, connect, resume and fork answer.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Sandbox {
    /// What it was made of.
    #[serde(rename = "templateID")]
    pub template_id: String,
    /// Which.
    #[serde(rename = "sandboxID")]
    pub sandbox_id: String,
    /// Of no use; clients need the key.
    #[serde(rename = "clientID")]
    pub client_id: String,
    /// What its agent speaks.
    pub envd_version: String,
    /// The template's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alias: Option<String>,
    /// What `X-Access-Token` must say; absent: the agent is open.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub envd_access_token: Option<String>,
    /// What `e2b-traffic-access-token` must say; absent: the ports are public.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traffic_access_token: Option<String>,
    /// Where its ports are reached; absent: where the client was told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub domain: Option<String>,
}

impl std::fmt::Debug for Sandbox {
    /// Without the tokens.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sandbox")
            .field("sandbox_id", &self.sandbox_id)
            .field("template_id", &self.template_id)
            .finish_non_exhaustive()
    }
}

/// Two states are all that clients know.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SandboxState {
    /// It runs.
    Running,
    /// It is on disk.
    Paused,
}

/// What a pause saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PauseMode {
    /// Disk and memory.
    Full,
    /// The disk.
    Filesystem,
}

/// What happens at the timeout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnTimeout {
    /// It pauses.
    Pause,
    /// It ends.
    Kill,
}

/// What a sandbox does by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Lifecycle {
    /// Traffic wakes it.
    pub auto_resume: bool,
    /// At its timeout.
    pub on_timeout: OnTimeout,
}

/// One of the lists.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ListedSandbox {
    /// What it was made of.
    #[serde(rename = "templateID")]
    pub template_id: String,
    /// Which.
    #[serde(rename = "sandboxID")]
    pub sandbox_id: String,
    /// Of no use; clients need the key.
    #[serde(rename = "clientID")]
    pub client_id: String,
    /// When it was created.
    pub started_at: Timestamp,
    /// When it ends or pauses; for a paused one, when it was paused.
    pub end_at: Timestamp,
    /// What its agent speaks.
    pub envd_version: String,
    /// vCPUs.
    pub cpu_count: u8,
    /// MiB.
    #[serde(rename = "memoryMB")]
    pub memory_mb: u64,
    /// MiB.
    #[serde(rename = "diskSizeMB")]
    pub disk_size_mb: u64,
    /// Running or paused.
    pub state: SandboxState,
    /// The template's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alias: Option<String>,
    /// The caller's words; an empty object when there are none.
    #[serde(default)]
    pub metadata: BTreeMap<String, String>,
}

/// `GET /sandboxes/{id}`: what lists tell, and what only one who asks for it needs.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SandboxDetail {
    /// What it was made of.
    #[serde(rename = "templateID")]
    pub template_id: String,
    /// Which.
    #[serde(rename = "sandboxID")]
    pub sandbox_id: String,
    /// Of no use; clients need the key.
    #[serde(rename = "clientID")]
    pub client_id: String,
    /// When it was created.
    pub started_at: Timestamp,
    /// When it ends or pauses; for a paused one, when it was paused.
    pub end_at: Timestamp,
    /// What its agent speaks.
    pub envd_version: String,
    /// vCPUs.
    pub cpu_count: u8,
    /// MiB.
    #[serde(rename = "memoryMB")]
    pub memory_mb: u64,
    /// MiB.
    #[serde(rename = "diskSizeMB")]
    pub disk_size_mb: u64,
    /// Running or paused.
    pub state: SandboxState,
    /// The template's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alias: Option<String>,
    /// The caller's words; an empty object when there are none.
    #[serde(default)]
    pub metadata: BTreeMap<String, String>,
    /// As [`Sandbox::envd_access_token`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub envd_access_token: Option<String>,
    /// What was asked for; absent: nothing was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allow_internet_access: Option<bool>,
    /// As [`Sandbox::domain`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub domain: Option<String>,
    /// What was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkConfig>,
    /// What it does by itself.
    pub lifecycle: Lifecycle,
    /// What its pause saved; absent while it runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pause_mode: Option<PauseMode>,
}

impl std::fmt::Debug for SandboxDetail {
    /// Without the token.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SandboxDetail")
            .field("sandbox_id", &self.sandbox_id)
            .field("state", &self.state)
            .field("end_at", &self.end_at)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_official_clients_send_is_read() {
        let minimal = r#"{"templateID":"code-interpreter-v1","timeout":60,"metadata":{"a":"b c"},
                          "envVars":{"X":"1"}}"#;
        let body: NewSandbox = serde_json::from_str(minimal).unwrap();
        assert_eq!(body.timeout, Some(60));
        assert_eq!(body.metadata.unwrap()["a"], "b c");
        let old = r#"{"templateID":"base","secure":false,"allow_internet_access":true,
                      "autoPause":null,"network":{"maskRequestHost":"h:${PORT}"},"unheard":[1]}"#;
        let body: NewSandbox = serde_json::from_str(old).unwrap();
        assert_eq!(body.secure, Some(false));
        assert_eq!(body.allow_internet_access, Some(true));
        assert_eq!(
            body.network.unwrap().mask_request_host.as_deref(),
            Some("h:${PORT}")
        );
    }

    #[test]
    fn answers_have_the_names_that_clients_require() {
        let sandbox = Sandbox {
            template_id: "t".into(),
            sandbox_id: "s".into(),
            client_id: "c".into(),
            envd_version: "v".into(),
            alias: None,
            envd_access_token: None,
            traffic_access_token: None,
            domain: None,
        };
        assert_eq!(
            serde_json::to_string(&sandbox).unwrap(),
            r#"{"templateID":"t","sandboxID":"s","clientID":"c","envdVersion":"v"}"#
        );
    }
}
