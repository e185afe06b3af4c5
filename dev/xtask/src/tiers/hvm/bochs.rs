//! Intel machines with VMX, emulated by Bochs.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};

use super::host_files::{DISK_CYLINDERS, HostFiles, KEPT_CYLINDERS};
use crate::{
    progress::Progress,
    stages::{
        archive,
        kernel::Kernel,
        stage::{Built, Recipe, Store},
    },
    tool,
};

/// Debian's source of Bochs 3.0, in the archive's pool, and its SHA-256. Debian's packages include the debugger,
/// which makes them several times slower, and have no display for programs.
const SOURCE: &str = "main/b/bochs/bochs_3.0+dfsg.orig.tar.xz";
const SOURCE_SHA256: &str = "78f6c73d4a6472d5130a87ab9dc306d02c7c71ed8e25b3a8ef642e2a7acd282b";
/// Firmware, the boot loader of the CD, and the build's tools.
const PACKAGES: [&str; 7] = [
    "bochsbios",
    "vgabios",
    "isolinux",
    "syslinux-common",
    "xorriso",
    "g++",
    "make",
];
/// Modules that the emulated host loads, in load order.
pub(super) const MODULES: [&str; 6] = [
    "ata_piix",
    "sd_mod",
    "ext4",
    "tun",
    "irqbypass",
    "kvm-intel",
];

/// A fix of Bochs: a source file, a text that occurs in it once, and its replacement.
type Fix = (&'static str, &'static str, &'static str);

const FIXES: [Fix; 2] = [
    // The posted-interrupt descriptor is aligned to 64 bytes, not to a page (Intel SDM 3C, 26.2.1.1). Without the fix,
    // VM entries with APICv fail. Fixed upstream in June 2025, after 3.0.
    (
        "cpu/vmx.cc",
        "if (! IsValidPageAlignedPhyAddr(vm->pid_addr)) {",
        "if (! IsValidPhyAddr(vm->pid_addr) || (vm->pid_addr & 0x3f) != 0) {",
    ),
    // If the delivery of a virtual interrupt ends in a VM exit, the exit reports the interrupt in the IDT-vectoring
    // information (Intel SDM 3C, 27.2.4). Without the fix, KVM injects an older event again, and guests crash. Not
    // fixed upstream (August 2026).
    (
        "cpu/vapic.cc",
        "    interrupt(vector, BX_EXTERNAL_INTERRUPT, 0, 0);\n",
        "    vm->idt_vector_info = vector | (BX_EXTERNAL_INTERRUPT << 8);\n    interrupt(vector, BX_EXTERNAL_INTERRUPT, 0, 0);\n",
    ),
];

/// `nogui` is for programs. Without the debugger, Bochs is several times faster. The line of instructions per second is
/// written in a signal handler that can deadlock.
const CONFIGURE: &str = "--with-nogui --enable-cpu-level=6 --enable-x86-64 --enable-vmx=2 --enable-svm --enable-avx \
    --enable-evex --enable-fpu --enable-pci --enable-all-optimizations --enable-handlers-chaining \
    --enable-monitor-mwait --enable-cdrom --enable-alignment-check --disable-docbook --disable-plugins \
    --disable-debugger --disable-debugger-gui --disable-show-ips";
const CXXFLAGS: &str = "-O2 -w -fno-strict-aliasing -flifetime-dse=1";

/// The emulator, and the kernel as a file that its boot loader reads.
#[derive(Debug)]
pub(super) struct Bochs {
    program: PathBuf,
    kernel: PathBuf,
}

/// A CPU that Bochs emulates. Its TSC has the frequency of its instructions.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cpu {
    pub(super) model: &'static str,
    pub(super) mhz: u32,
}

impl Bochs {
    /// Builds the emulator unless it exists, which takes about three minutes on one core.
    pub(super) fn prepare(store: &Store, progress: Progress, kernel: &Kernel) -> Result<Self> {
        let missing = archive::missing(&PACKAGES.map(str::to_owned))?;
        if !missing.is_empty() {
            let log = store.log("bochs-packages")?;
            archive::update(progress, &log)?;
            archive::install(&missing, progress, &log)?;
        }
        Ok(Self {
            program: build(store)?.dir.join("bochs"),
            kernel: boot_image(store, kernel)?.dir.join("vmlinuz"),
        })
    }

    /// The command that starts a machine with its files in `dir`. `words` is appended to the kernel command line.
    pub(super) fn command(
        &self,
        cpu: Cpu,
        files: &HostFiles,
        words: &str,
        dir: &Path,
        log: &Path,
    ) -> Result<Command> {
        crate::stages::stage::remove_tree(dir)?;
        fs::create_dir_all(dir.join("cd"))?;
        let cd = dir.join("boot.iso");
        self.write_cd(files, words, dir, log)?;
        // A killed Bochs leaves its lock, which keeps the next one from starting.
        let _ = fs::remove_file(format!("{}.lock", files.kept.display()));
        let _ = fs::remove_file(format!("{}.lock", files.disk.display()));
        let configuration = dir.join("bochsrc");
        fs::write(&configuration, bochsrc(cpu, files, &cd, dir))?;
        let mut command = Command::new(&self.program);
        command.arg("-q").arg("-f").arg(configuration);
        Ok(command)
    }

    /// Bochs cannot boot a kernel directly, so a CD with a boot loader does.
    fn write_cd(&self, files: &HostFiles, words: &str, dir: &Path, log: &Path) -> Result<()> {
        let content = dir.join("cd");
        for (from, name) in [
            (&*self.kernel, "vmlinuz"),
            (&*files.initramfs, "initrd"),
            (Path::new("/usr/lib/ISOLINUX/isolinux.bin"), "isolinux.bin"),
            (
                Path::new("/usr/lib/syslinux/modules/bios/ldlinux.c32"),
                "ldlinux.c32",
            ),
        ] {
            fs::copy(from, content.join(name))
                .with_context(|| format!("cannot copy {}", from.display()))?;
        }
        // A triple fault ends Bochs; any other reboot would start the machine again.
        let words = format!(
            "initrd=initrd console=ttyS0,115200 rdinit=/init quiet mitigations=off panic=-1 reboot=t {words}"
        );
        let menu =
            format!("default l\nprompt 0\ntimeout 1\nlabel l\n kernel vmlinuz\n append {words}\n");
        fs::write(content.join("isolinux.cfg"), menu)?;
        let mut make = Command::new("xorriso");
        make.args(["-as", "mkisofs", "-quiet", "-o"])
            .arg(dir.join("boot.iso"))
            .args(["-b", "isolinux.bin", "-c", "boot.cat", "-no-emul-boot"])
            .args(["-boot-load-size", "4", "-boot-info-table"])
            .arg(&content);
        tool::run(&mut make, log)
    }
}

fn bochsrc(cpu: Cpu, files: &HostFiles, cd: &Path, dir: &Path) -> String {
    let Cpu { model, mhz } = cpu;
    let (disk, kept, cd) = (files.disk.display(), files.kept.display(), cd.display());
    let (dir, instructions) = (dir.display(), u64::from(mhz) * 1_000_000);
    format!(
        "display_library: nogui
romimage: file=/usr/share/bochs/BIOS-bochs-latest
vgaromimage: file=/usr/share/vgabios/vgabios.bin
cpu: model={model}, add_features=\"sha\", count=1, ips={instructions}, reset_on_triple_fault=0
memory: guest=1536, host=1536
clock: sync=none, time0=utc
pci: enabled=1, chipset=i440fx
ata0: enabled=1, ioaddr1=0x1f0, ioaddr2=0x3f0, irq=14
ata1: enabled=1, ioaddr1=0x170, ioaddr2=0x370, irq=15
ata0-master: type=disk, path={disk}, mode=volatile, journal={dir}/journal, cylinders={DISK_CYLINDERS}, heads=16, spt=63
ata0-slave: type=disk, path={kept}, mode=flat, cylinders={KEPT_CYLINDERS}, heads=16, spt=63
ata1-master: type=cdrom, path={cd}, status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev=/dev/stdout
log: {dir}/bochs.log
panic: action=fatal
error: action=ignore
info: action=ignore
debug: action=ignore
"
    )
}

fn build(store: &Store) -> Result<Built> {
    let mut recipe = Recipe::new("bochs")
        .text("source", SOURCE_SHA256)
        .text("options", CONFIGURE)
        .text("flags", CXXFLAGS);
    for (_, _, new) in FIXES {
        recipe = recipe.text("fix", new);
    }
    store.build(&recipe, "stages/bochs", |out, log| {
        let tree = out.join("source");
        fs::create_dir(&tree)?;
        let source = out.join("source.tar.xz");
        let suites = archive::suites(&crate::host::codename()?)?;
        archive::fetch(&suites, SOURCE, SOURCE_SHA256, &source, log)?;
        let mut unpack = Command::new("tar");
        unpack.args(["--strip-components=1", "-C"]).arg(&tree);
        tool::run(unpack.arg("-xf").arg(&source), log)?;
        for fix in FIXES {
            apply(&tree, fix)?;
        }
        let mut configure = Command::new("./configure");
        configure.args(CONFIGURE.split_whitespace());
        configure.arg(format!("CXXFLAGS={CXXFLAGS}"));
        tool::run(configure.arg("CFLAGS=-O2 -w").current_dir(&tree), log)?;
        tool::run(Command::new("make").arg("-j2").current_dir(&tree), log)?;
        fs::rename(tree.join("bochs"), out.join("bochs"))?;
        fs::remove_file(&source)?;
        Ok(fs::remove_dir_all(&tree)?)
    })
}

fn apply(tree: &Path, (file, old, new): Fix) -> Result<()> {
    let path = tree.join(file);
    let text = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let text = String::from_utf8_lossy(&text);
    let times = text.matches(old).count();
    ensure!(times == 1, "{file} has {times} places for the fix {new:?}");
    Ok(fs::write(&path, text.replace(old, new))?)
}

/// The kernel of the stage `kernel` in its compressed form, which that stage does not keep.
fn boot_image(store: &Store, kernel: &Kernel) -> Result<Built> {
    let recipe = Recipe::new("hvm-vmlinuz")
        .text("form", "1")
        .stage("kernel", &kernel.built);
    store.build(&recipe, "stages/hvm-vmlinuz", |out, log| {
        let name = format!("linux-image-{}", kernel.release);
        let packages = kernel.packages()?;
        let package = packages.iter().find(|package| package.name == name);
        let package = package.with_context(|| format!("the kernel's packages lack {name}"))?;
        let (_, deb) = archive::download(&archive::apt, &name, &package.version, out, log)?;
        let tree = out.join("tree");
        tool::run(Command::new("dpkg-deb").arg("-x").arg(&deb).arg(&tree), log)?;
        let image = tree.join(format!("boot/vmlinuz-{}", kernel.release));
        fs::rename(image, out.join("vmlinuz"))?;
        fs::remove_file(&deb)?;
        Ok(fs::remove_dir_all(&tree)?)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fix_needs_exactly_one_place() {
        let tree = tempfile::tempdir().unwrap();
        let file = tree.path().join("a.cc");
        for (text, expected) in [("x old y", Some("x new y")), ("x", None), ("old old", None)] {
            fs::write(&file, text).unwrap();
            let done = apply(tree.path(), ("a.cc", "old", "new"));
            assert_eq!(done.is_ok(), expected.is_some(), "{text}");
            assert_eq!(fs::read_to_string(&file).unwrap(), expected.unwrap_or(text));
        }
    }
}
