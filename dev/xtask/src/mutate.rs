//! `cargo xtask mutate-netisolation`: does the prover notice when a check is taken out?
//!
//! ```text
//! mutations.toml ─► copy of the sources ─► one edit ─► cube-api ─► cube-bench verify isolation --case CLASS
//! ```
//! Each mutation takes one check out of the programs, the policy or the resolver. The prover then has to find a breach
//! or at least a refusal that nobody tells of, in the class that the list names; one that it does not notice is a
//! failure of this task. Unmutated, the same classes have to pass.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, anyhow, ensure};
use serde::Deserialize;

use crate::{
    isolation::{Proof, Prover},
    prepare,
    prepare::Freshness,
    progress::Progress,
    tool,
    workspace::Workspace,
};

const LIST: &str = "harness/verify/isolation/mutations.toml";

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct List {
    mutation: Vec<Mutation>,
}

/// One edit.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Mutation {
    name: String,
    /// In the checkout.
    file: PathBuf,
    /// Must be there exactly once.
    find: String,
    replace: String,
    /// Class of the prover's cases that have to notice.
    class: Option<String>,
    /// In place of a class: tests that have to fail.
    test: Option<Test>,
    /// How it has to end.
    found: Found,
}

/// Tests of a part that the prover's server does not come with.
#[derive(Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
struct Test {
    package: String,
    /// What their names have in them.
    names: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Found {
    /// Something gets through.
    Breach,
    /// Another check still stops it, for another reason.
    Unproven,
    /// A test fails.
    FailedTest,
}

impl Found {
    /// Of the prover's exit code.
    fn by_prover(code: i32) -> Option<Self> {
        match code {
            4 => Some(Self::Breach),
            5 => Some(Self::Unproven),
            _ => None,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Breach => "breach",
            Self::Unproven => "unproven",
            Self::FailedTest => "failed",
        }
    }
}

impl Mutation {
    /// What has to notice: a class or tests.
    fn noticer(&self) -> &str {
        match (&self.class, &self.test) {
            (Some(class), _) => class,
            (None, Some(test)) => &test.package,
            (None, None) => "nothing",
        }
    }
}

/// How it ended, if anything noticed, and in which cases.
type Noticed = (Option<Found>, String);

/// Where mutants are made.
#[derive(Debug)]
struct Nursery<'a> {
    workspace: &'a Workspace,
    /// Copy of the sources.
    tree: PathBuf,
    /// Cargo's target directory, kept from run to run.
    target: PathBuf,
    /// Binaries of the unmutated tree.
    binaries: PathBuf,
    log: PathBuf,
}

/// Tries the mutations whose names contain `only`; all without it. Whether all are noticed.
pub(crate) fn run(workspace: &Workspace, only: Option<&str>, progress: Progress) -> Result<bool> {
    let list = load(workspace)?;
    let chosen: Vec<&Mutation> = list
        .mutation
        .iter()
        .filter(|mutation| only.is_none_or(|part| mutation.name.contains(part)))
        .collect();
    ensure!(!chosen.is_empty(), "no mutation in {LIST} is called so");
    let binaries = prepare::all(workspace, progress, Freshness::Keep)?.dir;
    let home = workspace.artifacts().join("mutants");
    let nursery = Nursery {
        workspace,
        tree: home.join("tree"),
        target: home.join("target"),
        binaries,
        log: home.join("build.log"),
    };
    fs::create_dir_all(&home)?;
    fs::write(&nursery.log, "")?;
    nursery.copy_sources()?;
    nursery.pass_unmutated(&chosen, progress)?;
    let mut all_found = true;
    println!("{:<32} {:<10} {:<9} noticed by", "mutation", "class", "end");
    for mutation in chosen {
        let (end, noticed) = nursery.try_one(mutation, progress)?;
        all_found &= end == Some(mutation.found);
        let word = end.map_or("SURVIVED", Found::name);
        let by = mutation.noticer();
        println!("{:<32} {by:<10} {word:<9} {noticed}", mutation.name);
    }
    Ok(all_found)
}

fn load(workspace: &Workspace) -> Result<List> {
    let path = workspace.root().join(LIST);
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {LIST}"))?;
    toml::from_str(&text).with_context(|| format!("cannot understand {LIST}"))
}

fn classes<'a>(mutations: &[&'a Mutation]) -> Vec<&'a str> {
    let mut classes: Vec<&str> = mutations
        .iter()
        .filter_map(|mutation| mutation.class.as_deref())
        .collect();
    classes.sort_unstable();
    classes.dedup();
    classes
}

fn failing(proof: &Proof) -> String {
    let cases = proof.cases.iter().filter(|case| case.verdict != "pass");
    let cases: Vec<&str> = cases.map(|case| case.case.as_str()).collect();
    cases.join(" ")
}

impl Nursery<'_> {
    /// All that git knows of or would take up.
    fn copy_sources(&self) -> Result<()> {
        if self.tree.exists() {
            fs::remove_dir_all(&self.tree)?;
        }
        let mut list = Command::new("git");
        list.current_dir(self.workspace.root()).args([
            "ls-files",
            "--cached",
            "--others",
            "--exclude-standard",
        ]);
        for file in tool::output(&mut list)?.lines() {
            let (from, to) = (self.workspace.root().join(file), self.tree.join(file));
            if !from.is_file() {
                continue;
            }
            if let Some(dir) = to.parent() {
                fs::create_dir_all(dir)?;
            }
            // With its time, so that cargo builds anew only what was mutated.
            fs::copy(&from, &to)?;
            let time = fs::metadata(&from)?.modified()?;
            fs::File::options()
                .write(true)
                .open(&to)?
                .set_modified(time)?;
        }
        Ok(())
    }

    /// What has to notice mutants must not notice anything without.
    fn pass_unmutated(&self, chosen: &[&Mutation], progress: Progress) -> Result<()> {
        let classes = classes(chosen);
        if !classes.is_empty() {
            let api = progress.stage("unmutated", || self.build())?;
            let (code, proof) = self.prove(&api, &classes)?;
            let failing = failing(&proof);
            ensure!(code == 0, "cases fail without any mutation: {failing}");
        }
        let mut tests: Vec<&Test> = chosen.iter().filter_map(|m| m.test.as_ref()).collect();
        tests.dedup();
        for test in tests {
            let passes = progress.stage("unmutated", || self.passes(test))?;
            ensure!(passes, "{} fails without any mutation", test.names);
        }
        Ok(())
    }

    /// Whether tests of the copy pass, as it is now. One that does not build is an error.
    fn passes(&self, test: &Test) -> Result<bool> {
        let tests = ["test", "--package", &test.package, "--lib"];
        tool::run(self.cargo().args(tests).arg("--no-run"), &self.log)?;
        let done = self.cargo().args(tests).arg(&test.names).output()?;
        let said = String::from_utf8_lossy(&done.stdout);
        ensure!(
            !said.contains("running 0 tests"),
            "no test of {} is called {}",
            test.package,
            test.names
        );
        Ok(done.status.success())
    }

    fn cargo(&self) -> Command {
        let mut cargo = self.workspace.cargo();
        cargo
            .current_dir(&self.tree)
            .env("CARGO_TARGET_DIR", &self.target)
            .env("CARGO_PROFILE_DEV_DEBUG", "0");
        cargo
    }

    /// Builds the server of the copy as it is now.
    fn build(&self) -> Result<PathBuf> {
        tool::run(self.cargo().args(["build", "--package", "api"]), &self.log)?;
        Ok(self.target.join("debug/cube-api"))
    }

    /// How the prover ends with that server.
    fn prove(&self, api: &Path, classes: &[&str]) -> Result<(i32, Proof)> {
        let results = tempfile::tempdir()?;
        let prover = Prover::Isolation;
        let done = prover
            .command(self.workspace, &self.binaries, results.path())
            .args(classes.iter().flat_map(|class| ["--case", class]))
            .arg("--api")
            .arg(api)
            .output()
            .context("cannot start cube-bench")?;
        let code = done.status.code().context("the prover was killed")?;
        let said = String::from_utf8_lossy(&done.stderr);
        let proof = prover
            .read(results.path())
            .with_context(|| said.trim().to_owned())?;
        Ok((code, proof))
    }

    /// How the prover found it, if it did, and in which cases.
    fn try_one(&self, mutation: &Mutation, progress: Progress) -> Result<Noticed> {
        let path = self.tree.join(&mutation.file);
        let original = fs::read_to_string(&path)
            .with_context(|| format!("cannot read {}", mutation.file.display()))?;
        let places = original.matches(&mutation.find).count();
        ensure!(
            places == 1,
            "{}: {} has {places} places like {:?}",
            mutation.name,
            mutation.file.display(),
            mutation.find
        );
        fs::write(
            &path,
            original.replacen(&mutation.find, &mutation.replace, 1),
        )?;
        let tried = match (&mutation.class, &mutation.test) {
            (Some(class), None) => self.by_prover(&mutation.name, class, progress),
            (None, Some(test)) => self.by_test(&mutation.name, test, progress),
            _ => Err(anyhow!("{} has not one of class and test", mutation.name)),
        };
        fs::write(&path, &original)?;
        tried
    }

    fn by_prover(&self, name: &str, class: &str, progress: Progress) -> Result<Noticed> {
        let api = progress.stage(name, || self.build())?;
        let (code, proof) = self.prove(&api, &[class])?;
        let in_class = proof.cases.iter().any(|case| case.class == class);
        ensure!(in_class, "{name}: no case is of the class {class}");
        Ok((Found::by_prover(code), failing(&proof)))
    }

    fn by_test(&self, name: &str, test: &Test, progress: Progress) -> Result<Noticed> {
        let passes = progress.stage(name, || self.passes(test))?;
        Ok(((!passes).then_some(Found::FailedTest), test.names.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mutation_finds_its_place() {
        let workspace = Workspace::locate().unwrap();
        let list = load(&workspace).unwrap();
        assert!(!list.mutation.is_empty());
        for mutation in list.mutation {
            let text = fs::read_to_string(workspace.root().join(&mutation.file)).unwrap();
            assert_eq!(text.matches(&mutation.find).count(), 1, "{}", mutation.name);
            assert_ne!(mutation.find, mutation.replace);
        }
    }
}
