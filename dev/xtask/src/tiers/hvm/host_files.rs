//! The files of an emulated host: its kernel, its initramfs, and two disks.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::Result;

use crate::{
    prepare,
    stages::{
        binaries::StaticBinaries,
        cpio::Archive,
        guest_dir, initramfs,
        kernel::{Kernel, Origin},
        layer, root_image,
        stage::{Built, Recipe, Store},
    },
    tool,
    workspace::Workspace,
};

/// The sizes of disks are multiples of this, which Bochs needs: 16 heads with 63 sectors.
pub(super) const CYLINDER: u64 = 16 * 63 * 512;
/// The size of the disk with the files of guests, about 800 MB.
pub(super) const DISK_CYLINDERS: u64 = 1600;
/// The size of the disk with kept templates, about 400 MB.
pub(super) const KEPT_CYLINDERS: u64 = 800;

const DISK: &str = "disk.ext4";

#[derive(Debug)]
pub(super) struct HostFiles {
    pub(super) kernel: Kernel,
    pub(super) initramfs: PathBuf,
    /// Guest files, read by the emulated host.
    pub(super) disk: PathBuf,
    /// Templates that one machine writes and later ones read.
    pub(super) kept: PathBuf,
}

impl HostFiles {
    /// Builds the files of a host that loads `modules` in this order. `kept` is the disk for templates, `kernels` those
    /// of the host and of its guests.
    pub(super) fn prepare(
        store: &Store,
        workspace: &Workspace,
        binaries: &StaticBinaries,
        (modules, kept): (&[&str], &Path),
        kernels: (Origin, Origin),
    ) -> Result<Self> {
        let kernel = prepare::kernel(store, kernels.0)?;
        let initramfs = kept.with_extension("cpio");
        fs::write(&initramfs, archive_of(&kernel, binaries, modules)?)?;
        Ok(Self {
            initramfs,
            disk: disk(store, workspace, kernels.1)?.dir.join(DISK),
            kept: kept.to_owned(),
            kernel,
        })
    }
}

/// Makes an empty disk for templates.
pub(super) fn kept_disk(workspace: &Workspace, log: &Path) -> Result<PathBuf> {
    let kept = workspace.artifacts().join("tmp/hvm-kept.ext4");
    empty_disk(&kept, KEPT_CYLINDERS)?;
    tool::run(mkfs().arg(&kept), log)?;
    Ok(kept)
}

fn mkfs() -> Command {
    let mut mkfs = Command::new("mkfs.ext4");
    mkfs.args(["-q", "-F", "-O", "^has_journal", "-m", "0"]);
    mkfs
}

fn empty_disk(path: &Path, cylinders: u64) -> Result<()> {
    Ok(fs::File::create(path)?.set_len(cylinders * CYLINDER)?)
}

/// The initramfs of the emulated host.
fn archive_of(kernel: &Kernel, binaries: &StaticBinaries, modules: &[&str]) -> Result<Vec<u8>> {
    let wanted: Vec<String> = modules.iter().map(|name| (*name).to_owned()).collect();
    let modules = kernel.modules()?;
    let order = modules.load_order(&wanted)?;
    let mut archive = Archive::default();
    for name in [
        "dev", "etc", "proc", "sys", "tmp", "work", "guest", "kept", "modules",
    ] {
        archive.directory(name)?;
    }
    archive.device("dev/console", 0o600, (5, 1))?;
    archive.file("init", 0o755, &fs::read(&binaries.steps)?)?;
    archive.file("cube-vmm", 0o755, &fs::read(&binaries.vmm)?)?;
    archive.file("cube-verify", 0o755, &fs::read(&binaries.verify)?)?;
    initramfs::add_modules(&mut archive, &order)?;
    archive.finish()
}

/// The disk with the files that guests of the emulated host boot from.
fn disk(store: &Store, workspace: &Workspace, kernel: Origin) -> Result<Built> {
    let guest = workspace.guest_of(kernel);
    let recipe = Recipe::new("hvm-disk")
        .text("form", "2")
        .path("manifest", &workspace.guest().join(guest_dir::MANIFEST))?
        .path("initramfs", &guest.join(initramfs::FILE))?;
    let place = format!("stages/hvm-disk{}", kernel.ending());
    store.build(&recipe, &place, |out, log| {
        let content = out.join("content");
        fs::create_dir(&content)?;
        for name in ["vmlinux", initramfs::FILE, root_image::FILE, layer::FILE] {
            fs::hard_link(guest.join(name), content.join(name))?;
        }
        let image = out.join(DISK);
        empty_disk(&image, DISK_CYLINDERS)?;
        tool::run(mkfs().arg("-d").arg(&content).arg(&image), log)?;
        Ok(fs::remove_dir_all(content)?)
    })
}
