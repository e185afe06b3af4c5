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

/// The release binaries that cargo builds for the host, beside [`PROBE`].
pub(crate) const PROGRAMS: [&str; 7] = [
    "cube",
    "cube-vmm",
    "cube-bench",
    "cube-verify",
    "cube-api",
    "cube-image",
    "cube-egress",
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

/// Builds the release binaries and copies them into one directory.
///
/// The binaries are static and run at a fixed address: every clone starts a new `cube-vmm` process, and a dynamic
/// linker would take half of that process's start-up time.
pub(crate) fn build_host(
    workspace: &Workspace,
    progress: Progress,
    log: &Path,
) -> Result<HostBinaries> {
    progress.stage("host binaries", || {
        let mut cargo = workspace.cargo();
        cargo
            .env("RUSTFLAGS", STATIC)
            .args(["build", "--release", "--target", TARGET])
            .args(
                "vmm harness verify api oci-image egress cli"
                    .split(' ')
                    .flat_map(|package| ["--package", package]),
            );
        tool::run(&mut cargo, log)
    })?;
    let built = workspace.target()?.join(TARGET).join("release");
    let dir = workspace.artifacts().join("bin");
    std::fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let probe = build_guest(workspace, progress, "netprobe", PROBE, log)?;
    let programs = PROGRAMS.map(|name| built.join(name));
    for from in programs.into_iter().chain([probe]) {
        let from = existing(from)?;
        let name = from
            .file_name()
            .with_context(|| format!("{} has no file name", from.display()))?;
        let name = name.to_string_lossy();
        let to = dir.join(&*name);
        let next = dir.join(format!(".{name}"));
        std::fs::copy(&from, &next)
            .and_then(|_| std::fs::rename(&next, &to))
            .with_context(|| format!("cannot install {}", to.display()))?;
    }
    record_build(workspace, &dir)?;
    Ok(HostBinaries { dir })
}

/// Writes the commit from which the programs were built, and their hashes, to `build.json` beside them. `cube-bench`
/// records the commit of a program whose hash is in this file.
fn record_build(workspace: &Workspace, dir: &Path) -> Result<()> {
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
    for name in PROGRAMS.into_iter().chain([PROBE]) {
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
            // A VM of a former run may still execute the file, which could not be overwritten then.
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
