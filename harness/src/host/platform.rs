//! The platform probe: `cube-vmm probe`, which answers in JSON.

use std::{path::Path, process::Command};

use model::Platform;
use serde::{Deserialize, Serialize};

use testbed::artifacts::CURE;

/// What the probe found. Absent where it could not be asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Probe {
    /// The platform; absent when this host has none or the probe could not be run.
    pub platform: Option<Platform>,
    /// Why, for a person.
    pub why: String,
}

/// The part of the probe's answer that is read.
#[derive(Deserialize)]
struct Answer {
    platform: Option<Platform>,
    #[serde(default)]
    why: String,
}

/// Asks the VMM. A missing program or an unreadable answer is a reason, not an error.
#[must_use]
pub fn probe(program: &Path) -> Probe {
    let unknown = |why| Probe {
        platform: None,
        why,
    };
    if !program.is_file() {
        let why = format!("no cube-vmm at {}: {CURE}", program.display());
        return unknown(why);
    }
    // The timeout comes from coreutils so that a probe that hangs cannot hang the doctor.
    let output = Command::new("timeout")
        .args(["10"])
        .arg(program)
        .arg("probe")
        .output();
    let output = match output {
        Ok(output) => output,
        Err(e) => return unknown(format!("{} cannot be run: {e}", program.display())),
    };
    match serde_json::from_slice::<Answer>(&output.stdout) {
        Ok(answer) => Probe {
            platform: answer.platform,
            why: answer.why,
        },
        Err(_) => unknown(format!(
            "{} probe ended with {} and said: {}",
            program.display(),
            output.status,
            String::from_utf8_lossy(&output.stderr).trim()
        )),
    }
}
