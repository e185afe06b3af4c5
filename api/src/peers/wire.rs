//! Paths and bodies of requests between nodes. `control::internal` serves them.

use serde::{Deserialize, Serialize};

/// Path prefix of these routes.
pub const PREFIX: &str = "/cluster/";
/// The only route that accepts hosts that are not members.
pub const JOIN: &str = "/cluster/join";

/// Whether the response may take minutes, because it waits for files.
#[must_use]
pub fn is_long(path: &str) -> bool {
    path == "/cluster/moves" || path.starts_with("/cluster/files/")
}

/// Body of `POST /cluster/signed`.
#[derive(Serialize, Deserialize)]
pub(crate) struct SignedUrl {
    pub(crate) query: String,
    /// `read` or `write`.
    pub(crate) operation: String,
}

/// Body of `POST /cluster/template`.
#[derive(Serialize, Deserialize)]
pub(crate) struct TemplateName {
    pub(crate) name: String,
    /// Whether a copy qualifies while the home is unreachable.
    #[serde(default)]
    pub(crate) is_by_copies: bool,
}

/// The result of a removal.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Removal {
    Removed,
    NotMember,
    Lives,
    /// The removal failed, or this node does not have the authority's key.
    Failed(String),
}
