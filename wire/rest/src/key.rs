//! API keys, as clients see them.

use serde::{Deserialize, Serialize};

use envd::Timestamp;

/// An element of the response to `GET /api-keys`. Contains neither the key nor its hash.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ApiKey {
    /// Identifies the key on the command line of the server.
    pub id: String,
    /// Its purpose, as described by its creator. Need not be unique.
    pub name: String,
    pub scopes: Vec<String>,
    pub created_at: Timestamp,
}
