//! The body of every refusal.

use serde::{Deserialize, Serialize};

/// What failed, for a person and for a program. Official clients fail on a body without `code`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestError {
    /// The HTTP status, repeated.
    pub code: u16,
    /// What failed and what to do about it.
    pub message: String,
    /// A word that clients act on; absent for most errors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error_code: Option<String>,
}
