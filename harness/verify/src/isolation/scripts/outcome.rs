//! The observations of a script, and the errors that stop a script.

use std::io;

use crate::sandbox::SandboxError;

/// Observations of a script.
#[derive(Debug, Default)]
pub(super) struct Observed {
    /// Findings of the probe in the guest, for the report.
    pub(super) guest: String,
    /// Packets that must not get through but did.
    pub(super) breaches: Vec<String>,
    /// Missing observations without which the script proves nothing.
    pub(super) doubts: Vec<String>,
}

/// A script could not run to its end.
#[derive(Debug, thiserror::Error)]
pub(super) enum ScriptError {
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
    #[error("cannot use a socket, a process or the packet capture")]
    Io(#[from] io::Error),
    #[error("{0}")]
    Failed(String),
}

impl Observed {
    pub(super) fn breach_if(&mut self, is_so: bool, what: impl Into<String>) {
        if is_so {
            self.breaches.push(what.into());
        }
    }

    pub(super) fn doubt_unless(&mut self, is_so: bool, what: impl Into<String>) {
        if !is_so {
            self.doubts.push(what.into());
        }
    }

    /// Adds the observations of a part of the script.
    pub(super) fn add(&mut self, part: Self) {
        self.guest += &part.guest;
        self.breaches.extend(part.breaches);
        self.doubts.extend(part.doubts);
    }
}
