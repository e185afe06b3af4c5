//! `cargo xtask mutate-netisolation`, `mutate-egress`, `mutate-pool` and `mutate-cluster`: mutation tests of the
//! isolation prover, of the egress proxy's tests, of the explorer of the pool's states, and of the simulation of a
//! cluster.
//!
//! ```text
//! mutations.toml ─► copy of the sources ─► one edit ─┬─► cube-api, cube-egress ─► cube-bench verify isolation --case CLASS
//!                                                     └─► tests
//! ```
//! Each mutation removes one check from the eBPF programs, the policy or the resolver, or makes one decision of the
//! pool or of the cluster wrong. The list contains the expected result: in one class of cases, the prover reports a
//! breach or a case that is not proven; or a unit test fails, with the given property if there is one. Any other
//! result fails this task. Without a mutation, the same classes and tests must pass.

use std::{
    collections::HashSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, anyhow, ensure};
use serde::Deserialize;

use crate::{
    prepare::{self, Freshness},
    progress::Progress,
    tiers::isolation::{Proof, Prover},
    tool,
    workspace::Workspace,
};

/// The lists.
pub(crate) const NETISOLATION: &str = "harness/verify/isolation/mutations.toml";
pub(crate) const POOL: &str = "pool/mutations.toml";
pub(crate) const EGRESS: &str = "netisolation/egress/mutations.toml";
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

/// Tests that detect a mutation.
#[derive(Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
struct Test {
    package: String,
    /// Substring of the tests' names.
    names: String,
    /// The integration test that has them. `None`: they are in the library.
    target: Option<String>,
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
    /// Whether the name contains this text, or the class of cases or the package of tests that must detect the
    /// mutation equals it.
    fn is_named(&self, part: &str) -> bool {
        self.name.contains(part) || self.detector() == part
    }

    /// Whether only `cube-egress` must be rebuilt: `cube-api` does not use the forwarding code of that crate.
    fn is_in_proxy(&self) -> bool {
        self.file.starts_with("egress")
    }

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

/// The programs that the prover runs.
#[derive(Debug)]
struct Built {
    api: PathBuf,
    egress: PathBuf,
}

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

/// Runs the mutations that `only` names, or all mutations if it is `None`. Returns true if each was detected
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
        .filter(|mutation| only.is_none_or(|part| mutation.is_named(part)))
        .collect();
    ensure!(
        !chosen.is_empty(),
        "no mutation in {path} has {only:?} in its name or is detected by it"
    );
    // Unit tests need no binaries.
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

/// Copies a file, if it exists, unless the copy has the same content.
fn copy_changed(from: &Path, to: &Path) -> Result<()> {
    if !from.is_file() {
        return Ok(());
    }
    let content = fs::read(from).with_context(|| format!("cannot read {}", from.display()))?;
    if fs::read(to).is_ok_and(|copied| copied == content) {
        return Ok(());
    }
    if let Some(dir) = to.parent() {
        fs::create_dir_all(dir)?;
    }
    fs::copy(from, to).with_context(|| format!("cannot copy {}", from.display()))?;
    // `fs::copy` does not preserve the modification time, so cargo sees the copy as new.
    Ok(())
}

/// Removes the files below `dir` whose paths below `tree` are not in `files`.
fn remove_others(tree: &Path, dir: &Path, files: &HashSet<&Path>) -> Result<()> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() && !path.is_symlink() {
            remove_others(tree, &path, files)?;
        } else if !files.contains(path.strip_prefix(tree)?) {
            fs::remove_file(&path)?;
        }
    }
    Ok(())
}

impl MutationTree<'_> {
    /// Makes the copy contain all files tracked by git, and untracked files that are not ignored. A file with the
    /// same content is left alone: if a mutation was removed from it, it is newer than the build with the mutation,
    /// and cargo must notice that.
    fn copy_sources(&self) -> Result<()> {
        let mut list = Command::new("git");
        list.current_dir(self.workspace.root()).args([
            "ls-files",
            "--cached",
            "--others",
            "--exclude-standard",
        ]);
        let list = tool::output(&mut list)?;
        let files: HashSet<&Path> = list.lines().map(Path::new).collect();
        for file in &files {
            copy_changed(&self.workspace.root().join(file), &self.tree.join(file))?;
        }
        remove_others(&self.tree, &self.tree, &files)
    }

    /// Checks that the cases and tests used as detectors pass on the original sources.
    fn pass_unmutated(&self, chosen: &[&Mutation], progress: Progress) -> Result<()> {
        let classes = classes(chosen);
        if !classes.is_empty() {
            let in_proxy = chosen.iter().all(|mutation| mutation.is_in_proxy());
            let built = progress.stage("unmutated", || self.build(in_proxy))?;
            let (code, proof) = self.prove(&built, &classes)?;
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

    /// The output of these tests in the copy if they fail.
    ///
    /// # Errors
    /// Returns an error if the tests do not compile, or if no test has a matching name.
    fn failure_of(&self, test: &Test) -> Result<Option<String>> {
        let mut tests = vec!["test", "--package", &test.package];
        match &test.target {
            Some(target) => tests.extend(["--test", target]),
            None => tests.push("--lib"),
        }
        tool::run(self.cargo().args(&tests).arg("--no-run"), &self.log)?;
        let done = self.cargo().args(&tests).arg(&test.names).output()?;
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

    /// Builds `cube-egress` from the copy, and `cube-api` unless the mutation is only in the proxy.
    fn build(&self, in_proxy: bool) -> Result<Built> {
        let mut cargo = self.cargo();
        cargo.args(["build", "--package", "egress"]);
        if !in_proxy {
            cargo.args(["--package", "api"]);
        }
        tool::run(&mut cargo, &self.log)?;
        let dir = self.target.join("debug");
        Ok(Built {
            api: if in_proxy {
                self.binaries.join("cube-api")
            } else {
                dir.join("cube-api")
            },
            egress: dir.join("cube-egress"),
        })
    }

    /// Runs the prover with this server and proxy. Returns the prover's exit code and its report.
    fn prove(&self, built: &Built, classes: &[&str]) -> Result<(i32, Proof)> {
        let results = tempfile::tempdir()?;
        let prover = Prover::Isolation;
        let done = prover
            .command(self.workspace, &self.binaries, results.path())
            .args(classes.iter().flat_map(|class| ["--case", class]))
            .arg("--api")
            .arg(&built.api)
            .arg("--egress")
            .arg(&built.egress)
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
            (Some(class), None) => self.by_prover(mutation, class, progress),
            (None, Some(test)) => self.by_test(&mutation.name, test, progress),
            _ => Err(anyhow!(
                "{} must have either a class or a test",
                mutation.name
            )),
        };
        fs::write(&path, &original)?;
        tried
    }

    fn by_prover(
        &self,
        mutation: &Mutation,
        class: &str,
        progress: Progress,
    ) -> Result<MutationResult> {
        let name = &mutation.name;
        let built = progress.stage(name, || self.build(mutation.is_in_proxy()))?;
        let (code, proof) = self.prove(&built, &[class])?;
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
    fn a_copy_that_is_the_same_keeps_its_time_and_one_too_many_goes() {
        let (from, tree) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (source, copy) = (from.path().join("a"), tree.path().join("b/a"));
        let time = || fs::metadata(&copy).unwrap().modified().unwrap();
        fs::write(&source, "1").unwrap();
        copy_changed(&source, &copy).unwrap();
        let first = time();
        copy_changed(&source, &copy).unwrap();
        assert_eq!(time(), first);
        fs::write(&copy, "a mutation").unwrap();
        copy_changed(&source, &copy).unwrap();
        assert_eq!(fs::read_to_string(&copy).unwrap(), "1");
        assert!(time() >= first);
        let listed = HashSet::from([Path::new("b/a")]);
        fs::write(tree.path().join("c"), "").unwrap();
        remove_others(tree.path(), tree.path(), &listed).unwrap();
        assert!(copy.exists() && !tree.path().join("c").exists());
    }

    #[test]
    fn every_mutation_applies_to_the_sources() {
        let workspace = Workspace::locate().unwrap();
        let lists =
            [NETISOLATION, POOL, EGRESS, CLUSTER].map(|list| load(&workspace, list).unwrap());
        assert!(lists.iter().all(|list| !list.mutation.is_empty()));
        for mutation in lists.into_iter().flat_map(|list| list.mutation) {
            let text = fs::read_to_string(workspace.root().join(&mutation.file)).unwrap();
            assert_eq!(text.matches(&mutation.find).count(), 1, "{}", mutation.name);
            assert_ne!(mutation.find, mutation.replace);
        }
    }
}
