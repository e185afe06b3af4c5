//! `cargo xtask dist`: a Debian package and a relocatable archive from what `prepare` builds, and with `--interpreter` the
//! package of the template `code-interpreter-v1`.
//!
//! ```text
//! package                                        archive
//! /usr/lib/cube/bin/        programs             bin/
//! /usr/lib/cube/guest/      kernel, images       guest/
//! /usr/lib/cube/docs/       the documents        docs/
//! /usr/lib/systemd/system/  units                share/
//! /etc/cube/cube.toml       configuration        share/
//! /usr/bin/                 links to programs
//! ```
//! `cube-bench-client` is `cube-bench` alone: one file that measures any server.
//! The programs are static, so they run on any Debian. The template `base` is not included: it holds the CPU state
//! of the host that made it; `cube-api prepare` makes it.

mod tree;

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use model::Bytes;

use crate::{
    prepare,
    progress::Progress,
    stages::{binaries::HostBinaries, stage::remove_tree},
    tool,
    workspace::Workspace,
};
use tree::Tree;

/// Maximum size of a published package.
const MOST: Bytes = Bytes::mib(120);
/// Maximum size of the client, which users download to measure a server in two minutes.
const MOST_OF_CLIENT: Bytes = Bytes::mib(12);
/// The root image dominates the package. Level 19 takes minutes and unpacks at several hundred MB/s; xz would take
/// as long and unpack ten times slower. dpkg reads zstd since Debian 12.
const ZSTD_LEVEL: &str = "19";

/// The built files.
#[derive(Debug)]
pub(crate) struct Dist {
    pub(crate) package: PathBuf,
    pub(crate) archive: PathBuf,
    /// `cube-bench` alone, for hosts that measure other servers.
    pub(crate) client: PathBuf,
    pub(crate) interpreter: Option<PathBuf>,
}

/// Zstandard level of the interpreter's package: its image has 1.7 GB, for which level 19 takes more than ten minutes.
const INTERPRETER_LEVEL: u8 = 9;

/// Builds the files in `target/cube/dist`. `level` is the zstd level, 1 to 19; tests do not need a small package.
/// `interpreter` is the directory of the built template.
pub(crate) fn build(
    workspace: &Workspace,
    binaries: &HostBinaries,
    interpreter: Option<&Path>,
    version: &str,
    level: Option<u8>,
    progress: Progress,
) -> Result<Dist> {
    ensure!(
        version.starts_with(|c: char| c.is_ascii_digit())
            && (version.chars()).all(|c| c.is_ascii_alphanumeric() || ".+~".contains(c)),
        "{version:?} is not a version of a Debian package: use digits, letters, `.`, `+` and `~`"
    );
    let interpreter_level = level.unwrap_or(INTERPRETER_LEVEL);
    let level = level.map_or(ZSTD_LEVEL.to_owned(), |level| level.to_string());
    let out = workspace.artifacts().join("dist");
    fs::create_dir_all(&out)?;
    let log = workspace.artifacts().join("log/dist.log");
    fs::write(&log, "")?;
    let epoch = commit_time(workspace)?;
    let dist = Dist {
        package: out.join(format!("cube_{version}_amd64.deb")),
        archive: out.join(format!("cube-{version}-amd64.tar.zst")),
        client: out.join(format!("cube-bench-client-{version}-amd64")),
        interpreter: interpreter
            .map(|_| out.join(format!("cube-code-interpreter_{version}_amd64.deb"))),
    };
    let work = out.join("tree");
    remove_tree(&work)?;
    let site = prepare::site(workspace, progress)?;
    let tree = Tree {
        workspace,
        binaries,
        version,
        site: &site,
        log: &log,
    };
    progress.stage("package", || {
        let root = work.join("package");
        tree.package(&root)?;
        tool::run(&mut pack(&root, &dist.package, &level, &epoch), &log)
    })?;
    if let (Some(template), Some(package)) = (interpreter, &dist.interpreter) {
        progress.stage("interpreter package", || {
            let root = work.join("interpreter");
            tree.interpreter(template, &root)?;
            let level = interpreter_level.to_string();
            tool::run(&mut pack(&root, package, &level, &epoch), &log)
        })?;
        let size = Bytes(fs::metadata(package)?.len());
        progress.line(&format!("{}: {} MiB", package.display(), size.0 >> 20));
    }
    progress.stage("archive", || {
        let name = format!("cube-{version}-amd64");
        tree.archive(&work.join(&name))?;
        let mut tar = Command::new("tar");
        tar.args([
            "--create",
            "--sort=name",
            "--owner=0",
            "--group=0",
            "--numeric-owner",
        ])
        .arg(format!("--mtime=@{epoch}"))
        .arg(format!("--use-compress-program=zstd -q -T0 -{level}"))
        .arg("--file")
        .arg(&dist.archive)
        .arg("--directory")
        .arg(&work)
        .arg(&name);
        tool::run(&mut tar, &log)
    })?;
    let client = work.join(format!("cube-{version}-amd64/bin/cube-bench"));
    place(&client, &dist.client)?;
    remove_tree(&work)?;
    for (file, most) in [
        (&dist.package, MOST),
        (&dist.archive, MOST),
        (&dist.client, MOST_OF_CLIENT),
    ] {
        let size = Bytes(fs::metadata(file)?.len());
        progress.line(&format!("{}: {} MiB", file.display(), size.0 >> 20));
        ensure!(
            size <= most || level != ZSTD_LEVEL,
            "{} has {size}: more than {most}",
            file.display()
        );
    }
    Ok(dist)
}

fn pack(root: &Path, package: &Path, level: &str, epoch: &str) -> Command {
    let mut dpkg = Command::new("dpkg-deb");
    dpkg.env("SOURCE_DATE_EPOCH", epoch)
        .args(["--build", "--root-owner-group", "-Zzstd"])
        .arg(format!("-z{level}"))
        .args([root, package]);
    dpkg
}

/// The time of the commit, for files whose own times would differ from build to build.
fn commit_time(workspace: &Workspace) -> Result<String> {
    let mut git = Command::new("git");
    git.arg("-C").arg(workspace.root());
    let text = tool::output(git.args(["log", "-1", "--format=%ct"]));
    let text = text.context("a package has the time of its commit: build it in a checkout")?;
    Ok(text.trim().to_owned())
}

/// The version of the workspace.
pub(crate) fn version() -> &'static str {
    env!("CARGO_PKG_VERSION")
}

/// Copies a file. A hard link would not work: if a server links the same guest file at that time, the file's status
/// changes, and tar then fails.
fn place(from: &Path, to: &Path) -> Result<()> {
    let failed = || format!("cannot place {} at {}", from.display(), to.display());
    if let Some(parent) = to.parent() {
        fs::create_dir_all(parent).with_context(failed)?;
    }
    fs::copy(from, to).map(drop).with_context(failed)
}
