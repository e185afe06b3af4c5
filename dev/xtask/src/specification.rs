//! SPECIFICATION.md, and the tests behind it. The promises are data: each `promises.toml` lies in the folder of the
//! crate whose tests enforce them.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

/// The rendered document, relative to the root.
const DOCUMENT: &str = "SPECIFICATION.md";
const DATA: &str = "promises.toml";
/// Maximum depth of crates below the root.
const DEPTH: usize = 3;

/// Chapters in the reader's order, each with the sections of its promises.
const CHAPTERS: [(&str, &[&str]); 10] = [
    (
        "Sandboxes and their API",
        &[
            "E2B compatibility",
            "API keys",
            "Requests, creates and lists",
            "Deadlines",
            "Pause, resume, snapshots and forks",
            "Commands and terminals",
            "Files",
            "Traffic to sandboxes",
            "Connections, limits and TLS",
            "Events, webhooks, logs and traces",
            "Code interpreter",
            "Command line",
            "Web console",
        ],
    ),
    (
        "Templates and images",
        &["Templates", "Builds", "OCI images"],
    ),
    (
        "Network",
        &[
            "Network policy",
            "Network enforcement",
            "Host names",
            "Header rules and proxies",
            "Secrets",
        ],
    ),
    (
        "Operating a server",
        &[
            "Warm pool and admission",
            "Disk space and quotas",
            "Crashes and restarts",
            "Host crashes and broken disks",
            "Reloads",
            "Upgrades",
        ],
    ),
    (
        "Clusters",
        &[
            "Members and requests",
            "Shared templates and secrets",
            "Moving sandboxes",
        ],
    ),
    (
        "The microVM",
        &[
            "Boot",
            "The guest's Linux",
            "Clones",
            "Identity",
            "Snapshots",
            "Other CPUs",
            "Devices",
            "Control socket",
        ],
    ),
    (
        "Isolation of VMs",
        &["Isolation between clones", "Hostile guests", "Jails"],
    ),
    (
        "Measuring",
        &[
            "Runs",
            "Statistics",
            "Reports and published figures",
            "Provers",
        ],
    ),
    (INTERNAL, &["Builds, documents and CI"]),
    (LIMITS, &["Not promised"]),
];

/// The chapter for developers only, which the document for users omits.
const INTERNAL: &str = "This repository";
/// The chapter whose lines need no mark, because they are not promises.
const LIMITS: &str = "Limits";

const INTRODUCTION: &str = "\
# Specification

<!-- Rendered by `cargo xtask specification`. Do not edit. -->

These are the promises that you can rely on. A test, a scenario or a prover fails if one of them is broken. A line marked
**unenforced** is intended, but no test would detect a violation. A line marked `ring3` or `hvm` holds on that
[platform](docs/operate/platforms.md) only.

The promises and their tests are data: `promises.toml` in the folder of each crate.
`cargo xtask specification --tests` prints each promise with its tests, and the promises about this repository.
";

/// Platforms on which a promise holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Platform {
    #[default]
    All,
    Ring3,
    Hvm,
}

impl Platform {
    fn name(self) -> &'static str {
        match self {
            Self::All => "all",
            Self::Ring3 => "ring3",
            Self::Hvm => "hvm",
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Promise {
    section: String,
    /// One sentence.
    text: String,
    #[serde(default)]
    platform: Platform,
    /// Tests that enforce it. [`Reference`] lists the forms.
    #[serde(default)]
    tests: Vec<String>,
    /// Why no test enforces it.
    unenforced: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Data {
    promise: Vec<Promise>,
}

/// All promises, by the path of their file relative to the root.
#[derive(Debug)]
pub(crate) struct Promises(BTreeMap<String, Vec<Promise>>);

impl Promises {
    pub(crate) fn load(root: &Path) -> Result<Self> {
        let mut files = Vec::new();
        find(root, DEPTH, &mut files)?;
        ensure!(!files.is_empty(), "no {DATA} below {}", root.display());
        let mut promises = BTreeMap::new();
        for path in files {
            let text = fs::read_to_string(&path)?;
            let data: Data = toml::from_str(&text)
                .with_context(|| format!("cannot parse {}", path.display()))?;
            let name = path.strip_prefix(root)?.display().to_string();
            promises.insert(name, data.promise);
        }
        Ok(Self(promises))
    }

    /// The promises of a section with their files. The file with the most promises in this section comes first.
    fn of<'a>(&'a self, section: &str) -> Vec<(&'a str, &'a Promise)> {
        let mut groups: Vec<Vec<(&str, &Promise)>> = Vec::new();
        for (file, promises) in &self.0 {
            let own = promises.iter().filter(|one| one.section == section);
            groups.push(own.map(|one| (file.as_str(), one)).collect());
        }
        groups.sort_by_key(|group| std::cmp::Reverse(group.len()));
        groups.concat()
    }

    /// The text of SPECIFICATION.md.
    pub(crate) fn document(&self) -> String {
        let mut out = INTRODUCTION.to_owned();
        for (chapter, sections) in CHAPTERS {
            if chapter == INTERNAL {
                continue;
            }
            out.push_str(&format!("\n## {chapter}\n"));
            for section in sections {
                out.push_str(&format!("\n### {section}\n\n"));
                for (_, promise) in self.of(section) {
                    out.push_str("- ");
                    out.push_str(&promise.text);
                    if promise.platform != Platform::All {
                        out.push_str(&format!(" `{}`", promise.platform.name()));
                    }
                    if promise.unenforced.is_some() && chapter != LIMITS {
                        out.push_str(" **unenforced**");
                    }
                    out.push('\n');
                }
            }
        }
        out
    }

    /// A Markdown table with a row for each promise: section, promise, platform, tests, file.
    pub(crate) fn matrix(&self) -> String {
        let mut out = String::from(
            "| section | promise | platform | enforced by | data |\n|---|---|---|---|---|\n",
        );
        for section in CHAPTERS.iter().flat_map(|(_, sections)| *sections) {
            for (file, promise) in self.of(section) {
                let tests = promise.tests.iter().map(|test| format!("`{test}`"));
                let mut enforced = tests.collect::<Vec<_>>().join(", ");
                if let Some(why) = &promise.unenforced {
                    let _infallible = write!(enforced, "**unenforced**: {why}");
                }
                let (text, platform) = (&promise.text, promise.platform.name());
                let row = format!("| {section} | {text} | {platform} | {enforced} | {file} |\n");
                out.push_str(&row);
            }
        }
        out
    }
}

/// Writes SPECIFICATION.md.
pub(crate) fn write(root: &Path) -> Result<()> {
    let path = root.join(DOCUMENT);
    fs::write(&path, Promises::load(root)?.document())
        .with_context(|| format!("cannot write {}", path.display()))
}

fn find(dir: &Path, depth: usize, files: &mut Vec<PathBuf>) -> Result<()> {
    let data = dir.join(DATA);
    if data.is_file() {
        files.push(data);
    }
    if depth == 0 {
        return Ok(());
    }
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        let hidden = path
            .file_name()
            .is_some_and(|name| name.to_string_lossy().starts_with('.'));
        // Cargo marks its target directories with this file.
        if path.is_dir() && !hidden && !path.join("CACHEDIR.TAG").exists() {
            find(&path, depth - 1, files)?;
        }
    }
    Ok(())
}

#[cfg(test)]
pub(crate) mod check {
    use clap::{Parser, ValueEnum};

    use super::*;
    use crate::{Cli, tiers::Tier, workspace::Workspace};

    const LONGEST: usize = 120;

    /// The tests named in promises that do not exist. `has_function` looks up the name of a function.
    ///
    /// Without a prefix, a name is that of a test function, or the path of a file or directory with tests.
    pub(crate) fn missing(root: &Path, has_function: impl Fn(&str) -> bool) -> Vec<String> {
        let read = |path: &str| fs::read_to_string(root.join(path)).expect(path);
        let steps = read("dev/hvm-steps/src/steps.rs");
        let features = read("harness/verify/conformance/features.toml");
        let isolation = read("harness/verify/src/isolation/cases.rs");
        let confinement = read("harness/verify/src/confinement/attempts/attempt.rs");
        let is_class = |source: &str, name: &str| source.contains(&format!("=> \"{name}\","));
        let exists = |test: &str| match test.split_once('/') {
            Some(("hvm", step)) => steps.contains(&format!("(\"{step}\", ")),
            Some(("scenarios", name)) => root.join(format!("scenarios/{name}.toml")).is_file(),
            Some(("tier", name)) => Tier::from_str(name, false).is_ok(),
            Some(("isolation", class)) => is_class(&isolation, class),
            Some(("confinement", class)) => is_class(&confinement, class),
            Some(("prover", name)) => root.join(format!("harness/verify/src/{name}.rs")).is_file(),
            Some(("conformance", name)) => features.contains(&format!("name = \"{name}\"")),
            Some(("xtask", task)) => Cli::try_parse_from(["xtask", task]).is_ok(),
            Some(_) => root.join(test).exists(),
            None => has_function(test),
        };
        let mut missing = Vec::new();
        for (file, promises) in &Promises::load(root).expect("promises").0 {
            for test in promises.iter().flat_map(|promise| &promise.tests) {
                if !exists(test) {
                    missing.push(format!("{file}: {test}"));
                }
            }
        }
        missing
    }

    fn load() -> (Workspace, Promises) {
        let workspace = Workspace::locate().unwrap();
        let promises = Promises::load(workspace.root()).unwrap();
        (workspace, promises)
    }

    #[test]
    fn the_specification_is_rendered_from_the_promises() {
        let (workspace, promises) = load();
        let document = fs::read_to_string(workspace.root().join(DOCUMENT)).unwrap();
        assert!(
            document == promises.document(),
            "{DOCUMENT} is out of date: run `cargo xtask specification`"
        );
    }

    #[test]
    fn every_promise_is_a_short_sentence_that_tests_enforce_or_says_why_not() {
        let (_, promises) = load();
        let sections: Vec<&str> = CHAPTERS.iter().flat_map(|(_, all)| *all).copied().collect();
        let mut wrong = Vec::new();
        let mut texts = std::collections::HashSet::new();
        for (file, promises) in &promises.0 {
            for promise in promises {
                let text = &promise.text;
                let mut object = |why: &str| wrong.push(format!("{file}: {why}: {text}"));
                if text.chars().count() > LONGEST {
                    object("longer than 120 characters");
                }
                if !text.ends_with('.') || text.contains(['|', '\n']) {
                    object("not a sentence");
                }
                if !sections.contains(&promise.section.as_str()) {
                    object("unknown section");
                }
                if promise.tests.is_empty() == promise.unenforced.is_none() {
                    object("needs either `tests` or `unenforced`");
                }
                if !texts.insert((text, promise.platform.name())) {
                    object("stated twice");
                }
            }
        }
        assert!(wrong.is_empty(), "wrong promises:\n{}", wrong.join("\n"));
    }

    #[test]
    fn the_matrix_has_a_row_for_each_promise() {
        let (_, promises) = load();
        let count = promises.0.values().map(Vec::len).sum::<usize>();
        assert_eq!(promises.matrix().lines().count(), 2 + count);
    }
}
