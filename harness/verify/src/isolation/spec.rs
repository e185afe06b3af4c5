//! Options and results of the isolation suite.

use std::{net::IpAddr, path::PathBuf};

use serde::{Deserialize, Serialize};
use testbed::exit::End;

use super::evaluate::CaseReport;
use crate::{proof::end_of, setup::Setup};

/// Options of the isolation suite.
#[derive(Clone, Debug)]
pub struct IsolationSpec {
    pub setup: Setup,
    /// Path of `cube-netprobe`. `None`: from `$CUBE_BIN`, else beside this program.
    pub probe: Option<PathBuf>,
    /// Path of `cube-egress`. `None`: from `$CUBE_BIN`, else beside this program.
    pub egress: Option<PathBuf>,
    /// Path of `mitmdump`, whose outcomes of the class `l7` are compared. `None`: no comparison.
    pub oracle: Option<PathBuf>,
    pub scope: Scope,
    /// Names of cases or classes; empty: every case in the scope.
    pub only: Vec<String>,
    /// A running server. `None`: the suite starts one in its own network namespaces.
    pub target: Option<TargetSpec>,
}

/// The cases that a command covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scope {
    /// Every case.
    Isolation,
    /// Cases about allowed destinations.
    Egress,
}

impl Scope {
    /// Name of the command.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Isolation => "isolation",
            Self::Egress => "egress",
        }
    }
}

/// Results of a run of the suite.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Proof {
    /// Always [`super::report::FORMAT`].
    pub format: u32,
    pub scope: Scope,
    /// URL of the tested server. `None`: the suite started a server.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// In the order of the case files.
    pub cases: Vec<CaseReport>,
    /// Duration of the run.
    pub seconds: f64,
}

impl Proof {
    /// [`End::Breach`] if any case is a breach, [`End::Pass`] if there are cases and all pass, else
    /// [`End::Inconclusive`].
    #[must_use]
    pub fn end(&self) -> End {
        end_of(self.cases.iter().map(|case| case.result))
    }
}

/// A running server.
#[derive(Clone, Debug)]
pub struct TargetSpec {
    /// Its base URL.
    pub url: String,
    /// Sent as `X-API-KEY`.
    pub key: String,
    /// An address of this host that the server's sandboxes can reach, if there is one.
    pub outside: Option<IpAddr>,
}
