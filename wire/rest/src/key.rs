//! API keys, as clients see them.

use serde::{Deserialize, Serialize};

use envd::Timestamp;

/// An element of the answer of `GET /api-keys`. It has neither the key nor its hash.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ApiKey {
    /// Identifies the key on the command line of the server.
    pub id: String,
    /// Its purpose, in the words of its creator. Need not be unique.
    pub name: String,
    pub scopes: Vec<String>,
    pub created_at: Timestamp,
}
