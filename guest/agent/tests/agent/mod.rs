//! Starts agents as separate processes, and contains helpers for their tests.
#![expect(dead_code, reason = "each test program uses a part of it")]

use std::{
    fs,
    os::unix::{fs::PermissionsExt, net::UnixStream},
    path::PathBuf,
    process::{Child, Command},
    time::{Duration, Instant},
};

use envd::{ClientError, EnvdClient, ExecRequest, InitRequest, ProcessSelector};

pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// An agent that is killed at the end of the test.
pub(crate) struct Agent {
    pub(crate) child: Child,
    pub(crate) socket: PathBuf,
    pub(crate) dir: tempfile::TempDir,
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// Retries until the attempt succeeds.
pub(crate) fn until<T>(what: &str, mut attempt: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(done) = attempt() {
            return done;
        }
        assert!(Instant::now() < deadline, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(2));
    }
}

impl Agent {
    /// Starts an agent that listens and has no identity.
    pub(crate) fn raw() -> Self {
        let dir = tempfile::tempdir().unwrap();
        // Other users must be able to enter the directory.
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let socket = dir.path().join("agent.sock");
        let child = Command::new(env!("CARGO_BIN_EXE_guest-agent"))
            .arg("--listen")
            .arg(format!("unix:{}", socket.display()))
            .spawn()
            .unwrap();
        let agent = Self { child, socket, dir };
        until("listening", || UnixStream::connect(&agent.socket).ok());
        agent
    }

    pub(crate) fn start() -> Self {
        let agent = Self::raw();
        agent.client().init(&init()).unwrap();
        agent
    }

    pub(crate) fn client(&self) -> EnvdClient {
        EnvdClient::connect_unix(&self.socket, PATIENCE).unwrap()
    }

    /// Connects to the agent; `None` if it refuses the connection.
    pub(crate) fn try_client(&self) -> Option<EnvdClient> {
        EnvdClient::connect_unix(&self.socket, PATIENCE).ok()
    }

    pub(crate) fn path(&self, name: &str) -> String {
        self.dir.path().join(name).to_str().unwrap().to_owned()
    }

    /// Peak resident memory in KiB.
    pub(crate) fn peak_kib(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find(|l| l.starts_with("VmHWM:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }
}

/// An `/init` request with `/` as the default working directory, because the home directory may not exist on the test
/// machine.
pub(crate) fn init() -> InitRequest {
    InitRequest {
        default_workdir: Some("/".into()),
        ..InitRequest::default()
    }
}

pub(crate) fn sh(script: &str) -> ExecRequest {
    ExecRequest::new("sh", &["-c", script])
}

pub(crate) fn by_pid(pid: u32) -> ProcessSelector {
    ProcessSelector {
        pid: Some(pid),
        tag: None,
    }
}

pub(crate) fn refusal(error: ClientError) -> (u16, String, String) {
    match error {
        ClientError::Refused {
            status,
            code,
            message,
        } => (status, code, message),
        other => panic!("not a refusal: {other:?}"),
    }
}

pub(crate) fn is_alive(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    model::ProcessStat::parse(&stat).is_some_and(|stat| stat.is_alive())
}

pub(crate) fn is_root() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let uids = status.lines().find(|l| l.starts_with("Uid:")).unwrap();
    let root = uids.split_whitespace().nth(2) == Some("0");
    if !root {
        println!("skipped: needs root");
    }
    root
}
