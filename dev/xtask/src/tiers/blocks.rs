//! Blocks of commands in the documents, and the tiers that run them.
//!
//! The info string of a block contains its language, the tier that runs it, and how it ends unless that is with
//! exit code 0: `sh e2b`, `console package`, `python e2b`, `sh e2b server`, `sh e2b measures`. The blocks of one
//! document and tier run in order, in one environment, as if a reader typed them ([`session`]). Documents that start
//! no server share one ([`SERVER`]). In README and the quickstart, every block must name such a tier. In other
//! documents this is optional, and blocks without a tier are counted.
//!
//! A tier runs each block as written, with two exceptions, both checked by [`check`]: `cargo xtask …` commands,
//! because the tier itself is such a command and has run the same code ([`covered`]); and blocks of the tier
//! `bench`, which contain the commands that it runs anyway.

mod document;
mod judge;
mod session;

use std::{fs, path::Path, thread};

use anyhow::{Result, bail, ensure};
use clap::Parser;

use crate::{
    Cli, OptionalTemplate, Task,
    tiers::{Outcome, TestEnvironment, Tier, smoke},
    workspace::Workspace,
};
use document::{Block, Document, End, Language};
pub(crate) use session::Session;

/// Documents in which a tier must run every block.
const COVERED: [&str; 2] = ["README.md", "docs/use/quickstart.md"];
/// Directories whose documents may have blocks that a tier runs.
const OTHERS: [&str; 5] = [
    "docs",
    "docs/use",
    "docs/operate",
    "docs/measure",
    "docs/develop",
];

/// README's server and variables, which documents without a server assume.
const SERVER: &str = "```sh e2b server\ntarget/cube/bin/cube-api serve\n```\n\
    ```sh e2b\nexport PATH=$PWD/target/cube/bin:$PATH\ncube quickstart\n```\n";

/// All blocks of all documents.
#[derive(Debug, Default)]
pub(crate) struct Blocks {
    run: Vec<Block>,
    /// Number of command blocks that no tier runs, in documents other than [`COVERED`].
    not_run: usize,
}

impl Blocks {
    /// Reads the documents.
    ///
    /// # Errors
    /// Fails with one sentence for each block that no tier can run.
    pub(crate) fn load(workspace: &Workspace) -> Result<Self> {
        let mut blocks = Self::default();
        let mut wrong = Vec::new();
        for name in documents(workspace.root())? {
            let text = fs::read_to_string(workspace.root().join(&name))?;
            let document = Document::read(&name, &text);
            let is_covered = COVERED.contains(&name.as_str());
            wrong.extend(document.wrong);
            if is_covered {
                wrong.extend(document.unmarked);
            } else {
                blocks.not_run += document.unmarked.len();
            }
            blocks.run.extend(document.blocks);
        }
        for block in &blocks.run {
            wrong.extend(check(block, workspace.root()));
        }
        ensure!(
            wrong.is_empty(),
            "blocks that no tier runs:\n{}",
            wrong.join("\n")
        );
        Ok(blocks)
    }

    /// One line for each block, and the totals.
    pub(crate) fn list(&self) -> String {
        let mut text = String::new();
        for block in &self.run {
            let (first, tier) = (block.first_line(), block.tier);
            text.push_str(&format!("{tier:8} {}: {first}\n", block.place()));
        }
        text + &self.summary()
    }

    pub(crate) fn summary(&self) -> String {
        let of = |name: &str| self.run.iter().filter(|b| b.document == name).count();
        let covered: Vec<String> = COVERED
            .iter()
            .map(|name| format!("{} in {name}", of(name)))
            .collect();
        let elsewhere = self.run.len() - COVERED.iter().map(|name| of(name)).sum::<usize>();
        format!(
            "blocks of commands: {}, all run by a tier; elsewhere {elsewhere} that a tier runs and {} that none does",
            covered.join(", "),
            self.not_run
        )
    }

    /// The blocks of a tier, by document.
    pub(crate) fn of_tier(&self, tier: Tier) -> Vec<Vec<&Block>> {
        let mut groups: Vec<Vec<&Block>> = Vec::new();
        for block in self.run.iter().filter(|block| block.tier == tier) {
            match groups.last_mut() {
                Some(group) if group[0].document == block.document => group.push(block),
                Some(_) | None => groups.push(vec![block]),
            }
        }
        groups
    }

    /// The scenarios that blocks of the tier `bench` run.
    pub(crate) fn scenarios(&self) -> Vec<std::path::PathBuf> {
        let lines = self.run.iter().flat_map(|block| block.commands());
        lines
            .filter_map(|line| match xtask(&line)? {
                Ok(Task::Bench { scenario, .. }) => Some(scenario),
                Ok(_) | Err(_) => None,
            })
            .collect()
    }
}

/// Runs the blocks of the tier `e2b`, in all documents or in those whose names end like one of `only`.
pub(crate) fn run(
    workspace: &Workspace,
    environment: &TestEnvironment,
    only: &[String],
) -> Result<Outcome> {
    let blocks = Blocks::load(workspace)?;
    let server = Document::read("guides", SERVER).blocks;
    let mut groups = blocks.of_tier(Tier::E2b);
    groups.retain(|group| {
        only.is_empty() || only.iter().any(|name| group[0].document.ends_with(name))
    });
    let (mut groups, guides): (Vec<_>, Vec<_>) = groups
        .into_iter()
        .partition(|group| group.iter().any(|block| block.end == End::Server));
    if !guides.is_empty() {
        groups.push(server.iter().chain(guides.into_iter().flatten()).collect());
    }
    let sessions = groups.iter().map(|group| Session::create(workspace, group));
    let sessions: Vec<Session> = sessions.collect::<Result<_>>()?;
    // In parallel, because most steps have one thread, and each session has its own network and state.
    thread::scope(|scope| {
        let run = |session| {
            scope.spawn(move || Session::run_on_this_host(session, workspace, environment))
        };
        let running: Vec<_> = sessions.iter().map(run).collect();
        let mut ended = running.into_iter().map(|one| one.join());
        ended
            .try_for_each(|done| done.unwrap_or_else(|_| bail!("the thread of a session panicked")))
    })?;
    let mut outcome = Outcome::default();
    for session in sessions {
        outcome = outcome.and(session.judge()?);
    }
    Ok(outcome)
}

/// Names of the documents, relative to the root.
fn documents(root: &Path) -> Result<Vec<String>> {
    let mut names = vec![COVERED[0].to_owned()];
    for dir in OTHERS {
        let mut inside = Vec::new();
        for entry in fs::read_dir(root.join(dir))? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            if name.ends_with(".md") {
                inside.push(format!("{dir}/{name}"));
            }
        }
        inside.sort();
        names.extend(inside);
    }
    Ok(names)
}

/// The task of a line `cargo xtask …`; `None` for other lines.
fn xtask(line: &str) -> Option<Result<Task, clap::Error>> {
    let arguments = line.strip_prefix("cargo xtask ")?;
    let words = std::iter::once("xtask").chain(arguments.split_whitespace());
    Some(Cli::try_parse_from(words).map(|cli| cli.task))
}

/// Whether this tier runs the code of a task, with these or other arguments.
fn covered(task: &Task, tier: Tier) -> bool {
    match task {
        // Each of these tiers begins with this task.
        Task::Prepare { .. } => tier.needs_kvm(),
        Task::Bench { .. } => tier == Tier::Bench,
        Task::Verify { .. } | Task::Sdks => tier == Tier::E2b,
        Task::Dist { .. } | Task::Site => tier == Tier::Package,
        Task::Test { tiers, .. } => *tiers == [tier],
        Task::Hvm { vmx, .. } if *vmx => tier == Tier::HvmVmx,
        Task::Hvm { .. } => tier == Tier::Hvm,
        Task::Console => tier == Tier::Console,
        Task::Template {
            name: OptionalTemplate::CodeInterpreter,
        } => tier == Tier::Interpreter,
        Task::Images { .. }
        | Task::Peers
        | Task::Etcd
        | Task::Blocks { .. }
        | Task::Soak { .. }
        | Task::Fuzz { .. }
        | Task::MutateNetisolation { .. }
        | Task::MutateEgress { .. }
        | Task::MutatePool { .. }
        | Task::SimulateCluster { .. }
        | Task::MutateCluster { .. }
        | Task::Specification { .. }
        | Task::MutateConfinement => false,
    }
}

/// One sentence for each line of a block that its tier does not run.
fn check(block: &Block, root: &Path) -> Vec<String> {
    let mut wrong = Vec::new();
    let place = block.place();
    for line in block.commands() {
        match xtask(&line) {
            Some(Ok(task)) if covered(&task, block.tier) => {
                if let Task::Bench { scenario, .. } = task
                    && !root.join(&scenario).is_file()
                {
                    wrong.push(format!("{place}: no scenario {}", scenario.display()));
                }
            }
            Some(Ok(_)) => wrong.push(format!(
                "{place}: the tier {} does not run {line:?}",
                block.tier
            )),
            Some(Err(error)) => wrong.push(format!("{place}: {line:?}: {}", error.kind())),
            None if block.tier == Tier::Bench && line != smoke::CLAIMS => wrong.push(format!(
                "{place}: the tier bench runs only `cargo xtask bench` and {:?}, not {line:?}",
                smoke::CLAIMS
            )),
            None => {}
        }
    }
    wrong
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_block_of_readme_and_quickstart_is_run_by_a_tier() {
        let workspace = Workspace::locate().unwrap();
        let blocks = Blocks::load(&workspace).unwrap();
        for name in COVERED {
            let of_document = blocks.run.iter().filter(|block| block.document == name);
            assert!(of_document.count() >= 8, "{}", blocks.list());
        }
        for tier in [Tier::E2b, Tier::Package, Tier::Bench] {
            assert!(!blocks.of_tier(tier).is_empty(), "{}", blocks.list());
        }
    }

    /// Comments are translated, too.
    #[test]
    fn the_chinese_quickstart_has_the_blocks_of_the_english_one() {
        let workspace = Workspace::locate().unwrap();
        let blocks = |name: &str| -> Vec<String> {
            let text = fs::read_to_string(workspace.root().join(name)).unwrap();
            let without_comment =
                |line: &str| line.split(" # ").next().unwrap().trim_end().to_owned();
            let lines = |text: String| {
                text.lines()
                    .map(without_comment)
                    .collect::<Vec<_>>()
                    .join("\n")
            };
            let blocks = crate::markdown::code_blocks(&text).into_iter();
            blocks.map(|block| lines(block.text)).collect()
        };
        assert_eq!(
            blocks("docs/use/quickstart.zh.md"),
            blocks("docs/use/quickstart.md")
        );
    }

    fn wrong(markdown: &str) -> String {
        let document = Document::read("README.md", markdown);
        let mut wrong = document.wrong;
        wrong.extend(document.unmarked);
        for block in &document.blocks {
            wrong.extend(check(block, Workspace::locate().unwrap().root()));
        }
        wrong.join("\n")
    }

    #[test]
    fn a_block_that_no_tier_runs_is_found() {
        assert_eq!(
            wrong("```sh e2b\ncargo xtask prepare\ncube run -- true\n```\n"),
            ""
        );
        for (markdown, why) in [
            ("```sh\ntrue\n```\n", "README.md:1: names no tier"),
            ("```\ntrue\n```\n", "README.md:1: names no tier"),
            ("```sh nightly\ntrue\n```\n", "no tier \"nightly\""),
            ("```sh unit\ntrue\n```\n", "the tier unit runs no blocks"),
            (
                "```sh e2b\ncargo xtask soak\n```\n",
                "does not run \"cargo xtask soak\"",
            ),
            (
                "```sh e2b\ncargo xtask dist\n```\n",
                "the tier e2b does not run",
            ),
            (
                "```sh bench\ncargo xtask bench scenarios/none.toml\n```\n",
                "no scenario",
            ),
            (
                "```sh bench\ncube-bench run x\n```\n",
                "the tier bench runs only",
            ),
            ("```sh e2b\ncargo xtask prepar\n```\n", "cargo xtask prepar"),
            ("```text\n1\n```\n", "output of no program"),
        ] {
            assert!(
                wrong(markdown).contains(why),
                "{markdown}: {}",
                wrong(markdown)
            );
        }
    }

    #[test]
    fn a_task_belongs_to_the_tiers_that_run_its_code() {
        let task = |line: &str| xtask(line).unwrap().unwrap();
        assert!(covered(&task("cargo xtask prepare"), Tier::E2b));
        assert!(!covered(&task("cargo xtask prepare"), Tier::Unit));
        assert!(covered(
            &task("cargo xtask test --tier isolation"),
            Tier::Isolation
        ));
        assert!(!covered(&task("cargo xtask test"), Tier::Isolation));
        assert!(xtask("cube run -- true").is_none());
    }
}
