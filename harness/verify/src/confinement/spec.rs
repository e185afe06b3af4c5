//! Options and results of the confinement suite.

use serde::{Deserialize, Serialize};
use testbed::exit::End;

use super::attempts::Class;
use crate::{
    proof::{CaseResult, end_of},
    setup::Setup,
};

/// Options of the confinement suite.
#[derive(Clone, Debug)]
pub struct ConfinementSpec {
    pub setup: Setup,
    pub starts: Starts,
    /// Names of cases or classes; empty: all.
    pub only: Vec<String>,
}

/// The programs that start the VMMs under test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Starts {
    /// By this suite, and by the pool of a server.
    Both,
    /// By this suite only, which needs no program other than the VMM.
    Direct,
}

/// A case and its result.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CaseReport {
    /// Name of the case.
    pub case: String,
    pub class: Class,
    /// Consequence if the attempt succeeds.
    pub why: String,
    #[serde(rename = "verdict")]
    pub result: CaseResult,
    /// Refusals that pass.
    pub expected: String,
    /// The kernel's response to the process that made the attempt.
    pub inside: String,
    /// Change that was observed from outside; empty: none.
    pub outside: String,
}

/// Results of a run of the suite.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Proof {
    /// Always [`super::report::FORMAT`].
    pub format: u32,
    /// Ordered by class.
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

impl ConfinementSpec {
    /// Whether the options select a case: they contain its name or its class, or are empty.
    pub(super) fn selects(&self, name: &str, class: Class) -> bool {
        let is_named = |word: &String| word == name || word == class.name();
        self.only.is_empty() || self.only.iter().any(is_named)
    }
}
