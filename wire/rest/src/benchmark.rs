//! Runs of `cube-bench`.

use serde::{Deserialize, Serialize};

use envd::Timestamp;

/// An element of the response to `GET /benchmarks`: a directory with a `report.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BenchmarkRun {
    /// Name of the directory.
    pub name: String,
    /// Size of the report.
    pub bytes: u64,
    pub modified_at: Timestamp,
}
