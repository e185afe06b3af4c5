//! The body of an error.

use serde::{Deserialize, Serialize};

/// What failed, for people and programs. The official clients fail on a body without `code`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestError {
    /// The HTTP status.
    pub code: u16,
    /// What failed, and what to do.
    pub message: String,
    /// An identifier on which clients act. Most errors have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error_code: Option<String>,
}
