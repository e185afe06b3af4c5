//! Secrets: values that the server adds to outbound requests of sandboxes and never returns.

use std::{collections::BTreeMap, fmt};

use serde::{Deserialize, Serialize};

use envd::Timestamp;

/// Body of `POST /secrets`.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewSecret {
    /// Unique. Letters, digits, `-` and `_`; stored in lower case.
    pub name: String,
    /// Never returned.
    pub value: String,
    /// Labels chosen by the caller.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<BTreeMap<String, String>>,
    /// Extension to E2B's API: the hosts that the value may go to, such as `api.example.com` and `*.example.com`.
    /// Absent or empty: any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hosts: Option<Vec<String>>,
}

/// Body of `POST /secrets/{id}`: a new version of the value.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SecretUpdate {
    /// Never returned.
    pub value: String,
    /// Replaces the labels. Absent: unchanged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<BTreeMap<String, String>>,
    /// Extension to E2B's API: replaces the hosts. Absent: unchanged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hosts: Option<Vec<String>>,
}

/// Public properties of a secret, without its value.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Secret {
    #[serde(rename = "secretID")]
    pub secret_id: String,
    pub name: String,
    /// Version number of the value, counted from 1.
    pub current_version: u64,
    pub metadata: BTreeMap<String, String>,
    /// Extension to E2B's API: as [`NewSecret::hosts`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<String>,
    pub created_at: Timestamp,
    pub updated_at: Timestamp,
}

impl fmt::Debug for NewSecret {
    /// Omits the value.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NewSecret")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for SecretUpdate {
    /// Omits the value.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SecretUpdate").finish_non_exhaustive()
    }
}
