//! The SDKs: names, versions, and the commands that start their suites.
//!
//! ```text
//! ARTIFACTS/sdk/node/node/bin/node      Node, for all JavaScript SDKs
//! ARTIFACTS/sdk/NAME/bin/python         virtual environment of a Python SDK
//! ARTIFACTS/sdk/NAME/node_modules       packages of a JavaScript SDK
//! ARTIFACTS/sdk/NAME/suite              the cases, copied from harness/verify/conformance
//! ```
//! `cargo xtask sdks` installs the SDKs from the lock files in harness/verify/conformance.

use std::path::{Path, PathBuf};

use serde::Deserialize;

/// A suite of cases. All versions of an SDK share one.
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sdk {
    pub suite: Suite,
    /// Version of the SDK's package.
    pub version: &'static str,
}

impl Sdk {
    /// All SDKs; newer versions come before older ones.
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

    /// For example `python-2.63.0`.
    #[must_use]
    pub fn name(&self) -> String {
        let suite = match self.suite {
            Suite::Python => "python",
            Suite::Js => "js",
            Suite::Cli => "cli",
        };
        format!("{suite}-{}", self.version)
    }

    /// Paths of the interpreter and of the suite's program, below `dir`, the directory of all SDKs. The names of cases
    /// follow as arguments.
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
