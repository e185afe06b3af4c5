//! The tier `integrations`: the programs in `examples/integrations`, with the third-party packages that they
//! integrate, against a real server and real VMs. Each program counts as a test. The tier runs only if it is named,
//! because it takes minutes and two gigabytes of packages.

use std::{
    io::{BufRead, BufReader},
    process::{Command, Stdio},
};

use anyhow::{Context, Result};

use crate::{
    prepare,
    progress::Progress,
    tiers::{Counts, Outcome, TestEnvironment},
    workspace::Workspace,
};

const RUNNER: &str = "harness/verify/integrations/run.py";
/// Debian's Python, because the `python3` in PATH may be another one.
const PYTHON: &str = "/usr/bin/python3";

/// Installs the packages and runs all programs.
pub(crate) fn run(
    workspace: &Workspace,
    environment: &TestEnvironment,
    progress: Progress,
) -> Result<Outcome> {
    prepare::integrations(workspace, progress)?;
    let binaries = environment.binaries.as_deref();
    let binaries = binaries.context("the release binaries were not built")?;
    let mut runner = Command::new(PYTHON)
        .arg(workspace.root().join(RUNNER))
        .arg("--binaries")
        .arg(binaries)
        .arg("--artifacts")
        .arg(workspace.artifacts())
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot start the integrations")?;
    let lines = runner
        .stdout
        .take()
        .map(|pipe| BufReader::new(pipe).lines());
    let mut last = String::new();
    for line in lines.into_iter().flatten() {
        last = line.context("cannot read what the integrations print")?;
        // Standard output is reserved for the summary of all tiers.
        eprintln!("{last}");
    }
    let status = runner.wait().context("cannot wait for the integrations")?;
    Ok(Outcome::of("integrations", status, count(&last)))
}

/// The counts in the runner's last line, `N passed, N failed, N skipped`.
fn count(last: &str) -> Counts {
    let before = |word: &str| {
        let part = last.split(", ").find_map(|part| part.strip_suffix(word));
        part.and_then(|number| number.trim().parse().ok())
            .unwrap_or(0)
    };
    Counts {
        passed: before("passed"),
        failed: before("failed"),
        skipped: before("skipped"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_line_of_the_runner_is_counted() {
        let counts = count("3 passed, 1 failed, 2 skipped");
        assert_eq!(counts.to_string(), "3 passed, 1 failed, 2 skipped");
        assert_eq!(count("Traceback").passed, 0);
    }
}
