//! Runs the blocks of a document in order, as if a reader typed them.
//!
//! ```text
//! session.sh      runs the steps and records their results
//! steps/NN.sh     a step; NN.server, with NN.port: a program that keeps running; NN.py, NN.mjs: programs of steps
//! out/NN.out      standard output; NN.err; NN.status, absent if the step did not run; NN.seconds
//! work/           the current directory, with `target/cube/bin` and `examples`
//! bin/            pip, python, npm, node
//! outside         the network in which pip and npm run
//! ```
//! Steps share the environment and the current directory. If a step prints `export …` lines, they are applied, as
//! the reader of `cube quickstart` would do. Nothing else is substituted. On this host, a session has its own
//! /var/lib/cube and its own network with only the loopback interface, so the server has the address and state
//! directory named in the document. `pip` and `npm` use the host's network and the SDK versions pinned in the lock
//! files of the conformance suite.

use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::PathBuf,
    process::Command,
};

use anyhow::{Context, Result};

use super::{
    Block, Language,
    document::{End, exchanges},
    judge, xtask,
};
use crate::{
    stages::sdks,
    tiers::{Counts, Outcome, TestEnvironment},
    workspace::Workspace,
};

const SESSION: &str = include_str!("session.sh");
const ENTER: &str = include_str!("enter.sh");
/// Default port of a server.
const PORT: &str = "3000";

/// The steps of one document in a directory.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) dir: PathBuf,
    steps: Vec<Step>,
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Step {
    place: String,
    script: String,
    /// Name and text of a program that the script starts.
    program: Option<(&'static str, String)>,
    /// The port of a program that keeps running.
    port: Option<String>,
    prints: Option<String>,
    /// Whether exit code 5 also counts as success.
    is_measurement: bool,
}

impl Session {
    /// Writes the steps of these blocks, which belong to one document and tier.
    pub(crate) fn create(workspace: &Workspace, blocks: &[&Block]) -> Result<Self> {
        let name = blocks[0].document.replace('/', "-");
        let dir = workspace.artifacts().join("tmp/blocks").join(name);
        if dir.exists() {
            fs::remove_dir_all(&dir)?;
        }
        Self::write(dir, blocks)
    }

    fn write(dir: PathBuf, blocks: &[&Block]) -> Result<Self> {
        for inside in ["steps", "out", "work", "bin", "state"] {
            fs::create_dir_all(dir.join(inside))?;
        }
        fs::set_permissions(dir.join("state"), fs::Permissions::from_mode(0o700))?;
        fs::write(dir.join("session.sh"), SESSION)?;
        fs::write(dir.join("enter.sh"), ENTER)?;
        let steps: Vec<Step> = blocks.iter().flat_map(|block| steps(block)).collect();
        for (number, step) in steps.iter().enumerate() {
            let write = |ending: &str, text: &str| {
                fs::write(dir.join(format!("steps/{number:02}.{ending}")), text)
            };
            let kind = if step.port.is_some() { "server" } else { "sh" };
            let script = step.script.replace("@PROGRAM@", &format!("{number:02}"));
            write(kind, &script)?;
            if let Some(port) = &step.port {
                write("port", port)?;
            }
            if let Some((ending, text)) = &step.program {
                write(ending, text)?;
            }
        }
        Ok(Self { dir, steps })
    }

    /// Runs the steps with the SDKs and release programs of this checkout.
    pub(crate) fn run_on_this_host(
        &self,
        workspace: &Workspace,
        environment: &TestEnvironment,
    ) -> Result<()> {
        let binaries = environment.binaries.as_deref();
        let binaries = binaries.context("the release binaries were not built")?;
        let work = self.dir.join("work");
        fs::create_dir_all(work.join("target/cube"))?;
        symlink(binaries, work.join("target/cube/bin"))?;
        sdks::copy_tree(&workspace.root().join("examples"), &work.join("examples"))?;
        let artifacts = workspace.artifacts();
        let python = artifacts.join(sdks::newest_python()).join("bin/python");
        let node = artifacts.join(sdks::NODE).join(sdks::NODE_LINK);
        for name in ["package.json", "package-lock.json"] {
            fs::copy(
                artifacts.join(sdks::newest_js()).join(name),
                work.join(name),
            )
            .with_context(|| format!("cannot copy {name}"))?;
        }
        let python = python.display();
        self.program("python", &format!("exec {python} \"$@\""))?;
        self.program("python3", &format!("exec {python} \"$@\""))?;
        self.program("node", &format!("exec {}/bin/node \"$@\"", node.display()))?;
        let outside = format!("nsenter --net={}/outside", self.dir.display());
        let pip = format!("exec {outside} {python} -m pip --disable-pip-version-check \"$@\"");
        self.program("pip", &pip)?;
        // Certificate authorities of a proxy in front of the registry.
        let authorities = std::env::var("NODE_EXTRA_CA_CERTS").unwrap_or_default();
        let npm = format!(
            "export NODE_EXTRA_CA_CERTS='{authorities}'\n\
             exec {outside} {node}/bin/node {node}/lib/node_modules/npm/bin/npm-cli.js --no-audit --no-fund \"$@\"",
            node = node.display()
        );
        self.program("npm", &npm)?;
        let log = self.dir.join("session.log");
        let mut unshare = Command::new("unshare");
        unshare
            .args(["--mount", "--pid", "--fork", "--kill-child", "--mount-proc"])
            .args(["bash", "enter.sh"])
            .current_dir(&self.dir)
            .env_clear()
            .env("PATH", format!("{}/bin:{SYSTEM_PATH}", self.dir.display()))
            .env("HOME", "/root")
            .env("LANG", "C.UTF-8");
        for name in PROXIES {
            if let Some(value) = std::env::var_os(name) {
                unshare.env(name, value);
            }
        }
        crate::tool::run(&mut unshare, &log)
    }

    fn program(&self, name: &str, script: &str) -> Result<()> {
        let path = self.dir.join("bin").join(name);
        fs::write(&path, format!("#!/bin/sh\n{script}\n"))?;
        Ok(fs::set_permissions(
            &path,
            fs::Permissions::from_mode(0o755),
        )?)
    }

    /// Prints a line for each step, and counts each as a test.
    pub(crate) fn judge(&self) -> Result<Outcome> {
        let mut counts = Counts::default();
        for (number, step) in self.steps.iter().enumerate() {
            let seconds = self.output(number, "seconds").unwrap_or_default();
            match self.fault(number, step) {
                None => {
                    counts.passed += 1;
                    eprintln!("pass {}: {} s", step.place, seconds.trim());
                }
                Some(why) => {
                    counts.failed += 1;
                    eprintln!("FAIL {}: {why}", step.place);
                }
            }
        }
        Ok(Outcome {
            success: counts.failed == 0,
            counts,
        })
    }

    fn output(&self, number: usize, ending: &str) -> Option<String> {
        let bytes = fs::read(self.dir.join(format!("out/{number:02}.{ending}"))).ok()?;
        Some(String::from_utf8_lossy(&bytes).into_owned())
    }

    fn fault(&self, number: usize, step: &Step) -> Option<String> {
        let Some(status) = self.output(number, "status") else {
            return Some("did not run, because a step before it failed".to_owned());
        };
        let printed = self.output(number, "out").unwrap_or_default();
        let is_good = status.trim() == "0" || (step.is_measurement && status.trim() == "5");
        if !is_good {
            let errors = self.output(number, "err").unwrap_or_default();
            return Some(format!("exit code {}:\n{printed}{errors}", status.trim()));
        }
        let documented = step.prints.as_deref()?;
        (!judge::matches(documented, &printed))
            .then(|| format!("the document says:\n{documented}\nbut it printed:\n{printed}"))
    }
}

const SYSTEM_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// Variables that `pip` and `npm` may need to reach their registries.
const PROXIES: [&str; 8] = [
    "http_proxy",
    "https_proxy",
    "no_proxy",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "PIP_INDEX_URL",
    "npm_config_registry",
];

/// The steps of a block. xtask commands are omitted, because the tier has run them.
fn steps(block: &Block) -> Vec<Step> {
    let step = |script: String| Step {
        place: block.place(),
        script,
        prints: block.prints.clone(),
        is_measurement: block.end == End::Measured,
        ..Step::default()
    };
    let program = |interpreter: &str, ending: &'static str| Step {
        program: Some((ending, block.text.clone())),
        ..step(format!(
            "cp \"$STEPS/@PROGRAM@.{ending}\" block.{ending}\n{interpreter} block.{ending}\n"
        ))
    };
    match (block.language, block.end) {
        (Language::Python, _) => vec![program("python", "py")],
        (Language::Js, _) => vec![program("node", "mjs")],
        (Language::Console, _) => exchanges(&block.text)
            .into_iter()
            .map(|(command, output)| Step {
                prints: Some(output),
                ..step(format!("exec 2>&1\n{command}\n"))
            })
            .collect(),
        (Language::Sh, End::Server) => vec![Step {
            port: Some(port(&block.text)),
            ..step(format!("exec {}", block.text))
        }],
        (Language::Sh, End::Success | End::Measured) => {
            let rest: Vec<&str> = (block.text.lines())
                .filter(|line| xtask(line).is_none())
                .collect();
            if rest.is_empty() {
                Vec::new()
            } else {
                vec![step(rest.join("\n") + "\n")]
            }
        }
    }
}

/// The port in a server's `--listen` option.
fn port(command: &str) -> String {
    let words: Vec<&str> = command.split_whitespace().collect();
    let listen = words.windows(2).find(|pair| pair[0] == "--listen");
    let port = listen.and_then(|pair| pair[1].rsplit_once(':'));
    port.map_or(PORT, |(_, port)| port).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tiers::blocks::document::Document;

    fn steps_of(text: &str) -> Vec<Step> {
        let document = Document::read("a.md", text);
        assert!(document.wrong.is_empty(), "{document:?}");
        document.blocks.iter().flat_map(steps).collect()
    }

    #[test]
    fn commands_of_xtask_are_left_out_and_everything_else_is_run_as_written() {
        let found =
            steps_of("```sh e2b\ncargo xtask prepare   # minutes\ncube a  # b\ncube c\n```\n");
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].script, "cube a  # b\ncube c\n");
        assert!(steps_of("```sh e2b\ncargo xtask prepare\n```\n").is_empty());
        let console = steps_of("```console package\n# a\n1\n# b\n```\n");
        assert_eq!(console[1].script, "exec 2>&1\nb\n");
        assert_eq!(console[0].prints.as_deref(), Some("1\n"));
    }

    #[test]
    fn a_server_has_the_port_that_it_names() {
        let server = |command: &str| {
            steps_of(&format!("```sh e2b server\n{command}\n```\n"))
                .remove(0)
                .port
        };
        assert_eq!(server("cube-api serve").as_deref(), Some("3000"));
        assert_eq!(
            server("cube-api serve --listen 0.0.0.0:8443 --x").as_deref(),
            Some("8443")
        );
    }

    /// The steps run here, in this test's namespaces.
    fn run(text: &str) -> (Outcome, PathBuf, tempfile::TempDir) {
        let temporary = tempfile::tempdir().unwrap();
        let document = Document::read("a.md", text);
        let blocks: Vec<&Block> = document.blocks.iter().collect();
        let session = Session::write(temporary.path().join("a"), &blocks).unwrap();
        let status = Command::new("bash")
            .arg("session.sh")
            .current_dir(&session.dir)
            .status()
            .unwrap();
        assert!(status.success());
        (session.judge().unwrap(), session.dir, temporary)
    }

    #[test]
    fn steps_share_their_environment_and_exports_that_are_printed_are_set() {
        let (outcome, ..) = run(
            "```sh e2b\nexport A=1; mkdir d; cd d\n```\n```sh e2b\necho 'export B=2'\n```\n\
             ```sh e2b\necho \"$A $B $(basename \"$PWD\")\"\n```\n```text\n1 2 d\n```\n",
        );
        assert_eq!(outcome.counts.to_string(), "3 passed, 0 failed, 0 skipped");
    }

    #[test]
    fn a_wrong_output_a_failure_and_what_comes_after_it_are_found() {
        let busy = "```sh e2b measures\nexit 5\n```\n```sh e2b\ntrue\n```\n";
        assert_eq!(
            run(busy).0.counts.to_string(),
            "2 passed, 0 failed, 0 skipped"
        );
        let (outcome, ..) = run("```sh e2b\nexit 5\n```\n");
        assert_eq!(outcome.counts.failed, 1);
        let (outcome, ..) = run("```sh e2b\necho 1\n```\n```text\n2\n```\n```sh e2b\ntrue\n```\n");
        assert_eq!(outcome.counts.to_string(), "1 passed, 1 failed, 0 skipped");
        let (outcome, ..) = run("```sh e2b\ntrue\nfalse\ntrue\n```\n```sh e2b\ntrue\n```\n");
        assert_eq!(outcome.counts.to_string(), "0 passed, 2 failed, 0 skipped");
        assert!(!outcome.success);
    }
}
