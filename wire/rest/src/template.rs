//! Templates, as clients see them.

use serde::{Deserialize, Serialize};

use super::BuildStatus;
use envd::Timestamp;

/// An element of the response to `GET /templates`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Template {
    /// Identifies the template; never changes.
    #[serde(rename = "templateID")]
    pub template_id: String,
    /// A UUID: the build that its name refers to, or the last build.
    #[serde(rename = "buildID")]
    pub build_id: String,
    pub cpu_count: u8,
    /// In MiB.
    #[serde(rename = "memoryMB")]
    pub memory_mb: u64,
    /// In MiB.
    #[serde(rename = "diskSizeMB")]
    pub disk_size_mb: u64,
    /// Whether other teams may use the template. It has no effect: there is only one team.
    pub public: bool,
    /// Names without tags.
    pub aliases: Vec<String>,
    /// Names with their tags.
    pub names: Vec<String>,
    pub created_at: Timestamp,
    /// When the template was last built.
    pub updated_at: Timestamp,
    /// Always `null`: there are no user accounts. Clients require the key.
    pub created_by: Option<String>,
    /// Always `null`: not recorded. Clients require the key.
    pub last_spawned_at: Option<Timestamp>,
    /// Number of sandboxes started from this template since the start of the server.
    pub spawn_count: u64,
    pub build_count: usize,
    /// Version of the agent's protocol.
    pub envd_version: String,
    /// Status of the last build.
    pub build_status: BuildStatus,
    /// Extension to E2B's API: disk space of its memory, state and layer on the server, in bytes. For a template
    /// with several builds, that of the named one. `None`: unknown, or there is no ready build.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stored_bytes: Option<u64>,
    /// Extension to E2B's API: the nodes of a cluster that have the template. Empty for a single server.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nodes: Vec<String>,
    /// Extension to E2B's API: whether the operator installed it. Clients can neither change nor delete such a
    /// template.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub installed: bool,
}

/// Response to `GET /templates/{id}`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TemplateWithBuilds {
    #[serde(rename = "templateID")]
    pub template_id: String,
    /// Same as [`Template::public`].
    pub public: bool,
    /// Names without tags.
    pub aliases: Vec<String>,
    /// Names with their tags.
    pub names: Vec<String>,
    pub created_at: Timestamp,
    pub updated_at: Timestamp,
    /// Always `null`: not recorded. Clients require the key.
    pub last_spawned_at: Option<Timestamp>,
    /// Same as [`Template::spawn_count`].
    pub spawn_count: u64,
    /// One page of builds, newest first.
    pub builds: Vec<TemplateBuild>,
    /// Extension to E2B's API: the nodes of a cluster that have the template. Empty for a single server.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nodes: Vec<String>,
    /// Same as [`Template::installed`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub installed: bool,
}

/// A build in a [`TemplateWithBuilds`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TemplateBuild {
    #[serde(rename = "buildID")]
    pub build_id: String,
    pub status: BuildStatus,
    pub created_at: Timestamp,
    pub updated_at: Timestamp,
    /// `None`: the build has not ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub finished_at: Option<Timestamp>,
    pub cpu_count: u8,
    /// In MiB.
    #[serde(rename = "memoryMB")]
    pub memory_mb: u64,
    /// In MiB; only for a build that has a template.
    #[serde(
        rename = "diskSizeMB",
        default,
        skip_serializing_if = "Option::is_none"
    )]
    pub disk_size_mb: Option<u64>,
    pub envd_version: String,
}

/// Body of `PATCH /v2/templates/{id}`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UpdateTemplate {
    #[serde(default)]
    pub public: Option<bool>,
}

/// Response to `PATCH /v2/templates/{id}`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UpdatedTemplate {
    /// Names with their tags.
    pub names: Vec<String>,
}

/// Response to `GET /templates/aliases/{alias}`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TemplateAlias {
    /// Id of the template with this alias.
    #[serde(rename = "templateID")]
    pub template_id: String,
    /// Same as [`Template::public`].
    pub public: bool,
}

/// An element of the response to `GET /templates/{id}/tags`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TemplateTag {
    /// The part of a name after the colon; `default` if the name has no tag.
    pub tag: String,
    /// Same as [`Template::build_id`].
    #[serde(rename = "buildID")]
    pub build_id: String,
    /// When the template was created.
    pub created_at: Timestamp,
}

/// An element of the response to `GET /teams`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Team {
    #[serde(rename = "teamID")]
    pub team_id: String,
    pub name: String,
    /// An API key of the team: the key that the request presented.
    pub api_key: String,
    /// Whether clients use this team by default.
    pub is_default: bool,
}
