//! `cube-bench ab A B`: two builds measured in one run on one host, in the order A B B A.
//!
//! ```text
//! builds ─► run: one recorded block after the other ─► record ─► metrics ─► compare ─► report
//! ```
//! A *block* is one run of the scenario's measured work with one build: a new server or template mapping, warm-up,
//! and one round. Some random effects, such as the address layout and the placement of huge pages, are constant
//! within a process. Because each block starts new processes, these effects vary between blocks, and the test
//! accounts for variation between blocks. Two consecutive blocks of different builds are a *pair*.
//!
//! Only the *primary* metrics, which are declared before the run, have verdicts. All others describe.
//!
//! Everything after `run` is a pure function of the recorded directory.

pub mod builds;
pub mod compare;
mod metrics;
pub mod record;
pub mod report;
pub mod run;
pub mod sequential;
pub mod tally;
#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};

/// One of the two builds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Side {
    A,
    B,
}

impl Side {
    #[must_use]
    pub fn letter(self) -> char {
        match self {
            Self::A => 'A',
            Self::B => 'B',
        }
    }
}

/// The order in which the builds run, two blocks for each pair: A B, B A, A B, and so on.
#[must_use]
pub fn order(pairs: u32) -> Vec<Side> {
    (0..pairs)
        .flat_map(|pair| {
            if pair.is_multiple_of(2) {
                [Side::A, Side::B]
            } else {
                [Side::B, Side::A]
            }
        })
        .collect()
}
