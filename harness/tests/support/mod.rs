//! Runs `cube-bench` without guests, with a template of zeros and the example `stand-in-vmm` as the VMM.
#![expect(
    clippy::unwrap_used,
    reason = "a stage that cannot be set should stop the test"
)]

use std::{
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};

use model::{Bytes, FileSum, MANIFEST_NAME, Platform, TEMPLATE_FORMAT, TemplateManifest};

/// File of the template from which the stand-in reads the output of its commands, in base64.
const SAYS: &str = model::template_file::STATE;

/// Other tests run at the same time, and must not cause a round to be excluded.
pub(crate) const KEEP_ALL: &str =
    "\n[interference]\nforeign_cpu_share = 1.0\nmemory_wait_share = 1.0\n";

/// A directory with a template, a stand-in VMM and a place for runs.
pub(crate) struct Stage {
    pub(crate) dir: tempfile::TempDir,
}

impl Stage {
    /// Creates the directory. Returns `None` and prints the reason on a host without /dev/kvm, where the harness
    /// refuses to run.
    pub(crate) fn set() -> Option<Self> {
        if !Path::new("/dev/kvm").exists() {
            eprintln!("skipped: no /dev/kvm, so cube-bench ends with exit code 6");
            return None;
        }
        let dir = tempfile::Builder::new()
            .prefix("hb")
            .tempdir_in("/tmp")
            .unwrap();
        let template = dir.path().join("templates/base");
        std::fs::create_dir_all(&template).unwrap();
        let manifest = serde_json::to_vec(&manifest()).unwrap();
        std::fs::write(template.join(MANIFEST_NAME), manifest).unwrap();
        std::fs::write(template.join("memory"), vec![0; 4096]).unwrap();
        std::fs::write(template.join(SAYS), "b2sK").unwrap();
        Some(Self { dir })
    }

    /// Sets the output of commands, in base64.
    pub(crate) fn says(&self, base64: &str) {
        std::fs::write(self.dir.path().join("templates/base").join(SAYS), base64).unwrap();
    }

    /// Makes all restores fail.
    pub(crate) fn refuse(&self) {
        std::fs::remove_file(self.dir.path().join("templates/base").join(SAYS)).unwrap();
    }

    /// Path of the stand-in, which cargo builds together with the tests.
    pub(crate) fn vmm() -> PathBuf {
        let bench = Path::new(env!("CARGO_BIN_EXE_cube-bench"));
        let path = bench.with_file_name("examples").join("stand-in-vmm");
        assert!(
            path.exists(),
            "no {}: `cargo build -p harness --example stand-in-vmm` makes it",
            path.display()
        );
        path
    }

    pub(crate) fn run_root(&self) -> PathBuf {
        self.dir.path().join("run")
    }

    pub(crate) fn results(&self) -> PathBuf {
        self.dir.path().join("r")
    }

    /// The command `cube-bench run` for the text of a scenario.
    pub(crate) fn command(&self, scenario: &str) -> Command {
        self.command_of(scenario, &Self::vmm(), &self.results())
    }

    /// The same command with another VMM and another results directory.
    pub(crate) fn command_of(&self, scenario: &str, vmm: &Path, results: &Path) -> Command {
        let path = self.dir.path().join("test.toml");
        let rule = if scenario.contains("[interference]") {
            ""
        } else {
            KEEP_ALL
        };
        std::fs::write(&path, format!("{scenario}{rule}")).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_cube-bench"));
        command
            .env_remove("CI")
            .args(["run", "--format", "json", "--artifacts"])
            .arg(self.dir.path())
            .arg("--vmm")
            .arg(vmm)
            .arg("--run-root")
            .arg(self.run_root())
            .arg("--results")
            .arg(results)
            .arg(path);
        command
    }

    pub(crate) fn run(&self, scenario: &str) -> Output {
        self.command(scenario).output().unwrap()
    }

    pub(crate) fn start(&self, scenario: &str) -> Child {
        self.command(scenario)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    }

    pub(crate) fn sweep(&self) -> Output {
        Command::new(env!("CARGO_BIN_EXE_cube-bench"))
            .args(["sweep", "--run-root"])
            .arg(self.run_root())
            .output()
            .unwrap()
    }

    /// Number of vsock sockets below the run root, one for each living clone.
    pub(crate) fn sockets(&self) -> usize {
        let list = |dir: &Path| -> Vec<PathBuf> {
            let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
            entries.map(|e| e.path()).collect()
        };
        let runs = list(&self.run_root());
        let clones = runs.iter().flat_map(|run| list(run));
        clones
            .filter(|clone| clone.join("vsock.sock").exists())
            .count()
    }
}

/// Waits up to 30 seconds for a condition.
pub(crate) fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !condition() {
        assert!(
            Instant::now() < deadline,
            "timeout while waiting for {what}"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn manifest() -> TemplateManifest {
    let sum = FileSum {
        bytes: 0,
        sha256: "0".repeat(64),
    };
    TemplateManifest {
        format: TEMPLATE_FORMAT,
        platform: Platform::Ring3,
        memory: Bytes::mib(256),
        vcpus: 1,
        hypercalls: None,
        taken_at_unix_ns: 0,
        root: "/none".into(),
        root_sum: sum.clone(),
        kernel_sum: sum.clone(),
        base: None,
        memory_sum: sum.clone(),
        state_sum: sum.clone(),
        layer_sum: sum,
    }
}
