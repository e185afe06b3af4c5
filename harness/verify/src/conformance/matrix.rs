//! Results of the conformance suite.

use serde::{Deserialize, Serialize};
use testbed::exit::End;

/// Result of one feature with one SDK.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CellResult {
    /// The case passed.
    Pass,
    /// The SDK lacks the feature, which the list of features allows.
    Absent,
    /// The case failed.
    Fail,
    /// The case exceeded its time limit; its process was killed.
    TimedOut,
    /// The case was not run: the SDK is not installed, has no such case, or its process ended.
    NotRun,
}

impl CellResult {
    /// Whether the case passed or is allowed to be absent.
    #[must_use]
    pub fn is_green(self) -> bool {
        match self {
            Self::Pass | Self::Absent => true,
            Self::Fail | Self::TimedOut | Self::NotRun => false,
        }
    }

    /// Name in JSON and reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Pass => "pass",
            Self::Absent => "absent",
            Self::Fail => "fail",
            Self::TimedOut => "timed_out",
            Self::NotRun => "not_run",
        }
    }
}

/// One cell of the matrix: a feature, an SDK, and the result.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cell {
    /// Name of the feature.
    pub feature: String,
    /// Name and version of the SDK.
    pub sdk: String,
    /// Whether the suite fails if the result is not green.
    pub must: bool,
    #[serde(rename = "verdict")]
    pub result: CellResult,
    /// Why the result is not green; empty if it is.
    pub why: String,
    /// Duration of the case. `None` if it was not run.
    pub seconds: Option<f64>,
}

/// Results of a run of the suite.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Matrix {
    /// Always [`super::report::FORMAT`].
    pub format: u32,
    /// URL of the endpoint, or a description of the server.
    pub endpoint: String,
    /// Names of the SDKs, in the order of the columns.
    pub sdks: Vec<String>,
    /// Name and reason of each feature, in the order of the rows.
    pub features: Vec<(String, String)>,
    /// Ordered by row, then column. An SDK that has no case for a feature has no cell there.
    pub cells: Vec<Cell>,
}

impl Matrix {
    #[must_use]
    pub fn cell(&self, feature: &str, sdk: &str) -> Option<&Cell> {
        self.cells
            .iter()
            .find(|cell| cell.feature == feature && cell.sdk == sdk)
    }

    /// [`End::Pass`] if there are cells and all required ones are green, else [`End::GateFailed`].
    #[must_use]
    pub fn end(&self) -> End {
        let holds = |cell: &Cell| cell.result.is_green() || !cell.must;
        if !self.cells.is_empty() && self.cells.iter().all(holds) {
            End::Pass
        } else {
            End::GateFailed
        }
    }
}
