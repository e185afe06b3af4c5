//! Creation and life cycle of sandboxes.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{NetworkConfig, RestError};
use envd::Timestamp;

/// Body of `POST /v2/sandboxes` and of `POST /sandboxes`. The former ignores `secure`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NewSandbox {
    /// Template id, alias, `name:tag` or snapshot id.
    #[serde(rename = "templateID")]
    pub template_id: String,
    /// Seconds until the sandbox is killed or paused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<i64>,
    /// Whether the sandbox is paused at the timeout instead of being killed. Absent: no.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auto_pause: Option<bool>,
    /// Whether a pause at the timeout keeps memory. Absent: yes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auto_pause_memory: Option<bool>,
    /// Whether requests to a paused sandbox resume it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auto_resume: Option<AutoResume>,
    /// `false` denies all outbound traffic except to `network.allowOut`; `true` allows the internet by default. E2B
    /// writes this key in snake case.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "allow_internet_access")]
    pub allow_internet_access: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkConfig>,
    /// Labels that the client chooses. Lists can be filtered by them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<BTreeMap<String, String>>,
    /// Environment variables of all processes in the sandbox.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub env_vars: Option<BTreeMap<String, String>>,
    /// The server only stores this value: the client starts the MCP gateway itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mcp: Option<Value>,
    /// Workload identity. Not supported.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iam: Option<Value>,
    /// Not supported.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume_mounts: Option<Vec<Value>>,
    /// Whether the agent requires an access token. Absent: yes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secure: Option<bool>,
    /// Extension to E2B's API.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lifecycle: Option<NewLifecycle>,
}

/// Automatic actions requested in a create.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NewLifecycle {
    /// Absent: requests do not move the sandbox's deadline.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_activity: Option<OnActivity>,
}

/// Each request to a sandbox renews its deadline with the last requested timeout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OnActivity {
    /// Seconds since the sandbox's creation after which requests no longer move the deadline.
    pub max_timeout: i64,
}

/// Whether requests to a paused sandbox resume it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AutoResume {
    #[serde(default)]
    pub enabled: bool,
}

/// Body of `POST …/connect`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConnectSandbox {
    /// Minimum remaining lifetime in seconds from now.
    #[serde(default)]
    pub timeout: Option<i64>,
    /// `false`: boot a paused sandbox from its disk. Not supported for sandboxes that were paused with their memory.
    #[serde(default)]
    pub memory: Option<bool>,
}

/// Body of `POST /sandboxes/{id}/resume`, the predecessor of connect.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ResumeRequest {
    /// Seconds from now.
    #[serde(default)]
    pub timeout: Option<i64>,
    /// Changes the action at the timeout: `true` pauses the sandbox, `false` kills it.
    #[serde(default)]
    pub auto_pause: Option<bool>,
    /// `false`: as in [`ConnectSandbox`].
    #[serde(default)]
    pub memory: Option<bool>,
}

/// Body of `POST /sandboxes/{id}/timeout`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TimeoutRequest {
    /// Seconds from now. May shorten the lifetime.
    pub timeout: i64,
}

/// Body of `POST /sandboxes/{id}/refreshes`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RefreshRequest {
    /// Seconds from now. Never shortens the lifetime.
    #[serde(default)]
    pub duration: Option<i64>,
}

/// Body of `POST /sandboxes/{id}/pause`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PauseRequest {
    /// Whether the pause keeps memory. Absent: yes.
    #[serde(default)]
    pub memory: Option<bool>,
    /// Whether the pause fails if the agent does not respond. Absent: no.
    #[serde(default)]
    pub require_healthy_guest: Option<bool>,
}

/// Body of `POST /sandboxes/{id}/snapshots`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotRequest {
    /// `name` or `name:tag`.
    #[serde(default)]
    pub name: Option<String>,
    /// Whether the snapshot keeps memory. Absent: yes; `false` is not supported.
    #[serde(default)]
    pub memory: Option<bool>,
}

/// A snapshot from which sandboxes can be created.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotInfo {
    /// Accepted as `templateID` by create requests.
    #[serde(rename = "snapshotID")]
    pub snapshot_id: String,
    /// Names with tags.
    pub names: Vec<String>,
    /// Extension to E2B's API: the sandbox that was snapshotted, which may have ended. `None`: not recorded.
    #[serde(
        rename = "sourceSandboxID",
        default,
        skip_serializing_if = "Option::is_none"
    )]
    pub source_sandbox_id: Option<String>,
    /// Extension to E2B's API.
    #[serde(rename = "createdAt", default, skip_serializing_if = "Option::is_none")]
    pub created_at: Option<Timestamp>,
    /// Extension to E2B's API: disk space on the server, in bytes. `None`: unknown.
    #[serde(
        rename = "storedBytes",
        default,
        skip_serializing_if = "Option::is_none"
    )]
    pub stored_bytes: Option<u64>,
}

/// Body of `POST /sandboxes/{id}/fork`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForkRequest {
    /// Lifetime of each fork in seconds.
    #[serde(default)]
    pub timeout: Option<i64>,
    /// Number of forks. Absent: 1.
    #[serde(default)]
    pub count: Option<i64>,
}

/// The result of one fork. Exactly one field is set.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForkResult {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<Sandbox>,
    /// Why the fork could not be started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<RestError>,
}

/// Answer of create, connect, resume and fork.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Sandbox {
    /// Template from which the sandbox was created.
    #[serde(rename = "templateID")]
    pub template_id: String,
    #[serde(rename = "sandboxID")]
    pub sandbox_id: String,
    /// Clients require this key, but do not use its value.
    #[serde(rename = "clientID")]
    pub client_id: String,
    /// Version of the agent's protocol.
    pub envd_version: String,
    /// Name of the template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alias: Option<String>,
    /// The `X-Access-Token` for the agent. Absent: the agent requires none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub envd_access_token: Option<String>,
    /// The `e2b-traffic-access-token` for the sandbox's ports. Absent: the ports are public.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traffic_access_token: Option<String>,
    /// Domain of the sandbox's host names. Absent: the domain in the client's configuration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub domain: Option<String>,
}

impl std::fmt::Debug for Sandbox {
    /// Omits the tokens.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sandbox")
            .field("sandbox_id", &self.sandbox_id)
            .field("template_id", &self.template_id)
            .finish_non_exhaustive()
    }
}

/// The state of a sandbox. E2B's interface defines no others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SandboxState {
    Running,
    Paused,
}

/// The state that a pause saves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PauseMode {
    /// Disk and memory.
    Full,
    /// Only the disk.
    Filesystem,
}

/// Action at a sandbox's timeout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnTimeout {
    Pause,
    Kill,
}

/// Automatic actions of a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Lifecycle {
    /// Whether requests to the paused sandbox resume it.
    pub auto_resume: bool,
    pub on_timeout: OnTimeout,
    /// Extension to E2B's API. Absent: requests do not move the deadline.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_activity: Option<OnActivity>,
}

/// An element of a list of sandboxes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ListedSandbox {
    /// Template from which the sandbox was created.
    #[serde(rename = "templateID")]
    pub template_id: String,
    #[serde(rename = "sandboxID")]
    pub sandbox_id: String,
    /// Clients require this key, but do not use its value.
    #[serde(rename = "clientID")]
    pub client_id: String,
    /// When the sandbox was created.
    pub started_at: Timestamp,
    /// When the sandbox will be killed or paused; for a paused sandbox, when it was paused.
    pub end_at: Timestamp,
    /// Version of the agent's protocol.
    pub envd_version: String,
    pub cpu_count: u8,
    /// In MiB.
    #[serde(rename = "memoryMB")]
    pub memory_mb: u64,
    /// In MiB.
    #[serde(rename = "diskSizeMB")]
    pub disk_size_mb: u64,
    pub state: SandboxState,
    /// Name of the template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alias: Option<String>,
    /// Labels that the client chose; may be empty.
    #[serde(default)]
    pub metadata: BTreeMap<String, String>,
}

/// Response to `GET /sandboxes/{id}`: the fields of [`ListedSandbox`] and further details.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SandboxDetail {
    /// Template from which the sandbox was created.
    #[serde(rename = "templateID")]
    pub template_id: String,
    #[serde(rename = "sandboxID")]
    pub sandbox_id: String,
    /// Clients require this key, but do not use its value.
    #[serde(rename = "clientID")]
    pub client_id: String,
    /// When the sandbox was created.
    pub started_at: Timestamp,
    /// When the sandbox will be killed or paused; for a paused sandbox, when it was paused.
    pub end_at: Timestamp,
    /// Version of the agent's protocol.
    pub envd_version: String,
    pub cpu_count: u8,
    /// In MiB.
    #[serde(rename = "memoryMB")]
    pub memory_mb: u64,
    /// In MiB.
    #[serde(rename = "diskSizeMB")]
    pub disk_size_mb: u64,
    pub state: SandboxState,
    /// Name of the template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alias: Option<String>,
    /// Labels that the client chose; may be empty.
    #[serde(default)]
    pub metadata: BTreeMap<String, String>,
    /// Same as [`Sandbox::envd_access_token`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub envd_access_token: Option<String>,
    /// As requested. Absent: the request did not contain the option.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allow_internet_access: Option<bool>,
    /// Same as [`Sandbox::domain`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub domain: Option<String>,
    /// As requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkConfig>,
    pub lifecycle: Lifecycle,
    /// The state that the pause saved. Absent while the sandbox is running.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pause_mode: Option<PauseMode>,
}

impl std::fmt::Debug for SandboxDetail {
    /// Omits the token.
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
    fn requests_of_the_official_clients_are_parsed() {
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
    fn answers_have_the_field_names_that_clients_require() {
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
