//! The platform probe: runs `cube-vmm probe` and parses its JSON.

use std::{path::Path, process::Command};

use model::Platform;
use serde::{Deserialize, Serialize};

use testbed::artifacts::CURE;

/// Result of the probe.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Probe {
    /// `None` if this host supports no platform, or if the probe could not be run.
    pub platform: Option<Platform>,
    /// Reason for the result, as text.
    pub why: String,
}

/// The part of the probe's output that is used.
#[derive(Deserialize)]
struct Answer {
    platform: Option<Platform>,
    #[serde(default)]
    why: String,
}

/// Runs the probe. A missing program and invalid output are reported in [`Probe::why`].
#[must_use]
pub fn probe(program: &Path) -> Probe {
    let unknown = |why| Probe {
        platform: None,
        why,
    };
    if !program.is_file() {
        let why = format!("cannot find cube-vmm at {}: {CURE}", program.display());
        return unknown(why);
    }
    // coreutils' `timeout` ends a probe that hangs.
    let output = Command::new("timeout")
        .args(["10"])
        .arg(program)
        .arg("probe")
        .output();
    let output = match output {
        Ok(output) => output,
        Err(e) => return unknown(format!("cannot run {}: {e}", program.display())),
    };
    match serde_json::from_slice::<Answer>(&output.stdout) {
        Ok(answer) => Probe {
            platform: answer.platform,
            why: answer.why,
        },
        Err(_) => unknown(format!(
            "{} probe ended with {} and printed: {}",
            program.display(),
            output.status,
            String::from_utf8_lossy(&output.stderr).trim()
        )),
    }
}
