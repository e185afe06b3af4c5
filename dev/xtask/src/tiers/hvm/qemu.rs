//! AMD machines with SVM, emulated by QEMU.

use std::{path::Path, process::Command};

use anyhow::{Context, Result, ensure};

use super::host_files::HostFiles;
use crate::{host, progress::Progress, stages::archive, tool, workspace::Workspace};

const EMULATOR: &str = "qemu-system-x86_64";
const PACKAGE: &str = "qemu-system-x86";
/// The first major version of QEMU that emulates XSAVE correctly under SVM. In older versions, a guest of the emulated
/// machine can set XCR0 without an intercept to KVM, and its XSAVE state becomes inconsistent. Without XSAVE no guest
/// sets the bits of CR4 that KVM shows in CPUID, and a restore that compares them passes.
const OLDEST: u32 = 10;
/// Protection keys are not in the model. KVM shows the bit of CR4 that enables them in CPUID.
const CPU: &str = "EPYC,+svm,+pku";
/// Modules that the emulated host loads, in load order.
pub(super) const MODULES: [&str; 6] = [
    "irqbypass",
    "kvm-amd",
    "virtio_pci",
    "virtio_blk",
    "ext4",
    "tun",
];

/// Installs QEMU if it is missing, from backports if the host's release has a version before [`OLDEST`].
pub(super) fn install(workspace: &Workspace, progress: Progress, log: &Path) -> Result<()> {
    if version().is_ok_and(|version| version >= OLDEST) {
        return Ok(());
    }
    archive::update(progress, log)?;
    let (candidate, _) = archive::candidate(&archive::apt, PACKAGE)?;
    if major(candidate.trim_start_matches("1:")) >= Some(OLDEST) {
        archive::install(&[PACKAGE.to_owned()], progress, log)?;
    } else {
        let codename = host::codename()?;
        let mut suites = archive::suites(&codename)?;
        suites.push(archive::backports(&codename)?);
        let dir = workspace.artifacts().join("tmp/backports");
        archive::install_from(&suites, &[PACKAGE], &dir, progress, log)?;
    }
    let version = version()?;
    ensure!(
        version >= OLDEST,
        "the installed QEMU has version {version}, but the tier hvm needs {OLDEST} or newer, whose emulation of XSAVE \
         is correct: install {PACKAGE} from the backports of this release"
    );
    Ok(())
}

/// The QEMU command line. `without` is removed from the CPU model; `words` is appended to the kernel command line,
/// where `hvm-steps` reads its options.
pub(super) fn command(files: &HostFiles, without: &[&str], words: &str) -> Command {
    let without: String = without.iter().map(|name| format!(",-{name}")).collect();
    let drive = |file: &Path, snapshot| {
        let file = file.display();
        format!("file={file},format=raw,if=virtio,snapshot={snapshot}")
    };
    let words = format!("console=ttyS0 panic=-1 rdinit=/init quiet mitigations=off {words}");
    let mut command = Command::new(EMULATOR);
    command
        .args(["-accel", "tcg,thread=multi", "-machine", "pc"])
        .args(["-cpu", &format!("{CPU}{without}")])
        .args(["-smp", "1", "-m", "1536", "-nodefaults", "-no-user-config"])
        .args(["-no-reboot", "-display", "none", "-serial", "stdio"])
        .args(["-drive", &drive(&files.disk, "on")])
        .args(["-drive", &drive(&files.kept, "off")])
        .arg("-kernel")
        .arg(files.kernel.vmlinux())
        .arg("-initrd")
        .arg(&files.initramfs)
        .args(["-append", &words]);
    command
}

/// The major version of QEMU.
fn version() -> Result<u32> {
    let output = tool::output(Command::new(EMULATOR).arg("--version"))?;
    let number = output.split_once("version ").map(|(_, rest)| rest);
    number
        .and_then(major)
        .with_context(|| format!("`{EMULATOR} --version` printed no version number: {output:?}"))
}

fn major(version: &str) -> Option<u32> {
    version.split('.').next()?.parse().ok()
}
