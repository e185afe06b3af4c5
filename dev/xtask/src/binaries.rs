//! What cargo builds. Cargo itself knows what is fresh.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::{progress::Progress, tool, workspace::Workspace};

/// The guest's programs are static, for one target, in a profile of their own.
const GUEST_TARGET: &str = "x86_64-unknown-linux-gnu";

/// Release binaries that need no library, for a host that has none.
#[derive(Debug, Clone)]
pub(crate) struct StaticBinaries {
    pub(crate) vmm: PathBuf,
    pub(crate) bench: PathBuf,
    pub(crate) steps: PathBuf,
}

/// Flags of a static program at a fixed address.
const STATIC: &str = "-C target-feature=+crt-static -C relocation-model=static";

/// The release binaries of the host.
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

/// Builds the static agent and returns its file.
pub(crate) fn build_agent(
    workspace: &Workspace,
    progress: Progress,
    log: &Path,
) -> Result<PathBuf> {
    build_guest(workspace, progress, "guest-agent", "guest-agent", log)
}

/// Builds a static program that runs in guests and returns its file.
pub(crate) fn build_guest(
    workspace: &Workspace,
    progress: Progress,
    package: &'static str,
    program: &str,
    log: &Path,
) -> Result<PathBuf> {
    progress.stage(package, || {
        let mut cargo = workspace.cargo();
        // A fixed address saves a small program its relocations, and a clone the pages they touch.
        cargo
            .env("RUSTFLAGS", STATIC)
            .args(["build", "--profile", "guest", "--target", GUEST_TARGET])
            .args(["--package", package]);
        tool::run(&mut cargo, log)
    })?;
    let dir = workspace.target()?.join(GUEST_TARGET).join("guest");
    existing(dir.join(program))
}

/// Builds `cube-vmm`, `cube-bench`, `cube-api` and the probe that `cube-bench` puts into guests, and puts them into one
/// place. They are static at a fixed address: a clone is a new `cube-vmm`, and half of what starting one costs is the dynamic linker's work.
pub(crate) fn build_host(
    workspace: &Workspace,
    progress: Progress,
    log: &Path,
) -> Result<HostBinaries> {
    progress.stage("host binaries", || {
        let mut cargo = workspace.cargo();
        cargo
            .env("RUSTFLAGS", STATIC)
            .args(["build", "--release", "--target", GUEST_TARGET])
            .args(["--package", "vmm", "--package", "harness"])
            .args(["--package", "api"]);
        tool::run(&mut cargo, log)
    })?;
    let built = workspace.target()?.join(GUEST_TARGET).join("release");
    let dir = workspace.artifacts().join("bin");
    std::fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let probe = build_guest(workspace, progress, "netprobe", "cube-netprobe", log)?;
    let programs = ["cube-vmm", "cube-bench", "cube-api"].map(|name| built.join(name));
    for from in programs.into_iter().chain([probe]) {
        let from = existing(from)?;
        let name = from.file_name().context("a program without a name")?;
        let name = name.to_string_lossy();
        let to = dir.join(&*name);
        let next = dir.join(format!(".{name}"));
        std::fs::copy(&from, &next)
            .and_then(|_| std::fs::rename(&next, &to))
            .with_context(|| format!("cannot install {}", to.display()))?;
    }
    Ok(HostBinaries { dir })
}

/// Builds `cube-vmm`, `cube-bench` and `hvm-steps` as for a release, but static.
pub(crate) fn build_static(
    workspace: &Workspace,
    progress: Progress,
    log: &Path,
) -> Result<StaticBinaries> {
    progress.stage("static binaries", || {
        let mut cargo = workspace.cargo();
        cargo
            .env("RUSTFLAGS", STATIC)
            .args(["build", "--release", "--target", GUEST_TARGET])
            .args(["--package", "vmm", "--package", "hvm-steps"])
            .args(["--package", "harness"]);
        tool::run(&mut cargo, log)
    })?;
    let dir = workspace.target()?.join(GUEST_TARGET).join("release");
    Ok(StaticBinaries {
        vmm: existing(dir.join("cube-vmm"))?,
        bench: existing(dir.join("cube-bench"))?,
        steps: existing(dir.join("hvm-steps"))?,
    })
}

/// Builds a `cube-vmm` that leaves out the layers of its confinement that it is told to. It is in no directory of
/// programs that are used otherwise.
pub(crate) fn build_weak_vmm(
    workspace: &Workspace,
    progress: Progress,
    log: &Path,
) -> Result<PathBuf> {
    let target = workspace.artifacts().join("weak");
    progress.stage("weak VMM", || {
        let mut cargo = workspace.cargo();
        cargo
            .env("CARGO_TARGET_DIR", &target)
            .env("CARGO_PROFILE_DEV_DEBUG", "0")
            .env("RUSTFLAGS", STATIC)
            .args(["build", "--target", GUEST_TARGET, "--package", "vmm"])
            .args(["--features", "vmm/weaken"]);
        tool::run(&mut cargo, log)
    })?;
    existing(target.join(GUEST_TARGET).join("debug/cube-vmm"))
}

fn existing(file: PathBuf) -> Result<PathBuf> {
    let meta =
        std::fs::metadata(&file).with_context(|| format!("cargo built no {}", file.display()))?;
    ensure!(meta.is_file(), "{} is no file", file.display());
    Ok(file)
}
