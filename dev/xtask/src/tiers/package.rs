//! The tier `package`: builds two versions of the package and runs `dev/packaging/test.sh` with them. Each line of
//! the script that begins with `pass` or `FAIL` counts as a test, and so does each step of the documents' blocks
//! for this tier, which the script runs at the end in the VM.

use std::process::{Command, Stdio};

use anyhow::{Context, Result};

use crate::{
    dist, prepare,
    progress::Progress,
    stages::{binaries::HostBinaries, interpreter},
    tiers::{
        Counts, Outcome, TestEnvironment, Tier,
        blocks::{Blocks, Session},
    },
    tool,
    workspace::Workspace,
};

const NAME: &str = "package";
/// Unpacking takes about as long as with the release level, and packing takes seconds instead of minutes.
const LEVEL: u8 = 3;

pub(crate) fn run(
    workspace: &Workspace,
    environment: &TestEnvironment,
    progress: Progress,
) -> Result<Outcome> {
    let has = |program: &&str| tool::output(Command::new(program).arg("--version")).is_ok();
    if !["systemd-nspawn", "mmdebstrap", "curl"].iter().all(has) {
        prepare::package_tools(workspace, progress)?;
    }
    let dir = environment.binaries.clone();
    let binaries = HostBinaries {
        dir: dir.context("the release binaries were not built")?,
    };
    let template = interpreter::place(workspace);
    let build = |suffix: &str, template| {
        let version = format!("{}{suffix}", dist::version());
        dist::build(
            workspace,
            &binaries,
            template,
            &version,
            Some(LEVEL),
            progress,
        )
    };
    let (old, new) = (build("~test1", None)?, build("~test2", Some(&*template))?);
    let package = new
        .interpreter
        .as_ref()
        .context("the interpreter has no package")?;
    let documents = Blocks::load(workspace)?;
    let mut sessions = Vec::new();
    for group in documents.of_tier(Tier::Package) {
        let session = Session::create(workspace, &group)?;
        // The document's name for the package.
        let name = format!("work/cube_{}_amd64.deb", dist::version());
        std::fs::hard_link(&new.package, session.dir.join(name))?;
        sessions.push(session);
    }
    let done = Command::new(workspace.root().join("dev/packaging/test.sh"))
        .args([&old.package, &new.package, package])
        .arg(workspace.artifacts().join("package"))
        .args(sessions.iter().map(|session| &session.dir))
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .context("cannot start dev/packaging/test.sh")?;
    let text = String::from_utf8_lossy(&done.stdout);
    // Standard output is reserved for the summary of all tiers.
    eprint!("{text}");
    for dist in [old, new] {
        std::fs::remove_file(dist.package)?;
        std::fs::remove_file(dist.archive)?;
        // The client alone, without the other programs.
        tool::output(
            Command::new(&dist.client)
                .env_clear()
                .args(["quick", "--help"]),
        )?;
        std::fs::remove_file(dist.client)?;
        dist.interpreter.map_or(Ok(()), std::fs::remove_file)?;
    }
    let mut outcome = Outcome::of(NAME, done.status, counts(&text));
    for session in sessions {
        outcome = outcome.and(session.judge()?);
    }
    Ok(outcome)
}

fn counts(text: &str) -> Counts {
    let of = |word: &str| {
        let lines = text.lines().filter(|line| line.starts_with(word));
        lines.count() as u64
    };
    Counts {
        passed: of("pass "),
        failed: of("FAIL "),
        skipped: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_script_are_counted() {
        let found = counts("pass install: 9 s\nFAIL purge: left\n  FAIL x\npassed\n");
        assert_eq!((found.passed, found.failed), (1, 1));
    }
}
