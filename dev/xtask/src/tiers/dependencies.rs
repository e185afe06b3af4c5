//! Checks all linked crates against `deny.toml`: licences, duplicate versions and sources. Security advisories are
//! checked too if `cargo-deny` is installed and its database can be fetched.
//!
//! `cargo deny` checks all of this, but it takes minutes to build and needs a database from the network. The checks
//! that need neither are implemented here on the same configuration file, so that they run on every host.

mod spdx;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
};

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;

use crate::{
    progress::Progress,
    tiers::{Counts, Outcome},
    tool,
    workspace::Workspace,
};

/// The part of `deny.toml` that is enforced here. `cargo deny` reads the whole file.
#[derive(Debug, Deserialize)]
struct Rules {
    graph: Graph,
    licenses: Licenses,
    bans: Bans,
    sources: Sources,
}

#[derive(Debug, Deserialize)]
struct Graph {
    targets: Vec<String>,
}

#[derive(Debug, Deserialize)]
struct Licenses {
    allow: BTreeSet<String>,
}

#[derive(Debug, Deserialize)]
struct Bans {
    skip: Vec<Skip>,
}

#[derive(Debug, Deserialize)]
struct Skip {
    /// `name@version`.
    #[serde(rename = "crate")]
    name: String,
    reason: String,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Sources {
    allow_registry: BTreeSet<String>,
}

/// The part of the output of `cargo metadata` that is used here.
#[derive(Debug, Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Debug, Deserialize)]
struct Package {
    name: String,
    version: String,
    license: Option<String>,
    /// `None` for a crate of this repository.
    source: Option<String>,
}

/// Runs all checks that this host supports. Counts three passed checks (licences, duplicates, sources), and one passed
/// or skipped check for advisories.
///
/// # Errors
/// Returns an error if a check finds a violation, or if the lock file of `dev/fuzz` is out of date.
pub(crate) fn check(workspace: &Workspace, progress: Progress) -> Result<Outcome> {
    progress.stage("dependencies", || {
        let rules = fs::read_to_string(workspace.root().join("deny.toml"))?;
        let rules: Rules = toml::from_str(&rules).context("cannot read deny.toml")?;
        let faults = rules.faults(&packages(workspace, &rules.graph)?);
        ensure!(
            faults.is_empty(),
            "dependencies violate deny.toml: {}",
            faults.join("; ")
        );
        fuzz_lock_is_current(workspace, &rules.graph)
    })?;
    let mut counts = Counts {
        passed: 3,
        ..Counts::default()
    };
    match advisories(workspace)? {
        None => counts.passed += 1,
        Some(lack) => {
            progress.line(&format!("advisories not checked: {lack}"));
            counts.skipped += 1;
        }
    }
    Ok(Outcome {
        success: true,
        counts,
    })
}

/// Checks the lock file of `dev/fuzz` before the tests start. `dev/fuzz` is a separate workspace; without this check, a
/// stale lock file would be noticed only when the tier `fuzz` starts, after the tests of other tiers.
fn fuzz_lock_is_current(workspace: &Workspace, graph: &Graph) -> Result<()> {
    let manifest = workspace.root().join("dev/fuzz/Cargo.toml");
    let mut command = workspace.cargo();
    command.args(["fetch", "--locked", "--manifest-path"]);
    command.arg(manifest);
    for target in &graph.targets {
        command.args(["--target", target]);
    }
    tool::output(&mut command).map(drop).context(
        "dev/fuzz/Cargo.lock is out of date: run `cargo fetch` in dev/fuzz/ and commit the file",
    )
}

fn packages(workspace: &Workspace, graph: &Graph) -> Result<Vec<Package>> {
    let mut command = workspace.cargo();
    command.args(["metadata", "--format-version=1", "--locked"]);
    for target in &graph.targets {
        command.args(["--filter-platform", target]);
    }
    let metadata: Metadata = serde_json::from_str(&tool::output(&mut command)?)?;
    Ok(metadata.packages)
}

/// Checks for security advisories. Returns `Some(reason)` if the check cannot run on this host.
///
/// # Errors
/// Returns an error if `cargo deny check advisories` fails, usually because a linked crate has an advisory.
fn advisories(workspace: &Workspace) -> Result<Option<String>> {
    if tool::output(workspace.cargo().args(["deny", "--version"])).is_err() {
        let lack = "cargo-deny is not installed (cargo install --locked cargo-deny)";
        return Ok(Some(lack.into()));
    }
    let mut fetch = workspace.cargo();
    if let Err(error) = tool::output(fetch.args(["deny", "fetch", "db"])) {
        return Ok(Some(format!(
            "cannot fetch the advisory database: {error:#}"
        )));
    }
    let mut check = workspace.cargo();
    check.args(["deny", "check", "--disable-fetch", "advisories"]);
    match tool::output(&mut check) {
        Ok(_) => Ok(None),
        Err(error) => bail!("cargo deny check advisories: {error:#}"),
    }
}

impl Rules {
    /// Violations of the rules, and `skip` entries that match no crate or have no reason.
    fn faults(&self, packages: &[Package]) -> Vec<String> {
        let mut faults = self.licence_faults(packages);
        faults.extend(self.duplicates(packages));
        let foreign = packages
            .iter()
            .filter(|package| !self.has_allowed_source(package));
        faults.extend(foreign.map(|p| format!("{} comes from {:?}", p.name, p.source)));
        faults
    }

    fn licence_faults(&self, packages: &[Package]) -> Vec<String> {
        let is_forbidden = |package: &&Package| {
            let text = package.license.as_deref().unwrap_or_default();
            !spdx::allows(text, &self.licenses.allow)
        };
        packages
            .iter()
            .filter(is_forbidden)
            .map(|p| format!("{} {}: licence {:?}", p.name, p.version, p.license))
            .collect()
    }

    fn duplicates(&self, packages: &[Package]) -> Vec<String> {
        let mut versions: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        let mut unused: BTreeSet<&str> = self.bans.skip.iter().map(|s| s.name.as_str()).collect();
        for package in packages {
            let known = versions.entry(&package.name).or_default();
            let skipped = format!("{}@{}", package.name, package.version);
            if !unused.remove(skipped.as_str()) {
                known.insert(&package.version);
            }
        }
        let twice = versions.iter().filter(|(_, known)| known.len() > 1);
        let mut faults: Vec<_> = twice
            .map(|(name, known)| format!("{name} is linked in versions {known:?}"))
            .collect();
        faults.extend(
            unused
                .iter()
                .map(|s| format!("the skip entry {s} matches no crate: remove it")),
        );
        let bare = self.bans.skip.iter().filter(|skip| skip.reason.is_empty());
        faults.extend(bare.map(|skip| format!("the skip entry {} has no reason", skip.name)));
        faults
    }

    fn has_allowed_source(&self, package: &Package) -> bool {
        let Some(source) = &package.source else {
            return true;
        };
        let registry = source.strip_prefix("registry+");
        registry.is_some_and(|registry| self.sources.allow_registry.contains(registry))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REGISTRY: &str = "registry+https://r.test/index";

    fn rules() -> Rules {
        toml::from_str(
            r#"
            [graph]
            targets = []
            [licenses]
            allow = ["MIT"]
            [bans]
            skip = [{ crate = "a@1.0.0", reason = "b" }]
            [sources]
            allow-registry = ["https://r.test/index"]
            "#,
        )
        .unwrap()
    }

    fn package(name: &str, version: &str, license: &str, source: Option<&str>) -> Package {
        Package {
            name: name.into(),
            version: version.into(),
            license: Some(license.into()),
            source: source.map(Into::into),
        }
    }

    #[test]
    fn allowed_crates_and_skipped_duplicates_pass() {
        let packages = [
            package("a", "1.0.0", "MIT", Some(REGISTRY)),
            package("a", "2.0.0", "MIT OR GPL-3.0", Some(REGISTRY)),
            package("ours", "0.1.0", "MIT", None),
        ];
        assert_eq!(rules().faults(&packages), [""; 0]);
    }

    #[test]
    fn each_rule_reports_its_violation() {
        let skipped = || package("a", "1.0.0", "MIT", Some(REGISTRY));
        for (packages, fault) in [
            (
                vec![skipped(), package("b", "1.0.0", "GPL-3.0", Some(REGISTRY))],
                "b 1.0.0: licence Some(\"GPL-3.0\")",
            ),
            (
                vec![
                    skipped(),
                    package("a", "2.0.0", "MIT", Some(REGISTRY)),
                    package("a", "3.0.0", "MIT", Some(REGISTRY)),
                ],
                "a is linked in versions {\"2.0.0\", \"3.0.0\"}",
            ),
            (
                vec![
                    skipped(),
                    package("c", "1.0.0", "MIT", Some("git+https://c.test")),
                ],
                "c comes from Some(\"git+https://c.test\")",
            ),
            (vec![], "the skip entry a@1.0.0 matches no crate: remove it"),
        ] {
            assert_eq!(rules().faults(&packages), [fault]);
        }
    }
}
