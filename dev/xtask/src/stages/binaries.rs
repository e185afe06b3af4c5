//! The binaries that cargo builds. Cargo decides what has to be rebuilt.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};

use crate::{progress::Progress, tool, workspace::Workspace};

pub(crate) const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Static release binaries for the emulated host of the tier `hvm`, which has no shared libraries.
#[derive(Debug, Clone)]
pub(crate) struct StaticBinaries {
    pub(crate) vmm: PathBuf,
    pub(crate) verify: PathBuf,
    pub(crate) steps: PathBuf,
}

/// Flags for a static program at a fixed address.
pub(crate) const STATIC: &str = "-C target-feature=+crt-static -C relocation-model=static";

/// The release binaries that cargo builds for the host, beside [`PROBE`], each with its package.
pub(crate) const PROGRAMS: [(&str, &str); 7] = [
    ("cube", "cli"),
    ("cube-vmm", "vmm"),
    ("cube-bench", "harness"),
    ("cube-verify", "verify"),
    ("cube-api", "api"),
    ("cube-image", "oci-image"),
    ("cube-egress", "egress"),
];
pub(crate) const PROBE: &str = "cube-netprobe";
/// The commit and the hashes of these programs, in a file beside them.
pub(crate) const BUILD_RECORD: &str = "build.json";

/// The directory that contains [`PROGRAMS`] and [`PROBE`].
#[derive(Debug, Clone)]
pub(crate) struct HostBinaries {
    pub(crate) dir: PathBuf,
}

impl HostBinaries {
    pub(crate) fn vmm(&self) -> PathBuf {
        self.dir.join("cube-vmm")
    }

    pub(crate) fn bench(&self) -> PathBuf {
        self.dir.join("cube-bench")
    }
}

/// Builds the static guest agent and returns its path.
pub(crate) fn build_agent(
    workspace: &Workspace,
    progress: Progress,
    log: &Path,
) -> Result<PathBuf> {
    build_guest(workspace, progress, "agent", "guest-agent", log)
}

/// Builds a static program for guests and returns its path.
pub(crate) fn build_guest(
    workspace: &Workspace,
    progress: Progress,
    package: &'static str,
    program: &str,
    log: &Path,
) -> Result<PathBuf> {
    progress.stage(package, || {
        let mut cargo = workspace.cargo();
        // At a fixed address the program needs no relocations, which would touch pages in every clone.
        cargo
            .env("RUSTFLAGS", STATIC)
            .args(["build", "--profile", "guest", "--target", TARGET])
            .args(["--package", package]);
        tool::run(&mut cargo, log)
    })?;
    let dir = workspace.target()?.join(TARGET).join("guest");
    existing(dir.join(program))
}

/// Which of [`PROGRAMS`] and [`PROBE`] to build.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Wanted(Vec<&'static str>);

impl Wanted {
    pub(crate) fn all() -> Self {
        let names = PROGRAMS.into_iter().map(|(name, _)| name);
        Self(names.chain([PROBE]).collect())
    }

    /// The programs that `cube-bench run` starts for this scenario, so that a first report does not wait for the others.
    /// Returns all of them if the text is not valid TOML: `cube-bench` reports the error.
    pub(crate) fn by_scenario(text: &str) -> Self {
        let Ok(scenario) = text.parse::<toml::Table>() else {
            return Self::all();
        };
        let scenario = toml::Value::Table(scenario);
        if mentions(&scenario, "isolated") {
            return Self::all();
        }
        let mut names = vec!["cube-vmm", "cube-bench"];
        names.extend(mentions(&scenario, "e2b").then_some("cube-api"));
        Self(names)
    }

    /// These, and the programs that a build before this one has installed: all programs of a directory are of one build.
    fn and_installed(mut self, dir: &Path) -> Self {
        let all = Self::all().0.into_iter();
        let old = all.filter(|name| dir.join(name).exists() && !self.0.contains(name));
        let old: Vec<_> = old.collect();
        self.0.extend(old);
        self
    }
}

/// Whether a key or a text in the value is this word.
fn mentions(value: &toml::Value, word: &str) -> bool {
    match value {
        toml::Value::String(text) => text == word,
        toml::Value::Array(values) => values.iter().any(|value| mentions(value, word)),
        toml::Value::Table(table) => {
            let mut entries = table.iter();
            entries.any(|(key, value)| key == word || mentions(value, word))
        }
        _ => false,
    }
}

/// Builds release binaries, and copies them into one directory.
///
/// The binaries are static and run at a fixed address: every clone starts a new `cube-vmm` process, and a dynamic
/// linker would take half of that process's start-up time.
pub(crate) fn build_host(
    workspace: &Workspace,
    progress: Progress,
    log: &Path,
    wanted: Wanted,
) -> Result<HostBinaries> {
    let dir = workspace.artifacts().join("bin");
    std::fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let wanted = wanted.and_installed(&dir);
    progress.stage("host binaries", || {
        let mut cargo = workspace.cargo();
        cargo
            .env("RUSTFLAGS", STATIC)
            .args(["build", "--release", "--target", TARGET]);
        let packages = PROGRAMS.iter().filter(|(name, _)| wanted.0.contains(name));
        cargo.args(packages.flat_map(|(_, package)| ["--package", package]));
        tool::run(&mut cargo, log)
    })?;
    let built = workspace.target()?.join(TARGET).join("release");
    for name in &wanted.0 {
        let from = match *name {
            PROBE => build_guest(workspace, progress, "netprobe", PROBE, log)?,
            name => existing(built.join(name))?,
        };
        let to = dir.join(name);
        let next = dir.join(format!(".{name}"));
        std::fs::copy(&from, &next)
            .and_then(|_| std::fs::rename(&next, &to))
            .with_context(|| format!("cannot install {}", to.display()))?;
    }
    record_build(workspace, &dir, &wanted)?;
    Ok(HostBinaries { dir })
}

/// Writes the commit from which the programs were built, and their hashes, to `build.json` beside them. `cube-bench`
/// records the commit of a program whose hash is in this file.
fn record_build(workspace: &Workspace, dir: &Path, built: &Wanted) -> Result<()> {
    let git = |arguments: &[&str]| {
        let output = Command::new("git")
            .arg("-C")
            .arg(workspace.root())
            .args(arguments)
            .output();
        let output = output.ok().filter(|output| output.status.success())?;
        Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let mut programs = BTreeMap::new();
    for name in &built.0 {
        let path = dir.join(name);
        let sum = template::file_sum(&path);
        programs.insert(
            name,
            sum.with_context(|| format!("cannot read {}", path.display()))?,
        );
    }
    let changed = git(&["status", "--porcelain", "--untracked-files=no"]);
    let record = serde_json::json!({
        "commit": git(&["rev-parse", "HEAD"]),
        "dirty_tree": changed.map(|text| !text.is_empty()),
        "programs": programs,
    });
    let path = dir.join(BUILD_RECORD);
    std::fs::write(&path, serde_json::to_vec_pretty(&record)?)
        .with_context(|| format!("cannot write {}", path.display()))
}

/// Builds `cube-vmm`, `cube-verify` and `hvm-steps` as static release binaries.
pub(crate) fn build_static(
    workspace: &Workspace,
    progress: Progress,
    log: &Path,
) -> Result<StaticBinaries> {
    progress.stage("static binaries", || {
        let mut cargo = workspace.cargo();
        cargo
            .env("RUSTFLAGS", STATIC)
            .args(["build", "--release", "--target", TARGET])
            .args(["--package", "vmm", "--package", "hvm-steps"])
            .args(["--package", "verify"]);
        tool::run(&mut cargo, log)
    })?;
    let dir = workspace.target()?.join(TARGET).join("release");
    Ok(StaticBinaries {
        vmm: existing(dir.join("cube-vmm"))?,
        verify: existing(dir.join("cube-verify"))?,
        steps: existing(dir.join("hvm-steps"))?,
    })
}

/// Builds a `cube-vmm` in which the layers of the confinement can be switched off (feature `weaken`). Its target
/// directory is separate, so that no other task can pick the binary up.
pub(crate) fn build_weak_vmm(
    workspace: &Workspace,
    progress: Progress,
    log: &Path,
) -> Result<PathBuf> {
    progress.stage("weak VMM", || {
        let mut cargo = variant(workspace);
        cargo.args(["--features", "vmm/weaken"]);
        tool::run(&mut cargo, log)
    })?;
    existing(variants(workspace).join(TARGET).join("debug/cube-vmm"))
}

/// Builds `1/cube-vmm` and `2/cube-vmm`, the VMMs of later releases for the tests of upgrades: their template formats
/// are different, so they cannot read what other VMMs have written. Returns the directory.
pub(crate) fn build_later_vmms(
    workspace: &Workspace,
    progress: Progress,
    log: &Path,
) -> Result<PathBuf> {
    let dir = workspace.artifacts().join("later-vmms");
    progress.stage("later VMMs", || {
        for release in ["1", "2"] {
            let mut cargo = variant(workspace);
            cargo.env("CUBE_TEST_TEMPLATE_FORMAT", format!("100{release}"));
            tool::run(&mut cargo, log)?;
            let built = existing(variants(workspace).join(TARGET).join("debug/cube-vmm"))?;
            let to = dir.join(release);
            std::fs::create_dir_all(&to)?;
            // A VM of an earlier run may still execute the file, which could not be overwritten then.
            let next = to.join(".cube-vmm");
            std::fs::copy(&built, &next)?;
            std::fs::rename(&next, to.join("cube-vmm"))?;
        }
        Ok(())
    })?;
    Ok(dir)
}

/// The target directory of VMMs that only tests use.
fn variants(workspace: &Workspace) -> PathBuf {
    workspace.artifacts().join("weak")
}

fn variant(workspace: &Workspace) -> std::process::Command {
    let mut cargo = workspace.cargo();
    cargo
        .env("CARGO_TARGET_DIR", variants(workspace))
        .env("CARGO_PROFILE_DEV_DEBUG", "0")
        .env("RUSTFLAGS", STATIC)
        .args(["build", "--target", TARGET, "--package", "vmm"]);
    cargo
}

fn existing(file: PathBuf) -> Result<PathBuf> {
    let meta = std::fs::metadata(&file)
        .with_context(|| format!("cargo did not build {}", file.display()))?;
    ensure!(meta.is_file(), "{} is not a regular file", file.display());
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scenario_builds_what_it_starts() {
        let of = |text| Wanted::by_scenario(text).0;
        assert_eq!(
            of("[target]\nkind = \"vmm-direct\""),
            ["cube-vmm", "cube-bench"]
        );
        let server = ["cube-vmm", "cube-bench", "cube-api"];
        assert_eq!(of("[[peers]]\nname = \"a\"\nkind = \"e2b\""), server);
        let isolated = "[target]\nkind = \"e2b\"\nnetwork = { kind = \"isolated\" }";
        assert_eq!(of(isolated), Wanted::all().0);
        assert_eq!(of("not a scenario"), Wanted::all().0);
    }

    #[test]
    fn programs_of_a_build_before_are_built_again() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("cube-egress"), "").unwrap();
        let wanted = Wanted::by_scenario("").and_installed(dir.path());
        assert_eq!(wanted.0, ["cube-vmm", "cube-bench", "cube-egress"]);
    }
}
