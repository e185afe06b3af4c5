//! `cargo xtask mutate-netisolation`, `mutate-pool` and `mutate-cluster`: mutation tests of the isolation prover, of the
//! explorer of the pool's states, and of the simulation of a cluster.
//!
//! ```text
//! mutations.toml ─► copy of the sources ─► one edit ─┬─► cube-api ─► cube-bench verify isolation --case CLASS
//!                                                     └─► unit tests
//! ```
//! Each mutation removes one check from the eBPF programs, the policy or the resolver, or makes one decision of the pool
//! or of the cluster wrong. The list names what must then happen: in one class of cases, the prover reports a breach or a case that is not
//! proven; or a unit test fails, with this property if one is given. Any other result fails this task. Without a mutation, the same classes and tests must pass.

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

/// The lists.
pub(crate) const NETISOLATION: &str = "harness/verify/isolation/mutations.toml";
pub(crate) const POOL: &str = "pool/mutations.toml";
pub(crate) const CLUSTER: &str = "api/cluster/mutations.toml";

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct List {
    mutation: Vec<Mutation>,
}

/// An edit that removes one check. Exactly one of `class` and `test` is given.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Mutation {
    name: String,
    /// Path relative to the root of the checkout.
    file: PathBuf,
    /// Text that occurs in the file exactly once.
    find: String,
    replace: String,
    /// The class of the prover's cases that must detect this mutation.
    class: Option<String>,
    /// The tests that must fail, for code that the prover does not reach.
    test: Option<Test>,
    /// The expected detection.
    found: Detection,
}

/// Unit tests that detect a mutation.
#[derive(Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
struct Test {
    package: String,
    /// Substring of the tests' names.
    names: String,
    /// The property that the failed test must print, after `property: `. `None`: any failure counts.
    property: Option<String>,
}

/// The way in which a mutation is detected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Detection {
    /// The prover reports a breach: traffic gets through.
    Breach,
    /// The prover reports a case as not proven: another check still drops the traffic, for another reason.
    Unproven,
    /// A unit test fails.
    FailedTest,
}

impl Detection {
    /// Maps the prover's exit code. `None` if the prover detected nothing.
    fn from_prover(code: i32) -> Option<Self> {
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
    /// The class of cases or the package of tests that must detect this mutation.
    fn detector(&self) -> &str {
        match (&self.class, &self.test) {
            (Some(class), _) => class,
            (None, Some(test)) => &test.package,
            (None, None) => "-",
        }
    }
}

/// The detection of a mutation, `None` if it was not detected; and the cases that did not pass, or the names of the
/// tests that ran.
type MutationResult = (Option<Detection>, String);

/// A copy of the sources in which mutations are applied and built.
#[derive(Debug)]
struct MutationTree<'a> {
    workspace: &'a Workspace,
    /// Root of the copy.
    tree: PathBuf,
    /// Cargo's target directory, kept from run to run.
    target: PathBuf,
    /// Release binaries of the original sources.
    binaries: PathBuf,
    log: PathBuf,
}

/// Runs the mutations whose names contain `only`, or all mutations if it is `None`. Returns true if each was detected
/// in the expected way.
pub(crate) fn run(
    workspace: &Workspace,
    path: &str,
    only: Option<&str>,
    progress: Progress,
) -> Result<bool> {
    let list = load(workspace, path)?;
    let chosen: Vec<&Mutation> = list
        .mutation
        .iter()
        .filter(|mutation| only.is_none_or(|part| mutation.name.contains(part)))
        .collect();
    ensure!(
        !chosen.is_empty(),
        "no name of a mutation in {path} contains {only:?}"
    );
    // Unit tests need none.
    let binaries = if classes(&chosen).is_empty() {
        PathBuf::new()
    } else {
        prepare::all(workspace, progress, Freshness::Keep)?.dir
    };
    let home = workspace.artifacts().join("mutants");
    let mutants = MutationTree {
        workspace,
        tree: home.join("tree"),
        target: home.join("target"),
        binaries,
        log: home.join("build.log"),
    };
    fs::create_dir_all(&home)?;
    fs::write(&mutants.log, "")?;
    mutants.copy_sources()?;
    mutants.pass_unmutated(&chosen, progress)?;
    let mut all_detected = true;
    println!(
        "{:<32} {:<10} {:<9} failed cases or property",
        "mutation", "class", "result"
    );
    for mutation in chosen {
        let (detection, failed) = mutants.try_one(mutation, progress)?;
        all_detected &= detection == Some(mutation.found);
        let result = detection.map_or("SURVIVED", Detection::name);
        let detector = mutation.detector();
        println!("{:<32} {detector:<10} {result:<9} {failed}", mutation.name);
    }
    Ok(all_detected)
}

fn load(workspace: &Workspace, list: &str) -> Result<List> {
    let path = workspace.root().join(list);
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {list}"))?;
    toml::from_str(&text).with_context(|| format!("cannot parse {list}"))
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

impl MutationTree<'_> {
    /// Replaces the copy with all files that git tracks, and untracked files that it does not ignore.
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
            // Keep the modification time, so that cargo rebuilds only the mutated crate.
            fs::copy(&from, &to)?;
            let time = fs::metadata(&from)?.modified()?;
            fs::File::options()
                .write(true)
                .open(&to)?
                .set_modified(time)?;
        }
        Ok(())
    }

    /// Checks that the cases and tests used as detectors pass on the original sources.
    fn pass_unmutated(&self, chosen: &[&Mutation], progress: Progress) -> Result<()> {
        let classes = classes(chosen);
        if !classes.is_empty() {
            let api = progress.stage("unmutated", || self.build())?;
            let (code, proof) = self.prove(&api, &classes)?;
            let failing = failing(&proof);
            ensure!(
                code == 0,
                "cases fail on the original sources, without a mutation: {failing}"
            );
        }
        let mut tests: Vec<&Test> = chosen.iter().filter_map(|m| m.test.as_ref()).collect();
        tests.dedup();
        for test in tests {
            let failure = progress.stage("unmutated", || self.failure_of(test))?;
            ensure!(
                failure.is_none(),
                "tests named {} fail on the original sources, without a mutation",
                test.names
            );
        }
        Ok(())
    }

    /// The output of these tests in the copy, if they fail.
    ///
    /// # Errors
    /// Returns an error if the tests do not compile, or if no test has a matching name.
    fn failure_of(&self, test: &Test) -> Result<Option<String>> {
        let tests = ["test", "--package", &test.package, "--lib"];
        tool::run(self.cargo().args(tests).arg("--no-run"), &self.log)?;
        let done = self.cargo().args(tests).arg(&test.names).output()?;
        let output = String::from_utf8_lossy(&done.stdout);
        ensure!(
            !output.contains("running 0 tests"),
            "no test in package {} has {:?} in its name",
            test.package,
            test.names
        );
        Ok((!done.status.success()).then(|| output.into_owned()))
    }

    fn cargo(&self) -> Command {
        let mut cargo = self.workspace.cargo();
        cargo
            .current_dir(&self.tree)
            .env("CARGO_TARGET_DIR", &self.target)
            .env("CARGO_PROFILE_DEV_DEBUG", "0");
        cargo
    }

    /// Builds `cube-api` from the copy.
    fn build(&self) -> Result<PathBuf> {
        tool::run(self.cargo().args(["build", "--package", "api"]), &self.log)?;
        Ok(self.target.join("debug/cube-api"))
    }

    /// Runs the prover with the server `api`. Returns the prover's exit code and its report.
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
        let code = done
            .status
            .code()
            .context("the prover was killed by a signal")?;
        let stderr = String::from_utf8_lossy(&done.stderr);
        let proof = prover
            .read(results.path())
            .with_context(|| format!("the prover wrote no report: {}", stderr.trim()))?;
        Ok((code, proof))
    }

    /// Applies the mutation, runs its detector, and restores the file.
    fn try_one(&self, mutation: &Mutation, progress: Progress) -> Result<MutationResult> {
        let path = self.tree.join(&mutation.file);
        let original = fs::read_to_string(&path)
            .with_context(|| format!("cannot read {}", mutation.file.display()))?;
        let places = original.matches(&mutation.find).count();
        ensure!(
            places == 1,
            "{}: {:?} must occur in {} exactly once, but occurs {places} times",
            mutation.name,
            mutation.find,
            mutation.file.display()
        );
        fs::write(
            &path,
            original.replacen(&mutation.find, &mutation.replace, 1),
        )?;
        let tried = match (&mutation.class, &mutation.test) {
            (Some(class), None) => self.by_prover(&mutation.name, class, progress),
            (None, Some(test)) => self.by_test(&mutation.name, test, progress),
            _ => Err(anyhow!(
                "{} must have either a class or a test",
                mutation.name
            )),
        };
        fs::write(&path, &original)?;
        tried
    }

    fn by_prover(&self, name: &str, class: &str, progress: Progress) -> Result<MutationResult> {
        let api = progress.stage(name, || self.build())?;
        let (code, proof) = self.prove(&api, &[class])?;
        let in_class = proof.cases.iter().any(|case| case.class == class);
        ensure!(in_class, "{name}: the prover ran no case of class {class}");
        Ok((Detection::from_prover(code), failing(&proof)))
    }

    fn by_test(&self, name: &str, test: &Test, progress: Progress) -> Result<MutationResult> {
        let failure = progress.stage(name, || self.failure_of(test))?;
        let lines = failure.iter().flat_map(|output| output.lines());
        let found = lines.filter_map(|line| line.trim().strip_prefix("property: "));
        let found: Vec<&str> = found.collect();
        let is_expected = match &test.property {
            Some(property) => found.contains(&property.as_str()),
            None => failure.is_some(),
        };
        let detection = is_expected.then_some(Detection::FailedTest);
        let by = match found.first() {
            Some(property) => (*property).to_owned(),
            None => test.names.clone(),
        };
        Ok((detection, by))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mutation_applies_to_the_sources() {
        let workspace = Workspace::locate().unwrap();
        let lists = [NETISOLATION, POOL, CLUSTER].map(|list| load(&workspace, list).unwrap());
        assert!(lists.iter().all(|list| !list.mutation.is_empty()));
        for mutation in lists.into_iter().flat_map(|list| list.mutation) {
            let text = fs::read_to_string(workspace.root().join(&mutation.file)).unwrap();
            assert_eq!(text.matches(&mutation.find).count(), 1, "{}", mutation.name);
            assert_ne!(mutation.find, mutation.replace);
        }
    }
}
