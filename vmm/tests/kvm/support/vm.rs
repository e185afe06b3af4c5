//! A VM with its process, socket and console. Dropping it leaves nothing behind.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    time::Duration,
};

use envd::{ENVD_PORT, EnvdClient, ExecOutput, ExecRequest};
use model::chain;
use model::{Bytes, HypercallPath, RestoreSpec, VmSpec, WorkingSetPrefault};
use vmm_control::{
    ControlClient, ControlError, Failure, VmPhase, VmProcess, VmStats, fresh_identity,
};

use super::{host, program, run_dir, until};

/// Time limit for each response of the VMM. A boot takes about a second on an idle host.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub(crate) struct TestVm {
    process: Option<VmProcess>,
    pub(crate) dir: PathBuf,
    pub(crate) name: String,
}

impl TestVm {
    /// A process without a VM.
    pub(crate) fn spawn() -> Self {
        let dir = run_dir::make("vm");
        let log = File::create(dir.join("log")).expect("a log");
        let process = VmProcess::spawn(&host::program(), Some(log), Some(PATIENCE));
        let name = dir.file_name().unwrap_or_default().to_string_lossy();
        Self {
            process: Some(process.expect("cube-vmm starts")),
            name: name.into_owned(),
            dir,
        }
    }

    /// The default specification of the tests.
    pub(crate) fn spec(&self) -> VmSpec {
        VmSpec {
            memory: Bytes::mib(256),
            vcpus: 1,
            guest: host::guest(),
            cmdline: String::new(),
            hypercalls: HypercallPath::default(),
            vsock: self.vsock(),
            console: Some(self.dir.join("console")),
            layer_limit: None,
        }
    }

    /// A booted VM whose agent is ready.
    pub(crate) fn boot(change: impl FnOnce(&mut VmSpec)) -> Self {
        let mut vm = Self::spawn();
        let mut spec = vm.spec();
        change(&mut spec);
        if let Err(e) = vm.control().boot(spec, None) {
            panic!("no boot: {e:?}");
        }
        vm.identify();
        vm
    }

    /// A running clone of the shared template.
    pub(crate) fn new() -> Self {
        Self::clone_of(super::template())
    }

    /// A running clone.
    pub(crate) fn clone_of(template: &Path) -> Self {
        let mut vm = Self::spawn();
        if let Err(e) = vm.restore(template) {
            panic!("no restore: {e}");
        }
        vm.control().resume().expect("a resume");
        vm.identify();
        vm
    }

    /// Restores and leaves the VM paused.
    pub(crate) fn restore(&mut self, template: &Path) -> Result<(), Failure> {
        let spec = self.restore_spec(template);
        refusal(self.control().restore(spec, None))
    }

    pub(crate) fn restore_spec(&self, template: &Path) -> RestoreSpec {
        RestoreSpec {
            template: template.to_owned(),
            base: None,
            root: None,
            vsock: self.vsock(),
            console: Some(self.dir.join("console")),
            layer_limit: None,
            prefault: WorkingSetPrefault::On,
        }
    }

    /// Sends an identity and waits until the agent is ready.
    pub(crate) fn identify(&mut self) {
        let identity = fresh_identity(&self.name).expect("random bytes");
        if let Err(e) = self.control().identity(identity, PATIENCE) {
            panic!("no identity: {e:?}\n{}", self.console());
        }
    }

    pub(crate) fn vsock(&self) -> PathBuf {
        self.dir.join("vsock")
    }

    pub(crate) fn control(&mut self) -> &mut ControlClient {
        &mut self.process.as_mut().expect("a process").control
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.as_ref().expect("a process").pid()
    }

    pub(crate) fn stats(&mut self) -> VmStats {
        self.control().stats().expect("stats")
    }

    /// The console output so far.
    pub(crate) fn console(&self) -> String {
        String::from_utf8_lossy(&fs::read(self.dir.join("console")).unwrap_or_default()).into()
    }

    /// The VMM's standard error.
    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.dir.join("log")).unwrap_or_default()
    }

    /// A connection to the agent.
    pub(crate) fn agent(&self) -> EnvdClient {
        EnvdClient::connect(&self.vsock(), ENVD_PORT, PATIENCE)
            .unwrap_or_else(|e| panic!("no agent: {e:?}\n{}", self.console()))
    }

    /// Runs a command as root and waits for its end.
    pub(crate) fn exec(&self, cmd: &str, args: &[&str]) -> ExecOutput {
        let request = as_root(cmd, args);
        self.agent()
            .exec(&request, PATIENCE)
            .unwrap_or_else(|e| panic!("{cmd} {args:?}: {e:?}\n{}", self.console()))
    }

    /// Runs a shell script as root, which must succeed. Returns its output without the final newline.
    pub(crate) fn sh(&self, script: &str) -> String {
        let out = self.exec("/bin/bash", &["-c", script]);
        let text = |bytes| String::from_utf8_lossy(bytes).trim_end().to_owned();
        let stdout = text(&out.stdout);
        assert!(
            out.exit_code == 0,
            "{script}: {}\n{stdout}\n{}\n{}",
            out.status,
            text(&out.stderr),
            self.console()
        );
        stdout
    }

    /// Copies a program of `tests/guest` into the guest. Returns its path there.
    pub(crate) fn upload(&self, name: &str) -> String {
        let path = format!("/root/{name}");
        self.agent()
            .write_file(&path, &program::compiled(name), Some("root"))
            .expect("an upload");
        self.sh(&format!("chmod 755 {path}"));
        path
    }

    /// Runs a program of `tests/guest`, which checks itself. Returns its output.
    pub(crate) fn check(&self, name: &str, args: &str) -> String {
        let path = self.upload(name);
        self.sh(&format!("timeout -s KILL 50 {path} {args} 2>&1"))
    }

    /// Checks that the kernel log contains no errors.
    pub(crate) fn assert_healthy(&self) {
        let log = self.sh("dmesg");
        let complaints = complaints(&log);
        assert!(
            complaints.is_empty(),
            "the kernel log has errors: {complaints:#?}"
        );
    }

    /// Waits for the end of the guest. Returns the reason.
    pub(crate) fn ended(&mut self, within: Duration) -> String {
        let stats = until("the guest ends", within, || {
            Some(self.stats()).filter(|stats| stats.phase == VmPhase::Exited)
        });
        stats.exit_reason.expect("a reason")
    }

    /// Kills the VMM without an orderly shutdown, as a crash would.
    pub(crate) fn kill(&mut self) {
        if let Some(process) = self.process.take() {
            process.kill().expect("a kill");
        }
    }

    /// Takes the process, with its control socket, out of this value.
    pub(crate) fn take_process(&mut self) -> VmProcess {
        self.process.take().expect("a process")
    }
}

impl Drop for TestVm {
    fn drop(&mut self) {
        self.process = None;
        if std::thread::panicking() {
            eprintln!("--- log of {}\n{}", self.name, self.log());
            let console = self.console();
            let from = console.char_indices().rev().nth(4000).map_or(0, |(i, _)| i);
            eprintln!("--- console\n{}", &console[from..]);
        }
        // The run's directory is removed at the end anyway.
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// A command to run as root.
pub(crate) fn as_root(cmd: &str, args: &[&str]) -> ExecRequest {
    let mut request = ExecRequest::new(cmd, args);
    request.user = Some("root".into());
    request
}

/// Extracts the VMM's refusal from a reply. Any other failure fails the test.
pub(crate) fn refusal<T>(answer: Result<T, ControlError>) -> Result<(), Failure> {
    match answer {
        Ok(_) => Ok(()),
        Err(ControlError::Refused(failure)) => Err(failure),
        Err(ControlError::Files(error)) => Err(Failure {
            kind: error.kind(),
            message: chain(&error),
        }),
        Err(other) => panic!("the VMM neither fulfilled nor refused the request: {other:?}"),
    }
}

/// Lines of a kernel log that report a problem.
///
/// One warning is expected: with `hypercalls = "call"` the rewritten site is not a return that `apply_returns`
/// recognizes, and the kernel warns once at boot.
pub(crate) fn complaints(log: &str) -> Vec<&str> {
    const BAD: [&str; 9] = [
        "BUG:",
        "Oops",
        "WARNING:",
        "lockup",
        "general protection",
        "self-detected stall",
        "detected stalls on",
        "detected expedited stalls",
        "blocked for more than",
    ];
    log.lines()
        .filter(|line| BAD.iter().any(|bad| line.contains(bad)))
        .filter(|line| !line.contains("apply_returns"))
        .collect()
}
