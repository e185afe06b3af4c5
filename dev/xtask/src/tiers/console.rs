//! The web console: its build, the comparison with the files in git, and the tier `console`, which uses it in a
//! browser.
//!
//! `console/dist` is in git, so that cargo alone can build `cube-api`. The build is reproducible: the same sources
//! and lock file give the same bytes on every host.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use crate::{
    prepare,
    progress::Progress,
    stages::{
        sdks,
        stage::{Built, Recipe, Store},
    },
    tiers::{Counts, Outcome, TestEnvironment},
    tool,
    workspace::Workspace,
};

/// Host packages with which Node's wheel is installed.
const FOR_NODE: &str = "harness/verify/conformance/host-packages.txt";
/// Host packages with the browser.
const FOR_TESTS: &str = "console/test/host-packages.txt";
/// Inputs of the build in the directory `console`.
const SOURCES: [&str; 5] = [
    "build.mjs",
    "package.json",
    "package-lock.json",
    "tsconfig.json",
    "src",
];

/// A console that was built from the sources of this checkout.
#[derive(Debug)]
pub(crate) struct Console {
    /// Contains `dist`, the sources and `node_modules`.
    dir: PathBuf,
    /// The program `node`.
    node: PathBuf,
}

/// Checks the types and builds the console.
pub(crate) fn build(store: &Store, workspace: &Workspace, node: &Built) -> Result<Console> {
    let from = workspace.root().join("console");
    let mut recipe = Recipe::new("console").stage("node", node);
    for name in SOURCES {
        recipe = recipe.path(name, &from.join(name))?;
    }
    let program = node.dir.join(sdks::NODE_LINK).join("bin/node");
    let built = store.build(&recipe, "console", |out, log| {
        for name in SOURCES {
            let path = from.join(name);
            if path.is_dir() {
                sdks::copy_tree(&path, &out.join(name))?;
            } else {
                fs::copy(&path, out.join(name))
                    .with_context(|| format!("cannot copy {}", path.display()))?;
            }
        }
        sdks::npm_ci(node, out, log)?;
        let run = |script: &str, arguments: &[&str]| {
            let mut command = Command::new(&program);
            command.arg(script).args(arguments).current_dir(out);
            tool::run(&mut command, log)
        };
        run("node_modules/typescript/bin/tsc", &["--noEmit"])?;
        run("build.mjs", &[])
    })?;
    Ok(Console {
        dir: built.dir,
        node: program,
    })
}

/// `cargo xtask console`: builds, and replaces the files in git.
pub(crate) fn refresh(workspace: &Workspace, progress: Progress) -> Result<()> {
    let console = prepare::console(workspace, progress, &[FOR_NODE])?;
    let to = workspace.root().join("console/dist");
    crate::stages::stage::remove_tree(&to)?;
    sdks::copy_tree(&console.dir.join("dist"), &to)
}

/// The tier `console`. Counts the comparison with the files in git as a test, and each case in the browser.
pub(crate) fn run(
    workspace: &Workspace,
    environment: &TestEnvironment,
    progress: Progress,
) -> Result<Outcome> {
    let console = prepare::console(workspace, progress, &[FOR_NODE, FOR_TESTS])?;
    let compared = judge(
        "console/dist is what the sources give",
        compare(
            &console.dir.join("dist"),
            &workspace.root().join("console/dist"),
        ),
    );
    let binaries = environment.binaries.as_deref();
    let binaries = binaries.context("the release binaries were not built")?;
    let results = workspace.artifacts().join("results/console");
    crate::stages::stage::remove_tree(&results)?;
    fs::create_dir_all(&results)?;
    let tests = console.dir.join("test");
    crate::stages::stage::remove_tree(&tests)?;
    sdks::copy_tree(&workspace.root().join("console/test"), &tests)?;
    let status = Command::new(&console.node)
        .arg("test/run.mjs")
        .current_dir(&console.dir)
        .env("CUBE_BIN", binaries)
        .env("CUBE_ARTIFACTS", workspace.artifacts())
        .env("CUBE_CONSOLE_RESULTS", &results)
        .stdin(Stdio::null())
        // Standard output is reserved for the summary of all tiers.
        .stdout(Stdio::from(std::io::stderr()))
        .status()
        .context("cannot start node")?;
    let path = results.join("cases.json");
    let text = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let cases: Vec<Case> = serde_json::from_slice(&text)?;
    Ok(compared.and(Outcome::of(
        "the test of the console",
        status,
        count(&cases),
    )))
}

#[derive(Debug, Deserialize)]
struct Case {
    is_good: bool,
}

fn count(cases: &[Case]) -> Counts {
    let good = cases.iter().filter(|case| case.is_good).count();
    let number = |n: usize| u64::try_from(n).unwrap_or(u64::MAX);
    Counts {
        passed: number(good),
        failed: number(cases.len() - good),
        skipped: 0,
    }
}

fn judge(name: &str, result: Result<()>) -> Outcome {
    let mut outcome = Outcome::default();
    match result {
        Ok(()) => {
            eprintln!("pass {name}");
            outcome.counts.passed = 1;
        }
        Err(why) => {
            eprintln!("FAIL {name}: {why:#}");
            outcome.counts.failed = 1;
            outcome.success = false;
        }
    }
    outcome
}

/// Compares the names and contents of two directories of files.
fn compare(built: &Path, in_git: &Path) -> Result<()> {
    let read = |dir: &Path| -> Result<Vec<(String, Vec<u8>)>> {
        let mut files = Vec::new();
        let entries =
            fs::read_dir(dir).with_context(|| format!("cannot read {}", dir.display()))?;
        for entry in entries {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            files.push((name, fs::read(entry.path())?));
        }
        files.sort();
        Ok(files)
    };
    let (built, in_git) = (read(built)?, read(in_git)?);
    let names = |files: &[(String, Vec<u8>)]| {
        let names: Vec<_> = files.iter().map(|(name, _)| name.as_str()).collect();
        names.join(", ")
    };
    let stale = "run `cargo xtask console` and commit console/dist";
    ensure!(
        names(&built) == names(&in_git),
        "the build has {}, git has {}: {stale}",
        names(&built),
        names(&in_git)
    );
    for (new, old) in built.iter().zip(&in_git) {
        ensure!(new == old, "{} differs: {stale}", new.0);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_a_missing_and_a_further_file_are_noticed() {
        let (built, in_git) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let put = |dir: &tempfile::TempDir, name: &str, text: &str| {
            fs::write(dir.path().join(name), text).unwrap();
        };
        let same = || compare(built.path(), in_git.path());
        put(&built, "a.js", "1");
        assert!(same().unwrap_err().to_string().contains("git has :"));
        put(&in_git, "a.js", "2");
        assert!(same().unwrap_err().to_string().starts_with("a.js differs"));
        put(&in_git, "a.js", "1");
        same().unwrap();
        put(&in_git, "b.js", "1");
        assert!(same().unwrap_err().to_string().contains("a.js, b.js"));
    }

    #[test]
    fn each_case_counts() {
        let cases: Vec<Case> =
            serde_json::from_str(r#"[{"name":"a","is_good":true},{"name":"b","is_good":false}]"#)
                .unwrap();
        assert_eq!(count(&cases).to_string(), "1 passed, 1 failed, 0 skipped");
    }
}
