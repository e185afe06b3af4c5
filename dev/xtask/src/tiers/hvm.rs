//! The tiers `hvm` and `hvm-vmx`: run `hvm-steps` with the release binaries.
//!
//! `hvm` runs the steps on this host if its KVM uses VMX or SVM, otherwise on AMD machines with SVM that QEMU emulates.
//! `hvm-vmx` runs them on Intel machines with VMX that Bochs emulates ([`vmx`]).
//!
//! ```text
//! emulator ─► Debian's cloud kernel ─► /init = hvm-steps ─► cube-vmm ─► the same kernel, in a VM
//!   initramfs: init, cube-vmm, cube-verify, modules      disk: vmlinux, initramfs, root image, layer
//!   second disk: templates, for the machines of later runs
//! ```

use std::{
    fs,
    io::{BufRead, BufReader},
    path::Path,
    process::{Child, Command, Stdio},
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};

mod qemu;
mod vmx;

mod bochs;
mod host_files;

use crate::{
    host,
    prepare::{self, Freshness},
    progress::Progress,
    stages::{binaries, kernel::Origin, stage::Store},
    tiers::{Counts, Outcome},
    tool,
    workspace::Workspace,
};
use host_files::HostFiles;

/// Time limit of a run. On an emulated machine, a run takes three or four minutes with two cores.
const RUN_TIMEOUT: Duration = Duration::from_secs(900);
const PASSED: &str = "hvm-steps: passed";
const FAILED: &str = "hvm-steps: failed";

/// The part of `hvm-steps` to run.
#[derive(Debug)]
pub(crate) enum Work {
    /// All steps: the tier.
    Steps,
    /// The confinement prover, with these cases and classes. Empty: all cases.
    Prover(Vec<String>),
    /// The steps on Intel machines: the tier `hvm-vmx`.
    Vmx,
    /// Some steps with each pair of the release's kernel and a newer one, as host and as guest, but for the pair of the
    /// other works.
    NewerKernel,
}

/// The pairs of kernels of [`Work::NewerKernel`]: host, guest. A pair that fails does not stop the others.
const KERNELS: [(Origin, Origin); 3] = [
    (Origin::Release, Origin::Backports),
    (Origin::Backports, Origin::Release),
    (Origin::Backports, Origin::Backports),
];

/// CPU features that the second machine lacks. QEMU and the VMM use the same names; the first machine has these
/// features, and its KVM offers them to guests.
const LACKING: [&str; 2] = ["aes", "bmi2"];

/// Runs the tier `hvm-vmx`, or the steps or the prover: on this host if its platform is `hvm`, otherwise on
/// emulated machines. After all steps have passed on the first machine, the second one, which lacks [`LACKING`],
/// must refuse its template, and some steps run on a third one without XSAVE.
pub(crate) fn run(workspace: &Workspace, progress: Progress, work: &Work) -> Result<Outcome> {
    let guest = if matches!(work, Work::NewerKernel) {
        prepare::newer_kernel(workspace, progress)?
    } else {
        prepare::images(workspace, progress, Freshness::Keep)?;
        workspace.guest()
    };
    let log = workspace.artifacts().join("log/hvm.log");
    fs::write(&log, "")?;
    let binaries = binaries::build_static(workspace, progress, &log)?;
    if matches!(work, Work::Vmx) {
        return vmx::run(workspace, progress, &binaries, &log);
    }
    if host_platform_is_hvm(&binaries.vmm) {
        progress.line("tier hvm: running on the KVM of this host");
        let mut command = Command::new(&binaries.steps);
        command.arg("--vmm").arg(&binaries.vmm);
        command.arg("--verify").arg(&binaries.verify);
        command.arg("--guest").arg(guest);
        if let Work::Prover(cases) = work {
            command.arg("--confinement").args(cases);
        }
        return watch(command, &log);
    }
    qemu::install(workspace, progress, &log)?;
    let store = Store::open(&workspace.artifacts(), progress)?;
    let kept = host_files::kept_disk(workspace, &log)?;
    let files = |kernels| {
        let modules = (&qemu::MODULES[..], &*kept);
        HostFiles::prepare(&store, workspace, &binaries, modules, kernels)
    };
    let emulated = |files: &HostFiles, machine: &str, without: &[&str], words: &str, log: &str| {
        let log = workspace.artifacts().join("log").join(log);
        progress.line(&format!(
            "tier hvm: running on {machine}, for at most {} s; its console output goes to {}",
            RUN_TIMEOUT.as_secs(),
            log.display()
        ));
        watch(qemu::command(files, without, words), &log)
    };
    if matches!(work, Work::NewerKernel) {
        let mut outcome = Outcome::default();
        for kernels in KERNELS {
            let (host, guest) = (kernels.0.ending(), kernels.1.ending());
            let machine = format!("a machine with kernel{host}, guests with kernel{guest}");
            let log = format!("hvm-kernel{host}-guest{guest}.log");
            let words = "hvm_steps.brief=1 hvm_steps.skip=keep";
            outcome = outcome.and(emulated(&files(kernels)?, &machine, &[], words, &log)?);
        }
        return Ok(outcome);
    }
    let files = files((Origin::Release, Origin::Release))?;
    if let Work::Prover(cases) = work {
        let words = format!("hvm_steps.confinement={}", cases.join(","));
        return emulated(&files, "an emulated machine", &[], &words, "hvm.log");
    }
    let mut outcome = emulated(&files, "an emulated machine", &[], "", "hvm.log")?;
    let refused = format!("hvm_steps.templates=one:{}", LACKING.join("+"));
    let lesser = format!("an emulated machine without {}", LACKING.join(" and "));
    let without_xsave = "hvm_steps.brief=1 hvm_steps.skip=diff,keep";
    for (machine, without, words, log) in [
        (&*lesser, &LACKING[..], &*refused, "hvm-lesser.log"),
        (
            "an emulated machine without XSAVE",
            &["xsave"],
            without_xsave,
            "hvm-no-xsave.log",
        ),
    ] {
        if outcome.success {
            outcome = outcome.and(emulated(&files, machine, without, words, log)?);
        }
    }
    Ok(outcome)
}

fn host_platform_is_hvm(vmm: &Path) -> bool {
    if host::check_kvm().is_err() {
        return false;
    }
    let output = tool::output(Command::new(vmm).arg("probe")).unwrap_or_default();
    let probe: serde_json::Value = serde_json::from_str(&output).unwrap_or_default();
    probe["platform"] == "hvm"
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
