//! Templates as clients see them.

use serde::{Deserialize, Serialize};

use crate::envd::Timestamp;

/// One of `GET /templates`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Template {
    /// Identifies it for ever.
    #[serde(rename = "templateID")]
    pub template_id: String,
    /// A UUID that stands for the template's one build.
    #[serde(rename = "buildID")]
    pub build_id: String,
    /// vCPUs.
    pub cpu_count: u8,
    /// MiB.
    #[serde(rename = "memoryMB")]
    pub memory_mb: u64,
    /// MiB.
    #[serde(rename = "diskSizeMB")]
    pub disk_size_mb: u64,
    /// Whether others than its owner may use it.
    pub public: bool,
    /// Names without tags.
    pub aliases: Vec<String>,
    /// Names as they were given.
    pub names: Vec<String>,
    /// When it was made.
    pub created_at: Timestamp,
    /// When it was made last.
    pub updated_at: Timestamp,
    /// Always `null`: there are no users. Clients need the key.
    pub created_by: Option<String>,
    /// Always `null`: it is not recorded. Clients need the key.
    pub last_spawned_at: Option<Timestamp>,
    /// Sandboxes started from it since the server was started.
    pub spawn_count: u64,
    /// Always 1.
    pub build_count: u32,
    /// What its agent speaks.
    pub envd_version: String,
    /// Always `ready`.
    pub build_status: String,
}

/// `GET /templates/aliases/{alias}`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TemplateAlias {
    /// What the alias means.
    #[serde(rename = "templateID")]
    pub template_id: String,
    /// As [`Template::public`].
    pub public: bool,
}

/// One of `GET /templates/{id}/tags`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TemplateTag {
    /// The part of a name after the colon, `default` where there is none.
    pub tag: String,
    /// As [`Template::build_id`].
    #[serde(rename = "buildID")]
    pub build_id: String,
    /// When the template was made.
    pub created_at: Timestamp,
}

/// One of `GET /teams`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Team {
    /// Identifies it.
    #[serde(rename = "teamID")]
    pub team_id: String,
    /// For people.
    pub name: String,
    /// A key of the team; here the one that asked.
    pub api_key: String,
    /// Whether clients take it when none is chosen.
    pub is_default: bool,
}
