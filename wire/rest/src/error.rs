//! The response body of a failed request.

use serde::{Deserialize, Serialize};

/// The error body. The official clients cannot parse a body without `code`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestError {
    pub code: u16,
    /// Describes the failure and its remedy.
    pub message: String,
    /// An identifier from E2B's specification, such as `sandbox_capacity_unavailable`. Absent: there is none for
    /// this error.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error_code: Option<String>,
}
