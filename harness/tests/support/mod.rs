//! A stand-in for `cube-vmm` and its guest's agent: it speaks the control socket and one command of the
//! agent's wire, and runs no guest. A test binary becomes it through the script that [`Stage`] writes.

use std::{
    io::{BufRead, BufReader, Read, Write},
    os::{
        fd::AsFd,
        unix::{
            fs::PermissionsExt,
            net::{UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};

use api_types::envd::frame as envd_frame;
use model::{
    Bytes, FileSum, MANIFEST_NAME, Platform, StartPhase, TEMPLATE_FORMAT, TemplateManifest,
    Timeline,
};
use vmm_control::{Failure, FailureKind, Reply, Request, frame};

/// Name of the ignored test that is the stand-in's `main`.
const MAIN: &str = "stand_in_main";
/// File of a template: what the stand-in's commands print, base64.
const SAYS: &str = "says";

/// A directory with a template, a stand-in VMM and a place for runs.
pub(crate) struct Stage {
    pub(crate) dir: tempfile::TempDir,
}

impl Stage {
    /// `None`, with a word about it, where the harness itself would refuse to run.
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
        let stage = Self { dir };
        let exe = std::env::current_exe().unwrap();
        let script = format!(
            "#!/bin/sh\nexec {} --ignored --exact --nocapture --test-threads=1 {MAIN}\n",
            exe.display()
        );
        std::fs::write(stage.vmm(), script).unwrap();
        std::fs::set_permissions(stage.vmm(), PermissionsExt::from_mode(0o755)).unwrap();
        Some(stage)
    }

    /// From now on commands print this (base64).
    pub(crate) fn says(&self, base64: &str) {
        std::fs::write(self.dir.path().join("templates/base").join(SAYS), base64).unwrap();
    }

    fn vmm(&self) -> PathBuf {
        self.dir.path().join("cube-vmm")
    }

    pub(crate) fn run_root(&self) -> PathBuf {
        self.dir.path().join("run")
    }

    pub(crate) fn results(&self) -> PathBuf {
        self.dir.path().join("r")
    }

    /// `cube-bench run` on a scenario's text.
    pub(crate) fn command(&self, scenario: &str) -> Command {
        let path = self.dir.path().join("test.toml");
        std::fs::write(&path, scenario).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_cube-bench"));
        command
            .args(["run", "--format", "json", "--artifacts"])
            .arg(self.dir.path())
            .arg("--vmm")
            .arg(self.vmm())
            .arg("--run-root")
            .arg(self.run_root())
            .arg("--results")
            .arg(self.results())
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

    /// vsock sockets of living clones below the run root.
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

/// Waits for a condition.
pub(crate) fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !condition() {
        assert!(Instant::now() < deadline, "{what} did not come");
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
        memory_sum: sum.clone(),
        state_sum: sum.clone(),
        layer_sum: sum,
    }
}

/// Serves the control socket on standard input until it closes.
pub(crate) fn serve() {
    let control = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned().unwrap());
    let mut timeline = Timeline::default();
    timeline.stamp(StartPhase::ProcessStarted, harness::clock::monotonic_ns());
    while let Ok((request, _)) = frame::receive::<Request>(&control) {
        let answer: Result<Reply, Failure> = match request {
            Request::Restore(spec) => {
                let says = std::fs::read(spec.template.join(SAYS)).unwrap();
                let listener = UnixListener::bind(spec.vsock).unwrap();
                std::thread::spawn(move || agent(&listener, &says));
                timeline.stamp(StartPhase::MemoryMapped, harness::clock::monotonic_ns());
                Ok(Reply::Started(timeline.clone()))
            }
            Request::Resume => {
                timeline.stamp(StartPhase::Resumed, harness::clock::monotonic_ns());
                Ok(Reply::Done)
            }
            Request::Identity { identity, .. } => {
                assert_eq!(identity.machine_id.len(), 32);
                timeline.stamp(StartPhase::AgentReady, harness::clock::monotonic_ns());
                Ok(Reply::Started(timeline.clone()))
            }
            other => Err(Failure {
                kind: FailureKind::BadSpec,
                message: format!("the stand-in has no {other:?}"),
            }),
        };
        frame::send(&control, &answer, None).unwrap();
    }
    std::process::exit(0);
}

fn agent(listener: &UnixListener, says: &[u8]) {
    for stream in listener.incoming() {
        let says = says.to_owned();
        std::thread::spawn(move || answer(stream.unwrap(), &says));
    }
}

fn answer(stream: UnixStream, says: &[u8]) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut writer = stream;
    let mut line = String::new();
    reader.read_line(&mut line)?;
    writer.write_all(b"OK 1\n")?;
    let mut length = 0;
    loop {
        line.clear();
        reader.read_line(&mut line)?;
        if let Some((name, value)) = line.split_once(':')
            && name.eq_ignore_ascii_case("content-length")
        {
            length = value.trim().parse().unwrap();
        }
        if line.trim().is_empty() {
            break;
        }
    }
    std::io::copy(&mut reader.take(length), &mut std::io::sink())?;
    let says = String::from_utf8_lossy(says);
    let mut body = Vec::new();
    for (flags, message) in [
        (0, r#"{"event":{"start":{"pid":7}}}"#.to_owned()),
        (
            0,
            format!(r#"{{"event":{{"data":{{"stdout":"{says}"}}}}}}"#),
        ),
        (
            0,
            r#"{"event":{"end":{"exited":true,"status":"exit status 0"}}}"#.to_owned(),
        ),
        (envd_frame::END_STREAM, "{}".to_owned()),
    ] {
        envd_frame::encode(flags, message.as_bytes(), &mut body).unwrap();
    }
    write!(
        writer,
        "HTTP/1.1 200 OK\r\ncontent-type: application/connect+json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    )?;
    writer.write_all(&body)
}
