//! The SDKs that are verified with: names, versions, and how their suites are started.
//!
//! ```text
//! ARTIFACTS/sdk/node/node/bin/node      Node for all of JavaScript
//! ARTIFACTS/sdk/NAME/bin/python         a virtual environment per Python SDK
//! ARTIFACTS/sdk/NAME/node_modules       the packages of a JavaScript SDK
//! ARTIFACTS/sdk/NAME/suite              the cases, copied from harness/verify/conformance
//! ```
//! `cargo xtask` makes all of it from the lock files there.

use std::path::{Path, PathBuf};

use serde::Deserialize;

/// A suite of cases, shared by the versions of one SDK.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Suite {
    /// The Python SDK.
    Python,
    /// The JavaScript SDK.
    Js,
    /// The command line client.
    Cli,
}

/// One version of an SDK.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sdk {
    /// Whose cases it runs.
    pub suite: Suite,
    /// Version of its package.
    pub version: &'static str,
}

impl Sdk {
    /// All, newest first of each kind.
    #[must_use]
    pub fn all() -> Vec<Self> {
        [
            (Suite::Python, "2.63.0"),
            (Suite::Python, "2.45.1"),
            (Suite::Js, "2.51.0"),
            (Suite::Js, "2.45.0"),
            (Suite::Cli, "2.19.0"),
        ]
        .map(|(suite, version)| Self { suite, version })
        .to_vec()
    }

    /// `python-2.63.0`.
    #[must_use]
    pub fn name(&self) -> String {
        let suite = match self.suite {
            Suite::Python => "python",
            Suite::Js => "js",
            Suite::Cli => "cli",
        };
        format!("{suite}-{}", self.version)
    }

    /// Program and first argument; cases follow. Relative to nothing but `dir`, the directory of all SDKs.
    #[must_use]
    pub fn command(&self, dir: &Path) -> (PathBuf, PathBuf) {
        let own = dir.join(self.name());
        let node = dir.join("node/node/bin/node");
        match self.suite {
            Suite::Python => (own.join("bin/python"), own.join("suite/run.py")),
            Suite::Js | Suite::Cli => (node, own.join("suite/run.mjs")),
        }
    }
}
