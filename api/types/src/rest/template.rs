//! Templates, as clients see them.

use serde::{Deserialize, Serialize};

use crate::envd::Timestamp;

/// An element of the answer of `GET /templates`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Template {
    /// Identifies the template; never changes.
    #[serde(rename = "templateID")]
    pub template_id: String,
    /// A UUID for the template's only build.
    #[serde(rename = "buildID")]
    pub build_id: String,
    pub cpu_count: u8,
    /// In MiB.
    #[serde(rename = "memoryMB")]
    pub memory_mb: u64,
    /// In MiB.
    #[serde(rename = "diskSizeMB")]
    pub disk_size_mb: u64,
    /// Whether other teams may use the template. Always `false`: there is only one team.
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
    /// Sandboxes started from this template since the server was started.
    pub spawn_count: u64,
    /// Always 1.
    pub build_count: u32,
    /// Version of the agent's protocol.
    pub envd_version: String,
    /// Always `ready`.
    pub build_status: String,
}

/// Answer of `GET /templates/aliases/{alias}`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TemplateAlias {
    /// Id of the template with this alias.
    #[serde(rename = "templateID")]
    pub template_id: String,
    /// As [`Template::public`].
    pub public: bool,
}

/// An element of the answer of `GET /templates/{id}/tags`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TemplateTag {
    /// The part of a name after the colon; `default` if the name has no tag.
    pub tag: String,
    /// As [`Template::build_id`].
    #[serde(rename = "buildID")]
    pub build_id: String,
    /// When the template was created.
    pub created_at: Timestamp,
}

/// An element of the answer of `GET /teams`.
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
