//! The two builds: the locations of their programs and templates, and their identity (commits and hashes).

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use testbed::artifacts::{self, ArtifactError};

use crate::{
    host::facts,
    scenario::{Scenario, TargetKind},
};

/// A directory that does not hold a complete build.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    #[error(
        "no build in {dir}: expected {program} in {dir}/target/cube/bin or {dir}/bin; run `cargo xtask prepare` in that \
         checkout"
    )]
    Program { dir: PathBuf, program: &'static str },
    /// The template of the scenario is missing or unreadable.
    #[error(transparent)]
    Template(#[from] ArtifactError),
}

/// Programs and templates of one build.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Build {
    /// The directory as given on the command line.
    pub path: PathBuf,
    /// Directory with `bin/` and `templates/`, absolute.
    pub artifacts: PathBuf,
    /// Commit of the checkout; `None` if the directory is not in a git work tree.
    pub commit: Option<String>,
    /// Whether tracked files differ from that commit.
    pub dirty_tree: Option<bool>,
    /// SHA-256 of `cube-vmm` and, for a scenario that starts a server, `cube-api`.
    pub binaries: BTreeMap<String, String>,
    /// SHA-256 of the template's files, as recorded in its manifest.
    pub template: BTreeMap<String, String>,
    /// URL of a running API that is measured instead of a build; all other fields except `path` are then empty.
    #[serde(default)]
    pub endpoint: Option<String>,
}

/// The URL that was given instead of a directory.
pub(super) fn url_of(path: &Path) -> Option<&str> {
    let text = path.to_str()?;
    (text.starts_with("http://") || text.starts_with("https://")).then_some(text)
}

impl Build {
    /// Finds the build in `dir`, which is a checkout, a directory with `bin/` and `templates/`, or the URL of an API.
    ///
    /// # Errors
    /// Returns [`BuildError`] if a program or the template that the scenario needs is missing.
    pub fn find(dir: &Path, scenario: &Scenario) -> Result<Self, BuildError> {
        if let Some(url) = url_of(dir) {
            return Ok(Self {
                path: dir.to_owned(),
                artifacts: artifacts::default_dir(),
                commit: None,
                dirty_tree: None,
                binaries: BTreeMap::new(),
                template: BTreeMap::new(),
                endpoint: Some(url.to_owned()),
            });
        }
        let programs: &[&'static str] = match scenario.target.kind {
            TargetKind::E2b => &["cube-vmm", "cube-api"],
            _ => &["cube-vmm"],
        };
        let artifacts = [dir.join("target/cube"), dir.to_owned()]
            .into_iter()
            .find(|artifacts| artifacts.join("bin/cube-vmm").is_file())
            .and_then(|artifacts| artifacts.canonicalize().ok());
        let missing = |program| BuildError::Program {
            dir: dir.to_owned(),
            program,
        };
        let artifacts = artifacts.ok_or_else(|| missing("cube-vmm"))?;
        let mut binaries = BTreeMap::new();
        for program in programs {
            let path = artifacts.join("bin").join(program);
            let sum = facts::sha256(&path).map_err(|_| missing(program))?;
            binaries.insert((*program).to_owned(), sum);
        }
        let target = &scenario.target;
        let manifest =
            artifacts::find_template(&artifacts, &target.template, target.memory)?.manifest;
        Ok(Self {
            path: dir.to_owned(),
            commit: facts::git(dir, &["rev-parse", "HEAD"]),
            dirty_tree: facts::git(dir, &["status", "--porcelain", "--untracked-files=no"])
                .map(|text| !text.is_empty()),
            binaries,
            template: facts::template_sums(&manifest),
            endpoint: None,
            artifacts,
        })
    }

    /// The VMM of this build.
    #[must_use]
    pub fn vmm(&self) -> PathBuf {
        self.artifacts.join("bin/cube-vmm")
    }

    /// The server of this build; the file may be absent if the scenario does not start a server.
    #[must_use]
    pub fn api(&self) -> PathBuf {
        self.artifacts.join("bin/cube-api")
    }

    /// Name of a program, or of a file of the template, whose hash differs from the recorded one. A file without a
    /// hash on either side is not compared.
    #[must_use]
    pub fn changed_file(
        &self,
        binaries: &BTreeMap<String, String>,
        template: &BTreeMap<String, String>,
    ) -> Option<String> {
        let differing = |ours: &BTreeMap<String, String>, now: &BTreeMap<String, String>| {
            let mut names = ours.iter();
            let found = names.find(|(name, sum)| now.get(*name).is_some_and(|now| now != *sum));
            found.map(|(name, _)| name.clone())
        };
        differing(&self.binaries, binaries).or_else(|| {
            differing(&self.template, template).map(|file| format!("the template's {file}"))
        })
    }

    /// Whether the recorded programs and the template have the same hashes in both builds.
    #[must_use]
    pub fn same_files(&self, other: &Self) -> bool {
        let same = self.binaries == other.binaries && self.template == other.template;
        same && self.endpoint == other.endpoint
    }
}
