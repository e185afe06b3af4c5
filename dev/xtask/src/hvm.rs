//! The tier `hvm`: runs `hvm-steps` with the release binaries. The steps run on this host if its KVM uses VMX or SVM,
//! otherwise on an AMD machine with SVM that QEMU emulates.
//!
//! ```text
//! QEMU (TCG) ─► Debian's cloud kernel ─► /init = hvm-steps ─► cube-vmm ─► the same kernel, in a VM
//!   initramfs: init, cube-vmm, cube-bench, modules      disk: vmlinux, initramfs, root image, layer
//! ```

use std::{
    fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};

use crate::{
    archive, binaries,
    binaries::StaticBinaries,
    cpio::Archive,
    guest_dir, host, initramfs,
    kernel::Kernel,
    prepare::{self, Freshness},
    progress::Progress,
    root_image,
    stage::{Built, Recipe, Store},
    tiers::{Counts, Outcome},
    tool,
    workspace::Workspace,
};

const EMULATOR: &str = "qemu-system-x86_64";
const PACKAGE: &str = "qemu-system-x86";
/// Time limit of a run. On an emulated machine, a run takes three or four minutes with two cores.
const RUN_TIMEOUT: Duration = Duration::from_secs(900);
/// The first major version of QEMU that emulates XSAVE correctly under SVM. In older versions, a guest of the emulated
/// machine can set XCR0 without an intercept to KVM, and its XSAVE state becomes inconsistent.
const XSAVE_SINCE: u32 = 10;
/// Modules that the emulated host loads, in load order.
const MODULES: [&str; 6] = [
    "irqbypass",
    "kvm-amd",
    "virtio_pci",
    "virtio_blk",
    "ext4",
    "tun",
];
const PASSED: &str = "hvm-steps: passed";
const FAILED: &str = "hvm-steps: failed";

/// The part of `hvm-steps` to run.
#[derive(Debug)]
pub(crate) enum Work {
    /// All steps: the tier.
    Steps,
    /// The confinement prover, with these cases and classes. Empty: all cases.
    Prover(Vec<String>),
}

/// Runs the steps or the prover, on this host if its platform is `hvm`, otherwise on an emulated machine. If all steps
/// pass on the emulated machine, the steps for a CPU that lacks [`LACKING`] run on a second one.
pub(crate) fn run(workspace: &Workspace, progress: Progress, work: &Work) -> Result<Outcome> {
    prepare::images(workspace, progress, Freshness::Keep)?;
    let log = workspace.artifacts().join("log/hvm.log");
    fs::write(&log, "")?;
    let binaries = binaries::build_static(workspace, progress, &log)?;
    if host_platform_is_hvm(&binaries.vmm) {
        progress.line("tier hvm: running on the KVM of this host");
        let mut command = Command::new(&binaries.steps);
        command.arg("--vmm").arg(&binaries.vmm);
        command.arg("--bench").arg(&binaries.bench);
        command.arg("--guest").arg(workspace.guest());
        if let Work::Prover(cases) = work {
            command.arg("--confinement").args(cases);
        }
        return watch(command, &log);
    }
    let machine = Emulated::prepare(workspace, progress, &binaries, &log)?;
    progress.line(&format!(
        "tier hvm: running on an emulated machine, for at most {} s; its console output goes to {}",
        RUN_TIMEOUT.as_secs(),
        log.display()
    ));
    let words = match work {
        Work::Steps => String::new(),
        Work::Prover(cases) => format!("hvm_steps.confinement={}", cases.join(",")),
    };
    let outcome = watch(machine.command(&[], &words), &log)?;
    if !outcome.success || matches!(work, Work::Prover(_)) {
        return Ok(outcome);
    }
    progress.line(&format!(
        "tier hvm: running on a second emulated machine, without the CPU features {}",
        LACKING.join(", ")
    ));
    let log = log.with_file_name("hvm-lesser.log");
    let words = format!("hvm_steps.lacking={}", LACKING.join(","));
    let lesser = watch(machine.command(&LACKING, &words), &log)?;
    Ok(outcome.and(lesser))
}

fn host_platform_is_hvm(vmm: &Path) -> bool {
    if host::check_kvm().is_err() {
        return false;
    }
    let output = tool::output(Command::new(vmm).arg("probe")).unwrap_or_default();
    let probe: serde_json::Value = serde_json::from_str(&output).unwrap_or_default();
    probe["platform"] == "hvm"
}

/// CPU features that the second machine lacks. QEMU and the VMM use the same names; the first machine has these
/// features, and its KVM offers them to guests.
const LACKING: [&str; 2] = ["aes", "bmi2"];

/// The files and the CPU model of an emulated machine.
struct Emulated {
    kernel: PathBuf,
    initramfs: PathBuf,
    /// Guest files, read by the emulated host.
    disk: PathBuf,
    /// A disk that the first machine writes and the second one reads.
    kept: PathBuf,
    cpu: &'static str,
}

impl Emulated {
    fn prepare(
        workspace: &Workspace,
        progress: Progress,
        binaries: &StaticBinaries,
        log: &Path,
    ) -> Result<Self> {
        if tool::output(Command::new(EMULATOR).arg("--version")).is_err() {
            archive::update(progress, log)?;
            archive::install(&[PACKAGE.to_owned()], progress, log)?;
        }
        let store = Store::open(&workspace.artifacts(), progress)?;
        let kernel = prepare::kernel(&store)?;
        let initramfs = workspace.artifacts().join("tmp/hvm-initramfs.cpio");
        fs::write(&initramfs, archive_of(&kernel, binaries)?)?;
        let kept = workspace.artifacts().join("tmp/hvm-kept.ext4");
        let mut mkfs = Command::new("mkfs.ext4");
        mkfs.args(["-q", "-F", "-O", "^has_journal"]).arg(&kept);
        tool::run(mkfs.arg("64M"), log)?;
        Ok(Self {
            kernel: kernel.vmlinux(),
            initramfs,
            disk: disk(&store, workspace)?.dir.join(DISK),
            kept,
            cpu: match version()? {
                XSAVE_SINCE.. => "EPYC,+svm",
                _ => "EPYC,+svm,-xsave",
            },
        })
    }

    /// The QEMU command line. `lacking` is removed from the CPU model; `words` is appended to the kernel command line,
    /// where `hvm-steps` reads its options.
    fn command(&self, lacking: &[&str], words: &str) -> Command {
        let without: String = lacking.iter().map(|name| format!(",-{name}")).collect();
        let drive = |file: &Path, snapshot| {
            let file = file.display();
            format!("file={file},format=raw,if=virtio,snapshot={snapshot}")
        };
        let words = format!("console=ttyS0 panic=-1 rdinit=/init quiet mitigations=off {words}");
        let mut command = Command::new(EMULATOR);
        command
            .args(["-accel", "tcg,thread=multi", "-machine", "pc"])
            .args(["-cpu", &format!("{}{without}", self.cpu)])
            .args(["-smp", "1", "-m", "1536", "-nodefaults", "-no-user-config"])
            .args(["-no-reboot", "-display", "none", "-serial", "stdio"])
            .args(["-drive", &drive(&self.disk, "on")])
            .args(["-drive", &drive(&self.kept, "off")])
            .arg("-kernel")
            .arg(&self.kernel)
            .arg("-initrd")
            .arg(&self.initramfs)
            .args(["-append", &words]);
        command
    }
}

/// The major version of QEMU.
fn version() -> Result<u32> {
    let output = tool::output(Command::new(EMULATOR).arg("--version"))?;
    let number = output.split_once("version ").map(|(_, rest)| rest);
    let major = number.and_then(|number| number.split('.').next());
    major
        .and_then(|major| major.parse().ok())
        .with_context(|| format!("`{EMULATOR} --version` printed no version number: {output:?}"))
}

/// The initramfs of the emulated host.
fn archive_of(kernel: &Kernel, binaries: &StaticBinaries) -> Result<Vec<u8>> {
    let modules = kernel.modules()?;
    let order = modules.load_order(&MODULES.map(str::to_owned))?;
    let mut archive = Archive::default();
    for name in [
        "dev", "etc", "proc", "sys", "tmp", "work", "guest", "kept", "modules",
    ] {
        archive.directory(name)?;
    }
    archive.device("dev/console", 0o600, (5, 1))?;
    archive.file("init", 0o755, &fs::read(&binaries.steps)?)?;
    archive.file("cube-vmm", 0o755, &fs::read(&binaries.vmm)?)?;
    archive.file("cube-bench", 0o755, &fs::read(&binaries.bench)?)?;
    initramfs::add_modules(&mut archive, &order)?;
    archive.finish()
}

const DISK: &str = "disk.ext4";

/// The disk with the files that guests of the emulated host boot from.
fn disk(store: &Store, workspace: &Workspace) -> Result<Built> {
    let guest = workspace.guest();
    let recipe = Recipe::new("hvm-disk")
        .text("form", "1")
        .path("manifest", &guest.join(guest_dir::MANIFEST))?;
    store.build(&recipe, "stages/hvm-disk", |out, log| {
        let content = out.join("content");
        fs::create_dir(&content)?;
        for name in [
            "vmlinux",
            initramfs::FILE,
            root_image::FILE,
            crate::layer::FILE,
        ] {
            fs::hard_link(guest.join(name), content.join(name))?;
        }
        let mut mkfs = Command::new("mkfs.ext4");
        mkfs.args(["-q", "-F", "-O", "^has_journal", "-m", "0", "-d"])
            .arg(&content)
            .arg(out.join(DISK))
            .arg("768M");
        tool::run(&mut mkfs, log)?;
        Ok(fs::remove_dir_all(content)?)
    })
}

/// A child process that is killed on drop.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // An error here means that the process has already exited.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs the steps: prints their result lines as they arrive, counts them, and writes the whole output to `log`.
///
/// # Errors
/// Returns an error if the steps do not finish within [`RUN_TIMEOUT`], or end early without a failed step.
fn watch(mut command: Command, log: &Path) -> Result<Outcome> {
    let (reader, writer) = std::io::pipe()?;
    command
        .stdin(Stdio::null())
        .stdout(writer.try_clone()?)
        .stderr(writer);
    let mut running = Running(command.spawn().context("cannot start the steps")?);
    // `command` still holds the write ends of the pipe: drop it, or the reader never sees end-of-file.
    drop(command);
    let (to, lines) = mpsc::channel();
    thread::spawn(move || {
        for line in BufReader::new(reader).split(b'\n').map_while(Result::ok) {
            let _ = to.send(String::from_utf8_lossy(&line).trim_end().to_owned());
        }
    });
    let deadline = Instant::now() + RUN_TIMEOUT;
    let mut counts = Counts::default();
    let mut text = String::new();
    loop {
        match lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(line) => {
                text.push_str(&line);
                text.push('\n');
                note(&line, &mut counts);
            }
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => {
                fs::write(log, &text)?;
                let end = tool::last_lines(log);
                bail!(
                    "the steps did not finish within {RUN_TIMEOUT:?}; last lines of the console:\n{end}"
                );
            }
        }
    }
    fs::write(log, &text)?;
    let status = running.0.wait()?;
    let completed = text.contains(PASSED) || (status.success() && !text.contains(EMULATED_MARK));
    let success = completed && counts.failed == 0 && counts.passed > 0;
    ensure!(
        success || counts.failed > 0,
        "the steps ended early ({status}); last lines of the console:\n{}",
        tool::last_lines(log)
    );
    if !success {
        eprintln!("{}", tool::last_lines(log));
    }
    Ok(Outcome { success, counts })
}

/// Printed by `hvm-steps` as PID 1 of an emulated host. The exit status is then that of QEMU, which does not depend on
/// the result of the steps.
const EMULATED_MARK: &str = "prepared in ";

/// Prints a result line, and counts it if it is the result of one step. Ignores all other output.
fn note(line: &str, counts: &mut Counts) {
    if !line.starts_with("step ") && !line.starts_with("all steps") && !line.starts_with(FAILED) {
        return;
    }
    eprintln!("{line}");
    let word = |word: &str| line.split_whitespace().any(|w| w == word);
    if line.starts_with("step ") {
        counts.passed += u64::from(word("passed"));
        counts.failed += u64::from(word("FAILED"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passed_and_failed_steps_are_counted() {
        let log = tempfile::NamedTempFile::new().unwrap();
        let mut command = Command::new("sh");
        command.args([
            "-c",
            "echo 'step probe passed 0.1 s'; echo noise; echo 'step boot FAILED 1.0 s'; exit 1",
        ]);
        let outcome = watch(command, log.path()).unwrap();
        assert!(!outcome.success);
        assert_eq!((outcome.counts.passed, outcome.counts.failed), (1, 1));
        assert!(fs::read_to_string(log.path()).unwrap().contains("noise"));
    }

    #[test]
    fn an_emulated_host_that_stops_early_is_an_error() {
        let log = tempfile::NamedTempFile::new().unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", "echo 'prepared in 1 s'; echo 'step probe passed 1 s'"]);
        assert!(watch(command, log.path()).is_err());
    }
}
