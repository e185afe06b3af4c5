//! The root image `base`: a minimal Debian in a read-only EROFS file, which all VMs share through the host's page
//! cache.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

use crate::{
    stages::{
        archive::{self, Package, Suite},
        kernel::Kernel,
        stage::{Built, Recipe, Store},
    },
    tool,
    workspace::{Workspace, read_list},
};

pub(crate) const FILE: &str = "base.erofs";
const PLACE: &str = "stages/root-image";
const PACKAGES: &str = "packages.json";

/// Modification time of all files, 2024-01-01. With one common time, EROFS uses its compact inodes: half the size.
const IMAGE_TIME: &str = "1704067200";
/// A fixed UUID makes the image reproducible.
const IMAGE_UUID: &str = "c0bec0be-0000-4000-8000-000000000001";
/// No compression. With lz4, a first `python3` is slower and takes 630 KiB of guest memory for buffers instead of
/// 130 KiB. The uncompressed image is larger, but its pages in the host's page cache are shared by all VMs.
const EROFS_OPTIONS: [&str; 1] = ["--quiet"];
/// Excludes documentation and translations from the image, but keeps the licences.
const DPKG_OPTIONS: [&str; 5] = [
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
    "path-exclude=/usr/share/man/*",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/locale/*",
];

/// The inputs of the image.
#[derive(Debug)]
pub(crate) struct RootRecipe<'a> {
    pub(crate) workspace: &'a Workspace,
    pub(crate) codename: &'a str,
    pub(crate) suites: &'a [Suite],
}

impl RootRecipe<'_> {
    pub(crate) fn sources(&self) -> String {
        let lines: Vec<_> = self.suites.iter().map(Suite::source_line).collect();
        lines.join("\n")
    }

    pub(crate) fn root_modules(&self) -> PathBuf {
        self.workspace.recipe("kernel/root-modules.txt")
    }

    fn stage(&self, kernel: &Kernel) -> Result<Recipe> {
        Recipe::new("root-image")
            .text("form", "1")
            .text("release of Debian", self.codename)
            .text("sources", &self.sources())
            .text("options", &format!("{EROFS_OPTIONS:?} {DPKG_OPTIONS:?}"))
            .stage("kernel", &kernel.built)
            .path("base", &self.workspace.recipe("base"))?
            .path("probe", &self.workspace.recipe("probe"))?
            .path("modules", &self.root_modules())
    }

    pub(crate) fn fresh(&self, store: &Store, kernel: &Kernel) -> Result<Option<Built>> {
        Ok(store.fresh(&self.stage(kernel)?, PLACE))
    }

    pub(crate) fn build(&self, store: &Store, kernel: &Kernel) -> Result<Built> {
        store.build(&self.stage(kernel)?, PLACE, |out, log| {
            self.make(kernel, out, log)
        })
    }

    fn make(&self, kernel: &Kernel, out: &Path, log: &Path) -> Result<()> {
        let tree = out.join("tree");
        self.unpack(kernel, &[], &tree, log)?;
        take_package_list(&tree, out)?;
        pack(&tree, &out.join(FILE), log)
    }

    /// Builds the file tree of an image: the packages of `base`, the packages in `further`, the kernel's modules, and
    /// the probe program.
    pub(crate) fn unpack(
        &self,
        kernel: &Kernel,
        further: &[String],
        tree: &Path,
        log: &Path,
    ) -> Result<()> {
        self.bootstrap(further, tree, log)?;
        self.add_modules(kernel, tree, log)?;
        build_probe(&self.workspace.recipe("probe/probe.c"), tree, log)
    }

    fn bootstrap(&self, further: &[String], tree: &Path, log: &Path) -> Result<()> {
        let base = self.workspace.recipe("base");
        let mut packages = read_list(&base.join("packages.txt"))?;
        packages.extend_from_slice(further);
        let mut command = Command::new("mmdebstrap");
        command
            .env("SOURCE_DATE_EPOCH", IMAGE_TIME)
            .args(["--mode=root", "--format=directory", "--variant=minbase"])
            .arg(format!("--include={}", packages.join(",")))
            .args(DPKG_OPTIONS.map(|option| format!("--dpkgopt={option}")))
            .args([
                "--aptopt=APT::Install-Recommends \"false\"",
                "--aptopt=Acquire::Retries 3",
            ])
            .arg(format!(
                "--customize-hook=sh {}/customize.sh \"$1\"",
                base.display()
            ))
            .arg(self.codename)
            .arg(tree)
            .args(self.suites.iter().map(Suite::source_line));
        if !further.is_empty() {
            // DPKG_OPTIONS excludes this directory, but a JDK's installation scripts create links to manual pages in
            // it.
            command.arg("--essential-hook=mkdir -p \"$1/usr/share/man/man1\"");
        }
        tool::run(&mut command, log)
    }

    /// Adds kernel modules and the index files that modprobe reads.
    fn add_modules(&self, kernel: &Kernel, tree: &Path, log: &Path) -> Result<()> {
        let from = kernel.modules_dir();
        let to = tree.join("usr/lib/modules").join(&kernel.release);
        let modules = kernel.modules()?;
        for file in modules.load_order(&read_list(&self.root_modules())?)? {
            copy_below(file, &from, &to)?;
        }
        for name in [
            "modules.builtin",
            "modules.builtin.modinfo",
            "modules.order",
        ] {
            copy_below(&from.join(name), &from, &to)?;
        }
        let mut depmod = Command::new("chroot");
        depmod.arg(tree).args(["depmod", &kernel.release]);
        tool::run(&mut depmod, log)
    }
}

pub(crate) fn forget(store: &Store) -> Result<()> {
    store.forget(PLACE)
}

/// The Debian packages in an image.
pub(crate) fn packages(image: &Built) -> Result<Vec<Package>> {
    Ok(serde_json::from_slice(&fs::read(
        image.dir.join(PACKAGES),
    )?)?)
}

/// Packs a tree into an image and removes the tree.
pub(crate) fn pack(tree: &Path, image: &Path, log: &Path) -> Result<()> {
    tool::run(
        Command::new("mkfs.erofs")
            .args(EROFS_OPTIONS)
            .args(["-T", IMAGE_TIME, "-U", IMAGE_UUID])
            .arg(image)
            .arg(tree),
        log,
    )?;
    crate::stages::mounts::detach_below(tree)?;
    fs::remove_dir_all(tree).context("cannot remove the unpacked tree")
}

/// Converts the package list that the customize hook wrote into the tree to `packages.json` in `out`, and removes the
/// list from the tree.
pub(crate) fn take_package_list(tree: &Path, out: &Path) -> Result<()> {
    let list = tree.join(".packages");
    let text =
        fs::read_to_string(&list).with_context(|| format!("cannot read {}", list.display()))?;
    let packages = serde_json::to_string_pretty(&archive::parse_packages(&text))?;
    fs::write(out.join(PACKAGES), packages)?;
    Ok(fs::remove_file(&list)?)
}

fn copy_below(file: &Path, from: &Path, to: &Path) -> Result<()> {
    let target = to.join(file.strip_prefix(from)?);
    if let Some(parent) = target.parent() {
        fs::create_dir_all(parent)?;
    }
    fs::copy(file, &target).with_context(|| format!("cannot copy {}", file.display()))?;
    Ok(())
}

/// Compiles the probe: a one-page program without libraries. No program can start faster.
fn build_probe(source: &Path, tree: &Path, log: &Path) -> Result<()> {
    let program = tree.join("usr/local/bin/probe");
    let mut cc = Command::new("gcc");
    cc.args([
        "-Os",
        "-static",
        "-nostdlib",
        "-fno-pie",
        "-no-pie",
        "-fcf-protection=none",
    ])
    .args([
        "-fno-stack-protector",
        "-fno-asynchronous-unwind-tables",
        "-s",
    ])
    .args(["-Wl,--build-id=none", "-Wl,-z,noseparate-code", "-o"])
    .arg(&program)
    .arg(source);
    tool::run(&mut cc, log)?;
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
    Ok(())
}
